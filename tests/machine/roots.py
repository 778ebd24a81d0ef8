"""Root file systems of a Debian suite: to boot, to build packages in, and for evaluators."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.machine.cache import cached
from tests.run import ROOT

_SCRIPTS = ROOT / "scripts"
(README_PACKAGES,) = re.findall(
    r"(?m)^apt-get install (.* make .*)$", (ROOT / "README.md").read_text()
)
"""The Debian packages that the demo and the tests need."""
_UNIT = Path(__file__).with_name("guest") / "given.service"

# A machine that boots, with AppArmor, and what the package depends on: it has no network.
_MACHINE = (
    *("systemd", "systemd-sysv", "udev", "dbus", "kmod", "procps", "iproute2", "initramfs-tools"),
    *("zstd", "apparmor", "linux-image-cloud-amd64"),
    *("python3", "bubblewrap", "git", "libseccomp2"),
)
# What `make deb` needs, and the unit tests.
_BUILDER = (
    *("make", "debhelper", "dh-apparmor", "python3", "python3-venv", "ca-certificates"),
    *("git", "bubblewrap", "libseccomp2", "systemd", "util-linux"),
)
# What README.md says that is needed, the programs that `bare.QUICK` uses, and no more.
_BARE = (*README_PACKAGES.split(), "openssl", "procps", "systemd", "xz-utils")
# As Debian's installer writes it.
_HOSTS = "127.0.0.1\\tlocalhost\\n::1\\tlocalhost ip6-localhost ip6-loopback\\n"
# A toolchain for evaluators, with another Python and another JDK than this machine's.
_TOOLCHAIN = ("python3-minimal", "default-jdk-headless")
# Which is half of it.
_UNUSED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/lib/jvm/*/jmods")
# Sparse, and large: `tawebeval doctor` asks for as much room as the limits allow to be filled.
_DISK = "96G"
_MASKED = (
    *("serial-getty@ttyS0.service", "serial-getty@ttyS1.service"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "systemd-timesyncd.service"),
)

# For whatever names no time itself: on an emulated processor that others use, too.
_PATIENT = r"[Manager]\nDefaultTimeoutStartSec=600\n"

_MACHINE_HOOKS = (
    'mkdir "$1/etc/systemd/system.conf.d"',
    f'printf "{_PATIENT}" >"$1/etc/systemd/system.conf.d/patience.conf"',
    'echo force-unsafe-io >"$1/etc/dpkg/dpkg.cfg.d/unsafe-io"',  # the disk is thrown away
    'chroot "$1" systemctl enable --quiet given.service',
    f'chroot "$1" systemctl mask --quiet {" ".join(_MASKED)}',
    'echo machine >"$1/etc/hostname"',
)


# Fills a directory with the disk, from the archive of its files.
_MAKE_DISK = f"""
mkdir root
tar -xf root.tar -C root --exclude './dev/*' --exclude './var/cache/apt/*'
chmod -R u+r root  # some files are nobody's to read, not even their owner's
mv root/boot/vmlinuz-* vmlinuz
mv root/boot/initrd.img-* initrd
chmod 644 vmlinuz initrd
/usr/sbin/mke2fs -q -t ext4 -d root disk {_DISK}
rm -rf root root.tar
"""
_MAKE_DIRECTORY = """
mkdir root
tar -xf root.tar -C root --exclude './dev/*' --exclude './var/cache/apt/*'
rm root.tar
"""


@contextmanager
def machine(suite: str) -> Iterator[Path]:
    """Give a directory with `disk`, `vmlinuz` and `initrd` of a machine. Blocks, for a minute."""

    def make(folder: Path) -> None:
        put = f"copy-in {_UNIT} /etc/systemd/system"
        _archive(suite, _MACHINE, (put, *_MACHINE_HOOKS), folder / "root.tar")
        # So files have their owners on the disk, whoever makes it.
        fake = ["fakeroot"] if os.geteuid() else []
        run(*fake, "sh", "-euc", _MAKE_DISK, cwd=folder)

    ingredients = "\n".join([*_MACHINE, *_MACHINE_HOOKS, _UNIT.read_text(), _MAKE_DISK])
    with cached(f"machine-{suite}", ingredients, make) as folder:
        yield folder


@contextmanager
def builder(suite: str) -> Iterator[Path]:
    """Give the root file system in which packages are built. Blocks, for a minute."""

    def make(folder: Path) -> None:
        _archive(suite, _BUILDER, (), folder / "root.tar")
        run("sh", "-euc", _MAKE_DIRECTORY, cwd=folder)

    with cached(f"builder-{suite}", "\n".join([*_BUILDER, _MAKE_DIRECTORY]), make) as folder:
        yield folder / "root"


@contextmanager
def bare(suite: str) -> Iterator[Path]:
    """Give a root file system with what README.md tells people to install. Blocks, for a minute."""
    hook = f'printf "{_HOSTS}" >"$1/etc/hosts"'

    def make(folder: Path) -> None:
        _archive(suite, _BARE, (hook,), folder / "root.tar")
        run("sh", "-euc", _MAKE_DIRECTORY, cwd=folder)

    with cached(f"bare-{suite}", "\n".join([*_BARE, hook, _MAKE_DIRECTORY]), make) as folder:
        yield folder / "root"


@contextmanager
def toolchain(suite: str) -> Iterator[Path]:
    """Give the archive of a root file system with Python and a JDK. Blocks, for a minute."""
    hook = 'cd "$1" && rm -rf ' + " ".join(_UNUSED)

    def make(folder: Path) -> None:
        _archive(suite, _TOOLCHAIN, (hook,), folder / "root.tar")
        (folder / "root.tar").chmod(0o644)

    with cached(f"toolchain-{suite}", "\n".join([*_TOOLCHAIN, hook]), make) as folder:
        yield folder / "root.tar"


@contextmanager
def image_base() -> Iterator[Path]:
    """Give the first layer of the image of this machine's suite. Blocks, for a minute."""

    def make(folder: Path) -> None:
        run(_SCRIPTS / "image", "--base", folder / "base.tar.gz")

    ingredients = "\n".join((_SCRIPTS / name).read_text() for name in ("image", "debian_root"))
    with cached("image-base", ingredients, make) as folder:
        yield folder / "base.tar.gz"


def _archive(suite: str, packages: Sequence[str], hooks: Sequence[str], archive: Path) -> None:
    """Write a root file system with these packages into an archive."""
    options = [f"--customize-hook={hook}" for hook in hooks]
    included = f"--include={','.join(packages)}"
    run(_SCRIPTS / "debian_root", "--variant=minbase", included, *options, suite, archive)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command, and return what it prints. Raises CalledProcessError. Blocks."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    ).stdout.decode(errors="replace")
