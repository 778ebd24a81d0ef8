"""`linux.child` with real children: what they inherit of the daemon, which is nothing."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.cases.children import LOOK, PATH, ProcessTestCase


class InheritanceTests(ProcessTestCase):
    async def look(self, *arguments: str, **settings: Any) -> dict[str, Any]:
        # Without -E: its environment is the one given. `-S` for speed.
        child = self.spawn(sys.executable, "-S", "-c", LOOK, *arguments, **settings)
        await child.ended.wait()
        self.assertEqual(bytes(child.stderr), b"")
        return json.loads(bytes(child.stdout))

    async def test_arguments_environment_and_directory_are_those_given(self) -> None:
        self.patch(os, "environ", {**os.environ, "SECRET": "of the daemon"})
        before, directory = os.getcwd(), os.path.realpath(self.mktemp())
        os.mkdir(directory)
        arguments = ["", "a b", "$HOME", "*", "--", "ü", "'\""]
        given = {"A": "1", "EMPTY": "", "UMLAUT": "ü \n x", "LC_ALL": "C.UTF-8"}
        seen = await self.look(*arguments, environment=given, directory=directory)
        self.assertEqual(seen["argv"], arguments)
        self.assertEqual(seen["environment"], given)
        self.assertEqual(seen["directory"], directory)
        self.assertEqual(os.getcwd(), before)
        self.assertEqual((seen["session"], seen["group"]), (seen["pid"], seen["pid"]))

    async def test_stdin_is_at_its_end(self) -> None:
        reading, writing = os.pipe()
        self.addCleanup(os.close, writing)
        own = os.dup(0)
        self.addCleanup(os.close, own)
        self.addCleanup(os.dup2, own, 0)
        os.dup2(reading, 0)
        os.close(reading)
        os.write(writing, b"x")
        self.assertEqual((await self.look())["stdin"], "")

    async def test_umask_and_signals_are_not_inherited(self) -> None:
        self.addCleanup(os.umask, os.umask(0o077))
        seen = await self.look()
        self.assertEqual((seen["umask"], seen["blocked"]), (0o022, []))

    async def test_descriptors_of_the_daemon_and_other_children_are_not_inherited(self) -> None:
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.addCleanup(os.close, writing)
        os.set_inheritable(writing, True)
        self.shell("sleep 600")
        self.assertEqual((await self.look())["descriptors"], [0, 1, 2])

    async def test_given_descriptors_keep_their_numbers(self) -> None:
        opened = os.open("/dev/null", os.O_RDONLY)
        self.addCleanup(os.close, opened)
        self.assertEqual(
            (await self.look(descriptors=[opened]))["descriptors"], sorted([0, 1, 2, opened])
        )

    async def test_children_start_beside_more_descriptors_than_select_takes(self) -> None:
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(2000)]
        for descriptor in opened:
            self.addCleanup(os.close, descriptor)
        os.set_inheritable(opened[-1], True)
        self.assertEqual((await self.look(environment=PATH))["descriptors"], [0, 1, 2])
