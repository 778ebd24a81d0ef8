"""The configuration is read again: what is live counts, the rest is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import attrs
import msgspec

from tawebeval.config import Configuration, parse_configuration
from tawebeval.daemon.live import LIVE, adopt, differences
from tawebeval.errors import ConfigurationError
from tawebeval.linux.rlimits import check_limits, processes
from tawebeval.reloadable import Rereading


@attrs.frozen
class ConfigurationFile:
    """The file at `path`, None where defaults hold, and the endpoints that replace its own.

    `written` is what holds by it at the start.
    """

    path: Path | None = None
    listen: Sequence[str] = ()
    written: Configuration = attrs.field(factory=Configuration)

    def read(self) -> Configuration:
        """Return what holds by it now. Blocks. Raises ConfigurationError."""
        return read_configuration(self.path, self.listen)


@attrs.define
class Reconfiguring:
    """Has what a file says count.

    `running` is what holds. Some of it may never have been written: there are fewer connections
    where descriptors are short. `takers` are told each time what is to hold from then on.
    """

    _file: ConfigurationFile
    _running: Configuration
    _takers: Sequence[Callable[[Configuration], None]]

    def rereadings(self) -> Sequence[Rereading[Configuration]]:
        """Return what reads it again; nothing without a file."""
        path = self._file.path
        if path is None:
            return ()
        return (Rereading("the configuration", (path,), self._read, self._take, self._notes),)

    def _read(self) -> Configuration:
        wanted = self._file.read()
        check_limits(wanted.limits)
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
                notes += [f"processes: {few}" for few in processes(following).problems]
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
