"""The form of `POST /evaluate`, as a client sends it: streamed, and as often as it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar
from uuid import uuid4

import attrs
from treq.multipart import MultiPartProducer
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer
from twisted.internet.task import Cooperator
from twisted.web.client import FileBodyProducer

from tawebeval.core.filenames import base_name

T = TypeVar("T")


@attrs.frozen
class Named:
    """The content of a file, or where it is, and the name that the evaluator is to see."""

    filename: str
    content: bytes | Path


Content: TypeAlias = str | bytes | Path | Named
"""A field of a submission: text or bytes, which have no name of a file, or a file."""


class Upload(MultiPartProducer):
    """A body that can be stopped whether it is on its way or not.

    A server may answer, and be believed, in the middle of it.
    """

    _on_its_way = False

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Send it."""
        self._on_its_way = True
        return super().startProducing(consumer).addBoth(self._sent)

    def _sent(self, result: T) -> T:
        self._on_its_way = False
        return result

    def stopProducing(self) -> None:
        """Send no more of it."""
        if self._on_its_way:
            self._on_its_way = False
            super().stopProducing()


@attrs.frozen
class Form:
    """A form: `fields` are text, `submission` the fields of the submission by their names."""

    fields: Mapping[str, str]
    submission: Mapping[str, Content]
    _boundary: str = attrs.field(init=False, factory=lambda: uuid4().hex)

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for the name of a file that cannot be one, and for no UTF-8."""
        for name, content in self.submission.items():
            _filename(content)
            check_text(f"submission[{name}]", content if isinstance(content, str) else "")
        for name, text in self.fields.items():
            check_text(name, text)

    @property
    def content_type(self) -> str:
        """What the body is, in the words of the header."""
        return f"multipart/form-data; boundary={self._boundary}"

    def body(self, cooperator: Cooperator, opened: ExitStack) -> Upload:
        """Return the body, read anew from files; `opened` stops and closes. Raises OSError."""
        parts = [*self.fields.items(), *self._parts(cooperator, opened)]
        upload = Upload(parts, self._boundary, cooperator)
        opened.callback(upload.stopProducing)
        return upload

    def _parts(self, cooperator: Cooperator, opened: ExitStack) -> Iterator[tuple[str, Any]]:
        for name, content in self.submission.items():
            field, filename = f"submission[{name}]", _filename(content)
            if isinstance(content, str):
                yield field, content
                continue
            source = opened.enter_context(_open(content))
            producer = FileBodyProducer(source, cooperator)
            yield field, (filename, "application/octet-stream", producer)


def check_text(name: str, text: str) -> None:
    """Raise ValueError for a field that UTF-8 has no bytes for."""
    try:
        f"{name}{text}".encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: must be UTF-8") from None


def _filename(content: Content) -> str | None:
    if isinstance(content, Named):
        return base_name(content.filename)
    return base_name(content.name) if isinstance(content, Path) else None


def _open(content: bytes | Path | Named) -> IO[bytes]:
    if isinstance(content, Named):
        content = content.content
    return BytesIO(content) if isinstance(content, bytes) else content.open("rb")
