"""Programs of the machine that tests use, by the modules of these tests.

    python3 tests/programs.py [--all | --skipped] [NAME...]

prints the options by which scripts/bootstrap provides them, for the tests that are named, or for
all; with `--skipped` what is skipped on this machine, and why. Without a NAME, optional programs
are provided only with `--all` or with CI in the environment. Runs before there is a virtualenv, so
with the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Use(NamedTuple):
    """Programs and libraries, named as for scripts/bootstrap, and who uses them.

    Without what is `needed` tests fail, without other programs they are skipped. `npm` are packages
    of npm. What is `optional` is large, for few tests.
    """

    things: str
    modules: str
    needed: bool = False
    npm: str = ""
    optional: bool = False


_PAGE = (
    "test_documented_clients test_page test_page_class test_page_http2"
    " test_lti test_page_problems test_page_results test_page_tokens"
)
_PROXIES = "test_proxies test_several test_page_http2"
_TOOLCHAINS = "gcc /usr/bin/node"
_SANDBOXED = "tests.sandbox.test_bubblewrap tests.sandbox.test_environments"
_BOOTED = "test_hardening test_install test_systemd"


def _integration(names: str) -> str:
    return " ".join(f"tests.integration.{name}" for name in names.split())


USES = (
    Use("git libseccomp.so.2 /usr/bin/python3", "tests", needed=True),
    Use("bwrap curl", f"tests.integration {_SANDBOXED}", needed=True),
    Use("systemd-analyze", f"tests.test_units tests.test_container_files {_integration(_BOOTED)}"),
    Use("nsenter ip pgrep", _integration(f"{_BOOTED} test_full_disk")),
    Use("bash zsh fish", _integration("test_install")),
    Use("jq", _integration("test_documented_commands")),
    Use("jq /usr/bin/node", _integration("test_documented_clients")),
    Use("/usr/bin/node", _integration("test_page_modules")),
    Use("/usr/bin/node", _integration("test_client_packages"), npm="typescript"),
    Use(_TOOLCHAINS, _integration("test_toolchains")),
    Use("/usr/bin/go /usr/bin/rustc", _integration("test_toolchains"), optional=True),
    Use("git-lfs", _integration("test_lfs")),
    Use("/usr/bin/ssh", _integration("test_git_attacks")),
    Use("g++ dash bash", _integration("test_libraries")),
    Use("g++ bash /usr/bin/javac", _integration("test_examples")),
    Use("mmdebstrap", _integration("test_environments")),
    Use("podman crun mmdebstrap newuidmap", _integration("test_image")),
    Use(
        "/usr/sbin/munged /usr/sbin/slurmctld /usr/sbin/slurmd srun",
        _integration("test_slurm"),
    ),
    Use("chromium chromedriver", _integration(_PAGE), npm="axe-core"),
    Use("/usr/sbin/nginx /usr/sbin/haproxy caddy", _integration(_PROXIES)),
)

FOR_ROOT = (
    "tests.evaluations.test_store tests.linux.test_hidden_proc tests.linux.test_privileges "
    + _integration(
        f"{_BOOTED} test_environments"
        " test_full_disk test_git_attacks test_overlays"
        f" test_privileges test_try test_verdicts test_writable_trees test_slurm"
    )
)
"""Modules of which some tests, or all, are skipped for ordinary users."""


def used(modules: str, names: Sequence[str]) -> list[str]:
    """Return which of the modules have tests that are named, all without a name."""
    return [
        module
        for module in modules.split()
        if not names
        or any(f"{name}.".startswith(f"{module}.") for name in names)
        or any(f"{module}.".startswith(f"{name}.") for name in names)
    ]


def options(names: Sequence[str], *, optional: bool = False) -> Iterator[str]:
    """Yield the options for scripts/bootstrap; with `optional` programs, or those of `names`."""
    uses = [
        use for use in USES if used(use.modules, names) and (names or optional or not use.optional)
    ]
    for option, kind in (("--needs", True), ("--wants", False)):
        if things := [use.things.replace(" ", ",") for use in uses if use.needed == kind]:
            yield f"{option}={','.join(things)}"
    if packages := [use.npm for use in uses if use.npm]:
        yield f"--npm={','.join(packages)}"


def skipped(names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each reason for which tests that are named are skipped on this machine."""
    for use in USES:
        lacking = [thing for thing in use.things.split() if shutil.which(thing) is None]
        modules = used(use.modules, names)
        if lacking and modules and not use.needed:
            why = f"without {', '.join(lacking)}"
            remedy = "; `make setup` as root installs them" if use.optional else ""
            yield _line(why, modules) + remedy
    if os.geteuid() != 0 and (modules := used(FOR_ROOT, names)):
        yield _line("without root", modules)


def _line(why: str, modules: Iterable[str]) -> str:
    return f"{why}, tests are skipped in {', '.join(modules)}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--skipped"]:
        for reason in skipped(sys.argv[2:]):
            print(f"[tests] {reason}")
    else:
        everything = sys.argv[1:2] == ["--all"]
        print(*options(sys.argv[1 + everything :], optional=everything or "CI" in os.environ))
