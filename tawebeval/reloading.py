"""What can change while the daemon runs is read again: by SIGHUP, or when the operator waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.logger import Logger

from tawebeval.errors import ConfigurationError
from tawebeval.rereading import Outcome, Rereading, Source
from tawebeval.supervisor import Supervisor

log = Logger()


class Reloading(Service):
    """Reads the files of all `sources` again when the operator says so, by SIGHUP or by `reload`.

    `copies` is the directory of what systemd has handed over at the start, empty without one.
    """

    def __init__(
        self,
        sources: Iterable[Source | None],
        copies: str,
        supervisor: Supervisor,
        reactor: Any,
    ) -> None:
        self._rereadings = [
            one for source in sources if source is not None for one in source.rereadings()
        ]
        self._copies = copies
        self._supervisor = supervisor
        self._reactor = reactor
        self._before: Any = None

    def startService(self) -> None:
        """Wait for the signal, which would end the daemon otherwise."""
        super().startService()
        for each in self._rereadings:
            for path in each.paths:
                if not os.access(path, os.R_OK):
                    log.warn(
                        "{path} cannot be read by the user that the daemon runs as: what it says "
                        "({name}) is known, but each reload is refused until chown or chmod lets "
                        "that user read it; ssh cannot use such a key at all",
                        path=path,
                        name=each.name,
                    )
        self._before = signal.signal(
            signal.SIGHUP, lambda *_: self._reactor.callFromThread(self.reload)
        )

    def reload(self) -> Outcome:
        """Read all of them, and only then have them count, or none where one is broken."""
        self._supervisor.reloading()
        try:
            outcome = self._reload()
        finally:
            self._supervisor.ready()
        for problem in outcome.problems:
            log.error("nothing is reloaded: {problem}", problem=problem)
        for note in outcome.notes:
            log.warn("{note}", note=note)
        return outcome

    def _reload(self) -> Outcome:
        found: list[tuple[Rereading[Any], Any]] = []
        problems: list[str] = []
        for each in self._rereadings:
            try:
                found.append((each, each.read()))
            except ConfigurationError as error:
                problems.append(str(error))
        if problems:
            return Outcome(tuple(problems))
        notes: list[str] = []
        for each, content in found:
            notes += each.notes(content)
            notes += self._notes_of_copies(each)
            each.take(content)
            paths = ", ".join(map(str, each.paths))
            log.info("{name}: read again from {paths}", name=each.name, paths=paths)
        if not found:
            log.info("there is no file to read again")
        return Outcome(notes=tuple(notes))

    def _notes_of_copies(self, rereading: Rereading[Any]) -> list[str]:
        return [
            f"{rereading.name}: {path} is a copy that systemd has made at the start"
            " (LoadCredential=): a change of the file itself counts after a restart"
            for path in rereading.paths
            if self._copies and path.parent == Path(self._copies)
        ]

    def stopService(self) -> None:
        """Wait no more."""
        super().stopService()
        signal.signal(signal.SIGHUP, self._before)
