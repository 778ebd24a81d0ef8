"""The writable tree of each evaluation, over a checkout that does not change.

The tree is an overlay mount: changes go to a directory of the evaluation, and nothing is copied in
advance. Mounting needs a capability, which a user has in a user namespace of its own. So the
starter runs in such a namespace and mounts each overlay in a new mount namespace, which is the
evaluator's. The daemon, outside of that namespace, reads the tree by a descriptor.

Without a sandbox, or where overlays do not work, the tree is a copy.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.internet.protocol import ProcessProtocol

from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import copy_tree
from tawebeval.linux.starter_client import (
    LaunchSpec,
    MountedOverlay,
    OverlayLayers,
    StartedProgram,
    StarterClient,
    spawn_starter,
)
from tawebeval.linux.tail import FileWatcher
from tawebeval.linux.tailed_process import ProgramFiles, TailedProcess
from tawebeval.sandbox.workspace import Workspace

# Errors for which the starter could not be asked, though it may run.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETIMEDOUT)


class WritableTrees:
    """The maker of writable trees, by the starter, which starts the programs that write to them.

    The starter listens at `socket`. If it `is_own`, it is started here, by the main thread, and
    ends at `close` or with this process. Trees are overlays if `overlay_problem` is None, and
    otherwise copies for that reason.
    """

    def __init__(self, socket: Path, *, is_own: bool = True) -> None:
        self.overlay_problem: str | None = "nothing is mounted yet"
        self._socket = socket
        self._is_own = is_own
        self._client: StarterClient | None = None
        self._files: ProgramFiles | None = None
        self._watcher: FileWatcher | None = None

    def connect_starter(self) -> StarterClient:
        """Return the connection to the starter, which is started if it is the daemon's own. Blocks.

        Raises: OSError; ConfigurationError, if it is of another version.
        """
        if self._client is None:
            if self._is_own:
                # One of a killed daemon, which may not have ended yet.
                with suppress(OSError, ConfigurationError):
                    client = StarterClient.connect(self._socket)
                    client.stop_starter(signal.SIGKILL)
                    client.close()
                spawn_starter(self._socket)
            self._client = StarterClient.connect(self._socket)
        return self._client

    @property
    def starter(self) -> StarterClient:
        """The connected starter."""
        assert self._client is not None, "connected by the check of the sandbox"
        return self._client

    def use_overlays(self) -> None:
        """Make overlays from now on, or copies if overlays do not work. Blocks.

        Raises: OSError, ConfigurationError.
        """
        self.overlay_problem = self.connect_starter().mount_problem

    def use_copies(self, problem: str) -> None:
        """Make copies from now on; `problem` is the reason. Blocks. Raises as `use_overlays`."""
        self.connect_starter()
        self.overlay_problem = problem

    def attach(
        self,
        reactor: Any,
        run_in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_lost: Callable[[], object],
    ) -> None:
        """Let started programs drive protocols; `on_lost()` is called if the starter ends. Blocks.

        Raises: OSError.
        """
        self.starter.attach(reactor, on_lost)
        self._watcher = FileWatcher(reactor)
        self._files = ProgramFiles(reactor, self.starter, self._watcher, run_in_thread)

    def start_program(
        self, checkout: Path, workspace: Workspace, launch: LaunchSpec
    ) -> StartedProgram:
        """Start a program, with a tree of the workspace that begins as `checkout`. Blocks.

        Copying blocks the longer the larger the checkout is. The caller closes the top of the
        overlay, if there is one. Raises: OSError; OverlayMountError, if the overlay cannot be
        mounted.
        """
        layers = None
        if self.overlay_problem is None:
            layers = OverlayLayers(
                checkout, workspace.tree_directory, workspace.overlay_work_directory
            )
            layers.work.mkdir()
        else:
            copy_tree(checkout, workspace.tree_directory)
        return self.starter.start_program(workspace.output_directory, launch, layers)

    def connect_program(
        self, protocol: ProcessProtocol, program: StartedProgram, stdout_offset: int = 0
    ) -> TailedProcess:
        """Let a program drive a protocol, from `stdout_offset` bytes of stdout on.

        Raises: OSError.
        """
        assert self._files is not None, "attached"
        return TailedProcess(self._files, protocol, program, stdout_offset=stdout_offset)

    def reopen_overlay(self, workspace: Workspace) -> MountedOverlay | None:
        """Return the overlay of a program of an earlier process; None if it is gone. Blocks."""
        with suppress(OSError):
            return self.starter.reopen_overlay(workspace.output_directory)
        return None

    def forget_program(self, workspace: Workspace) -> None:
        """Kill the program of a workspace, and its overlay with it. Blocks.

        Raises: OSError, if the starter cannot be asked now; call again later.
        """
        if self._client is not None:
            try:
                self._client.forget_program_now(workspace.output_directory)
            except OSError as error:
                if error.errno in _PASSING:
                    raise  # otherwise the starter, or the program, has ended

    def close(self) -> None:
        """Close the connection, and end a starter that was started here. Blocks."""
        client, self._client = self._client, None
        if self._watcher is not None:
            self._watcher.close()
            self._files = self._watcher = None
        if client is not None:
            client.ignore_connection_loss()
            if self._is_own:
                client.stop_starter()
            client.close()
