"""Hardened git commands, for URLs and repositories of strangers, and the check of git's version.

git gets none of its usual configuration, environment, hooks and helpers (git(1), git-config(1)).
Callers put URLs and names that a client gave after `--end-of-options`.

git's exit status does not tell failures apart, so patterns classify its stderr. They are the
messages of LC_ALL=C, which hardly change from version to version. A line that begins with `remote:`
was written by the server, and tells nothing about this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.error import ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval.core.hosts import SSH_COMMAND
from tawebeval.deferreds import OneShotEvent, wait_despite_cancellation
from tawebeval.errors import ConfigurationError, EvaluationFailure, format_size
from tawebeval.git.remotes import Login
from tawebeval.linux.child import ChildProcess
from tawebeval.linux.starter import OOM_SCORE_ADJ
from tawebeval.sandbox.bubblewrap import (
    BWRAP_ERROR_PREFIX,
    READ_ONLY_ACCESS,
    SandboxAccess,
    TrustedCommandSandbox,
)

GIT_SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
"""The directories in which git and its helpers are found."""

# Older ones lack `http.curloptResolve`: they would look checked names up again.
_OLDEST = (2, 37)
_NO_REPOSITORY = "/nonexistent"  # a path, since git would search the directories above for one

_VERSION = re.compile(r"git version (\d+)\.(\d+)\S*")
_REMEDY = (
    f"install git {_OLDEST[0]}.{_OLDEST[1]} or newer in a directory of the daemon's PATH,"
    f" {GIT_SEARCH_PATH}"
)

_STDERR_KEPT = 8 * 1024  # bytes
_STDOUT_KEPT = 64 * 1024  # bytes
# Servers may send messages without end, and each costs the reactor's time.
_STDERR_LIMIT = 4 * 2**20  # bytes

# Faults that old importers left in commits, tags and trees: git clone and hosting services accept
# them, and nothing here reads the names and dates. All other faults stay errors.
_HARMLESS_FAULTS = (
    *("badDate", "badDateOverflow", "badEmail", "badName", "badTimezone", "missingAuthor"),
    *("missingCommitter", "missingEmail", "missingNameBeforeEmail", "missingSpaceBeforeDate"),
    *("missingSpaceBeforeEmail", "multipleAuthors", "nulInCommit", "zeroPaddedDate"),
    "zeroPaddedFilemode",
)

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    # git streams larger files, and never has them in memory as a whole.
    "core.bigFileThreshold": "16m",
    "credential.helper": "",
    "fetch.fsckObjects": "true",
    "transfer.fsckObjects": "true",
    # Always keep a pack, which appears whole or not at all; loose objects appear one by one.
    "fetch.unpackLimit": "1",
    "fetch.recurseSubmodules": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "http.followRedirects": "false",
    "protocol.version": "2",
    "core.autocrlf": "false",
    "core.symlinks": "true",
    "core.fileMode": "true",
    **{f"fetch.fsck.{fault}": "ignore" for fault in _HARMLESS_FAULTS},
}

_MEMORY = 2**30  # bytes
_KIB, _BLOCK = 1024, 512  # bytes: the units of memory and files in ulimit of sh(1)
_SHELL = "tawebeval-git"  # the name with which the first shell of a command begins its errors
# The kernel kills git before the daemon, as `starter` arranges for evaluators.
_SET_OOM_SCORE = (
    "read -r score </proc/self/oom_score_adj;"
    f' [ "$score" -ge {OOM_SCORE_ADJ} ] || echo {OOM_SCORE_ADJ} >/proc/self/oom_score_adj'
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")

_EXCERPT = 300  # characters of git's reason
_UNKNOWN_OR_PRIVATE = (
    "the repository does not exist, or needs credentials; check repository[url], or ask the"
    " operator (repositories.credentials)"
)
# What people read where git's own reason misleads, by the first pattern in the lines that git, curl
# and ssh of this machine print.
_EXPLANATIONS = {
    # GitHub and GitLab ask for credentials for a repository that does not exist.
    # Few beginnings in a line: the server may print many.
    r"could not read Username|Authentication failed|(?m:^.{0,40}repository .*not found)|"
    r"Permission denied \(": _UNKNOWN_OR_PRIVATE,
    "returned error: (401|403|404|410|451)": (
        "the git server refuses access (HTTP status {}); check repository[url], or ask the operator"
        " (repositories.credentials)"
    ),
    r"returned error: (429|5\d\d)": (
        "the git server cannot answer now (HTTP status {}); try again later"
    ),
    r"returned error: (30[178])(?!\d)": (
        "the repository has moved (HTTP status {}), and redirects are not followed; use the new"
        " URL, which `git ls-remote URL` prints"
    ),
    r"returned error: (30[23])(?!\d)": (
        "the git server redirects to another page, such as a login page (HTTP status {}); ask the"
        " operator for credentials (repositories.credentials), or use the new URL if `git ls-remote"
        " URL` prints one"
    ),
    "not support shallow (?:clients|requests)": (
        "the git server lacks the feature `shallow`, by which single commits are fetched; use a"
        " server that has it, such as GitHub, GitLab or git's own"
    ),
    "dumb http transport|not valid: is this a git|invalid server response|bad line length": (
        "repository[url] leads to a web page or a server of plain files, not to a git server; use"
        " the URL for `git clone`"
    ),
    "(connection refused|could(?:n't| not) connect to server|network is unreachable|"
    "no route to host|connection timed out|could not resolve host)": (
        "cannot connect to the git server ({}); check host and port of repository[url], or try"
        " again later"
    ),
    "host key verification failed": (
        "the ssh key of the git server is not in the operator's known_hosts_file"
        " (repositories.credentials)"
    ),
}
_REMOTE = re.compile("^remote:.*\n?", re.MULTILINE)
_FATAL = re.compile("^(?:fatal|error): (.+)$", re.MULTILINE)
_OUT_OF_MEMORY = "out of memory|cannot allocate memory|unable to create thread"
_OUT_OF_MEMORY_ANYWHERE = re.compile(_OUT_OF_MEMORY, re.IGNORECASE)
_OUT_OF_MEMORY_HERE = re.compile(rf"^(?!remote:).*({_OUT_OF_MEMORY})", re.IGNORECASE | re.MULTILINE)
DISK_ERROR_PATTERN = re.compile(
    "^(?!remote:).*(no space left on device|disk quota exceeded|read-only file system|"
    "too many open files|input/output error)",
    re.IGNORECASE | re.MULTILINE,
)
"""The error of this machine's disk, as strerror(3) words it."""

