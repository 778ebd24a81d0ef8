"""The configuration is read again: what is live counts, the rest is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import msgspec

from tawebeval.config import Configuration, parse_configuration
from tawebeval.daemon.belongings import check_readable
from tawebeval.daemon.live import LIVE, adopt, differences
from tawebeval.errors import ConfigurationError
from tawebeval.linux.descriptors import check_more
from tawebeval.linux.rlimits import check_limits, few_processes
from tawebeval.reloadable import Rereading


@attrs.frozen
class ConfigurationFile:
    """The file at `path`, None where defaults hold, and the endpoints that replace its own.

    `written` is what holds by it at the start, `environment` the daemon's own. `folder` is the one
    that paths begin at, for twistd may go elsewhere.
    """

    path: Path | None = None
    listen: Sequence[str] = ()
    written: Configuration = attrs.field(factory=Configuration)
    environment: Mapping[str, str] = attrs.field(factory=dict)
    folder: Path = attrs.field(factory=Path.cwd)

    def read(self) -> Configuration:
        """Return what holds by it now. Blocks. Raises ConfigurationError."""
        found = read_configuration(self.path, self.listen)
        secrets = found.callbacks.secrets
        if secrets:  # of all paths the only one that counts at once
            callbacks = msgspec.structs.replace(found.callbacks, secrets=str(self.folder / secrets))
            found = msgspec.structs.replace(found, callbacks=callbacks)
        return found

    def check(self, running: Configuration, following: Configuration) -> None:
        """Look whether one may follow the other. Blocks. Raises ConfigurationError."""
        check_limits(following.limits)
        check_more(running, following)
        check_readable(following, self.path, self.environment)


@attrs.define
class Reconfiguring:
    """Has what a file says count.

    `running` is what holds. Some of it may never have been written: there are fewer connections
    where descriptors are short. `takers` are told each time what is to hold from then on, and
    `further` returns what reads the files that it names.
    """

    _file: ConfigurationFile
    _running: Configuration
    _takers: Sequence[Callable[[Configuration], None]]
    _further: Callable[[Configuration], Iterable[Rereading[Any]]]

    def rereadings(self) -> Sequence[Rereading[Any]]:
        """Return what reads it again; without a file of its own only those that it names."""
        path, named = self._file.path, tuple(self._further(self._running))
        if path is None:
            return named
        return (
            Rereading(
                "the configuration",
                (path,),
                self._read,
                self._take,
                self._notes,
                further=lambda wanted: self._further(adopt(self._running, wanted)),
                named=named,
            ),
        )

    def _read(self) -> Configuration:
        wanted = self._file.read()
        self._file.check(self._running, adopt(self._running, wanted))
        return wanted

    def _take(self, wanted: Configuration) -> None:
        self._running = adopt(self._running, wanted)
        for take in self._takers:
            take(self._running)

    def _notes(self, wanted: Configuration) -> Sequence[str]:
        notes = [
            f"{setting}: has changed, and counts after a restart"
            for setting in differences(self._file.written, wanted)
            if setting not in LIVE
        ]
        following = adopt(self._running, wanted)
        if following.limits.processes > self._running.limits.processes:
            with suppress(OSError):  # only the note is lost
                notes += few_processes(following)
        return notes


def read_configuration(path: Path | None, listen: Sequence[str] = ()) -> Configuration:
    """Return what the file at `path` says, the defaults without one. Blocks.

    Endpoints replace its own where there are any. Raises ConfigurationError.
    """
    configuration = Configuration() if path is None else _read(path)
    return msgspec.structs.replace(configuration, listen=tuple(listen)) if listen else configuration


def _read(path: Path) -> Configuration:
    try:
        text = path.read_text(encoding="utf-8")
    except PermissionError:
        raise ConfigurationError(
            f"{path} cannot be read by the user of this process (uid {os.geteuid()}): let it, by"
            " chown or chmod"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    try:
        return parse_configuration(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
