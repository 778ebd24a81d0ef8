"""The client library: submits evaluations to a server and follows their events to the end.

Every request is repeated until a usable response comes, and no event is lost or read twice: a
cursor advances only when a whole page has arrived, and the next page is requested only when the
caller has taken the last one. So a slow caller holds one page in memory.

Two clients have the same methods, those of the HTTP API:

- `Client` (`sync_client`) blocks. Threads may share one, and so may processes after a fork.
- `AsyncClient` (`async_client`) is for asyncio.

The other modules only compute. `operations` has one coroutine for each method, which sends and
pauses by two methods of its client, and `BaseClient`, the arguments that the clients share.
`http` decides what a response or failure means, has the exceptions, and encodes submissions.

- `Text`, `Data`, `File`, `EvaluationError` and `Unknown` are the events (`events`); `Page` holds
  consecutive ones, and an `Outcome` how an evaluation has ended.
- `ClientError` is the base of all exceptions: `Unavailable` when no usable response
  came, `Refused` and its subclasses when the server refuses the request.
- A `Backoff` says how often, and after which pauses, a request is repeated (`backoff`).

Callers are other people's programs (docs/clients.md) and `tawebeval.cli`. The distribution
`tawebeval-client` has this package alone, and that of the daemon depends on it: `results` and
`backoff` serve both. The client imports nothing of the daemon.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tawebeval_client.async_client import AsyncClient
    from tawebeval_client.backoff import Backoff
    from tawebeval_client.events import (
        Data,
        EvaluationError,
        Event,
        File,
        Outcome,
        Page,
        Text,
        Unknown,
    )
    from tawebeval_client.http import (
        ClientError,
        EvaluationGone,
        Forbidden,
        InvalidRequest,
        NamedFile,
        Refused,
        Unavailable,
        UnknownEvaluation,
    )
    from tawebeval_client.sync_client import Client

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Backoff",
    "Client",
    "ClientError",
    "Data",
    "EvaluationError",
    "EvaluationGone",
    "Event",
    "File",
    "Forbidden",
    "InvalidRequest",
    "NamedFile",
    "Outcome",
    "Page",
    "Refused",
    "Text",
    "Unavailable",
    "Unknown",
    "UnknownEvaluation",
]

_MODULES = ("backoff", "events", "http", "sync_client", "async_client")


def __getattr__(name: str) -> Any:
    """Import what is used: httpx, of the last two modules, takes 0.1 s of processor time."""
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"{__name__}.{module}"))
            if name in found:
                return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, for `help` and pydoc."""
    return [*globals(), *__all__]
