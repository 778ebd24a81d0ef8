"""`tawebeval_client.documents`, and the types of the JavaScript client."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.scripts import load_script


class DocumentTests(SynchronousTestCase):
    def test_types_are_those_of_the_description_of_the_api(self) -> None:
        script = load_script("document_types")
        for language in (script.PYTHON, script.TYPESCRIPT):
            expected = script.Types(language).write()
            self.assertEqual(language.path.read_text(), expected, "run scripts/document_types")
