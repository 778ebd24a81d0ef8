"""Authentication by bearer tokens, and the rate limit of each caller."""

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
_ROUNDING = 1e-9  # of a request; so no client is refused that has waited for Retry-After


@attrs.define
class RateLimit:
    """A token bucket for each caller: `per_minute` requests, refilled steadily; 0 = no limit.

    `seconds` is a clock, in seconds.
    """

    per_minute: int
    _seconds: Callable[[], float]
    # By caller: the requests left, and the time of that in seconds.
    _left: dict[str, tuple[float, float]] = attrs.field(factory=dict, init=False)

    def spend(self, caller: str) -> None:
        """Count a request. Raises: OverShare, without counting, if the bucket is empty."""
        if not self.per_minute:
            return
        now = self._seconds()
        left, since = self._left.get(caller, (self.per_minute, now))
        left = min(self.per_minute, left + (now - since) * self.per_minute / 60)
        if left < 1 - _ROUNDING:
            wait = (1 - left) * 60 / self.per_minute
            raise OverShare(
                f"too many requests; the limit is {self.per_minute} per minute"
                " (callers.requests_per_minute)",
                max(1, ceil(wait)),
            )
        self._left[caller] = left - 1, now


@attrs.define
class Authentication:
    """Authentication by the token file `source`; None = anybody may call.

    `setting` names the file in messages.
    """

    rate: RateLimit
    source: Path | None = None
    setting: str = "callers.tokens"
    _tokens: Tokens | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Read the token file. Raises: ConfigurationError."""
        if self.source is not None:
            self._tokens = self._read(self.source)

    @property
    def is_open(self) -> bool:
        """Whether anybody may call."""
        return self._tokens is None

    def admit(self, authorization: Sequence[bytes]) -> str:
        """Return the caller's name by the headers `Authorization`, and count the request.

        Raises: Unauthorized, OverShare.
        """
        if self._tokens is None:
            return ANONYMOUS
        caller = self._tokens.authenticate(authorization)
        self.rate.spend(caller)
        return caller

    def reloadables(self) -> Iterator[Reloadable[Tokens]]:
        """Yield the token file as a reloadable, if there is one."""
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
    """Return the path of the token file; None if there is none.

    It is the configured path, or a credential of systemd (`LoadCredential=tokens:...`). Raises:
    ConfigurationError, if there is a file and `callers.open` is true, or if the credential cannot
    be looked up.
    """
    found = find_secrets_file(callers.tokens, _CREDENTIAL, environment)
    if found is not None and callers.open:
        raise ConfigurationError(
            f"callers.open: true, although {found} has tokens; remove callers.open or"
            " callers.tokens"
        )
    return found


def find_metrics_tokens(metrics: MetricsSettings, environment: Mapping[str, str]) -> Path | None:
    """Return the path of the metrics' token file; None if metrics need no token.

    Raises: ConfigurationError, if `metrics.readers` asks for tokens and there is no file.
    """
    if metrics.readers != "tokens":
        return None
    found = find_secrets_file(metrics.tokens, _METRICS_CREDENTIAL, environment)
    if found is None:
        raise ConfigurationError(
            'metrics.readers: "tokens" needs a file of tokens; set metrics.tokens, or'
            f" LoadCredential={_METRICS_CREDENTIAL}:FILE in the unit"
        )
    return found


def read_tokens(path: Path) -> Tokens:
    """Parse the token file at `path`. Raises: ConfigurationError, with file and line."""
    return read_secrets(path, parse_tokens)
