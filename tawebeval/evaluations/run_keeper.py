"""What the keeper holds of evaluations, so that they outlive this process of the daemon.

For each evaluation it holds the journal, and while the evaluator runs the descriptors of the run.
The keeper knows them by names that begin with the evaluation's name in the log.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
from twisted.internet.protocol import ProcessProtocol

from tawebeval.core.events import EventBatch
from tawebeval.core.segi import SegiParser
from tawebeval.evaluations.journal import JournaledBatch, ParserCheckpoint
from tawebeval.evaluations.run import EvaluatorRun
from tawebeval.linux import keeper_owned_process
from tawebeval.linux.child import ResumableProcess, StartedProcess
from tawebeval.linux.keeper_client import DescriptorBundle, KeeperClient, RunningKeeper
from tawebeval.linux.keeper_owned_process import KeeperOwnedProcess
from tawebeval.linux.launcher_client import KEPT_LAUNCHER_PREFIX

RUN, BROKER, CALLBACK = ".run", ".broker", ".callback"
"""Ends of the names of bundles."""

HEARTBEAT_BUNDLE_NAME = "daemon.heart"

_BEAT = struct.Struct("<d")
_STEP = 64 * 1024  # bytes of stdout that are parsed without an event until that is recorded


@attrs.frozen
class RunDescriptors:
    """A run or a broker that the keeper holds: its process, and the sandbox's descriptors."""

    process_descriptors: keeper_owned_process.KeeperOwnedDescriptors
    sandbox_descriptors: Sequence[int] = ()

    def close_process_descriptors(self) -> None:
        """Close the descriptors of a process that nothing drives."""
        process = self.process_descriptors
        pipes = process.stdout, process.stderr
        for descriptor in (process.pidfd, *pipes, process.stdout_memfd, process.stderr_memfd):
            os.close(descriptor)


class RunKeeper:
    """The daemon's use of the keeper; `bundles` are what that held at first."""

    def __init__(self, client: KeeperClient, reactor: Any) -> None:
        self.client = client
        self.bundles = client.list_bundles()
        self.address = RunningKeeper(
            client.path,
            client.pid,
            {
                name: each
                for name, each in self.bundles.items()
                if name.startswith(KEPT_LAUNCHER_PREFIX)
            },
        )
        self._reactor = reactor
        self._heart: int | None = None

    def take_over_heartbeat(self, bundle: DescriptorBundle | None) -> float | None:
        """Return the last heartbeat of the earlier process, and record those of this one.

        The time between the last heartbeat and a restart counts for no limit. Raises: OSError.
        """
        if bundle is not None:
            self._heart = bundle.descriptors[0]
            found = os.pread(self._heart, _BEAT.size, 0)
            return float(_BEAT.unpack(found)[0]) if len(found) == _BEAT.size else None
        self._heart = os.memfd_create("heart", os.MFD_CLOEXEC)
        self.client.keep_bundle(HEARTBEAT_BUNDLE_NAME, [self._heart])
        return None

    def record_heartbeat(self) -> None:
        """Note that this process is alive. To be called about once a second."""
        if self._heart is not None:
            os.pwrite(self._heart, _BEAT.pack(self._reactor.seconds()), 0)

    def keep_callback(self, name: str, packed: bytes) -> None:
        """Keep a callback until it is delivered. Raises: OSError."""
        descriptor = os.memfd_create("callback", os.MFD_CLOEXEC)
        try:
            os.pwrite(descriptor, packed, 0)
            self.client.keep_bundle(name + CALLBACK, [descriptor])
        finally:
            os.close(descriptor)

    def drop_callback(self, name: str) -> None:
        """Let the keeper close a callback."""
        self.client.drop_bundle(name + CALLBACK)

    def keep_run(
        self, name: str, started: StartedProcess, sandbox_descriptors: Sequence[int] = ()
    ) -> RunDescriptors:
        """Give the keeper a started process, as the bundle `name`. Raises: OSError."""
        with ExitStack() as failing:
            files = []
            for what in ("stdout", "stderr"):
                files.append(os.memfd_create(what, os.MFD_CLOEXEC))
                failing.callback(os.close, files[-1])
            kept = keeper_owned_process.KeeperOwnedDescriptors(
                started.pid, started.pidfd, started.stdout, started.stderr, *files
            )
            self.client.keep_bundle(
                name,
                [
                    kept.pidfd,
                    kept.stdout,
                    kept.stderr,
                    kept.stdout_memfd,
                    kept.stderr_memfd,
                    *sandbox_descriptors,
                ],
                kept.pid,
            )
            failing.pop_all()
            return RunDescriptors(kept, sandbox_descriptors)

    def connect_run_to_protocol(
        self,
        name: str,
        protocol: ProcessProtocol,
        process: keeper_owned_process.KeeperOwnedDescriptors,
    ) -> KeeperOwnedProcess:
        """Let the process of the bundle `name` drive a protocol from now on."""
        wait = partial(self.client.wait_for_exit_status, name, process.pid)
        return KeeperOwnedProcess(self._reactor, protocol, process, wait)

    def drop_run(self, name: str) -> None:
        """Let the keeper close what it has of a run, which has ended."""
        self.client.drop_bundle(name + RUN)
        self.client.drop_bundle(name + BROKER)


@attrs.frozen
class KeeperSpawner:
    """Adopter of processes that the keeper holds in a bundle `name`, one after the other.

    `list_descriptors` returns what the bundle has besides (`SandboxedRun.list_descriptors`).
    """

    _keeper: RunKeeper
    _name: str
    _list_descriptors: Callable[[], Sequence[int]] = tuple

    def adopt_child(self, protocol: ProcessProtocol, started: StartedProcess) -> KeeperOwnedProcess:
        """Let the keeper hold a process, which drives a protocol from now on. Raises: OSError."""
        kept = self._keeper.keep_run(self._name, started, self._list_descriptors())
        return self._keeper.connect_run_to_protocol(self._name, protocol, kept.process_descriptors)


@attrs.define
class RunRecorder:
    """Recorder of the events of one run; `write` writes to the journal."""

    _write: Callable[[JournaledBatch], None]
    _parser: SegiParser
    _run: EvaluatorRun
    _process: ResumableProcess
    _recorded: int = 0

    def record_batch(self, begin_cursor: int, batch: EventBatch, time_ms: int) -> None:
        """Do as `EventRecorder` says."""
        offset, state = self._parser.make_checkpoint()
        if not batch.count and offset - self._recorded < _STEP:
            return
        self._recorded = offset
        counted = self._run.output_bytes - (self._process.delivered_bytes - offset)
        checkpoint = ParserCheckpoint(offset, counted, state)
        self._write(JournaledBatch(begin_cursor, batch, time_ms, checkpoint))
        self._process.release_output_memory(offset)
