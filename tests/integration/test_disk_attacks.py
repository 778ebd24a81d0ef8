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
    """All places are on one disk, and one limit is for all."""

    async def test_many_files(self) -> None:
        """Files of a size that is allowed, but too many, in each of the places."""
        for place in PLACES:
            attacked = await self.attack_by(filling(fillers.MANY_FILES, place))
            self.stopped(attacked, "disk", "disk", DISK)

    async def test_one_file(self) -> None:
        """One file that is too large, by a program that asks, and by one that does not."""
        attacked = await self.attack_by(filling(fillers.ONE_FILE))
        self.stopped(attacked, "file_size", "file_size", FILE_SIZE)
        attacked = await self.attack_by("head -c 20000000 /dev/zero > $HOME/{word}; exit 1")
        self.stopped(attacked, "file_size", "file_size", FILE_SIZE)

    async def test_inodes(self) -> None:
        """Files with nothing in them, in each of the places."""
        for place in PLACES:
            attacked = await self.attack_by(filling(fillers.INODES, place))
            self.stopped(attacked, "disk", "disk_files", DISK_FILES)

    async def test_nameless_files(self) -> None:
        """Files that were removed and are open still."""
        for place in MOUNTED:
            attacked = await self.attack_by(filling(fillers.NAMELESS, place))
            self.stopped(attacked, "disk", "disk", DISK)

    async def test_nameless_files_of_a_thread(self) -> None:
        """Such that are open in another thread than the first, which has ended."""
        attacked = await self.attack_by(filling(fillers.OF_A_THREAD))
        self.stopped(attacked, "disk", "disk", DISK)

    async def test_closed_directories(self) -> None:
        """Files in a directory into which its owner may not look."""
        for place in MOUNTED:
            attacked = await self.attack_by(filling(fillers.CLOSED, place))
            self.stopped(attacked, "disk", "disk", DISK)

    async def test_deep_directories(self) -> None:
        """Directories in directories, deeper than any path is long: stopped, and removed."""
        attacked = await self.attack_by(filling(fillers.DEEP))
        self.stopped(attacked, "disk", "disk_files", DISK_FILES)

    async def test_deep_directories_at_the_end(self) -> None:
        """Such that are left behind are removed with all the rest."""
        script = "import os\nfor _ in range(90):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
        attacked = await self.attack_by(python(script))
        self.assertEqual(attacked.status["state"], "finished", attacked.events)

    async def test_sparse_files(self) -> None:
        """What takes no room does no harm."""
        attacked = await self.attack_by(filling(fillers.SPARSE))
        self.assertEqual(attacked.text, "True\n")
        self.assertEqual(attacked.status["state"], "finished")

    async def test_allocation(self) -> None:
        """Nothing is allocated without a write; programs that ask for it write."""
        for place in MOUNTED:
            attacked = await self.attack_by(filling(fillers.ALLOCATED, place))
            self.assertEqual(attacked.text, f"{2 * UNSUPPORTED}True\nTrue\n")

    async def test_read_only_places(self) -> None:
        """Nowhere else is anything to be filled."""
        script = (
            "for place in / /usr /usr/local /etc /dev /proc /evaluation /evaluation/submission"
            ' "$(dirname "$SUBMISSION_FILE_SOLUTION")" /var /run /opt; do'
            " (echo x > $place/{word}) 2>/dev/null && echo $place; done; true"
        )
        self.assertEqual((await self.attack_by(script)).text, "")

    async def test_submission(self) -> None:
        """The submitted files are not to be changed, removed or replaced."""
        attacked = await self.attack_by(
            'f="$SUBMISSION_FILE_SOLUTION"; (echo x > "$f") 2>/dev/null && echo written;'
            ' rm -f "$f" 2>/dev/null && echo removed; mv README "$f" 2>/dev/null && echo moved;'
            ' chmod 777 "$f" 2>/dev/null && echo changed; ln "$f" link 2>/dev/null && echo linked;'
            ' cat "$f"'
        )
        self.assertEqual(attacked.text, "42\n")

    async def test_it_is_said_also_by_a_run_that_fails_of_it(self) -> None:
        """A run that fails before anybody has looked is told why."""
        script = fillers.MANY_FILES.replace(fillers.WAIT, "raise SystemExit(1)")
        attacked = await self.attack_by(filling(script))
        failure(attacked.events, "disk")
