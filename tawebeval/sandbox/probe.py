"""Which sandbox there is: the configured one, tried out before anything relies on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec

import attrs
from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.errors import ConfigurationError, Problem
from tawebeval.linux.cgroups.group import Cgroups
from tawebeval.linux.diskfaults import MAKE_ROOM, is_full, naming, says_full
from tawebeval.linux.filetree import remove
from tawebeval.linux.privileges import Privileges
from tawebeval.linux.reaper import Orphans
from tawebeval.linux.reports import NotMounted
from tawebeval.linux.starting import wait_for
from tawebeval.sandbox.base import NoSandbox, Sandbox
from tawebeval.sandbox.bubblewrap import Bubblewrap, network_view, programs_view, system_view
from tawebeval.sandbox.commands import Box, GitBox, NoBox
from tawebeval.sandbox.overlay import Trees
from tawebeval.sandbox.seccomp import make_filter
from tawebeval.sandbox.workspace import Workspace

COPIED = "the tree of a commit is copied for each evaluation, which takes longer the larger it is"
"""What follows where overlays do not work."""
_OVERLAYS = (
    "Linux 5.11 or newer, a python3 that every user can execute, and a state directory on a file"
    " system with attributes of users, such as ext4, xfs or btrfs"
)
_PYTHON = "install a python3 that the daemon's user can execute"

# Changes a file, and replaces a directory: an overlay that may not set attributes could not.
_DIRECTORY = "directory"
_WHOLE = "as it was"
# What the command prints in the end. Its status would not do: in a daemon that runs whoever reaps
# orphans may be the first to learn of it.
_SOUND = "sound"
_TRIAL = (
    f"cd {_DIRECTORY} && read -r line <file; [ \"$line\" = '{_WHOLE}' ] && echo changed >file"
    f" && cd .. && rm -r {_DIRECTORY} && mkdir {_DIRECTORY} && [ ! -e {_DIRECTORY}/file ]"
    f" && echo {_SOUND}"
)
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
    " kernel.apparmor_restrict_unprivileged_userns=0, or by the unit, whose AppArmor profile"
    " permits them",
    "Creating new namespace failed: Permission denied": "let AppArmor permit user namespaces: start"
    " the daemon by the unit, whose profile (/etc/apparmor.d/tawebeval) does",
    "Can't mount proc": "do not mask /proc in the container"
    " (Docker: --security-opt systempaths=unconfined)",
    "Function not implemented": "permit the system call openat2 in the container"
    " (Docker: --security-opt seccomp=unconfined)",
    "max_user_namespaces": "leave /proc/sys writable: no ProtectKernelTunables=yes in the unit",
}
_PERMITTED = (
    "AppArmorProfile=-tawebeval in the unit, and the profile loaded:"
    " apparmor_parser --replace /etc/apparmor.d/tawebeval"
)
# Where the daemon is the main process of a unit of systemd, whose lines can be the reason.
_UNIT_REMEDIES = {
    "setting up uid map": _PERMITTED,
    "Creating new namespace failed: Permission denied": _PERMITTED,
    "Can't mount proc": "ProtectKernelLogs=no in the unit, no ProtectKernelTunables=yes and no"
    " ProcSubset=pid",
    "Function not implemented": "RestrictSUIDSGID=no in the unit, and a User= in the place of"
    " DynamicUser=yes, which implies RestrictSUIDSGID=yes",
}

_MEND = f"mend that, {_OTHERWISE}"

P = ParamSpec("P")


@attrs.frozen
class Places:
    """Where checkouts and workspaces lie; None is for where temporary files do."""

    checkouts: Path | None = None
    workspaces: Path | None = None


ANYWHERE = Places()

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


def check_sandbox(
    sandbox: Sandbox, privileges: Privileges | None = None, places: Places = ANYWHERE
) -> None:
    """Try out whether evaluators can be started in a sandbox; blocks.

    With `privileges` that is tried as their user. Raises ConfigurationError with the remedy.
    """
    if isinstance(sandbox, Bubblewrap):
        problem = try_with_overlays(sandbox, privileges, places)
        if problem is not None:
            what, remedy = problem
            raise ConfigurationError(f"sandbox.kind: bubblewrap does not work here: {what}", remedy)
    else:
        try:
            sandbox.trees.copy("there is no sandbox", privileges.user if privileges else None)
        except OSError as error:
            raise ConfigurationError(
                f"no evaluator can be started: {error.strerror}", _PYTHON
            ) from None


def find_problems(sandbox: Sandbox) -> Iterator[Problem]:
    """Yield how a sandbox that was verified does less than it could.

    Without a sandbox, which is the operator's decision, that is what evaluators may do.
    """
    if not isinstance(sandbox, Bubblewrap):
        yield Problem(
            'sandbox.kind is "none": whoever can send a request can do on this machine all that the'
            " daemon's user can",
            'apt-get install bubblewrap, and leave out sandbox.kind = "none"',
        )
    elif sandbox.trees.problem is not None:
        yield Problem(f"{COPIED} ({sandbox.trees.problem})", _OVERLAYS)


def rely_on(sandbox: Sandbox, places: Places = ANYWHERE) -> None:
    """Verify a sandbox and log its problems; blocks. Exits with a message if it does not work."""
    try:
        check_sandbox(sandbox, places=places)
    except ConfigurationError as error:
        raise SystemExit(f"tawebeval: {error}") from None
    for problem in find_problems(sandbox):
        log.warn("{problem}", problem=str(problem))


def close_sandbox(sandbox: Sandbox) -> None:
    """Give back what `rely_on` has made. Blocks, hardly."""
    sandbox.trees.close()


def open_box(sandbox: Sandbox, accounts: Path) -> Box:
    """Return what git is to run in: as evaluators, but it sees less, and fetches. Blocks."""
    if not isinstance(sandbox, Bubblewrap):
        return NoBox()
    return GitBox(
        sandbox.program,
        make_filter(internet=True),
        tuple(programs_view(accounts)),
        tuple(network_view()),
    )


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
        make_filter(internet=network or configuration.sandbox.loopback),
        tuple(system_view(accounts, network=network)),
        configuration.sandbox.readable,
        network,
        Trees(),
        configuration.limits,
        cgroups,
        orphans,
    )


def try_with_overlays(
    sandbox: Bubblewrap, privileges: Privileges | None = None, places: Places = ANYWHERE
) -> Problem | None:
    """Return why the sandbox does not work, as `try_out`, with overlays if these work. Blocks.

    If they do not its `trees` says why, and copies.
    """
    user = privileges.user if privileges else None
    try:
        sandbox.trees.mount(user)
        problem = try_out(sandbox, privileges, places)
        if problem is not None and sandbox.trees.problem is None:
            sandbox.trees.copy(problem[0], user)
            problem = try_out(sandbox, privileges, places)
    except OSError as error:
        return Problem(f"nothing can be started: {error.strerror}", _PYTHON)
    return problem


def try_out(
    sandbox: Bubblewrap, privileges: Privileges | None = None, places: Places = ANYWHERE
) -> Problem | None:
    """Return why the sandbox does not work, and what can be done about it. Blocks.

    It does if a command in it, started as evaluators are, comes to its end, has changed its tree,
    and nothing of what that was made of. With `privileges` that is tried as their user. What
    evaluators rely on has to be there already: the trial makes nothing of it.
    """
    acting = privileges.acting if privileges else contextlib.nullcontext
    with contextlib.ExitStack() as made:
        try:
            with acting():
                folders = []
                for place in (places.checkouts, places.workspaces):
                    folders.append(Path(tempfile.mkdtemp(prefix="tawebeval-", dir=place)))
                    made.callback(_as(acting, remove), folders[-1])
                checkout, folder = folders
                whole = checkout / _DIRECTORY / "file"
                whole.parent.mkdir()
                with naming(whole):
                    whole.write_text(_WHOLE)
                upload = folder / "upload"
                (upload / "submission").mkdir(parents=True)
                workspace = Workspace(folder.resolve() / "probe")
                cell = sandbox.cell(
                    workspace, Checkout(Commit("", ""), checkout.resolve(), lambda: None)
                )
                workspace.create(upload, cell.view)
                # What stays of it now goes at the daemon's end.
                made.enter_context(contextlib.suppress(OSError))
                made.callback(_as(acting, cell.close))
                started = cell.start(_TRIAL, {"PATH": "/usr/bin:/bin"}, workspace.tree)
            try:
                problem = _judge(*wait_for(started, _PATIENCE))
            finally:
                sandbox.orphans.waited_for(started.pid)
            untouched = whole.read_text() == _WHOLE
        except NotMounted as error:
            return Problem(f"an overlay cannot be mounted: {error.strerror}", _MEND)
        except TimeoutError as error:
            return Problem(f"an empty sandbox: {error.strerror}", _MEND)
        except OSError as error:
            return Problem(str(error), MAKE_ROOM if is_full(error) else _MEND)
    if problem is None and not untouched:
        return Problem("what an evaluator writes gets into the cache", _MEND)
    return problem


def try_again(sandbox: Sandbox, places: Places) -> Problem | None:
    """Return why a sandbox that was relied on does not work any more. Blocks.

    Of one that is none there is nothing to try.
    """
    return try_out(sandbox, places=places) if isinstance(sandbox, Bubblewrap) else None


def _as(
    acting: Callable[[], contextlib.AbstractContextManager[None]], call: Callable[P, object]
) -> Callable[P, None]:
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        with acting():
            call(*args, **kwargs)

    return wrapped


def _judge(status: int, output: bytes) -> Problem | None:
    said = output.decode(errors="replace").strip()
    if said == _SOUND:
        return None
    said = said or f"it exited with {status}"
    remedies = _UNIT_REMEDIES if _is_main_process() else {}
    for sign, remedy in {**_REMEDIES, **remedies}.items():
        if sign in said:
            return Problem(said, f"{remedy}, {_OTHERWISE}")
    return Problem(said, MAKE_ROOM if says_full(said) else _MEND)


def _is_main_process() -> bool:
    """Tell whether a unit of systemd has started this process, and not one that started this."""
    return os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
