"""Programs that want more of the disk than they may have."""

from __future__ import annotations

import errno
import os

from tests.integration.attacks import fillers
from tests.integration.attacks.case import DISK, DISK_FILES, FILE_SIZE, AttackCase
from tests.integration.client import failure, python

# Every place of an evaluator that can be written, as its shell knows it.
PLACES = ("$PWD", "$TEMPORARY_DIRECTORY", "$HOME", "/tmp", "/dev/shm")
# Of them one that is an overlay, and one that is not.
MOUNTED = ("$PWD", "$TEMPORARY_DIRECTORY")
UNSUPPORTED = f"{os.strerror(errno.EOPNOTSUPP)}\n"


def filling(program: str, place: str = "$TEMPORARY_DIRECTORY") -> str:
    """Return the command that fills a place by a program."""
    return f'{python(program)} "{place}" "$WORD"'


class DiskAttacks(AttackCase):
    async def test_run_over_a_disk_limit_is_stopped_however_its_files_are_made(self) -> None:
        for name, places, limit, value in (
            ("MANY_FILES", PLACES, "disk", DISK),
            ("INODES", MOUNTED, "disk_files", DISK_FILES),
            ("NAMELESS", MOUNTED, "disk", DISK),
            ("OF_A_THREAD", MOUNTED[1:], "disk", DISK),
            ("CLOSED", MOUNTED, "disk", DISK),
            ("DEEP", MOUNTED[1:], "disk_files", DISK_FILES),
        ):
            for place in places:
                try:
                    attacked = await self.attack_by(filling(getattr(fillers, name), place))
                    self.stopped(attacked, "disk", limit, value)
                except AssertionError as error:
                    raise AssertionError(f"{name} in {place}: {error}") from error

    async def test_run_is_stopped_if_a_file_exceeds_the_file_size_limit(self) -> None:
        large = "head -c 20000000 /dev/zero > $HOME/{word}; exit 1"
        for command in (filling(fillers.ONE_FILE), large):
            self.stopped(await self.attack_by(command), "file_size", "file_size", FILE_SIZE)

    async def test_deep_directories_left_behind_are_removed(self) -> None:
        script = "import os\nfor _ in range(90):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
        attacked = await self.attack_by(python(script))
        self.assertEqual(attacked.status["state"], "finished", attacked.events)

    async def test_sparse_files_do_not_count_against_the_disk_limit(self) -> None:
        attacked = await self.attack_by(filling(fillers.SPARSE))
        self.assertEqual(attacked.text, "True\n")
        self.assertEqual(attacked.status["state"], "finished")

    async def test_allocation_without_a_write_is_refused(self) -> None:
        for place in MOUNTED:
            attacked = await self.attack_by(filling(fillers.ALLOCATED, place))
            self.assertEqual(attacked.text, f"{2 * UNSUPPORTED}True\nTrue\n")

    async def test_directories_outside_the_workspace_cannot_be_written(self) -> None:
        script = (
            "for place in / /usr /usr/local /etc /dev /proc /evaluation /evaluation/submission"
            ' "$(dirname "$SUBMISSION_FILE_SOLUTION")" /var /run /opt; do'
            " (echo x > $place/{word}) 2>/dev/null && echo $place; done; true"
        )
        self.assertEqual((await self.attack_by(script)).text, "")

    async def test_submitted_files_cannot_be_changed(self) -> None:
        attacked = await self.attack_by(
            'f="$SUBMISSION_FILE_SOLUTION"; (echo x > "$f") 2>/dev/null && echo written;'
            ' rm -f "$f" 2>/dev/null && echo removed; mv README "$f" 2>/dev/null && echo moved;'
            ' chmod 777 "$f" 2>/dev/null && echo changed; ln "$f" link 2>/dev/null && echo linked;'
            ' cat "$f"'
        )
        self.assertEqual(attacked.text, "42\n")

    async def test_failure_with_the_disk_full_has_the_reason_disk(self) -> None:
        script = fillers.MANY_FILES.replace(fillers.WAIT, "raise SystemExit(1)")
        attacked = await self.attack_by(filling(script))
        failure(attacked.events, "disk")
