"""`tawebeval_client.documents`, and the types of the JavaScript client."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.cases.scripts import load_script


class DocumentTests(SynchronousTestCase):
    def test_type_files_equal_those_generated_from_the_api_description(self) -> None:
        script = load_script("document_types")
        for language in (script.PYTHON, script.TYPESCRIPT):
            expected = script.Types(language).write()
            self.assertEqual(language.path.read_text(), expected, "run scripts/document_types")