_SIGBUS, _SIGKILL = 7, 9  # the first where a disk fails whose files are mapped
_CHILD_KILLED = re.compile("^(?!remote:).*died of signal [79]$", re.MULTILINE)
# git does not report how index-pack(1) ended; if it was killed nothing else is printed.
_PACK_READER_KILLED = re.compile("(remote:.*\n)*fatal: fetch-pack: invalid index-pack output")
COMMIT_UNADVERTISED_PATTERN = re.compile(
    "does not allow request for unadvertised object|find remote ref"
)
"""The server refuses the commit, which it may have, by this way to ask for it."""

COMMIT_MISSING_PATTERN = re.compile(
    "not our ref|want [0-9a-f]{40} not valid|missing object referenced"
)
"""The server hands out any commit by its OID, and does not have this one."""

REPOSITORY_CORRUPT_PATTERN = re.compile(
    r"^(?!remote:).*(corrupt(?!ion on the remote)|unable to read|could not read [0-9a-f]{40}|"
    r"failed to unpack tree|not a tree object|bad (tree|commit) object|not a git repository|"
    r"bad config|does not match index|far too short|is too small|necessary objects|inflate)",
    re.IGNORECASE | re.MULTILINE,
)
"""The repository on this disk is damaged: disks fail, and people remove files."""


@attrs.frozen
class GitResult:
    """The end of a git command; `status` is -N after the signal N.

    `stdout` and `stderr` are the last 64 KiB and 8 KiB that git printed, `stderr` without
    credentials and without the path of the cache; `is_stderr_complete` tells that `stderr` is not
    cut.
    """

    status: int
    stdout: str
    stderr: str
    is_timed_out: bool = False
    is_stderr_complete: bool = True


