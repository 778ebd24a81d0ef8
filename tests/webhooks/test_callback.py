"""`webhooks.callback`: what of a callback's URL is shown, and to whom."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.webhooks.callback import CallbackRecord, CallbackState


class CallbackTests(SynchronousTestCase):
    """One callback."""

    def test_begins(self) -> None:
        """It waits for the end of its evaluation."""
        callback = CallbackRecord("https://h/", "alice")
        self.assertEqual((callback.state, callback.attempt_count), (CallbackState.WAITING, 0))
        self.assertIsNone(callback.last_error)

    def test_shown(self) -> None:
        """A status has no query, the log no path either: both may be secrets."""
        for url, shown, origin in (
            ("https://Host/a/b?key=x", "https://Host/a/b", "https://host:443"),
            ("http://h:8080?key=x", "http://h:8080", "http://h:8080"),
            ("http://[2001:DB8::1]/x", "http://[2001:DB8::1]/x", "http://[2001:db8::1]:80"),
            ("https://8.8.8.8/x", "https://8.8.8.8/x", "https://8.8.8.8:443"),
        ):
            callback = CallbackRecord(url, "")
            self.assertEqual((callback.url_without_query, callback.url_origin), (shown, origin))
