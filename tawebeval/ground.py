"""What evaluations stand on: directories, cgroups, the sandbox, threads: sound before any is."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.application.service import Service
from twisted.logger import Logger

from tawebeval.bubblewrap import write_accounts
from tawebeval.ceilings import MORE
from tawebeval.cgroups import Cgroups
from tawebeval.directories import Directories
from tawebeval.diskfaults import told
from tawebeval.errors import ConfigurationError
from tawebeval.gitversion import check_git
from tawebeval.leftovers import end_leftovers
from tawebeval.sandbox import Sandbox
from tawebeval.sandboxes import Places, close_sandbox, rely_on
from tawebeval.signals import Threads

log = Logger()


class Ground(Service):
    """Started before the evaluations, by the user for whom it has to be sound, and stopped last.

    It holds the directories, and with them their locks, as long as it is. `crews` are the threads
    that run from its start to its stop.
    """

    name = "ground"

    def __init__(
        self,
        directories: Directories,
        cgroups: Cgroups,
        sandbox: Sandbox,
        crews: Sequence[Threads],
    ) -> None:
        self.directories = directories
        self._cgroups = cgroups
        self._sandbox = sandbox
        self._crews = crews

    def startService(self) -> None:
        """Try it out, and tell what does not hold.

        Exits with a message where what an earlier daemon has left cannot be removed, where the
        state cannot be written to, where git is missing or old, where the sandbox does not work,
        and where there are no threads.
        """
        super().startService()
        end_leftovers(self.directories.evaluations, self.directories.repositories)
        try:
            self.directories.clear()
            write_accounts(self.directories.accounts)
        except OSError as error:
            raise SystemExit(f"tawebeval: {told(error)}") from None
        try:
            check_git()
        except ConfigurationError as error:
            raise SystemExit(f"tawebeval: {error}") from None
        for problem in self._cgroups.problems:
            log.warn("limits: {problem}", problem=problem)
        rely_on(
            self._sandbox,
            Places(self.directories.repositories, self.directories.evaluations),
        )
        try:
            for threads in self._crews:
                threads.start()
        except OSError as error:
            raise SystemExit(f"tawebeval: {error.strerror}; {MORE}") from None

    def mend(self) -> None:
        """Make anew what of the directories is gone, as soon as that is possible."""
        try:
            gone = self.directories.restore()
            if self.directories.accounts in gone:
                write_accounts(self.directories.accounts)
        except OSError:
            return  # `GET /health/ready` says why no work is taken
        for path in gone:
            log.warn("{path} was gone, and is made anew", path=path)

    def stopService(self) -> None:
        """Let the threads end, and give back the cgroups. Blocks until they have."""
        super().stopService()
        for threads in self._crews:
            threads.stop()
        close_sandbox(self._sandbox)
        self._cgroups.close()
