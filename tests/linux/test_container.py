"""`linux.container`: the marks of engines, and their options."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import container
from tawebeval.linux.container import DOCKER, PODMAN, find_container


class ContainerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        (self.root / "run").mkdir(parents=True)
        self.patch(container, "ENGINE_MARKS_ROOT", self.root)

    def test_files_of_podman_and_docker_mark_a_container(self) -> None:
        for name, found in (("run/.containerenv", PODMAN), (".dockerenv", DOCKER)):
            self.assertIsNone(find_container({}))
            (self.root / name).touch()
            self.assertIs(find_container({}), found)
            self.assertIs(find_container({"container": "lxc"}), found)
            (self.root / name).unlink()

    def test_variable_names_the_engine(self) -> None:
        self.assertIs(find_container({"container": "podman"}), PODMAN)
        self.assertIs(find_container({"container": "docker"}), DOCKER)
        other = find_container({"container": "systemd-nspawn"})
        assert other is not None
        self.assertNotIn("--security-opt seccomp", other.namespaces_remedy)
        self.assertIsNone(find_container({"container": ""}))

    def test_cgroups_need_an_option_and_a_namespace(self) -> None:
        for engine in (PODMAN, DOCKER):
            self.assertIn(engine.cgroup_option, engine.cgroup_remedy)
            self.assertIn("--cgroupns=private", engine.cgroup_remedy)
