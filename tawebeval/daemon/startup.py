"""What evaluations stand on: directories, cgroups, the sandbox, threads: sound before any is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from twisted.application.service import Service
from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.daemon.state import Directories
from tawebeval.deferreds import Threads, in_background
from tawebeval.errors import ConfigurationError
from tawebeval.git.gitversion import check_git
from tawebeval.linux.cgroups.group import Cgroups
from tawebeval.linux.diskfaults import told
from tawebeval.linux.leftovers import end_leftovers
from tawebeval.linux.rlimits import MORE
from tawebeval.sandbox.base import Sandbox
from tawebeval.sandbox.bubblewrap import write_accounts
from tawebeval.sandbox.probe import Places, close_sandbox, rely_on
from tawebeval.sandbox.project_quotas import check_quotas, try_quotas

log = Logger()


class Crew(Protocol):
    """Threads."""

    def start(self) -> None:
        """Start them. Raises OSError."""

    def stop(self) -> None:
        """Stop them. May block."""


class Ground(Service):
    """Started before the evaluations, by the user for whom it has to be sound, and stopped last.

    It holds the directories, and with them their locks, as long as it is. `crews` are the threads
    that run from its start to its stop, and `checking` those among them that look after the disks.
    `configuration` says which quotas there have to be.
    """

    name = "ground"

    def __init__(
        self,
        directories: Directories,
        cgroups: Cgroups,
        sandbox: Sandbox,
        crews: Sequence[Crew],
        checking: Threads,
        configuration: Configuration,
    ) -> None:
        self.directories = directories
        self._configuration = configuration
        self._cgroups = cgroups
        self._sandbox = sandbox
        self._crews = crews
        self._checking = checking
        self._mending = False

    def startService(self) -> None:
        """Try it out, and tell what does not hold.

        Exits with a message where what an earlier daemon has left cannot be removed, where the
        state cannot be written to, where project quotas do not hold, where git is missing or old,
        where the sandbox does not work, and where there are no threads.
        """
        super().startService()
        directories = self.directories
        end_leftovers(directories.evaluations, directories.repositories, *directories.quotas)
        try:
            directories.clear()
            write_accounts(directories.accounts)
            check_quotas(directories.quotas, self._configuration)
            try_quotas(directories.quotas)
        except OSError as error:
            raise SystemExit(f"tawebeval: {told(error)}") from None
        except ConfigurationError as error:
            raise SystemExit(f"tawebeval: {error}") from None
        try:
            check_git()
        except ConfigurationError as error:
            raise SystemExit(f"tawebeval: {error}") from None
        for problem in self._cgroups.problems:
            log.warn("limits: {problem}", problem=problem)
        rely_on(
            self._sandbox,
            Places(directories.repositories, directories.evaluations),
        )
        try:
            for threads in self._crews:
                threads.start()
        except OSError as error:
            raise SystemExit(f"tawebeval: {error.strerror}; {MORE}") from None

    def mend(self) -> None:
        """Begin to make anew what of the directories is gone, unless that is being done."""
        if not self._mending:
            self._mending = True
            in_background(self._mend(), log, "nothing can be mended")

    async def _mend(self) -> None:
        try:
            gone = await self._checking.run(self._restore)
        except OSError:
            return  # `GET /health/ready` says why no work is taken
        finally:
            self._mending = False
        for path in gone:
            log.warn("{path} was gone, and is made anew", path=path)

    def _restore(self) -> Sequence[Path]:
        gone = self.directories.restore()
        if self.directories.accounts in gone:
            write_accounts(self.directories.accounts)
        return gone

    def stopService(self) -> None:
        """Let the threads end, and give back the cgroups. Blocks until they have."""
        super().stopService()
        for threads in self._crews:
            threads.stop()
        close_sandbox(self._sandbox)
        self._cgroups.close()