class _CommandProtocol(ProcessProtocol):
    """Collector of a git command's output.

    `kill` kills the child with all its descendants, `on_stdout` gets stdout in place of the result,
    and the path of the directory `cache`, if there is one, is removed from stderr.
    """

    child: ChildProcess

    def __init__(
        self,
        kill: Callable[[ChildProcess], object],
        on_stdout: Callable[[bytes], object] | None,
        login: Login | None,
        cache: Path | None,
    ) -> None:
        self._kill = kill
        self.ended: OneShotEvent[GitResult] = OneShotEvent()
        self.refused: EvaluationFailure | None = None
        self._on_stdout = on_stdout
        self._login = login
        self._cache = f"{cache}/" if cache is not None else ""
        self._margin = login.max_encoded_password_bytes if login is not None else 0
        self._printed = {1: b"", 2: b""}
        self._size = {1: 0, 2: 0}  # bytes

    def makeConnection(self, transport: Any) -> None:
        self.child = transport
        super().makeConnection(transport)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if childFD == 1 and self._on_stdout is not None:
            try:
                if self.refused is None:
                    self._on_stdout(data)
            except EvaluationFailure as error:
                self.refused = error
                self.kill()
            return
        # With 3 bytes of a character that is cut at the beginning.
        limit = _STDOUT_KEPT if childFD == 1 else _STDERR_KEPT + self._margin + 3
        self._size[childFD] += len(data)
        if self._size[2] > _STDERR_LIMIT and self.refused is None:
            self.refused = EvaluationFailure(
                "repository",
                f"git and the git server printed over {format_size(_STDERR_LIMIT)} of messages",
            )
            self.kill()
        self._printed[childFD] = (self._printed[childFD] + data)[-limit:]

    def kill(self) -> None:
        """Kill git and its descendants."""
        self._kill(self.child)

    def processExited(self, reason: Failure) -> None:
        self.child.signal_group(signal.SIGKILL)
        self.child.read_remaining_output()

    def processEnded(self, reason: Failure) -> None:
        status = 0
        if isinstance(reason.value, ProcessTerminated):
            status = reason.value.exitCode or -(reason.value.signal or 0)
        stdout = self._printed[1].decode("utf-8", "replace")
        is_whole = self._size[2] == len(self._printed[2]) <= _STDERR_KEPT
        self.ended.set_value(
            GitResult(status, stdout, self._clean_stderr(), is_stderr_complete=is_whole)
        )

    def _clean_stderr(self) -> str:
        """Return stderr without secrets and without the path of the cache."""
        stderr = self._printed[2].decode("utf-8", "replace")
        if self._cache:
            stderr = stderr.replace(self._cache, "")
        if self._login is not None:
            stderr = self._login.scrub_password(stderr)
            if len(self._printed[2]) > _STDERR_KEPT:
                # The kept part may begin in the middle of a password.
                stderr = stderr[self._margin :]
        clean = _USERINFO.sub("", stderr).strip()
        return clean.encode()[-_STDERR_KEPT:].decode("utf-8", "ignore")


@contextmanager
def _open_login(login: Login | None) -> Iterator[int | None]:
    """Open a pipe from which the login can be read once, and yield its descriptor, or None."""
    if login is None:
        yield None
        return
    descriptor, writing = os.pipe()
    try:
        try:
            os.write(writing, login.git_credential_output)
        finally:
            os.close(writing)
        yield descriptor
    finally:
        os.close(descriptor)


def _chain(commands: Iterable[Sequence[str]]) -> Sequence[str]:
    """Return the prefix that runs `commands` after the command behind the prefix.

    That command is arguments of a shell, so that nothing a client gave is in the shell's script.
    """
    script = "".join(f" && printf '\\0' && {shlex.join(command)}" for command in commands)
    return ("sh", "-c", f'"$@"{script}', "sh") if script else ()


