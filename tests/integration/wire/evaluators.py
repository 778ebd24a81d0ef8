"""Evaluators that do not behave: odd output, stray processes, and what they find around them."""

from __future__ import annotations

from tests.integration.client import python, text
from tests.integration.harness import DaemonTestCase
from tests.integration.processes import new_word, processes


class EvaluatorCase(DaemonTestCase):
    environment = {"CANARY": "the-daemons-own"}  # noqa: RUF012

    async def test_silent_evaluator_has_no_events(self) -> None:
        identifier = await self.begin("true")
        status = await self.client.ended(identifier)
        self.assertEqual(await self.client.follow(identifier), [])
        self.assertEqual(status["state"], "finished")
        self.assertEqual(status["exit"], {"status": 0, "signal": None})

    async def test_child_in_the_background_ends_with_the_shell_and_loses_no_output(self) -> None:
        word = new_word()
        identifier = await self.begin(f"export WORD={word}; sleep 6000 & sleep 6000 & seq 30000")
        await self.client.ended(identifier)
        self.assertEqual(processes(word), [])
        printed = "".join(f"{number}\n" for number in range(1, 30_001))
        self.assertEqual(text(await self.client.follow(identifier)), printed)

    async def test_stdin_is_empty(self) -> None:
        self.assertEqual(text(await self.run_command("wc -c; read x || echo end")), "0\nend\n")

    async def test_secretive_evaluator_keeps_its_markers(self) -> None:
        hide = "import ctypes, subprocess\nctypes.CDLL(None).prctl(4, 0)\n"
        look = "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
        program = f"{hide}print(subprocess.run({look!r}, shell=True, env={{}}, stdout=-1).stdout)"
        printed = text(await self.run_command(python(program)))
        self.assertIn("cat", printed)
        self.assertNotIn("~tawebeval", printed)

    async def test_environment_has_the_promised_variables_alone(self) -> None:
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
