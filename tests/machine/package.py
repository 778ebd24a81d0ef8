"""This checkout in the root file system of a suite: the Debian package, and the unit tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.machine import roots
from tests.machine.cache import cached
from tests.run import ROOT

# Where the checkout and the wheels are in there: directories that every Debian has.
_SOURCE, WHEELS = "/srv", "/mnt"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": WHEELS}
_CERTIFICATES = Path("/etc/ssl/certs")
# How this machine reaches PyPI, or a mirror of it.
_MIRROR = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
# Of all that `make deb` and the tests install, in the versions that are pinned.
_PINNED = ("build", "man", "runtime", "test")
_FETCH = f"""
python3 -m venv /tmp/venv
/tmp/venv/bin/pip download --quiet --require-hashes --dest {WHEELS} \\
    {" ".join(f"--requirement requirements/{name}.txt" for name in _PINNED)}
"""
# What the tests that need cgroups import, without the large packages of other tests.
_INSTALL = """
python3 scripts/bootstrap
.venv/bin/pip install --quiet hypothesis
# Which would take an emulated processor minutes.
.venv/bin/python -m compileall -q -j 0 .venv tawebeval tawebeval_client tests || :
"""
_TEST = """
python3 scripts/bootstrap --extras test
tests=$(find tests -name 'test_*.py' ! -path 'tests/integration/*' ! -path 'tests/fuzz/*' | sort)
exec .venv/bin/python tests/run.py $(echo "$tests" | sed 's:/:.:g; s:[.]py$::')
"""


class Workshop(NamedTuple):
    """A root file system, which nothing changes, the wheels for it, and a copy of this checkout."""

    root: Path
    wheels: Path
    source: Path

    def build(self) -> Path:
        """Build the package by `make deb`, without a network; return its file. Blocks."""
        # Half of the time would go into packing, and again into unpacking by an emulated processor.
        self._run("make", "deb", DPKG_DEB_COMPRESSOR_TYPE="none")
        (package,) = (self.source / "build" / "deb").glob("tawebeval_*.deb")
        return package

    def install(self) -> Path:
        """Make the virtualenv of the checkout; return the checkout. Blocks."""
        self._run("sh", "-euc", _INSTALL)
        return self.source

    def test(self) -> str:
        """Run the unit tests; return what they come to. Raises CalledProcessError. Blocks."""
        # With CI set, none may be skipped. All examples are tried by `make test` outside.
        variables = {"CI": "yes", "TAWEBEVAL_SAME_EXAMPLES": "yes", "TAWEBEVAL_EXAMPLES": "4"}
        *_, outcome = self._run("sh", "-euc", _TEST, **variables).splitlines()
        return outcome

    def has_other_python(self) -> bool:
        """Tell whether the Python in there is another version than the one that runs this."""
        version = ".".join(map(str, sys.version_info[:2]))
        return os.readlink(self.root / "usr/bin/python3") != f"python{version}"

    def _run(self, *command: str, **variables: str) -> str:
        options = ["--unshare-net", "--ro-bind", str(self.wheels), WHEELS]
        return _enter(self.root, self.source, options, command, {**OFFLINE, **variables})


@contextmanager
def workshop(suite: str, work: Path) -> Iterator[Workshop]:
    """Give what the package is built with, with a copy of this checkout in `work`. Blocks."""
    source = work / "source"
    copy_checkout(source)
    with roots.builder(suite) as root, wheels(suite, root, source) as folder:
        yield Workshop(root, folder, source)


@contextmanager
def wheels(suite: str, root: Path, source: Path) -> Iterator[Path]:
    """Give a directory with all wheels that the checkout needs. Blocks; uses the network."""

    def make(folder: Path) -> None:
        options = ["--bind", str(folder), WHEELS]
        options += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf"]
        # This machine may trust others than Debian does.
        options += ["--ro-bind-try", str(_CERTIFICATES), str(_CERTIFICATES)]
        variables = {"PIP_CERT": str(_CERTIFICATES / "ca-certificates.crt")}
        variables |= {name: os.environ[name] for name in _MIRROR if name in os.environ}
        _enter(root, source, options, ("sh", "-euc", _FETCH), variables)

    # A root that was made anew may have another Python.
    ingredients = [(ROOT / f"requirements/{name}.txt").read_text() for name in _PINNED]
    ingredients.append(os.readlink(root / "usr/bin/python3"))
    with cached(f"wheels-{suite}", "\n".join([_FETCH, *ingredients]), make) as folder:
        yield folder


def copy_checkout(source: Path) -> None:
    """Copy what git has of this checkout, or would have with the next commit."""
    source.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.split(b"\0")
    there = [name for name in listed if name and (ROOT / os.fsdecode(name)).exists()]
    names, archive = source / "names", source / "archive"
    names.write_bytes(b"\0".join(there))
    roots.run("tar", "-cf", archive, "--null", "-T", names, cwd=ROOT)
    roots.run("tar", "-xf", archive, "-C", source)
    names.unlink()
    archive.unlink()


def _enter(
    root: Path,
    source: Path,
    options: Sequence[str],
    command: Sequence[str],
    variables: dict[str, str],
) -> str:
    """Run a command in a root file system; return its output. Raises CalledProcessError."""
    return roots.run(*build_argv(root, source, options, command, variables))


def build_argv(
    root: Path,
    source: Path,
    options: Sequence[str],
    command: Sequence[str],
    variables: dict[str, str],
) -> Sequence[str]:
    """Return what runs a command in a root file system, in `source`, which is mounted there.

    `options` are further ones of bwrap.
    """
    given = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LC_ALL": "C.UTF-8"}
    argv = ["bwrap", "--ro-bind", str(root), "/", "--dev", "/dev"]
    if os.geteuid():
        argv += ["--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--proc", "/proc"]
    else:
        # With all users, some of whom tests become; and with a /proc of which bwrap covers nothing,
        # or no sandbox could mount another. setpriv: whatever ends this ends the command.
        new = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        argv = ["setpriv", "--pdeathsig", "KILL", *new, *argv]
        argv += ["--cap-add", "ALL", "--bind", "/proc", "/proc"]
    argv += ["--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session", "--clearenv"]
    argv += ["--tmpfs", "/tmp", "--tmpfs", "/run", "--bind", str(source), _SOURCE]
    for name, value in {**given, **variables}.items():
        argv += ["--setenv", name, value]
    return [*argv, "--chdir", _SOURCE, *options, "--", *command]
