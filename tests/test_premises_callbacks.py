"""`tawebeval.premises`: whether callbacks could be signed."""

from __future__ import annotations

from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import CallbackSettings, Configuration
from tawebeval.findings import Finding, Health
from tawebeval.premises import Premises
from tawebeval.privileges import Privileges
from tests.fake_process import FakeProcess
from tests.test_signatures import OLD, written


class CallbackTests(SynchronousTestCase):
    """The part of callbacks."""

    def find(self, settings: CallbackSettings) -> list[Finding]:
        """Return what is found with these settings."""
        configuration = Configuration(callbacks=settings)
        premises = Premises(configuration, None, {}, Privileges(FakeProcess()))
        return list(premises.secrets())

    def test_secrets(self) -> None:
        """Nothing is said where there are none; without usable secrets it is broken."""
        self.assertEqual(self.find(CallbackSettings()), [])
        path = Path(self.mktemp()).absolute()
        for text, health in ((f"* {written(OLD)}", Health.OK), ("* s3cret", Health.BROKEN)):
            path.write_text(text)
            path.chmod(0o600)
            (finding,) = self.find(CallbackSettings(enabled=True, secrets=str(path)))
            self.assertEqual((finding.part, finding.health), ("callbacks", health))
            self.assertNotIn("s3cret", f"{finding.what} {finding.remedy}")
        (finding,) = self.find(CallbackSettings(enabled=True))
        self.assertEqual(finding.health, Health.BROKEN)
