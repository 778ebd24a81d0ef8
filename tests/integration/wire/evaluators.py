"""Evaluators that do not behave: odd output, stray processes, and what they find around them."""

from __future__ import annotations

from tests.integration.client import failure, python, text
from tests.integration.harness import DaemonTestCase
from tests.integration.processes import new_word, processes


class EvaluatorCase(DaemonTestCase):
    """One command each, in a repository where nothing else is."""

    environment = {"CANARY": "the-daemons-own"}  # noqa: RUF012

    async def test_one_that_prints_nothing(self) -> None:
        """No events: the stream ends, and that is all."""
        identifier = await self.begin("true")
        status = await self.client.ended(identifier)
        self.assertEqual(await self.client.follow(identifier), [])
        self.assertEqual(status["state"], "finished")
        self.assertEqual(status["exit"], {"status": 0, "signal": None})

    async def test_ten_megabytes_on_one_line(self) -> None:
        """A line of any length arrives byte for byte, in events that are not too long."""
        program = "import sys; [sys.stdout.write(f'{i:09d},') for i in range(1_000_000)]"
        events = await self.run_command(python(program))
        self.assertEqual(text(events), "".join(f"{i:09d}," for i in range(1_000_000)))

    async def test_a_partial_line_arrives_while_the_evaluator_runs(self) -> None:
        """Text that waits for the rest of its line is delivered without it."""
        identifier = await self.begin_and_wait("printf 'one\nready'; exec sleep 600")
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        await self.client.cancel(identifier)

    async def test_one_that_ignores_term_is_cancelled_soon(self) -> None:
        """After the grace time it is killed, and cancelling answers when it is dead."""
        word = new_word()
        identifier = await self.begin_and_wait(f"trap '' TERM; : {word}; echo ready; sleep 600; :")
        self.assertNotEqual(processes(word), [])
        await self.client.cancel(identifier)  # which is not waited for as long as it sleeps
        self.assertEqual(processes(word), [])
        failure(await self.client.follow(identifier), "cancelled")

    async def test_a_child_in_the_background_is_dead_at_the_end(self) -> None:
        """What the shell has left running holds stdout, and is ended with the shell."""
        word = new_word()
        identifier = await self.begin(f"export WORD={word}; sleep 6000 & sleep 6000 & echo done")
        await self.client.ended(identifier)
        self.assertEqual(processes(word), [])
        self.assertEqual(text(await self.client.follow(identifier)), "done\n")

    async def test_what_is_printed_last_is_not_lost_by_that(self) -> None:
        """With a child that holds stdout, all that was printed before the end arrives."""
        events = await self.run_command("sleep 6000 & seq 30000")
        self.assertEqual(text(events), "".join(f"{i}\n" for i in range(1, 30001)))

    async def test_stdin_is_at_its_end(self) -> None:
        """Whoever reads stdin reads nothing, and does not wait."""
        self.assertEqual(text(await self.run_command("wc -c; read x || echo end")), "0\nend\n")

    async def test_a_secretive_evaluator_keeps_its_markers(self) -> None:
        """No other process in the sandbox has them where a submission could read them."""
        hide = "import ctypes, subprocess\nctypes.CDLL(None).prctl(4, 0)\n"
        look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
        program = f"{hide}print(subprocess.run({look!r}, shell=True, env={{}}, stdout=-1).stdout)"
        printed = text(await self.run_command(python(program)))
        self.assertIn("cat", printed)
        self.assertNotIn("~tawebeval", printed)

    async def test_the_environment_is_the_contracts(self) -> None:
        """Just the variables that evaluators are promised, and nothing of the daemon's."""
        print_it = "tr '\\0' '\\n' < /proc/$$/environ"
        identifier = await self.client.evaluate(
            self.repository.url,
            self.commit,
            f'{print_it}; ls -A "$TEMPORARY_DIRECTORY" "$HOME"; touch x "$TEMPORARY_DIRECTORY/x"',
            files=(("source_1", "my file.py", b"pass"), ("b", "", b"text")),
            seed="7",
        )
        printed = text(await self.client.follow(identifier))
        found = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
        self.assertEqual(
            sorted(found),
            sorted(
                [
                    *("PATH", "HOME", "LANG", "PWD", "PYTHONUNBUFFERED"),
                    *("TEMPORARY_DIRECTORY", "TURINGARENA_SEED", "EVALUATION_TOOLS"),
                    *("SUBMISSION_FILE_SOURCE_1", "SUBMISSION_FILE_B"),
                    *("EVALUATION_DATA_BEGIN", "EVALUATION_DATA_END"),
                    *("EVALUATION_FILE_BEGIN", "EVALUATION_FILE_END"),
                ]
            ),
        )
        self.assertNotIn("the-daemons-own", printed)
        self.assertEqual(found["LANG"], "C.UTF-8")
        self.assertEqual(found["PYTHONUNBUFFERED"], "1")
        self.assertEqual(found["TURINGARENA_SEED"], "7")
        self.assertEqual(found["SUBMISSION_FILE_SOURCE_1"].rpartition("/")[2], "my file.py")
        self.assertEqual(found["SUBMISSION_FILE_B"].rpartition("/")[2], "b.txt")
        blocks = ("EVALUATION_DATA_", "EVALUATION_FILE_")
        markers = {found[name] for name in found if name.startswith(blocks)}
        self.assertEqual(len(markers), 4)
        for marker in markers:
            self.assertNotIn(marker, text(await self.run_command(print_it)), "they are fresh")

    async def test_no_descriptor_of_the_daemon_is_open(self) -> None:
        """An evaluator has stdin, stdout and stderr, and nothing else of the daemon's."""
        program = """
import os
def is_open(number):
    try:
        return os.fstat(number)
    except OSError:
        return False
print([number for number in range(1000) if is_open(number)])
"""
        self.assertEqual(text(await self.run_command(python(program))), "[0, 1, 2]\n")

    async def test_a_seed_is_drawn_and_reported(self) -> None:
        """Without a seed one is drawn, which the evaluator and the status agree on."""
        seeds = set()
        for _ in range(3):
            identifier = await self.begin("echo $TURINGARENA_SEED")
            seed = (await self.client.ended(identifier))["seed"]
            self.assertEqual(text(await self.client.follow(identifier)), f"{seed}\n")
            seeds.add(seed)
        self.assertGreater(len(seeds), 1)
