"""Who may call, and how often: the tokens as they are now, and each caller's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path

import attrs

from tawebeval.config import CallerSettings, MetricsSettings
from tawebeval.core.tokens import ANONYMOUS, Tokens, parse_tokens
from tawebeval.errors import ConfigurationError, OverShare
from tawebeval.linux.ownership import find_secrets_file, read_secrets
from tawebeval.reloadable import Reloadable

_CREDENTIAL = "tokens"
_METRICS_CREDENTIAL = "metrics-tokens"
_ROUNDING = 1e-9  # of a request: who waits as long as it was told is not refused for a bit


@attrs.define
class RateLimit:
    """Lets each caller make `per_minute` requests, at once or spread; 0 is no limit.

    `seconds` is a clock. Each has a bucket that holds the requests of one minute at most, and
    fills steadily.
    """

    per_minute: int
    _seconds: Callable[[], float]
    # By caller: how many requests were left, and when.
    _left: dict[str, tuple[float, float]] = attrs.field(factory=dict, init=False)

    def spend(self, caller: str) -> None:
        """Count a request. Raises OverShare, and counts nothing, where there is none left."""
        if not self.per_minute:
            return
        now = self._seconds()
        left, since = self._left.get(caller, (self.per_minute, now))
        left = min(self.per_minute, left + (now - since) * self.per_minute / 60)
        if left < 1 - _ROUNDING:
            wait = (1 - left) * 60 / self.per_minute
            raise OverShare(
                f"these are more than the {self.per_minute} requests that you may make in a minute",
                max(1, ceil(wait)),
            )
        self._left[caller] = left - 1, now


@attrs.define
class Authentication:
    """Lets requests in; `source` is the file of tokens, None where anybody may call.

    `setting` is the one that names the file.
    """

    rate: RateLimit
    source: Path | None = None
    setting: str = "callers.tokens"
    _tokens: Tokens | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Read the tokens. Raises ConfigurationError."""
        if self.source is not None:
            self._tokens = self._read(self.source)

    @property
    def open(self) -> bool:
        """Whether anybody may call."""
        return self._tokens is None

    def admit(self, authorization: Sequence[bytes]) -> str:
        """Return the name of who calls, with such headers `Authorization`; count the request.

        Raises Unauthorized, OverShare.
        """
        if self._tokens is None:
            return ANONYMOUS
        caller = self._tokens.authenticate(authorization)
        self.rate.spend(caller)
        return caller

    def reloadables(self) -> Iterator[Reloadable[Tokens]]:
        """Yield what reads the tokens again; nothing where there are none."""
        if self.source is not None:
            yield Reloadable(
                self.setting, (self.source,), partial(self._read, self.source), self._take
            )

    def _take(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def _read(self, source: Path) -> Tokens:
        try:
            return read_tokens(source)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.setting}: {error}") from None


def find_tokens(callers: CallerSettings, environment: Mapping[str, str]) -> Path | None:
    """Return where the file of tokens is, None if there is none.

    It is the configured one, or what systemd hands over (`LoadCredential=tokens:…`). Raises
    ConfigurationError where there is one, and anybody may call all the same, and where that
    cannot be told.
    """
    found = find_secrets_file(callers.tokens, _CREDENTIAL, environment)
    if found is not None and callers.open:
        raise ConfigurationError(
            f"callers.open: is true, but there are tokens in {found}; one of them is a mistake"
        )
    return found


def find_metrics_tokens(metrics: MetricsSettings, environment: Mapping[str, str]) -> Path | None:
    """Return where the tokens of those who may read the metrics are; None where none are asked for.

    Raises ConfigurationError where there is no such file.
    """
    if metrics.readers != "tokens":
        return None
    found = find_secrets_file(metrics.tokens, _METRICS_CREDENTIAL, environment)
    if found is None:
        raise ConfigurationError(
            'metrics.readers: is "tokens", and no file of them is named (metrics.tokens), nor does'
            f" systemd hand one over (LoadCredential={_METRICS_CREDENTIAL}:...)"
        )
    return found


def read_tokens(path: Path) -> Tokens:
    """Return what the file at `path` says. Raises ConfigurationError with file and line."""
    return read_secrets(path, parse_tokens)
