"""What can change while the daemon runs is read again: by SIGHUP, or when the operator waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from twisted.application.service import Service
from twisted.logger import Logger

from tawebeval.daemon.systemd import Supervisor
from tawebeval.errors import ConfigurationError
from tawebeval.linux.secretfiles import digest
from tawebeval.reloadable import Outcome, Rereading, Source

log = Logger()


class EarlyHangup:
    """The handler of SIGHUP during the start, which the signal would end otherwise."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, *_: object) -> None:
        """Note that the signal came."""
        self.came = True

    def install(self) -> None:
        """Take the signal until `Reloading` does."""
        signal.signal(signal.SIGHUP, self)


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
        self._copies = Path(copies) if copies else None
        self._supervisor = supervisor
        self._reactor = reactor
        self._before: Any = None

    def startService(self) -> None:
        """Wait for the signal; one that came before makes a reload as soon as the reactor runs."""
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
        if isinstance(self._before, EarlyHangup) and self._before.came:
            self._reactor.callWhenRunning(self.reload)

    def reload(self, originals: Mapping[str, str] = MappingProxyType({})) -> Outcome:
        """Read all of them, and only then have them count, or none where one is broken.

        Nor does any where one is a copy that systemd has made, and its original, by that name, has
        another digest now.
        """
        self._supervisor.reloading()
        try:
            outcome = self._reload(originals)
        finally:
            self._supervisor.ready()
        for problem in outcome.problems:
            log.error("nothing is reloaded: {problem}", problem=problem)
        for note in outcome.notes:
            log.warn("{note}", note=note)
        return outcome

    def _reload(self, originals: Mapping[str, str]) -> Outcome:
        problems: list[str] = []
        found = list(self._read(originals, problems))
        if problems:
            return Outcome(tuple(problems))
        notes: list[str] = []
        for each, content in found:
            notes += each.notes(content)
            each.take(content)
            paths = ", ".join(map(str, each.paths))
            log.info("{name}: read again from {paths}", name=each.name, paths=paths)
        if not found:
            log.info("there is no file to read again")
        notes += [
            f"{each.name}: {path} is a copy that systemd has made at the start (LoadCredential=): a"
            " change of the file itself counts after a restart"
            for each, _ in found
            for path in self._copied(each)
        ]
        return Outcome(notes=tuple(notes))

    def _read(
        self, originals: Mapping[str, str], problems: list[str]
    ) -> Iterator[tuple[Rereading[Any], Any]]:
        """Yield each with its content; add what is wrong."""
        for each in self._rereadings:
            problems += [
                f"{each.name}: {path} is a copy that systemd has made at the start"
                " (LoadCredential=), and the file itself has changed: that counts after a restart"
                for path in self._copied(each)
                if _is_stale(path, originals)
            ]
            try:
                yield each, each.read()
            except ConfigurationError as error:
                problems.append(str(error))

    def _copied(self, rereading: Rereading[Any]) -> Iterator[Path]:
        """Yield which of its files are only copies."""
        return (path for path in rereading.paths if path.parent == self._copies)

    def stopService(self) -> None:
        """Wait no more."""
        super().stopService()
        signal.signal(signal.SIGHUP, self._before)


def _is_stale(copy: Path, originals: Mapping[str, str]) -> bool:
    try:
        return copy.name in originals and digest(copy) != originals[copy.name]
    except OSError:
        return False  # reading it says what is wrong
