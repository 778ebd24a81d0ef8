"""`cli.follow`: the line below the output that says what an evaluation is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.task import Clock

from tawebeval.cli import follow
from tawebeval.cli.follow import EvaluationReader, LiveStatus
from tawebeval.cli.runtime import ServerAccess
from tests.cases.agents import Fate
from tests.cases.command import CommandTestCase
from tests.cases.screen import CLEAR, Shown


class LiveStatusTests(CommandTestCase):
    """The line on a terminal."""

    def setUp(self) -> None:
        super().setUp()
        self.shown = Shown(terminal=True)
        self.clock = Clock()
        self.threads: list[Callable[[], None]] = []
        self.patch(follow, "Thread", self.make_thread)

    def make_thread(self, *, target: Callable[[], None], **_: object) -> Any:
        """Return a thread that does nothing when it is started, and is noted."""
        self.threads.append(target)
        return self

    def start(self) -> None:
        """Do nothing."""

    def make_live(self, identifier: str) -> LiveStatus:
        """Return the line of an evaluation."""
        server = ServerAccess("http://localhost:8080")
        return LiveStatus(server, identifier, self.shown.screen, get_time=self.clock.seconds)

    def update(self, live: LiveStatus) -> str:
        """Update the line and return what is written for that."""
        self.shown.out.truncate(0)
        self.shown.out.seek(0)
        with ServerAccess("").make_quiet_client() as client:
            live.update(client)
        return self.shown.out.getvalue()

    def test_line_has_state_queue_place_and_seconds(self) -> None:
        self.line = self.make(running=1)
        self.line.begin()
        live = self.make_live(self.line.begin())
        self.assertEqual(self.update(live), f"{CLEAR}queued, 0 ahead, 0 s")
        self.clock.advance(2.5)
        self.assertEqual(self.update(live), f"{CLEAR}{CLEAR}queued, 0 ahead, 2 s")
        self.line.service.world.spawn.children[0].end()
        self.line.settle()
        self.assertEqual(self.update(live), f"{CLEAR}{CLEAR}running, 0 s")

    def test_line_keeps_its_state_without_an_answer(self) -> None:
        live = self.make_live(self.line.begin())
        self.line.agent.fate = lambda: Fate.NONSENSE
        self.assertEqual(self.update(live), "")
        self.line.agent.fate = lambda: Fate.WELL
        self.update(live)
        self.line.agent.fate = lambda: Fate.NONSENSE
        self.clock.advance(1)
        self.assertEqual(self.update(live), f"{CLEAR}{CLEAR}running, 1 s")

    def test_status_is_not_requested_after_the_first_events(self) -> None:
        live = self.make_live("x")
        live.set_running()
        live.set_running()
        self.assertEqual(self.shown.out.getvalue(), f"{CLEAR}running, 0 s")
        self.assertEqual(self.update(live), f"{CLEAR}{CLEAR}running, 0 s")
        self.assertEqual(self.line.agent.asked, [])

    def test_line_has_the_results_below_the_output_until_the_end(self) -> None:
        identifier = self.line.begin()
        case = '{"type":"case","case":"a","verdict":"wrong_answer","time":1,"memory":2048}'
        progress = '{"type":"progress","done":1,"total":2}'
        pages = [b"one\n" + self.block(case, progress), b"half", b" two\n"]

        def meanwhile() -> None:
            if self.line.child.is_running:
                self.line.child.print(pages.pop(0)) if pages else self.line.child.end()

        self.meanwhile = meanwhile
        reader = EvaluationReader(self.make_context(self.shown.screen), identifier)
        reader.follow_evaluation()
        bar = f"[{'#' * 15}{'-' * 15}]"
        status = f"running, 0 s, {bar} 1/2, 0/1 cases (1 wrong answer)"
        table = (
            "CASE          VERDICT                TIME     MEMORY  POINTS\n"
            "a             wrong answer        1.000 s      2 KiB\n"
        )
        self.assertEqual(
            self.shown.out.getvalue(),
            f"{CLEAR}running, 0 s{CLEAR}one\n{table}{CLEAR}{status}{CLEAR}half two\n"
            f"{CLEAR}{status}{CLEAR}summary: 0/1 cases (1 wrong answer)\n",
        )

    def test_late_thread_shows_nothing_after_the_end(self) -> None:
        late = self.make_live(self.line.begin())
        with late:
            self.update(late)
        self.assertEqual(self.update(late), "")
        (run,) = self.threads
        run()  # which ends at once
        self.shown = Shown()
        with self.make_live("x"):
            pass
        self.assertEqual(len(self.threads), 1)  # none for a pipe
