"""Cases of tests of forms, fed to a receiver in all ways."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.errors import RequestError
from tawebeval.evaluations.service import ReceivedForm
from tawebeval.web.upload import FormReceiver, UnwrittenUploads, UploadWriter
from tests.fakes.clients import MULTIPART, Part, parts
from tests.fakes.uploads import FakeSource
from tests.fakes.world import InlineThreads

CONFIGURATION = Configuration(limits=LimitSettings(request_body=20_000))


def chunkings(body: bytes) -> Iterator[list[bytes]]:
    """Yield a body cut in many ways: not at all, into bytes, at random."""
    yield [body]
    yield [body[i : i + 1] for i in range(len(body))]
    chance = random.Random(0)
    for size in (2, 7, 60):
        chunks, at = [], 0
        while at < len(body):
            length = chance.randint(1, size)
            chunks.append(body[at : at + length])
            at += length
        yield chunks


class FakeSubmissions:
    """What counts the bytes of forms."""

    def __init__(self) -> None:
        self.budget = Budget(SharedResource.UPLOADS, 2**40)

    def discard_upload(self, directory: Path, size: int, caller: str) -> None:
        shutil.rmtree(directory)
        self.budget.give_back(size, caller)


class UploadTestCase(SynchronousTestCase):
    """Receives forms into a directory of each one's own."""

    def setUp(self) -> None:
        self.uploads = Path(self.mktemp())
        self.uploads.mkdir()
        self.count = 0
        self.submissions: Any = FakeSubmissions()
        self.spool, self.unwritten = self.submissions.budget, UnwrittenUploads()

    def receiver(
        self,
        length: int | None = None,
        key: str | None = None,
        content_type: str = MULTIPART,
        configuration: Configuration = CONFIGURATION,
    ) -> FormReceiver:
        self.count += 1
        threads: Any = InlineThreads()
        source: Any = FakeSource()
        files = UploadWriter(self.uploads / str(self.count), source, self.unwritten, threads)
        receiver = FormReceiver(files, key, configuration, self.submissions, "")
        receiver.check_headers(content_type, length)
        return receiver

    def finish(self, receiver: FormReceiver) -> ReceivedForm:
        """Return the form that has come. Raises what is wrong with it."""
        outcomes: list[Any] = []
        receiver.finish_parsing()
        Deferred.fromCoroutine(receiver.wait_until_stored()).addBoth(outcomes.append)
        (outcome,) = outcomes
        if isinstance(outcome, Failure):
            raise outcome.value
        upload: ReceivedForm = outcome
        return upload

    def receive(self, body: bytes, **settings: Any) -> ReceivedForm:
        """Receive a form in all ways, which must make no difference; return it."""
        uploads = []
        for chunks in chunkings(body):
            receiver = self.receiver(len(body), **settings)
            for chunk in chunks:
                receiver.feed(chunk)
            uploads.append(self.finish(receiver))
        for upload in uploads[1:]:
            self.assertEqual(upload.request, uploads[0].request)
            self.assertEqual(upload.form_digest, uploads[0].form_digest)
            self.assertEqual(files(upload), files(uploads[0]))
        return uploads[0]

    def refuse(
        self, error: type[RequestError], body: bytes, field: str | None = None, **settings: Any
    ) -> RequestError:
        """Hold that a form is refused so in all ways, naming the field."""
        caught: list[RequestError] = []
        for chunks in chunkings(body):
            receiver = self.receiver(None, **settings)
            with self.assertRaises(error) as raised:
                for chunk in chunks:
                    receiver.feed(chunk)
                self.finish(receiver)
            receiver.abandon()
            caught.append(raised.exception)
        self.assertEqual({type(one) for one in caught}, {error})
        for one in caught:
            self.assertEqual(one.extra_members.get("field"), field)
            self.assertIn(field or "", one.detail)
        return caught[0]


def files(upload: ReceivedForm) -> dict[str, bytes]:
    """Return the files of an upload."""
    return {
        str(path.relative_to(upload.directory)): path.read_bytes()
        for path in sorted(upload.directory.rglob("*"))
        if path.is_file()
    }


def without(name: str) -> list[Part]:
    """Return the parts of a good form save one."""
    return [part for part in parts() if part.name != name]
