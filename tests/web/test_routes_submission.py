"""`web`: the submitted files of an evaluation."""

from __future__ import annotations

from typing import Any

from tawebeval.config import ArchiveSettings, Configuration
from tests.cases.web import CallerTestCase, WebTestCase

FILE = {"field": "source", "filename": "solution.py", "size": 8, "text": "print()\n"}


class SubmissionTests(WebTestCase):
    """Without an archive."""

    def read(self, identifier: str, status: int = 200) -> Any:
        """Read the files."""
        return self.request("GET", f"/evaluation/{identifier}/submission", status).json()

    def test_life(self) -> None:
        """The files are there while the evaluation waits and runs, and after its end."""
        running = [self.evaluate() for _ in range(self.service.running)]
        waiting = self.evaluate()
        for identifier in (waiting, *running):
            self.assertEqual(self.read(identifier), {"files": [FILE]})
        self.request("HEAD", f"/evaluation/{waiting}/submission")
        self.finish()
        for identifier in (waiting, *running):
            self.assertEqual(self.read(identifier), {"files": [FILE]})

    def test_gone(self) -> None:
        """410 once the files are discarded or the evaluation is forgotten; 404 for unknown ones."""
        identifier = self.evaluate()
        self.finish()
        self.service.registry.submissions.share.make_room(1, None)
        self.assertIn("discarded", self.read(identifier, 410)["detail"])
        self.request("GET", f"/evaluation/{identifier}/events?after=end")
        self.assertIn("over", self.read(identifier, 410)["detail"])
        self.read("a" * 40, 404)


class ArchivedTests(SubmissionTests):
    """With an archive."""

    configuration = Configuration(archive=ArchiveSettings(enabled=True))

    def test_gone(self) -> None:
        """The archive has the files of a forgotten evaluation; nothing of them stays elsewhere."""
        identifier = self.evaluate()
        self.finish()
        self.request("GET", f"/evaluation/{identifier}/events?after=end")
        self.service.reactor.pump([0.1, 0.1])
        self.assertEqual(self.read(identifier), {"files": [FILE]})
        self.assertEqual(list((self.service.root / "evaluations").iterdir()), [])
        self.read("a" * 40, 404)


class CallerTests(CallerTestCase):
    """With tokens."""

    def test_other_caller(self) -> None:
        """Only the evaluation's caller reads them."""
        identifier = self.begin("alice").json()["id"]
        path = f"/evaluation/{identifier}/submission"
        self.assertEqual(self.call("GET", path, 200, "alice").json(), {"files": [FILE]})
        self.call("GET", path, 404, "bob")
        self.call("GET", path, 401, None)
