"""The client library: submits evaluations to a server and follows their events to the end.

Every request is repeated until a usable response comes, and no event is lost or read twice: a
cursor advances only when a whole page has arrived, and the next page is requested only when the
caller has taken the last one. So a slow caller holds one page in memory.

Two clients have the same methods, those of the HTTP API:

- `Client` (`sync_client`) blocks. Threads may share one, and so may processes after a fork.
- `AsyncClient` (`async_client`) is for asyncio.

The other modules only compute. `operations` has one coroutine for each method, which sends and
pauses by two methods of its client, and `ClientSettings`, the arguments that the clients share.
`http` decides what a response or failure means, has the exceptions, and encodes submissions.

- `Text`, `Data`, `File`, `EvaluationError` and `Unknown` are the events (`events`); `Page` holds
  consecutive ones, and an `Outcome` how an evaluation has ended.
- `ClientError` is the base of all exceptions: `Unavailable` when no usable response
  came, `Refused` and its subclasses when the server refuses the request.

Callers are other people's programs (docs/clients.md) and the package `cli`. The daemon does not
import the client, and the client imports only `core` and `errors` of the package. It is also
distributed without the daemon, as `tawebeval-client`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tawebeval.client.events import (
    Data,
    EvaluationError,
    Event,
    File,
    Outcome,
    Page,
    Text,
    Unknown,
)
from tawebeval.client.http import (
    ClientError,
    EvaluationGone,
    Forbidden,
    InvalidRequest,
    NamedFile,
    Refused,
    Unavailable,
    UnknownEvaluation,
)

if TYPE_CHECKING:
    from tawebeval.client.async_client import AsyncClient
    from tawebeval.client.sync_client import Client

__all__ = [
    "AsyncClient",
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

_DRIVERS = {"AsyncClient": "async_client", "Client": "sync_client"}


def __getattr__(name: str) -> Any:
    """Import a client when it is used: httpx takes 0.1 s of processor time."""
    if name in _DRIVERS:
        return getattr(import_module(f"{__name__}.{_DRIVERS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
