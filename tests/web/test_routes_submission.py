"""`web`: the submitted files of an evaluation."""

from __future__ import annotations

from typing import Any

from tawebeval.config import ArchiveSettings, Configuration
from tests.cases.web import CallerTestCase, WebTestCase

FILE = {"field": "source", "filename": "solution.py", "size": 8, "text": "print()\n"}


class SubmissionTestCase(WebTestCase):
    def read(self, identifier: str, status: int = 200) -> Any:
        return self.request("GET", f"/evaluation/{identifier}/submission", status).json()


class SubmissionTests(SubmissionTestCase):
    def test_files_are_readable_from_submission_to_after_the_end(self) -> None:
        running = [self.evaluate() for _ in range(self.service.running)]
        waiting = self.evaluate()
        for identifier in (waiting, *running):
            self.assertEqual(self.read(identifier), {"files": [FILE]})
        self.request("HEAD", f"/evaluation/{waiting}/submission")
        self.finish()
        for identifier in (waiting, *running):
            self.assertEqual(self.read(identifier), {"files": [FILE]})

    def test_discarded_or_forgotten_files_are_410_and_unknown_ones_404(self) -> None:
        identifier = self.evaluate()
        self.finish()
        self.service.registry.submissions.share.make_room(1, None)
        self.assertIn("discarded", self.read(identifier, 410)["detail"])
        self.request("GET", f"/evaluation/{identifier}/events?after=end")
        self.assertIn("over", self.read(identifier, 410)["detail"])
        self.read("a" * 40, 404)


class ArchivedTests(SubmissionTestCase):
    configuration = Configuration(archive=ArchiveSettings(enabled=True))

    def test_archive_has_the_files_of_a_forgotten_evaluation(self) -> None:
        identifier = self.evaluate()
        self.finish()
        self.request("GET", f"/evaluation/{identifier}/events?after=end")
        self.service.reactor.pump([0.1, 0.1])
        self.assertEqual(self.read(identifier), {"files": [FILE]})
        self.assertEqual(list((self.service.root / "evaluations").iterdir()), [])
        self.read("a" * 40, 404)


class CallerTests(CallerTestCase):
    def test_files_are_for_their_caller_only(self) -> None:
        identifier = self.begin("alice").json()["id"]
        path = f"/evaluation/{identifier}/submission"
        self.assertEqual(self.call("GET", path, 200, "alice").json(), {"files": [FILE]})
        self.call("GET", path, 404, "bob")
        self.call("GET", path, 401, None)
