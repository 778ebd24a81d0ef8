"""tawebeval is the same whether it comes as a wheel, as a source distribution or editable."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tests.cases.patience import LONG_PATIENCE
from tests.cases.scripts import load_script

CHECKOUT = Path(__file__).resolve().parent.parent.parent

# What a checkout may hold besides the project.
RUBBISH = (
    *(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", "*dropin.cache*"),
    *("_trial_temp*", ".coverage*", ".hypothesis", ".mypy_cache", ".ruff_cache", "twistd.*"),
)

# Prints from where the package and the plugin come; the last is False if the plugin is not found.
WHENCE = """\
import tawebeval, twisted.plugins.tawebeval_plugin as module
from twisted.application.service import IServiceMaker
from twisted.plugin import getPlugins
print(tawebeval.__file__, module.__file__, module.tawebeval in getPlugins(IServiceMaker), sep="\\n")
"""

EPOCH = 1_800_000_000  # 2027

TWISTD = "import sys; from twisted.scripts.twistd import run; sys.argv[0] = 'twistd'; run()"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return what a command prints on stdout. Raises AssertionError if it fails."""
    # Neither is coverage of interest here, nor may this Python's path reach into others.
    own = ("COVERAGE_", "PYTHON", "PIP_REQUIRE_VIRTUALENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment.update(variables, PIP_DISABLE_PIP_VERSION_CHECK="1")
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LONG_PATIENCE
    )
    if done.returncode:
        raise AssertionError(f"{command} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


class Environment:
    """A virtualenv of its own, which sees what stands beside this Python but no other tawebeval."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.work = folder / "work"
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        self.python = folder / "venv" / "bin" / "python"
        self.work.mkdir()
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(self.run("-c", purelib).strip())
        # As a path only: what editable installs have left there is not followed.
        beside = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site / "beside.pth").write_text("\n".join(sorted(beside)) + "\n")

    def run(self, *arguments: str) -> str:
        """Return what this Python prints, started where nothing can be imported from."""
        return run(self.python, *arguments, cwd=self.work)

    def install(self, *what: str | Path) -> None:
        options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        self.run("-m", "pip", "install", *options, "--ignore-installed", *map(str, what))


@attrs.frozen
class Built:
    """A copy of the checkout, and what was built from it."""

    checkout: Path
    sdist: Path
    wheel: Path


def copy_checkout(folder: Path) -> None:
    """Copy what is of the project."""
    ignore = shutil.ignore_patterns(*RUBBISH)
    shutil.copytree(CHECKOUT, folder, symlinks=True, ignore=ignore)


@functools.cache
def build() -> Built:
    """Build both, once; the wheel is built from what the source distribution holds."""
    folder = Path(tempfile.mkdtemp(prefix="tawebeval-")).resolve()
    atexit.register(shutil.rmtree, folder)
    checkout, dist = folder / "checkout", folder / "dist"
    copy_checkout(checkout)
    # It must not be shipped, and whoever has run twistd in a checkout has one.
    (checkout / "twisted" / "plugins" / "dropin.cache").touch()
    load_script("release").build_distributions(checkout, dist, EPOCH)
    name = f"tawebeval-{__version__}"
    return Built(checkout, dist / f"{name}.tar.gz", dist / f"{name}-py3-none-any.whl")


class PackagingTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.built = build()
        self.checkout = self.built.checkout

    def check_installed(self, *what: str | Path, at: Path | None = None) -> None:
        """Install into an environment; hold that the package and its plugin are found there.

        They have to come from `at`, or else from among the environment's own packages.
        """
        environment = Environment(self.checkout.with_name(self._testMethodName))
        environment.install(*what)
        root = at or environment.site
        self.assertEqual(
            environment.run("-c", WHENCE).splitlines(),
            [
                str(root / "tawebeval" / "__init__.py"),
                str(root / "twisted" / "plugins" / "tawebeval_plugin.py"),
                "True",
            ],
        )
        commands = environment.run("-c", TWISTD, "--help").partition("Commands:")[2].split()
        self.assertIn("tawebeval", commands)
        version = environment.run("-c", TWISTD, "tawebeval", "--version")
        self.assertEqual(version, f"tawebeval {__version__}\n")
        self.assertTrue((root / "tawebeval" / "py.typed").exists())
        self.assertFalse((root / "twisted" / "__init__.py").exists())
        self.assertFalse((root / "twisted" / "plugins" / "__init__.py").exists())

    def test_wheel_installs_package_and_plugin(self) -> None:
        self.check_installed(self.built.wheel)

    def test_builds_in_two_directories_are_the_same(self) -> None:
        folder = self.checkout.with_name(self._testMethodName)
        checkout, dist = folder / "another directory é", folder / "dist"
        copy_checkout(checkout)
        for path in checkout.rglob("*"):  # as another user's clone has them, at another time
            path.chmod(path.stat().st_mode & 0o700)
            os.utime(path, (EPOCH - 9, EPOCH - 9))
        load_script("release").build_distributions(checkout, dist, EPOCH)
        for built in (self.built.sdist, self.built.wheel):
            self.assertEqual((dist / built.name).read_bytes(), built.read_bytes(), built.name)
        with tarfile.open(self.built.sdist) as sdist:
            self.assertEqual({member.mtime for member in sdist.getmembers()}, {EPOCH})

    def test_editable_install_finds_the_plugin_in_the_checkout(self) -> None:
        self.check_installed("--editable", self.checkout, at=self.checkout)

    def test_wheel_has_the_package_and_nothing_else(self) -> None:
        with zipfile.ZipFile(self.built.wheel) as wheel:
            names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        package = self.checkout / "tawebeval"
        parts = [*package.rglob("*.py"), *(package / "web" / "static").iterdir()]
        parts.append(package / "web" / "openapi.json")
        tools = package / "sandbox" / "tools"
        parts += [
            tools / "bin" / "tawebeval-judge",
            tools / "bin" / "tawebeval-run",
            tools / "lib" / "segi.hpp",
            tools / "lib" / "segi.sh",
        ]
        modules = {str(path.relative_to(self.checkout)) for path in parts}
        self.assertEqual(
            names, {*modules, "tawebeval/py.typed", "twisted/plugins/tawebeval_plugin.py"}
        )

    def test_source_distribution_has_all_of_the_checkout(self) -> None:
        with tarfile.open(self.built.sdist) as sdist:
            names = {name.partition("/")[2] for name in sdist.getnames()}
        folders = "benchmarks debian docs etc examples packaging requirements scripts systemd tests"
        for folder in folders.split():
            for path in (self.checkout / folder).rglob("*"):
                name = str(path.relative_to(self.checkout))
                self.assertTrue(name in names or path.is_dir(), name)
        for name in ("LICENSE", "Makefile", "README.md", "setup.py", "tawebeval/py.typed"):
            self.assertIn(name, names)
        self.assertEqual([name for name in names if name.endswith("dropin.cache")], [])
        self.assertNotIn("twisted/__init__.py", names)

    def test_metadata_has_the_licence_and_absolute_links(self) -> None:
        with zipfile.ZipFile(self.built.wheel) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(wheel.read(name))
        self.assertEqual(metadata["License-Expression"], "MIT")
        self.assertEqual(metadata.get_all("License-File"), ["LICENSE"])
        self.assertIn(f"{name.partition('/')[0]}/licenses/LICENSE", self.names(self.built.wheel))
        description = metadata.get_payload()
        self.assertIn("A daemon that runs evaluators", description)
        self.assertEqual(re.findall(r"\]\((?!https?://)", description), [])

    def test_oldest_setuptools_builds_the_same_wheel(self) -> None:
        folder = self.checkout.with_name(self._testMethodName)
        oldest = self.checkout / "requirements" / "oldest" / "build.txt"
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes")
        run(*pip, "--target", folder / "oldest", "--requirement", oldest, cwd=self.checkout)
        command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder)
        run(*command, self.checkout, cwd=folder, PYTHONPATH=str(folder / "oldest"))
        (wheel,) = folder.glob("*.whl")
        self.assertEqual(self.names(wheel), self.names(self.built.wheel))

    def names(self, wheel: Path) -> list[str]:
        with zipfile.ZipFile(wheel) as file:
            return sorted(file.namelist())
