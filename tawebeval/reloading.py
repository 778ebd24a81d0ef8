"""Tokens and secrets are read again: by SIGHUP, or when the operator waits for it."""

from __future__ import annotations

import os
import signal
from typing import Any

from twisted.application.service import Service
from twisted.logger import Logger

from tawebeval.access import Access
from tawebeval.callbacks import Callbacks
from tawebeval.keyring import Keyring
from tawebeval.supervisor import Supervisor

log = Logger()


class Reloading(Service):
    """Reads tokens and secrets again when the operator says so, by SIGHUP or by `reload`."""

    def __init__(
        self,
        access: Access,
        keyring: Keyring,
        callbacks: Callbacks | None,
        supervisor: Supervisor,
        reactor: Any,
        readers: Access | None = None,
    ) -> None:
        self._access = access
        self._readers = readers
        self._keyring = keyring
        self._callbacks = callbacks
        self._supervisor = supervisor
        self._reactor = reactor
        self._before: Any = None

    def startService(self) -> None:
        """Wait for the signal, which would end the daemon otherwise."""
        super().startService()
        for source, what in (
            (self._access.source, "the tokens"),
            (self._readers.source if self._readers else None, "the tokens of the metrics"),
            (self._callbacks.source if self._callbacks else None, "the secrets of callbacks"),
        ):
            if source is not None and not os.access(source, os.R_OK):
                log.warn(
                    "{path} cannot be read by the user that the daemon runs as: {what} are known, "
                    "but SIGHUP will not read new ones until chown or chmod lets that user read it",
                    path=source,
                    what=what,
                )
        for path in self._keyring.files:
            if not os.access(path, os.R_OK):
                log.warn(
                    "{path} cannot be read by the user that the daemon runs as: a password is "
                    "known, but SIGHUP will not read a new one, and ssh reads no key at all",
                    path=path,
                )

        self._before = signal.signal(
            signal.SIGHUP, lambda *_: self._reactor.callFromThread(self.reload)
        )

    def reload(self) -> list[str]:
        """Read all of them; return what is wrong with some, which then stay as they were."""
        self._supervisor.reloading()
        try:
            files = (self._access, self._readers, self._keyring, self._callbacks)
            found = [each.reload() for each in files if each is not None]
        finally:
            self._supervisor.ready()
        return [str(error) for error in found if error is not None]

    def stopService(self) -> None:
        """Wait no more."""
        super().stopService()
        signal.signal(signal.SIGHUP, self._before)
