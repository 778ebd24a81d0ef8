"""The line below the output of an evaluation that follows what the evaluation is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock, Thread

import attrs

from tawebeval.cli.output import Screen
from tawebeval.cli.runtime import ServerAccess
from tawebeval.client import Client, ClientError

_INTERVAL = 1.0  # seconds between two updates


@attrs.define
class LiveStatus:
    """A context in which a terminal shows the state of an evaluation, updated every second.

    The status is requested until `set_running` is called, by a thread with a client of its own: the
    command waits for events meanwhile.
    """

    _server: ServerAccess
    _identifier: str
    _screen: Screen
    is_running: bool = False
    _get_time: Callable[[], float] = time.monotonic
    _state: str = ""
    _since: float = 0.0  # the time when the state was seen first
    _is_stopped: bool = False
    _lock: Lock = attrs.field(factory=Lock)
    _stopping: Event = attrs.field(factory=Event)

    def __enter__(self) -> LiveStatus:
        if self._screen.shows_progress:
            Thread(target=self._run, name="status", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_stopped = True
            self._screen.show_status("")
        self._stopping.set()

    def _run(self) -> None:
        with self._server.make_quiet_client() as client:
            while not self._is_stopped:
                self.update(client)
                self._stopping.wait(_INTERVAL)

    def set_running(self) -> None:
        """Show that the evaluator runs, and request the status no more."""
        if not self.is_running:
            self.is_running = True
            if self._screen.shows_progress:
                self._show("running")

    def update(self, client: Client) -> None:
        """Show the state; request the status first while the evaluator is not known to run."""
        state = "" if self.is_running else self._request_state(client)
        self._show("running" if self.is_running else state)  # perhaps since the request

    def _show(self, state: str) -> None:
        """Show a state and the time since it was shown first; empty for the last state."""
        now = self._get_time()
        with self._lock:
            if state and state != self._state:
                self._state, self._since = state, now
            if self._state and not self._is_stopped:
                self._screen.show_status(f"{self._state}, {int(now - self._since)} s")

    def _request_state(self, client: Client) -> str:
        """Return the state, empty without an answer."""
        try:
            status = client.status(self._identifier)
        except ClientError:  # reported by the requests for events
            return ""
        place = status.get("queue_place")
        return status["state"] if place is None else f"{status['state']}, {place} ahead"
