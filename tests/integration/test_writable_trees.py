"""Trees: what evaluators find in them; what one of them changes no other sees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SkipTest

from tawebeval.linux.starter import PROCESS_NAME
from tawebeval.sandbox.probe import TREE_COPY_WARNING
from tests.integration.client import python, text
from tests.integration.harness import UNSANDBOXED, DaemonTestCase, until

# An overlay's own attributes, and what could be undone with them.
ATTRIBUTES = """
import os
for path in (".", "folder", "README", "new"):
    open("new", "a").close()
    for name in ("opaque", "whiteout", "redirect", "metacopy", "origin", "nlink"):
        try:
            os.setxattr(path, f"user.overlay.{name}", b"y")
        except OSError:
            pass
print(sorted(os.listdir("folder")), open("README").read().strip())
"""


if TYPE_CHECKING:
    _Base = DaemonTestCase
else:
    _Base = object  # a test case of its own would run


class WritableTreeCase(_Base):
    """What holds of them in any way; mixed into a case with a daemon."""

    overlaid: bool

    def checkouts(self) -> list[Path]:
        return list((self.daemon.cache / "repositories").glob("*.tree"))

    async def test_tree_is_an_overlay_or_a_copy_as_configured(self) -> None:
        mounts = text(await self.run_command("cat /proc/self/mountinfo"))
        self.assertEqual(
            " - overlay overlay " in mounts and "/evaluation/tree" in mounts, self.overlaid
        )
        self.assertNotIn(TREE_COPY_WARNING, self.daemon.log)

    async def test_concurrent_runs_share_a_checkout_but_not_their_changes(self) -> None:
        self.repository.write("folder/file", "in a folder\n")
        self.commit = self.repository.commit()
        before = len(self.checkouts())
        command = (
            "cat README folder/*; echo $TURINGARENA_SEED >>README; tail -n 1 README;"
            " mv folder/file moved; touch new"
        )
        streams = await gatherResults(
            Deferred.fromCoroutine(self.run_command(command, seed=str(seed))) for seed in range(6)
        )
        self.assertEqual(
            [text(events) for events in streams],
            [f"an evaluator\nin a folder\n{number}\n" for number in range(6)],
        )
        self.assertEqual(len(self.checkouts()), before + 1)
        look = "echo *; cat README folder/*"
        seen = "README folder\nan evaluator\nin a folder\n"
        self.assertEqual(text(await self.run_command(look)), seen)


class CopiedTests(WritableTreeCase, DaemonTestCase):
    configuration = UNSANDBOXED
    overlaid = False


class OverlaidTests(WritableTreeCase, DaemonTestCase):
    overlaid = True

    async def test_overlay_xattrs_set_by_an_evaluator_have_no_effect(self) -> None:
        self.repository.write("folder/file", "")
        self.commit = self.repository.commit()
        seen = "['file'] an evaluator\n"
        for _ in range(2):
            self.assertEqual(text(await self.run_command(python(ATTRIBUTES))), seen)

    async def test_evaluator_cannot_see_the_paths_of_cache_and_overlay(self) -> None:
        events = await self.run_command(
            "cat /proc/self/mountinfo; ls -l /proc/self/fd; ls /evaluation;"
            " cat /proc/[0-9]*/cmdline"
        )
        seen = text(events)
        for hidden in (str(self.daemon.cache), "work\n", "mnt:[", PROCESS_NAME, ".tree"):
            self.assertNotIn(hidden, seen)

    async def test_overlay_is_mounted_in_no_process_of_the_daemon(self) -> None:
        await self.run_command("true")
        self.assertNotIn(str(self.daemon.state), Path("/proc/self/mounts").read_text())
        for pid in (self.daemon.pid, self.daemon.find_starter()):
            mounts = Path(f"/proc/{pid}/mounts").read_text()
            self.assertNotIn(str(self.daemon.state), mounts)

    async def test_starter_holds_nothing_of_ended_evaluations(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("descriptors of processes in user namespaces of their own are root's")
        starter = self.daemon.find_starter()

        def held() -> int:
            return len(os.listdir(f"/proc/{starter}/fd"))

        before = held()
        for _ in range(3):
            await self.run_command("tawebeval-run -- true")
        await until(lambda: held() <= before, "nothing is held")


class TreeTests(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.binary = bytes(range(256)) * 17
        self.repository.write("bin/run", "#!/bin/sh\necho run in $(basename $PWD)\n", 0o755)
        self.repository.write("bin/data", self.binary)
        self.repository.write("dos.txt", "one\r\ntwo\r\n")
        self.repository.write("città/ñ ü.txt", "far\n")
        self.repository.write(".gitattributes", "*.txt text eol=crlf\n")
        self.repository.link("to-run", "bin/run")
        self.repository.link("to-bin", "bin")
        self.repository.link("dangling", "no/such/place")
        self.repository.link("out", "/etc")
        self.repository.link("up", "../..")
        self.commit = self.repository.commit()

    async def test_modes_links_bytes_and_names_are_those_of_a_checkout(self) -> None:
        events = await self.run_command(
            "stat -c '%a %n' bin/run bin/data README; readlink to-run to-bin dangling out up;"
            " ./bin/run; ./to-run; cat città/*.txt; od -An -v -tx1 bin/data | tr -d ' \\n'"
        )
        self.assertEqual(
            text(events),
            "755 bin/run\n644 bin/data\n644 README\n"
            "bin/run\nbin\nno/such/place\n/etc\n../..\n"
            f"run in tree\nrun in tree\nfar\r\n{self.binary.hex()}",
        )

    async def test_tree_has_the_files_of_the_commit_without_the_git_directory(self) -> None:
        events = await self.run_command("ls -A1 | LC_ALL=C sort | tr '\\n' ' '")
        names = sorted({*os.listdir(self.repository.folder)} - {".git"})
        self.assertEqual(text(events), " ".join(names) + " ")
