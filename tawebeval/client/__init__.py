"""The client library: submits evaluations to a server and follows their events to the end.

Every request is repeated until a usable response comes, and no event is lost or read twice: a
cursor advances only when a whole page has arrived, and the next page is requested only when the
caller has taken the last one. So a slow caller slows the evaluator down.

- `Client` needs a running Twisted reactor. Its methods are those of the HTTP API.
- `blocking.BlockingClient` offers the same methods to programs without a reactor.
- `Text`, `Data`, `File`, `EvaluationError` and `Unknown` are the events (`events`); `Page` holds
  consecutive ones.
- `ClientError` is the base of all exceptions (`errors`): `Unavailable` when no usable response
  came, `Refused` and its subclasses when the server refuses the request.
- `Session` (`http`) sends one request as often as its `Backoff` allows.

Callers are other people's programs (docs/clients.md) and the package `cli`. The daemon does not
import the client, and the client imports only `core` and `errors` of the package.
"""

from tawebeval.client.client import Client
from tawebeval.client.errors import (
    ClientError,
    EvaluationGone,
    Forbidden,
    InvalidRequest,
    Refused,
    Unavailable,
    UnknownEvaluation,
)
from tawebeval.client.events import Data, EvaluationError, Event, File, Page, Text, Unknown
from tawebeval.client.http import Named

__all__ = [
    "Client",
    "ClientError",
    "Data",
    "EvaluationError",
    "EvaluationGone",
    "Event",
    "File",
    "Forbidden",
    "InvalidRequest",
    "Named",
    "Page",
    "Refused",
    "Text",
    "Unavailable",
    "Unknown",
    "UnknownEvaluation",
]
