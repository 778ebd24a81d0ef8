"""`requirements/*.txt`: what `make lock` has pinned of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from twisted.trial.unittest import SynchronousTestCase

from tests.run import ROOT

PROJECT, CLIENT = (
    tomllib.loads((ROOT / name).read_text())
    for name in ("pyproject.toml", "tawebeval_client/pyproject.toml")
)
REQUIRED = [
    requirement
    for project in (PROJECT, CLIENT)
    for requirement in project["project"]["dependencies"]
    if not requirement.startswith("tawebeval-client")
]
EXTRAS = PROJECT["project"]["optional-dependencies"]
BOUNDS = {"click": "<9", "httpx": "<0.29", "Twisted": "<26.11"}
"""First versions whose private names the package was not compared with (ARCHITECTURE.md)."""


class RequirementsTests(SynchronousTestCase):
    """Files that are committed, and read by pip with `--require-hashes`."""

    def read_pins(self, name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
        pins = {}
        for line in filter(None, (line.partition("#")[0] for line in text.splitlines())):
            self.assertRegex(line, " --hash=sha256:[0-9a-f]{64}")
            found = re.match(r"([^ =]+)==([^ ;]+)", line)
            assert found is not None, line
            pins[canonicalize_name(found[1])] = found[2]
        return pins

    def check(self, name: str, requirements: list[str]) -> None:
        pins = self.read_pins(name)
        for requirement in map(Requirement, requirements):
            version = pins.get(canonicalize_name(requirement.name), "0")
            self.assertIn(version, requirement.specifier, f"{name}: {requirement}: `make lock`")

    def test_each_dependency_has_a_reason_and_its_licence_in_the_architecture(self) -> None:
        section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Dependencies\n")[2]
        for requirement in map(Requirement, [*REQUIRED, *EXTRAS["traces"], *EXTRAS["sentry"]]):
            found = metadata(requirement.name)
            classifiers = found.get_all("Classifier") or []
            licence = (
                found["License-Expression"]
                or found["License"]
                or next((each for each in classifiers if each.startswith("License")), "")
            )
            licence = licence.removeprefix("License :: OSI Approved :: ").removesuffix(" License")
            self.assertRegex(section, rf"(?m)^- .*\b{requirement.name}\b.*\({re.escape(licence)}\)")

    def test_each_extra_has_a_file(self) -> None:
        files = {path.stem for path in (ROOT / "requirements").glob("*.txt")}
        self.assertEqual(files, {"runtime", *EXTRAS})
        self.check("runtime", REQUIRED)
        for name, requirements in EXTRAS.items():
            self.check(name, requirements)

    def test_files_pin_the_same_versions(self) -> None:
        versions: dict[str, str] = {}
        for name in ("runtime", *EXTRAS):
            for package, version in self.read_pins(name).items():
                self.assertEqual(versions.setdefault(package, version), version, package)

    def test_libraries_whose_private_names_are_used_have_an_upper_bound(self) -> None:
        found = {each.name: each for each in map(Requirement, REQUIRED)}
        for name, bound in BOUNDS.items():
            self.assertIn(bound, str(found[name].specifier))

    def test_build_extra_equals_the_build_system_requirements(self) -> None:
        self.assertEqual(EXTRAS["build"], PROJECT["build-system"]["requires"])