@attrs.frozen
class GitRunner:
    """Runner of git commands, each in a process of its own, bounded and in a sandbox.

    `spawn`: `spawn_child` of the reactor.
    `protocols`: those over which git may fetch, as GIT_ALLOW_PROTOCOL names them.
    `memory`: bytes of data (RLIMIT_DATA) for each process of a command.
    `box`: the sandbox.
    `entry`: the `cgroup.procs` files of the cgroups that a command enters, by writing "0" there.
    `niceness`: added to the daemon's own nice value.
    """

    _clock: Any
    _spawn: Callable[..., ChildProcess]
    _protocols: Sequence[str]
    _memory: int = _MEMORY
    _box: TrustedCommandSandbox = attrs.field(factory=TrustedCommandSandbox)
    _entry: Sequence[str] = ()
    _niceness: int = 0

    async def run_command(
        self,
        repository: Path | None,
        *arguments: str,
        next_commands: Sequence[Sequence[str]] = (),
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_file_size: int | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        login: Login | None = None,
        source: str | None = None,
        reach: SandboxAccess = READ_ONLY_ACCESS,
    ) -> GitResult:
        """Run `git ARGUMENTS` in the bare repository `repository`; None: without a repository.

        `next_commands`: run in the same sandbox, each after the one before has exited with 0, which
        a NUL in stdout marks. The result is that of the last command that was run.
        `environment`: added to git's own.
        `timeout`: seconds until git is killed with its descendants, as it is on cancellation.
        `max_file_size`: bytes that a file may have which git writes.
        `on_stdout`: gets stdout in place of the result. If it raises EvaluationFailure, git is
        killed and the error raised here.
        `login`: for the one server that it names.
        `source`: path of the repository of this machine that git serves to itself.
        `reach`: access beyond reading `repository`.

        Raises: EvaluationFailure if git could not be started or was killed, the disk fails, or the
        memory does not suffice; OSError if there is no shell.
        """
        cache = repository and repository.parent
        command = _CommandProtocol(self._box.kill_command, on_stdout, login, cache)
        directory = str(repository or _NO_REPOSITORY)
        git = ["git", f"--git-dir={directory}"]
        for setting, value in _SETTINGS.items():
            git += ["-c", f"{setting}={value}"]
        argv = [*_chain([*git, *one] for one in next_commands), *git]
        with (
            _open_login(login) as descriptor,
            self._box.open_command_prefix(repository, reach) as (prefix, opened),
        ):
            if login is not None:
                # A shell that git starts reads the login from the pipe; no argument has it.
                helper = f'!f() {{ test "$1" = get && cat /proc/self/fd/{descriptor}; }}; f'
                argv += ["-c", f"credential.{login.origin}.helper={helper}"]
            self._spawn(
                command,
                [*self._limit(max_file_size), *prefix, *argv, *arguments],
                {**self._environment(), "GIT_DIR": directory, **(environment or {})},
                "/",
                descriptors=[*([] if descriptor is None else [descriptor]), *opened],
            )
        timer = self._clock.callLater(timeout, command.kill) if timeout is not None else None
        try:
            result = await wait_despite_cancellation(command.ended, command.kill)
        finally:
            if timer is not None and timer.active():
                timer.cancel()
                timer = None
        if command.refused is not None:
            raise command.refused
        result = attrs.evolve(result, is_timed_out=timer is not None)
        self._raise_for_machine(result, serving=source is not None)
        return result

    def _limit(self, max_file_size: int | None) -> Sequence[str]:
        """Return the prefix for a command and its sandbox: a shell that sets limits and execs."""
        limits = [("c", 0), ("d", self._memory // _KIB)]
        if max_file_size is not None:
            limits.append(("f", -(-max_file_size // _BLOCK)))
        entering = "".join(f"echo 0 >{shlex.quote(entry)}; " for entry in self._entry)
        bounds = "".join(f"ulimit -{letter} {value} && " for letter, value in limits)
        nice = f"nice -n {self._niceness} " if self._niceness else ""
        script = f'{{ {entering}{_SET_OOM_SCORE}; }} 2>/dev/null; {bounds}exec {nice}"$@"'
        return "sh", "-c", script, _SHELL

    def _raise_for_machine(self, result: GitResult, *, serving: bool) -> None:
        """Raise EvaluationFailure if the shell, the sandbox, the disk or the memory made git fail.

        A server, and a path, can make git print any message. So such a message alarms nobody; the
        daemon tries its disks anyway. Only the shell and the sandbox print before git does.
        """
        printed = {"stderr": result.stderr}
        beginning = result.stderr if result.status and result.is_stderr_complete else ""
        if beginning.startswith((f"{_SHELL}: ", "nice: ")):
            raise EvaluationFailure(
                "lost", "git could not be started; see `tawebeval doctor`", printed
            )
        if beginning.startswith(BWRAP_ERROR_PREFIX):
            message = "the sandbox of git could not be started; see `tawebeval doctor`"
            raise EvaluationFailure("lost", message, printed, is_daemon_fault=not serving)
        if result.status and (disk_error := DISK_ERROR_PATTERN.search(result.stderr)):
            message = f"git cannot use the disk: {disk_error[1]}"
            raise EvaluationFailure("lost", message, printed, is_daemon_fault=False)
        if is_git_killed_by_kernel(result.status, result.stderr) and not result.is_timed_out:
            message = "git was killed: the server is short of memory, or its disk fails"
            raise EvaluationFailure("lost", message, printed, is_daemon_fault=False)
        if result.status and is_git_memory_exhausted(result.stderr, serving=serving):
            raise EvaluationFailure(
                "repository",
                f"git needs over {format_size(self._memory)} of memory (repositories.memory) for"
                " the repository",
                {"limit": "repositories.memory", "value": self._memory, **printed},
            )

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": GIT_SEARCH_PATH,
            "LC_ALL": "C",
            "HOME": "/nonexistent",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_SSH_COMMAND": SSH_COMMAND,
            "GIT_ALLOW_PROTOCOL": ":".join(self._protocols),
            "GIT_PROTOCOL_FROM_USER": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }


def check_git_version() -> str:
    """Return the output of `git version`. Blocks.

    Raises ConfigurationError, with the remedy, if git does not run or is too old.
    """
    try:
        printed = subprocess.run(
            ["git", "version"],
            env={"PATH": GIT_SEARCH_PATH, "LC_ALL": "C", "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"git does not run ({error}); {_REMEDY}") from None
    version = _VERSION.match(printed)
    if version is None:
        raise ConfigurationError(f"git printed {printed!r} in place of its version; {_REMEDY}")
    if (int(version[1]), int(version[2])) < _OLDEST:
        raise ConfigurationError(f"{printed} is too old; {_REMEDY}")
    return printed


def explain_fetch_failure(stderr: str) -> str:
    """Return the message about a failed fetch, with git's reason."""
    own = _REMOTE.sub("", stderr)
    for pattern, words in _EXPLANATIONS.items():
        if found := re.search(pattern, own, re.IGNORECASE):
            return words.format(*found.groups())
    found = _FATAL.search(stderr)
    reason = f": {found[1][:_EXCERPT]}" if found else "; see stderr"
    return f"git could not fetch the repository{reason}"


def is_git_killed_by_kernel(status: int, stderr: str) -> bool:
    """Tell whether the kernel killed git, or a child of git, for want of memory or a failing disk.

    `status` is negative after a signal, and 128 + the signal's number if a shell or a sandbox
    reported it.
    """
    if any(status in (-number, 128 + number) for number in (_SIGBUS, _SIGKILL)):
        return True
    return bool(_CHILD_KILLED.search(stderr) or _PACK_READER_KILLED.fullmatch(stderr))


def is_git_memory_exhausted(stderr: str, *, serving: bool) -> bool:
    """Tell whether git got no more memory.

    `serving`: git served a repository of this machine to itself, so `remote:` lines are its own.
    """
    return (_OUT_OF_MEMORY_ANYWHERE if serving else _OUT_OF_MEMORY_HERE).search(stderr) is not None
