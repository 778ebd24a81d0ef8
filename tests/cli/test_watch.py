"""`cli.watch`: an evaluation for each change of a file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import watch
from tawebeval.cli.watch import read_versions, wait_for_change
from tests.cases.agents import Fate
from tests.cases.command import REPOSITORY, CommandTestCase


class WatchTests(CommandTestCase):
    """`tawebeval evaluate --watch`."""

    def watch(
        self, *changes: Callable[[], object], options: tuple[str, ...] = (), end: Any = None
    ) -> Any:
        """Run the command; make these changes one after the other, then press Ctrl-C.

        `end` lets an evaluator end, as does `CommandTestCase.end` by default.
        """
        coming = iter(changes)

        def wait(*_: object) -> None:
            change = next(coming, None)
            if change is None:
                signal.raise_signal(signal.SIGINT)
            else:
                change()

        self.patch(watch, "wait_for_change", wait)
        self.meanwhile = end or self.end()
        given = ("--seed", "1", "--watch", *options, str(self.file))
        return self.run_command("evaluate", *REPOSITORY, *given)

    def test_each_change_is_evaluated_until_ctrl_c(self) -> None:
        def fail() -> None:
            self.line.fail_once(Fate.NONSENSE)

        result = self.watch(lambda: self.file.write_text("2"), fail, lambda: None)
        self.assertEqual(result.exit_code, 130, result.stderr)
        self.assertEqual(result.stdout, "hello\n" * 3)
        waiting = f"waiting for a change of {self.file}; Ctrl-C ends\n"
        self.assertEqual(result.stderr.count(waiting), 4)
        self.assertIn("is not a tawebeval server", result.stderr)
        self.assertTrue(result.stderr.endswith("interrupted\n"))
        self.assertEqual(len(self.line.service.world.spawn.children), 3)

    def test_files_of_each_evaluation_replace_earlier_ones(self) -> None:
        sent = '{"type":"file","filename":"a","content_type":"x","content_base64":"aGk="}'

        def end() -> None:
            children = self.line.service.world.spawn.children
            if children and children[-1].is_running:
                children[-1].print(self.block(sent))
                children[-1].end()

        folder = Path(self.mktemp())
        result = self.watch(lambda: None, options=("--files", str(folder)), end=end)
        self.assertEqual(result.stderr.count("saved as"), 2)
        self.assertEqual([path.name for path in folder.iterdir()], ["a"])

    def test_ctrl_c_during_an_evaluation_cancels_it_and_ends(self) -> None:
        self.line.service.world.spawn.obeys = (15,)
        presses = iter([signal.SIGINT])

        def meanwhile() -> None:
            if self.line.service.world.spawn.children:
                for number in presses:
                    signal.raise_signal(number)

        self.meanwhile = meanwhile
        result = self.run_command("evaluate", *REPOSITORY, "--watch", str(self.file))
        self.assertEqual(result.exit_code, 1, result.stderr)
        self.assertNotIn("waiting for", result.stderr)

    def test_watch_needs_a_file_and_excludes_detach(self) -> None:
        for arguments in (["x=1"], ["--detach", str(self.file)]):
            result = self.run_command("evaluate", *REPOSITORY, "--watch", *arguments)
            self.assertEqual(result.exit_code, 2)
            self.assertIn("--watch needs a file", result.stderr)


class ChangeTests(SynchronousTestCase):
    """Two files that an editor changes."""

    def test_change_is_reported_once_all_files_exist_and_stay_the_same(self) -> None:
        paths = [Path(self.mktemp()), Path(self.mktemp())]
        for path in paths:
            path.write_text("1")
        other = Path(self.mktemp())
        other.write_text("three")
        looks = []
        steps = iter(
            (
                lambda: None,
                lambda: paths[0].write_text("22"),
                lambda: paths[0].write_text("333"),
                paths[1].unlink,
                lambda: None,
                lambda: os.rename(other, paths[1]),
                lambda: None,
            )
        )

        def sleep(seconds: float) -> None:
            looks.append(seconds)
            next(steps)()

        wait_for_change(paths, read_versions(paths), sleep)
        self.assertEqual(len(looks), 7)
