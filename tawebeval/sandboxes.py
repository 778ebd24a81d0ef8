"""Which sandbox there is: the configured one, tried out before anything relies on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from twisted.logger import Logger

from tawebeval.bare import Commit
from tawebeval.bubblewrap import Bubblewrap, system_view
from tawebeval.cgroups import Cgroups
from tawebeval.config import Configuration
from tawebeval.errors import ConfigurationError
from tawebeval.gitbox import Box, GitBox, NoBox
from tawebeval.orphans import Orphans
from tawebeval.privileges import Privileges, User
from tawebeval.removal import remove
from tawebeval.sandbox import Launch, NoSandbox, Sandbox
from tawebeval.seccomp import make_filter
from tawebeval.workspace import Workspace

_PATIENCE = 20.0  # seconds for an empty sandbox to start and end

_OTHERWISE = 'or, if you trust everybody who can send a request, write sandbox.kind = "none"'
_REMEDIES = {
    "Unknown option": "install bubblewrap 0.8.0 or newer",
    "No permissions to create": "let users make namespaces: by sysctl, kernel."
    "unprivileged_userns_clone=1, and on Ubuntu kernel."
    "apparmor_restrict_unprivileged_userns=0; let a container make them, too",
    "max_*_namespaces exceeded": "raise user.max_user_namespaces and the other limits of"
    " namespaces, by sysctl",
    "setting up uid map": "let users make namespaces: on Ubuntu, by sysctl"
    " kernel.apparmor_restrict_unprivileged_userns=0",
    "Can't mount proc": "do not mask /proc in the container"
    " (Docker: --security-opt systempaths=unconfined)",
    "max_user_namespaces": "leave /proc/sys writable: no ProtectKernelTunables=yes in the unit",
}

_MEND = f"mend that, {_OTHERWISE}"

Problem = tuple[str, str]
"""Why something does not work, and the remedy."""

P = ParamSpec("P")

log = Logger()


def open_sandbox(
    configuration: Configuration, accounts: Path, cgroups: Cgroups, orphans: Orphans
) -> Sandbox:
    """Return the sandbox that the configuration asks for, not tried yet. Blocks.

    `accounts` is a directory for the files of its users and groups. Raises ConfigurationError,
    with the remedy, where it is not installed.
    """
    if configuration.sandbox.kind == "none":
        return NoSandbox(configuration.limits, cgroups, orphans)
    return open_bubblewrap(configuration, accounts, cgroups, orphans)


def rely_on(sandbox: Sandbox) -> None:
    """Look whether a sandbox can be relied on; blocks. Exits with a message if it cannot.

    Having none is the operator's decision, of which the log tells at every start.
    """
    if isinstance(sandbox, Bubblewrap):
        problem = try_out(sandbox)
        if problem is not None:
            raise SystemExit(
                "tawebeval: sandbox.kind: bubblewrap does not work here: " + "; ".join(problem)
            )
    else:
        log.warn(
            'sandbox.kind is "none": whoever can send a request can do on this machine all that'
            " user {uid} can",
            uid=os.geteuid(),
        )


def open_box(sandbox: Sandbox, accounts: Path) -> Box:
    """Return what git is to run in: the same as evaluators, but for what it sees. Blocks."""
    if not isinstance(sandbox, Bubblewrap):
        return NoBox()
    return GitBox(sandbox.program, sandbox.filter, tuple(system_view(accounts, network=True)))


def open_bubblewrap(
    configuration: Configuration, accounts: Path, cgroups: Cgroups, orphans: Orphans
) -> Bubblewrap:
    """Return the sandbox of bubblewrap, not tried yet. Raises ConfigurationError; blocks."""
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigurationError(
            "sandbox.kind: there is no bubblewrap here; apt-get install bubblewrap, " + _OTHERWISE
        )
    for index, path in enumerate(configuration.sandbox.readable):
        if not os.path.exists(path):
            raise ConfigurationError(f"sandbox.readable[{index}]: {path} does not exist")
    network = configuration.sandbox.network
    return Bubblewrap(
        program,
        accounts,
        make_filter(),
        tuple(system_view(accounts, network=network)),
        configuration.sandbox.readable,
        network,
        configuration.limits,
        cgroups,
        orphans,
    )


def try_out(sandbox: Bubblewrap, privileges: Privileges | None = None) -> Problem | None:
    """Return why the sandbox does not work, and what can be done about it. Blocks.

    It does if a command in it, started as evaluators are, exits as it should. With
    `privileges` that is tried as their user. What evaluators rely on has to be there already:
    the trial makes nothing of it.
    """
    acting = privileges.acting if privileges else contextlib.nullcontext
    with contextlib.ExitStack() as made:
        try:
            with acting():
                folder = Path(tempfile.mkdtemp(prefix="tawebeval-"))
                made.callback(_as(acting, remove), folder)
                upload = folder / "upload"
                (upload / "submission").mkdir(parents=True)
                workspace = Workspace(folder / "probe")
                workspace.create(upload)
                cell = sandbox.cell(workspace, Commit("", ""))
                made.callback(_as(acting, cell.close))
                cell.open()
            launch = cell.launch("exit 7", {"PATH": "/usr/bin:/bin"}, workspace.tree)
            return _run(launch, privileges.user if privileges else None)
        except OSError as error:
            return str(error), _MEND
        except subprocess.TimeoutExpired as error:
            return f"an empty sandbox has not ended within {error.timeout:g} seconds", _MEND


def _as(
    acting: Callable[[], contextlib.AbstractContextManager[None]], call: Callable[P, object]
) -> Callable[P, None]:
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        with acting():
            call(*args, **kwargs)

    return wrapped


def _run(launch: Launch, user: User | None) -> Problem | None:
    ended = subprocess.run(
        launch.argv,
        env=launch.environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=launch.descriptors,
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=() if user else None,
        timeout=_PATIENCE,
        check=False,
    )
    if ended.returncode == 7:
        return None
    said = ended.stdout.decode(errors="replace").strip() or f"it exited with {ended.returncode}"
    for sign, remedy in _REMEDIES.items():
        if sign in said:
            return said, f"{remedy}, {_OTHERWISE}"
    return said, _MEND
