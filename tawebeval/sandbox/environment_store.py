"""The store of environments in the state directory: import, list and remove roots. All blocks.

<state>/environments/sha256-HEX/   a root, read-only; HEX is the digest of its content
<state>/environments/new-*/        an import, locked while it runs

A source comes from strangers. So programs unpack it in a sandbox (`helper_sandbox`) that may
write to one directory alone, which has nothing else; the daemon never reads a root as root. The
limit of an import is the free disk. Of images of containers skopeo verifies all digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import attrs

from tawebeval.errors import ConfigurationError, format_size
from tawebeval.linux.filetree import remove_tree, run_and_read_stderr_line, walk_tree
from tawebeval.sandbox.bubblewrap import build_minimal_system_options, write_sandbox_files
from tawebeval.sandbox.disk_usage import measure_disk_usage
from tawebeval.sandbox.environments import (
    ACCOUNT_FILES,
    NETWORK_FILES,
    PYTHON,
    find_environment_root_problem,
    find_stored_root_digest,
    locate_in_root,
    lock_environment_root,
)
from tawebeval.sandbox.helper_sandbox import (
    BWRAP_ERROR_PREFIX,
    BubblewrapHelperSandbox,
    SandboxAccess,
)
from tawebeval.sandbox.images import (
    DOCKER_MANIFEST_FILE,
    MAX_JSON_BYTES,
    OCI_LAYOUT_FILE,
    check_digest,
    choose_digest,
    count_docker_images,
    select_image,
)
from tawebeval.sandbox.seccomp import make_seccomp_filters

_NEW = "new-"
_GONE = "gone-"
_LOOK = 0.2  # seconds between two looks at the free disk
_MAX_ENTRIES = 2_000_000
_COMPLAINT = 2000  # bytes of a program's messages that are shown
# Directories of a source that no sandbox shows, and what other programs have left.
_LEFT_OUT = ("boot", "dev", "home", "lost+found", "proc", "root", "run", "sys", "tmp")
_UNPACK = ("--extract", "--no-same-owner", "--no-same-permissions", "--delay-directory-restore")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/nonexistent",
}
_SHOWN = 0o555  # the mode of directories and programs
_NOTES = ("Removing leading", "•")  # in lines of tar and umoci that report no error
_IMAGE_FILES = (OCI_LAYOUT_FILE, DOCKER_MANIFEST_FILE)
_CONVERTER, _UNPACKER = "skopeo", "umoci"
_UNSIGNED = "--insecure-policy"  # skopeo checks digests, and no signatures
_LOG_PREFIX = re.compile(r'^time="[^"]*" level=\w+ msg=')  # of skopeo
# What tar(1) says without the program that its --list needs.
_NO_DECOMPRESSOR = re.compile(r"tar \(child\): (\w+): Cannot exec")
_DEBIAN_PACKAGES = {"xz": "xz-utils", "lzma": "xz-utils", "compress": "ncompress"}
_OWN = "own"  # the directory of the sandbox's files


@attrs.frozen
class StoredRoot:
    """A root of the store; `warnings` are for the operator who imports it.

    `image_digest` is that of the imported image; "" if the source was none.
    """

    path: Path
    was_added: bool = False
    warnings: Sequence[str] = ()
    image_digest: str = ""

    @property
    def digest(self) -> str:
        """The digest of the content."""
        return self.path.name


def locate_store(state: Path) -> Path:
    """Return the path of the store in a state directory."""
    return state / "environments"


@attrs.frozen
class EnvironmentStore:
    """The store in `directory`; an import leaves `min_free_bytes` bytes of the disk free.

    Its errors are ConfigurationError, or OSError with a path.
    """

    directory: Path
    min_free_bytes: int = 0

    def import_root(self, source: Path, digest: str = "") -> StoredRoot:
        """Make a root from a directory, a tar archive, or an image of a container.

        An image is an OCI layout, an archive of one, or an archive of docker. `digest` is the one
        that an image must have; "" takes any.
        """
        self._remove_stale()
        with self._make_staging() as staging:
            import_ = _Import(source, staging, self.min_free_bytes, digest)
            return attrs.evolve(self._finish(import_.unpack()), image_digest=import_.image_digest)

    def _finish(self, root: Path) -> StoredRoot:
        problem = find_environment_root_problem(root)
        if problem is not None:
            words = problem[0].replace(str(root), "the source")
            raise ConfigurationError(words, problem.remedy)
        target = self.directory / f"sha256-{_settle(root)}"
        warnings = []
        try:
            locate_in_root(root, PYTHON)
        except OSError:
            warnings.append(
                f"it has no {PYTHON}: tawebeval-run and segi.py do not work for its evaluators"
            )
        try:
            os.close(lock_environment_root(target))
            was_added = False
        except BlockingIOError:
            raise ConfigurationError(f"{target.name} is being removed", "import it again") from None
        except FileNotFoundError:
            was_added = True
            run_and_read_stderr_line("/bin/sync", "-f", "--", root)
            root.rename(target)
        return StoredRoot(target, was_added, tuple(warnings))

    def list_roots(self) -> Iterator[tuple[StoredRoot, int]]:
        """Yield the roots with their sizes in bytes on the disk, sorted by digest."""
        for path in self._list_paths():
            yield StoredRoot(path), measure_disk_usage(path, ()).disk_bytes

    def _list_paths(self) -> list[Path]:
        with suppress(FileNotFoundError):
            return sorted(filter(find_stored_root_digest, self.directory.iterdir()))
        return []

    def remove_root(self, digest: str) -> None:
        """Remove the root whose digest begins with `digest`."""
        found = [path for path in self._list_paths() if path.name.startswith(digest)]
        if len(found) != 1 or not digest:
            number = "no root" if not found else f"{len(found)} roots"
            raise ConfigurationError(
                f"{number} in {self.directory} with the digest {digest!r}",
                "`tawebeval environment list` lists them",
            )
        try:
            lock = lock_environment_root(found[0], fcntl.LOCK_EX)
        except BlockingIOError:
            raise ConfigurationError(
                f"{found[0].name} is in use by a daemon or an evaluation",
                "remove its table from the configuration, run `tawebeval reload`, and let its"
                " evaluations end",
            ) from None
        try:
            gone = found[0].with_name(_GONE + found[0].name)
            found[0].rename(gone)
            remove_tree(gone)
        finally:
            os.close(lock)

    def _remove_stale(self) -> None:
        """Remove what killed imports and removals have left."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for place in self.directory.iterdir():
            if place.name.startswith((_NEW, _GONE)):
                with suppress(OSError):  # it is in use
                    lock = lock_environment_root(place, fcntl.LOCK_EX)
                    try:
                        remove_tree(place)
                    finally:
                        os.close(lock)

    @contextmanager
    def _make_staging(self) -> Iterator[Path]:
        staging = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.directory))
        lock = lock_environment_root(staging, fcntl.LOCK_EX)
        try:
            yield staging
        finally:
            remove_tree(staging)
            os.close(lock)


