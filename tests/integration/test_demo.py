"""`make demo`: what it prints, and the page that it keeps open."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.ports import listens
from tests.integration.unprivileged import temporary_folder
from tests.run import ROOT

KNIGHT = """
import sys
sys.path.insert(0, "examples")
from demonstration import run
run.STEPS = [step for step in run.STEPS if step.problem == "knights_tour"]
import demo
sys.exit(demo.main())
"""
"""The demo with the steps of one problem, which take a second."""
STEPS = 4
LAST_LINE = "The page stays open until you press Ctrl-C here."


def get(url: str) -> Any:
    """Return the JSON at a URL."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return json.load(answer)


class DemoTests(SynchronousTestCase):
    timeout = LONG_PATIENCE

    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.environment = {**os.environ, "TMPDIR": str(self.folder)}

    def start(self, *options: str) -> subprocess.Popen[str]:
        demo = subprocess.Popen(
            [sys.executable, "-c", KNIGHT, *options],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(demo.wait)
        self.addCleanup(demo.terminate)
        return demo

    def start_and_keep(self) -> tuple[subprocess.Popen[str], str]:
        """Start the demo with `--keep`, and return its output up to the last line."""
        demo = self.start("--keep")
        assert demo.stdout is not None
        shown = ""
        for line in demo.stdout:
            shown += line
            if line.strip() == LAST_LINE:
                return demo, shown
        raise AssertionError(shown)

    def find_commands(self, shown: str) -> list[str]:
        return re.findall(r"^\d\. .*:\n\n    ((?:.*\\\n)*.*)$", shown, re.MULTILINE)

    def run_command(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the output as a person would, in another terminal."""
        return subprocess.run(
            ["sh", "-c", command], cwd=ROOT, env=self.environment, capture_output=True, text=True
        )

    def test_demo_ends_by_itself_without_a_terminal(self) -> None:
        demo = self.start()
        shown, _ = demo.communicate(timeout=LONG_PATIENCE)
        self.assertEqual(demo.returncode, 0, shown)
        self.assertIn(f"\n{STEPS} evaluations, {STEPS} of them as expected", shown)
        self.assertNotIn(LAST_LINE, shown)
        self.assertNotIn(str(self.folder), shown)
        self.assertNotIn("http://", shown.rpartition("Things to do next")[2])
        self.assertEqual(list(self.folder.iterdir()), [])
        self.assertEqual(self.find_commands(shown)[0], "make demo KEEP=1")

    def test_kept_demo_is_readable_and_its_commands_work_until_a_signal(self) -> None:
        demo, shown = self.start_and_keep()
        (base,) = re.findall(r"^    (http://.*)/#evaluations$", shown, re.MULTILINE)
        for _ in range(2):
            listed = get(f"{base}/evaluations")["data"]
            self.assertEqual(len(listed), STEPS)
            for each in listed:
                events = get(f"{base}/evaluation/{each['evaluation_id']}/events")
                self.assertTrue(events["data"])
        (drawing,) = re.findall(r"/#evaluation/(\w+)$", shown, re.MULTILINE)
        self.assertIn(drawing, [each["evaluation_id"] for each in listed])
        submit, judge = map(self.run_command, self.find_commands(shown))
        self.assertEqual(submit.returncode, 0, submit.stderr)
        listed = get(f"{base}/evaluations")["data"]
        self.assertIn(submit.stdout.strip(), [each["evaluation_id"] for each in listed])
        self.assertEqual(judge.returncode, 0, judge.stderr)
        self.assertIn("counted right, but in the wrong order", judge.stdout)
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=LONG_PATIENCE)
        self.assertEqual((demo.returncode, rest), (0, "\nStopping the daemon ... stopped.\n"))
        self.assertEqual(list(self.folder.iterdir()), [])
        self.assertFalse(listens(int(base.rpartition(":")[2])))
