"""The choice of the configured sandbox, and the probe that shows whether it works."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.core.evaluations import Checkout, Commit
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.filetree import (
    DISK_FULL_REMEDY,
    add_path_to_errors,
    is_disk_full_error,
    mentions_disk_full,
    remove_tree,
)
from tawebeval.sandbox.base import NoSandbox, Sandbox
from tawebeval.sandbox.bubblewrap import (
    EVALUATOR_TOOLS_DIRECTORY_NAME,
    NETWORK_FILE_PATTERNS,
    BubblewrapSandbox,
    TrustedCommandSandbox,
    build_file_options,
    build_system_options,
)
from tawebeval.sandbox.seccomp import make_seccomp_filters
from tawebeval.sandbox.workspace import Workspace, WorkspaceLauncher

TREE_COPY_WARNING = (
    "each evaluation copies the tree of its commit, which takes time for large trees"
)
"""The consequence of overlays that do not work."""
_OVERLAYS = (
    "overlays need Linux 5.11 or newer, a python3 that every user can execute, and a state"
    " directory on a file system with user attributes, such as ext4, xfs or btrfs"
)
_PYTHON = "install a python3 that the daemon's user can execute"
_PROC_MISSING = "run `mount -t proc proc /proc`"

# The probe changes a file and replaces a directory: an overlay needs extended attributes for that.
_DIRECTORY = "directory"
_WHOLE = "as it was"
# The last output of the command.
_SOUND = "sound"
_PROBE = (
    f"cd {_DIRECTORY} && read -r line <file; [ \"$line\" = '{_WHOLE}' ] && echo changed >file"
    f" && cd .. && rm -r {_DIRECTORY} && mkdir {_DIRECTORY} && [ ! -e {_DIRECTORY}/file ]"
    f" && echo {_SOUND}"
)
PROBE_TIMEOUT = 20.0  # seconds for the probe to start and end

_OTHERWISE = 'or, if you trust all callers, set sandbox.kind = "none"'
_MEND = (
    "make bubblewrap work as docs/security.md (Sandbox) says, in a container as docs/install.md"
    f" (Container) says, {_OTHERWISE}"
)
# What bwrap says of an option that it does not know, and what helps.
_UNKNOWN_OPTION = "Unknown option"
_OUTDATED = f"install bubblewrap 0.8.0 or newer; {_OTHERWISE}"


@attrs.frozen
class ProbeDirectories:
    """The directories of probe checkouts and workspaces; None is that of temporary files."""

    checkouts: Path | None = None
    workspaces: Path | None = None


DEFAULT_PROBE_DIRECTORIES = ProbeDirectories()

log = Logger()


def open_sandbox(
    configuration: Configuration,
    accounts: Path,
    cgroups: CgroupManager,
    launcher: WorkspaceLauncher,
) -> Sandbox:
    """Return the configured sandbox, not probed yet. Blocks.

    `accounts` is the directory of `write_sandbox_files`. Raises: ConfigurationError, with the
    remedy, if the sandbox is not installed.
    """
    if configuration.sandbox.kind == "none":
        tools = accounts.absolute() / EVALUATOR_TOOLS_DIRECTORY_NAME
        return NoSandbox(configuration.limits, cgroups, launcher, tools)
    program = shutil.which("bwrap")
    if program is None:
        raise ConfigurationError(
            "sandbox.kind: bubblewrap is not installed; run `apt-get install bubblewrap`, "
            + _OTHERWISE
        )
    for index, path in enumerate(configuration.sandbox.readable):
        if not os.path.exists(path):
            raise ConfigurationError(
                f"sandbox.readable[{index}]: {path} does not exist; create or remove it"
            )
    network = configuration.sandbox.network
    return BubblewrapSandbox(
        configuration.limits,
        cgroups,
        launcher,
        program,
        accounts,
        make_seccomp_filters(internet=network or configuration.sandbox.loopback),
        configuration.sandbox.readable,
        network,
    )


def check_sandbox(
    sandbox: Sandbox,
    places: ProbeDirectories = DEFAULT_PROBE_DIRECTORIES,
) -> None:
    """Check that evaluators can be started in a sandbox. Blocks.

    Raises: ConfigurationError, with the remedy.
    """
    try:
        sandbox.workspace_launcher.connect_starter()
        if not isinstance(sandbox, BubblewrapSandbox):
            sandbox.workspace_launcher.overlay_problem = "no sandbox"
            return
        problem = probe_overlays_or_copies(sandbox, places)
    except OSError as error:
        raise ConfigurationError(
            f"no evaluator can be started: {error.strerror}",
            _PYTHON if os.path.exists("/proc/self") else _PROC_MISSING,
        ) from None
    if problem is not None:
        what, remedy = problem
        raise ConfigurationError(f"sandbox.kind: bubblewrap does not work here: {what}", remedy)


def find_sandbox_problems(sandbox: Sandbox) -> Iterator[SetupProblem]:
    """Yield the shortcomings of a sandbox that was checked, and the lack of a sandbox."""
    if not isinstance(sandbox, BubblewrapSandbox):
        yield SetupProblem(
            'sandbox.kind is "none": callers can do all that the daemon\'s user can on this'
            " machine",
            'run `apt-get install bubblewrap`, and remove sandbox.kind = "none"',
        )
    elif sandbox.workspace_launcher.overlay_problem is not None:
        yield SetupProblem(
            f"{TREE_COPY_WARNING} ({sandbox.workspace_launcher.overlay_problem})", _OVERLAYS
        )


def check_sandbox_and_log_problems(
    sandbox: Sandbox, places: ProbeDirectories = DEFAULT_PROBE_DIRECTORIES
) -> None:
    """Check a sandbox, and log its problems. Blocks. Raises: SystemExit, with a message."""
    try:
        check_sandbox(sandbox, places)
    except ConfigurationError as error:
        raise SystemExit(f"tawebeval: {error}") from None
    for problem in find_sandbox_problems(sandbox):
        log.warn("{problem}", problem=str(problem))


def open_git_sandbox(sandbox: Sandbox, accounts: Path) -> TrustedCommandSandbox:
    """Return the sandbox of git commands that goes with `sandbox`. Blocks."""
    if not isinstance(sandbox, BubblewrapSandbox):
        return TrustedCommandSandbox()
    return TrustedCommandSandbox(
        sandbox.bwrap_path,
        make_seccomp_filters(internet=True),
        tuple(build_system_options(accounts)),
        tuple(build_file_options(NETWORK_FILE_PATTERNS)),
    )


def probe_overlays_or_copies(
    sandbox: BubblewrapSandbox,
    places: ProbeDirectories = DEFAULT_PROBE_DIRECTORIES,
) -> SetupProblem | None:
    """Probe the sandbox with overlays, or else with copies. Blocks.

    `sandbox.workspace_launcher.overlay_problem` is why overlays do not work; None if they do.
    """
    launcher = sandbox.workspace_launcher
    problem = probe_bubblewrap(sandbox, places)
    if problem is not None and launcher.overlay_problem is None:
        launcher.overlay_problem = problem[0]
        problem = probe_bubblewrap(sandbox, places)
    return problem


def probe_bubblewrap(
    sandbox: BubblewrapSandbox,
    places: ProbeDirectories = DEFAULT_PROBE_DIRECTORIES,
) -> SetupProblem | None:
    """Return why the sandbox does not work, with a remedy; None if it works. Blocks.

    The probe starts a command as evaluators are started. The command has to end, to have changed
    its tree, and to have left the checkout unchanged.
    """
    with contextlib.ExitStack() as made:
        try:
            folders = []
            for place in (places.checkouts, places.workspaces):
                folders.append(Path(tempfile.mkdtemp(prefix="tawebeval-", dir=place)))
                made.callback(remove_tree, folders[-1])
            checkout, folder = folders
            whole = checkout / _DIRECTORY / "file"
            whole.parent.mkdir()
            with add_path_to_errors(whole):
                whole.write_text(_WHOLE)
            upload = folder / "upload"
            (upload / "submission").mkdir(parents=True)
            workspace = Workspace(folder.resolve() / "probe")
            tree = Checkout(Commit("", ""), checkout.resolve(), lambda: None)
            run = sandbox.make_run(workspace, tree, sandbox.default_limits)
            workspace.create_directories(upload, run.workspace_view)
            # A cgroup that stays now is removed at the daemon's end.
            made.enter_context(contextlib.suppress(OSError))
            made.callback(run.close)
            run.start_evaluator(_PROBE, {"PATH": "/usr/bin:/bin"}, workspace.tree_directory)
            launcher = sandbox.workspace_launcher
            ended = launcher.starter.wait_for_program(workspace.output_directory, PROBE_TIMEOUT)
            problem = _judge(*ended)
            untouched = whole.read_text() == _WHOLE
        except TimeoutError as error:
            return SetupProblem(f"a sandbox without an evaluator: {error.strerror}", _MEND)
        except OSError as error:
            remedy = DISK_FULL_REMEDY if is_disk_full_error(error) else _MEND
            return SetupProblem(str(error), remedy)
    if problem is None and not untouched:
        return SetupProblem("writes of an evaluator reach the cache of checkouts", _MEND)
    return problem


def reprobe_sandbox(sandbox: Sandbox, places: ProbeDirectories) -> SetupProblem | None:
    """Probe a sandbox that has worked before; None without a sandbox. Blocks."""
    return probe_bubblewrap(sandbox, places) if isinstance(sandbox, BubblewrapSandbox) else None


def _judge(status: int, output: bytes) -> SetupProblem | None:
    said = output.decode(errors="replace").strip()
    if said == _SOUND:
        return None
    said = said or f"bwrap exited with status {status}"
    if _UNKNOWN_OPTION in said:
        return SetupProblem(said, _OUTDATED)
    return SetupProblem(said, DISK_FULL_REMEDY if mentions_disk_full(said) else _MEND)