class _Import:
    """One import into the directory `staging`; `image_digest` is known when it is unpacked."""

    def __init__(self, source: Path, staging: Path, reserve: int, digest: str) -> None:
        self._source = source
        self._staging = staging
        self._reserve = reserve
        self._wanted = digest
        self._extracted = staging / "extracted"  # an archive of an image
        self.image_digest = ""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigurationError(
                "bubblewrap is not installed; run `apt-get install bubblewrap`"
            )
        own = staging / _OWN
        own.mkdir()
        write_sandbox_files(own)
        options = tuple(build_minimal_system_options(own))
        self._sandbox = BubblewrapHelperSandbox(
            bwrap, make_seccomp_filters(internet=False), options
        )

    def unpack(self) -> Path:
        """Return the directory with the content of the source."""
        root = self._staging / "root"
        root.mkdir()
        source = self._source
        if not source.exists():
            raise ConfigurationError(f"{source} does not exist")
        if not os.access(source, os.R_OK, effective_ids=True):
            raise ConfigurationError(
                f"{source}: the daemon's user (uid {os.geteuid()}) cannot read it",
                "copy it to a place such as /var/tmp, with `chmod a+rX`",
            )
        if source.is_dir() and os.path.lexists(source / OCI_LAYOUT_FILE):
            return self._unpack_image(source)
        if not source.is_dir() and self._has_image_file():
            self._extracted.mkdir()
            self._extract(self._extracted)
            run_and_read_stderr_line("/bin/chmod", "-R", "u+rwX", "--", self._extracted)
            if os.path.lexists(self._extracted / OCI_LAYOUT_FILE):
                return self._unpack_image(self._extracted)
            return self._unpack_image(None)
        if self._wanted:
            raise ConfigurationError(f"{source} is not an image of a container; leave out --digest")
        if source.is_dir():
            self._copy_directory(root)
        else:
            self._extract(root, *_leave_out("./", "", "/"))
        return root

    def _extract(self, target: Path, *options: str) -> None:
        """Extract the source, an archive, into an empty directory."""
        files = (f"--directory={target}", f"--file={self._source}")
        self._run("tar", *_UNPACK, *files, *options, writable=target)

    def _copy_directory(self, root: Path) -> None:
        words = ("--ignore-failed-read", "--warning=no-failed-read", "--one-file-system")
        options = (*words, f"--directory={self._source}", *_leave_out("./"))
        packing = ("tar", "--create", *options, ".")
        with self._start(packing, subprocess.DEVNULL, subprocess.PIPE) as pack:
            unpacking = ("tar", *_UNPACK, "--directory", root, "--file", "-")
            self._run(*unpacking, stdin=pack.stdout, writable=root)
            assert pack.stdout is not None, "it is a pipe"
            pack.stdout.close()
            if pack.wait():
                raise ConfigurationError(f"{self._source}: tar could not read the directory")

    def _has_image_file(self) -> bool:
        """Tell whether an archive has a file by which it is an image."""
        command = ("tar", "--list", "--quoting-style=escape", "--file", self._source)
        with self._start(command, subprocess.DEVNULL, subprocess.PIPE) as child:
            assert child.stdout is not None, "it is a pipe"
            names = (os.fsdecode(line.rstrip(b"\n").removeprefix(b"./")) for line in child.stdout)
            found = [name for name in names if name in _IMAGE_FILES]
            if child.wait():
                said = self._read_errors()
                if program := _NO_DECOMPRESSOR.search(said):
                    raise ConfigurationError(
                        f"{self._source} needs {program[1]}, which is not installed",
                        f"install {program[1]}, on Debian as root: apt-get install"
                        f" {_DEBIAN_PACKAGES.get(program[1], program[1])}",
                    )
                raise ConfigurationError(
                    f"{self._source} is neither a tar archive nor an image: {said}"
                )
        return bool(found)

    def _unpack_image(self, layout: Path | None) -> Path:
        """Unpack an image of a layout; None: an archive of docker was extracted."""
        missing = [program for program in (_CONVERTER, _UNPACKER) if shutil.which(program) is None]
        if missing:
            raise ConfigurationError(
                f"{self._source} is an image of a container;"
                f" run `apt-get install {' '.join(missing)}` to import it"
            )
        copy, unpacked = self._staging / "copy", self._staging / "unpacked"
        copy.mkdir()
        unpacked.mkdir()
        archive = copy / "archive.tar"
        if layout is None:  # skopeo would copy an archive that is compressed, or begins like one
            files = (f"--file={archive}", f"--directory={self._extracted}")
            self._run("tar", "--create", *files, ".", writable=copy)
        try:
            if self._wanted:
                check_digest(self._wanted)
            if layout is None:
                reference = self._choose_docker_image(archive)
            else:
                chosen = self._staging / "chosen"
                self.image_digest = select_image(layout, chosen, self._wanted)
                reference = f"oci:{chosen}"
        except ConfigurationError as error:
            what, remedy = error.problem
            raise ConfigurationError(f"{self._source}: {what}", remedy) from None
        image = f"{copy}/image:root"
        options = (_UNSIGNED, f"--tmpdir={copy}", "copy", "--quiet", "--dest-compress-format=gzip")
        self._run(_CONVERTER, *options, reference, f"oci:{image}", writable=copy)
        words = ("raw", "unpack", "--rootless", "--image", image)
        self._run(_UNPACKER, *words, unpacked / "root", writable=unpacked)
        for name in _LEFT_OUT:
            remove_tree(unpacked / "root" / name)
        return unpacked / "root"

    def _choose_docker_image(self, archive: Path) -> str:
        """Return the reference of the image, among those of `archive`, with the wanted ID.

        `archive` has what was extracted, which is removed.
        """
        count = count_docker_images(self._extracted)
        remove_tree(self._extracted)
        references = dict[str, str]()
        for number in range(count):
            reference = f"docker-archive:{archive}:@{number}"
            command = (_CONVERTER, _UNSIGNED, "inspect", "--config", "--raw", reference)
            with self._start(command, subprocess.DEVNULL, subprocess.PIPE) as child:
                assert child.stdout is not None, "it is a pipe"
                configuration = child.stdout.read(MAX_JSON_BYTES)
                if child.wait():
                    raise ConfigurationError(f"{_CONVERTER} failed: {self._read_errors()}")
            references[f"sha256:{hashlib.sha256(configuration).hexdigest()}"] = reference
        self.image_digest = choose_digest(references, self._wanted)
        return references[self.image_digest]

    def _check_disk(self) -> None:
        """Raise ConfigurationError if the disk is nearly full."""
        free = shutil.disk_usage(self._staging).free
        if free < self._reserve:
            raise ConfigurationError(
                f"{self._source} does not fit on the disk: {format_size(free)} are left"
                f" of {self._staging.parent}; free some disk space"
            )

    def _run(
        self,
        *command: str | Path,
        writable: Path,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    ) -> None:
        """Run a program in the sandbox until it ends, or the disk is nearly full."""
        with self._start(command, stdin, subprocess.DEVNULL, writable) as child:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    status = child.wait(_LOOK)
                    break
                self._check_disk()
        if status:
            raise ConfigurationError(f"{self._source}: {command[0]} failed: {self._read_errors()}")

    @contextmanager
    def _start(
        self,
        command: Sequence[str | Path],
        stdin: int | IO[bytes] | None,
        stdout: int,
        writable: Path | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a program in the sandbox, which may write to one directory; end it with the body.

        It can read the source and the directory of the import.
        """
        access = SandboxAccess(
            writable_paths=[] if writable is None else [writable],
            readable_paths=[str(self._source)],
        )
        prepared = self._sandbox.prepare_command(self._staging, access)
        with prepared as (before, filters), (self._staging / "errors").open("wb") as errors:
            child = subprocess.Popen(
                [*before, *map(str, command)],
                cwd="/",
                env=_ENVIRONMENT,
                stdin=stdin,
                stdout=stdout,
                stderr=errors,
                pass_fds=filters,
            )
        try:
            yield child
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def _read_errors(self) -> str:
        with (self._staging / "errors").open("rb") as file:
            said = file.read(_COMPLAINT).decode(errors="replace").strip().splitlines()
        said = [
            _LOG_PREFIX.sub("", line.strip().removeprefix(BWRAP_ERROR_PREFIX))
            for line in said
            if not any(note in line for note in _NOTES)
        ]
        return "; ".join(said[:3]) or "it gave no reason"


def _leave_out(*prefixes: str) -> tuple[str, ...]:
    names = (f"{prefix}{name}" for prefix in prefixes for name in _LEFT_OUT)
    return ("--anchored", *(f"--exclude={name}" for name in names))


def _settle(root: Path) -> str:
    """Make a root read-only, with the modes and files that sandboxes need; return its digest."""
    run_and_read_stderr_line("/bin/chmod", "-R", "u+rwX", "--", root)
    _add_files(root / "etc")
    whole = hashlib.sha256()
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        entries = []
        for path, status in walk_tree(top):
            entries.append((path, status.st_mode))
            if len(entries) > _MAX_ENTRIES:
                raise ConfigurationError(f"the source has over {_MAX_ENTRIES} files")
        directories = []
        for path, mode in sorted(entries):
            if stat.S_ISDIR(mode):
                directories.append(path)
                kind, content = "directory", b""
            elif stat.S_ISLNK(mode):
                kind, content = "link", os.fsencode(os.readlink(path, dir_fd=top))
            elif stat.S_ISREG(mode):
                is_program = bool(mode & 0o111)
                os.chmod(path, _SHOWN if is_program else 0o444, dir_fd=top)
                kind, content = "program" if is_program else "file", _digest_file(path, top)
            else:
                os.unlink(path, dir_fd=top)
                continue
            whole.update(os.fsencode(f"{path}\0{kind}\0{len(content)}\0") + content)
        for path in directories:
            os.chmod(path, _SHOWN, dir_fd=top)
    finally:
        os.close(top)
    root.chmod(0o755)  # a directory that is moved must be writable
    return whole.hexdigest()


def _add_files(etc: Path) -> None:
    """Make the files over which the sandbox puts its own."""
    if not os.path.lexists(etc):
        etc.mkdir()
    if etc.is_symlink() or not etc.is_dir():
        raise ConfigurationError("/etc of the source is not a directory; use another source")
    for name in (*ACCOUNT_FILES, *NETWORK_FILES):
        remove_tree(etc / name) if (etc / name).is_dir() else (etc / name).unlink(missing_ok=True)
        (etc / name).touch()


def _digest_file(path: str, top: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    with open(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
