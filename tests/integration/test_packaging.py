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
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import attrs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
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

# What the client may need, directly or not; the last three with some versions of the others.
ALLOWED = {
    *("attrs", "httpx", "msgspec", "anyio", "certifi", "h11", "httpcore", "idna"),
    *("sniffio", "typing-extensions", "exceptiongroup"),
}

# Imports all modules, and uses the client.
USE = """\
import sys, pkgutil, tawebeval_client
from pathlib import Path
for module in pkgutil.iter_modules(tawebeval_client.__path__, "tawebeval_client."):
    __import__(module.name)
once = tawebeval_client.backoff.Backoff(1, 0, 0)
client = tawebeval_client.Client("http://127.0.0.1:9", request_backoff=once)
try:
    client.status("x")
except tawebeval_client.Unavailable as error:
    print(error)
print(hasattr(tawebeval_client, "AsyncClient"), hasattr(tawebeval_client, "None"))
print(Path(tawebeval_client.__file__).parent.parent, {"twisted", "tawebeval"} & {*sys.modules})
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

    def list_files(self) -> set[Path]:
        """Return all files of packages."""
        return {path for path in self.site.rglob("*") if path.is_file()}

    def run(self, *arguments: str) -> str:
        """Return what this Python prints, started where nothing can be imported from."""
        return run(self.python, *arguments, cwd=self.work)

    def install(self, *what: str | Path) -> None:
        options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
        self.run("-m", "pip", "install", *options, "--ignore-installed", *map(str, what))


def find_requirements(requirements: list[str]) -> set[str]:
    """Return the names of all distributions that these need, directly or not, without extras."""
    found: set[str] = set()
    rest = [Requirement(one) for one in requirements]
    while rest:
        one = rest.pop()
        name = canonicalize_name(one.name)
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        rest += [Requirement(text) for text in distribution(name).requires or ()]
    return found


@attrs.frozen
class Built:
    """A copy of the checkout, and what was built from it."""

    checkout: Path
    sdist: Path
    wheel: Path
    client: Path


def copy_checkout(folder: Path) -> None:
    """Copy what is of the project."""
    ignore = shutil.ignore_patterns(*RUBBISH)
    shutil.copytree(CHECKOUT, folder, symlinks=True, ignore=ignore)


@functools.cache
def build() -> Built:
    """Build all, once; the daemon's wheel is built from what the source distribution holds."""
    folder = Path(tempfile.mkdtemp(prefix="tawebeval-")).resolve()
    atexit.register(shutil.rmtree, folder)
    checkout, dist = folder / "checkout", folder / "dist"
    copy_checkout(checkout)
    # It must not be shipped, and whoever has run twistd in a checkout has one.
    (checkout / "twisted" / "plugins" / "dropin.cache").touch()
    load_script("release").build_distributions(checkout, dist, EPOCH)
    ending = f"-{__version__}-py3-none-any.whl"
    wheels = dist / f"tawebeval{ending}", dist / f"tawebeval_client{ending}"
    return Built(checkout, dist / f"tawebeval-{__version__}.tar.gz", *wheels)


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
        self.check_installed(self.built.wheel, self.built.client)

    def test_uninstalling_either_distribution_leaves_the_other_alone(self) -> None:
        wheels = {"tawebeval": self.built.wheel, "tawebeval-client": self.built.client}
        for removed, wheel in wheels.items():
            environment = Environment(self.checkout.with_name(f"without {removed}"))
            environment.install(*({*wheels.values()} - {wheel}))
            before = environment.list_files()
            environment.install(wheel)
            self.assertGreater(environment.list_files(), before)
            environment.run("-m", "pip", "uninstall", "--quiet", "--yes", removed)
            self.assertEqual(environment.list_files(), before)

    def test_client_wheel_runs_with_only_its_requirements_installed(self) -> None:
        folder = self.checkout.with_name(self._testMethodName)
        folder.mkdir()
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        python = folder / "venv" / "bin" / "python"
        (site,) = folder.glob("venv/lib/python*/site-packages")
        with zipfile.ZipFile(self.built.client) as wheel:
            wheel.extractall(site)
        needed = find_requirements(self.read_metadata(self.built.client).get_all("Requires-Dist"))
        self.assertLessEqual(needed, ALLOWED)
        for name in needed:
            for file in distribution(name).files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (site / top).exists():
                    (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
        self.assertEqual(
            run(python, "-I", "-c", USE, cwd=folder).splitlines(),
            [
                "cannot connect to http://127.0.0.1:9: connection refused",
                "True False",
                f"{site} set()",
            ],
        )

    def test_builds_in_two_directories_are_the_same(self) -> None:
        folder = self.checkout.with_name(self._testMethodName)
        checkout, dist = folder / "another directory é", folder / "dist"
        copy_checkout(checkout)
        for path in checkout.rglob("*"):  # as another user's clone has them, at another time
            if not path.is_symlink():  # it may lead to a file of the system
                path.chmod(path.stat().st_mode & 0o700)
                os.utime(path, (EPOCH - 9, EPOCH - 9))
        load_script("release").build_distributions(checkout, dist, EPOCH)
        for built in (self.built.sdist, self.built.wheel, self.built.client):
            self.assertEqual((dist / built.name).read_bytes(), built.read_bytes(), built.name)
        with tarfile.open(self.built.sdist) as sdist:
            self.assertEqual({member.mtime for member in sdist.getmembers()}, {EPOCH})

    def test_editable_install_finds_the_plugin_in_the_checkout(self) -> None:
        client = ("--editable", self.checkout / "tawebeval_client")
        self.check_installed(*client, "--editable", self.checkout, at=self.checkout)

    def test_wheels_have_their_package_and_nothing_else(self) -> None:
        package = self.checkout / "tawebeval_client"
        modules = {f"tawebeval_client/{path.name}" for path in package.glob("*.py")}
        names = {name for name in self.names(self.built.client) if ".dist-info/" not in name}
        self.assertEqual(names, {*modules, "tawebeval_client/py.typed"})
        names = {name for name in self.names(self.built.wheel) if ".dist-info/" not in name}
        package = self.checkout / "tawebeval"
        parts = list(package.rglob("*.py"))
        parts += [*(package / "web").glob("messages/*"), *(package / "web").glob("static/*")]
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
        paths = [*(self.checkout / "tawebeval_client").iterdir()]
        for folder in folders.split():
            paths += (self.checkout / folder).rglob("*")
        for path in paths:
            name = str(path.relative_to(self.checkout))
            self.assertTrue(name in names or path.is_dir(), name)
        for name in ("LICENSE", "Makefile", "README.md", "setup.py", "tawebeval/py.typed"):
            self.assertIn(name, names)
        self.assertEqual([name for name in names if name.endswith("dropin.cache")], [])
        self.assertNotIn("twisted/__init__.py", names)

    def test_metadata_has_the_licence_and_absolute_links(self) -> None:
        for wheel, words in (
            (self.built.wheel, "A daemon that runs evaluators"),
            (self.built.client, "follow the events"),
        ):
            metadata = self.read_metadata(wheel)
            self.assertEqual(metadata["Version"], __version__)
            self.assertEqual(metadata["License-Expression"], "MIT")
            self.assertEqual(metadata.get_all("License-File"), ["LICENSE"])
            (name,) = (each for each in self.names(wheel) if each.endswith("/licenses/LICENSE"))
            with zipfile.ZipFile(wheel) as file:
                self.assertEqual(file.read(name), (CHECKOUT / "LICENSE").read_bytes())
            description = metadata.get_payload()
            self.assertIn(words, description)
            self.assertEqual(re.findall(r"\]\((?!https?://)", description), [])

    def test_debian_changelog_has_the_version(self) -> None:
        first = (CHECKOUT / "debian" / "changelog").read_text().partition("\n")[0]
        self.assertEqual(first, f"tawebeval ({__version__}) unstable; urgency=medium")

    def test_daemon_requires_its_own_version_of_the_client(self) -> None:
        required = self.read_metadata(self.built.wheel).get_all("Requires-Dist")
        self.assertIn(f"tawebeval-client=={__version__}", required)

    def test_oldest_setuptools_builds_the_same_wheel_after_a_build_with_more_modules(self) -> None:
        folder = self.checkout.with_name(self._testMethodName)
        removed = self.checkout / "build" / "lib" / "tawebeval" / "removed.py"
        removed.parent.mkdir(parents=True, exist_ok=True)
        removed.touch()
        self.addCleanup(shutil.rmtree, self.checkout / "build")
        oldest = self.checkout / "requirements" / "oldest" / "build.txt"
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes")
        run(*pip, "--target", folder / "oldest", "--requirement", oldest, cwd=self.checkout)
        command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder)
        run(*command, self.checkout, cwd=folder, PYTHONPATH=str(folder / "oldest"))
        (wheel,) = folder.glob("*.whl")
        self.assertEqual(self.names(wheel), self.names(self.built.wheel))

    def read_metadata(self, wheel: Path) -> Message:
        with zipfile.ZipFile(wheel) as file:
            (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
            return message_from_bytes(file.read(name))

    def names(self, wheel: Path) -> list[str]:
        with zipfile.ZipFile(wheel) as file:
            return sorted(file.namelist())
