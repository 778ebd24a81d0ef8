"""Environments: a real Debian in place of the machine's own programs; import and reload."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest

from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import text
from tests.integration.harness import COMMAND, DaemonTestCase
from tests.machine.roots import toolchain

SUITE = "trixie"
_VERSION = "import sys; print(*sys.version_info[:2])"
MACHINE_VERSION = subprocess.run(
    ["/usr/bin/python3", "-c", _VERSION], capture_output=True, text=True, check=True
).stdout
JAVA = """
class Sum {
    public static void main(String[] arguments) {
        System.out.println("java " + Runtime.version().feature());
    }
}
"""


def environment_command(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `tawebeval environment` for the daemon with this state. Blocks."""
    return subprocess.run(
        [COMMAND, "environment", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "STATE_DIRECTORY": str(state)},
        timeout=LONG_PATIENCE,
    )


class EnvironmentTests(DaemonTestCase):
    timeout = 10 * LONG_PATIENCE  # the first test makes the root
    _table: ClassVar[str] = ""

    async def setUp(self) -> None:
        await super().setUp()
        if str(self.daemon.state) not in self._table:  # the root of this daemon
            type(self)._table = await deferToThread(self._import)
        self.addCleanup(self.daemon.reload, "")
        await self.daemon.reload(self._table)

    def _import(self) -> str:
        if shutil.which("mmdebstrap") is None:
            raise SkipTest("mmdebstrap is not installed")
        with ExitStack() as made:
            try:
                archive = made.enter_context(toolchain(SUITE))
            except subprocess.CalledProcessError as error:
                raise SkipTest(f"no root of {SUITE}: {error.output[-500:]}") from None
            given = self.folder / "root.tar"  # the cache may be in a home that others cannot enter
            shutil.copy(archive, given)
            done = environment_command(self.daemon.state, "import", "debian", str(given))
        assert done.returncode == 0, done.stderr
        return f'{done.stdout}description = "Debian"\nvariables = {{ FLAVOUR = "trixie" }}\n'

    async def run_in_debian(self, command: str, **fields: str) -> str:
        events = await self.run_command(command, environment="debian", **fields)
        return text(events)

    async def test_evaluator_and_submission_run_the_python_of_the_environment(self) -> None:
        show = f"python3 -c '{_VERSION}'"
        printed = await self.run_in_debian(f"{show}; tawebeval-run -- {show}; echo $FLAVOUR")
        one, two, flavour = printed.splitlines()
        self.assertEqual((one, flavour), (two, "trixie"))
        self.assertNotEqual(f"{one}\n", MACHINE_VERSION)
        events = await self.run_command(show, environment="default")
        self.assertEqual(text(events), MACHINE_VERSION)

    async def test_java_of_the_environment_compiles_and_runs_a_submission(self) -> None:
        self.repository.write("Sum.java", JAVA)
        self.commit = self.repository.commit()
        printed = await self.run_in_debian(
            "javac Sum.java && tawebeval-run --read $PWD:/work --dir /work -- java -Xmx64m Sum"
        )
        self.assertRegex(printed, r"\Ajava \d+\n\Z")

    async def test_environment_shows_no_file_of_the_machine_and_is_read_only(self) -> None:
        printed = await self.run_in_debian(
            "cut -d: -f1 /etc/passwd; cat /etc/debian_version; ls -d /usr/bin/git /etc/ssh /root"
            " 2>/dev/null; echo x 2>/dev/null >/usr/x || echo read-only; "
            " cat /sh 2>/dev/null || echo unreadable"
        )
        first, second, version, *rest = printed.splitlines()
        self.assertEqual((first, second), ("evaluator", "nobody"))
        self.assertRegex(version, r"\A\d+\.\d+\Z")
        self.assertEqual(rest, ["read-only", "unreadable"])
