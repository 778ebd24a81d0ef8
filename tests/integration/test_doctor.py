"""`tawebeval doctor` on this machine, and on what looks like worse ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.cases.patience import PATIENCE
from tests.integration.harness import COMMAND
from tests.integration.unprivileged import USER, give, temporary_folder

PRIVATE = ("unshare", "--mount", "--propagation", "private", "sh", "-ec")
OVERLAID = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/changes /mnt/work
mount -t overlay -o "lowerdir=$PLACES,upperdir=/mnt/changes,workdir=/mnt/work" overlay "$PLACES"
"""


class DoctorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)
        self.state, self.cache = (self.folder / "places" / name for name in ("state", "cache"))

    def run_command(self, *around: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        """Return the exit status, and the findings by their parts; `around` runs the command."""
        before = sorted(self.folder.rglob("*"))
        ran = subprocess.Popen(
            [*around, str(COMMAND), "doctor", "--json"],
            env={
                **os.environ,
                "TMPDIR": str(self.temporary),
                "PLACES": str(self.state.parent),
                "STATE_DIRECTORY": str(self.state),
                "CACHE_DIRECTORY": str(self.cache),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(ran.kill)
        said, complained = ran.communicate(timeout=PATIENCE)
        self.assertNotIn("Traceback", complained)
        self.assertEqual(sorted(self.folder.rglob("*")), before)
        groups = (path for path, _, _ in os.walk("/sys/fs/cgroup"))
        own = f"tawebeval-doctor-{ran.pid}"
        self.assertEqual([path for path in groups if own in path.split("/")], [])
        found: dict[str, list[dict[str, Any]]] = {}
        for each in json.loads(said):
            found.setdefault(each["part"], []).append(each)
        worst = {each["health"] for part in found.values() for each in part}
        self.assertEqual(ran.returncode, 2 if "broken" in worst else int("weaker" in worst))
        return ran.returncode, found

    def test_doctor_finds_this_machine_well(self) -> None:
        status, found = self.run_command()
        self.assertLess(status, 2, found)
        self.assertEqual(found["sandbox"][0]["health"], "ok")
        self.assertIn("git version", found["git"][0]["what"])
        self.assertEqual(len(found["limits"]), 4)
        if USER is not None:  # an ordinary user without cgroups
            self.assertEqual(status, 1, found)
            self.assertEqual({each["health"] for each in found["permissions"]}, {"ok"})
            self.assertEqual({each["health"] for each in found["limits"]}, {"weaker"})
            self.assertIn("cgroup", found["limits"][0]["remedy"])

    def test_overlay_below_the_state_makes_trees_copies(self) -> None:
        if USER is None:
            raise SkipTest("only root can mount")
        for place in (self.state, self.cache):
            place.mkdir(mode=0o700, parents=True)
            give(place)
        _, found = self.run_command(*PRIVATE, f'{OVERLAID}exec "$@"', "sh")
        self.assertEqual([each["health"] for each in found["sandbox"]], ["ok"])
        (trees,) = found["trees"]
        self.assertEqual(trees["health"], "weaker")
        self.assertIn("an overlay cannot be mounted: Invalid argument", trees["what"])
