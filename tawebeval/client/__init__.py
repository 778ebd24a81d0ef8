"""The client: begins evaluations on a server and follows their events to the end.

`Client` is for programs that run Twisted's reactor; `tawebeval.client.blocking` has the same for
those that do not.
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
from tawebeval.client.submission import Named

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
