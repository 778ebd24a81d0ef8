"""`webhooks.callback`: what of a callback's URL is shown, and to whom."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.webhooks.callback import CallbackRecord, CallbackState


class CallbackTests(SynchronousTestCase):
    def test_url_is_shown_without_query_and_logged_without_path(self) -> None:
        for url, shown, origin in (
            ("https://Host/a/b?key=x", "https://Host/a/b", "https://host:443"),
            ("http://h:8080?key=x", "http://h:8080", "http://h:8080"),
            ("http://[2001:DB8::1]/x", "http://[2001:DB8::1]/x", "http://[2001:db8::1]:80"),
            ("https://8.8.8.8/x", "https://8.8.8.8/x", "https://8.8.8.8:443"),
        ):
            callback = CallbackRecord(url, "")
            self.assertEqual((callback.url_without_query, callback.url_origin), (shown, origin))

    def test_callback_is_sent_again_unless_it_is_known_how_it_has_ended(self) -> None:
        open_ones = [state for state in CallbackState if not state.is_final]
        self.assertEqual(open_ones, [CallbackState.WAITING, CallbackState.PENDING])
