"""Journal of one evaluation for the handover to the next process of the daemon."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
from twisted.logger import Logger

from tawebeval.evaluations.journal import EvaluationJournal, JournaledBatch
from tawebeval.evaluations.snapshot import EvaluationSnapshot
from tawebeval.linux.keeper_client import KeeperClient

JOURNAL_SUFFIX = ".journal"
"""End of the names of journals with the keeper."""

_SUPERSEDED = 8 * 1024  # bytes of old snapshots, at most

log = Logger()


@attrs.define(eq=False)
class HandoverJournal:
    """Journal that the keeper holds, too, so that the next process of the daemon gets it.

    A write that fails closes the journal: the evaluation then ends with the daemon. `name` is
    the evaluation's name in the log.
    """

    _client: KeeperClient
    _name: str
    _journal: EvaluationJournal | None = None
    _saved: int | None = None  # digest of the last snapshot

    @classmethod
    def create(cls, client: KeeperClient, name: str) -> HandoverJournal:
        """Return a new journal, which is closed already if the kernel has no memory for it."""
        kept = cls(client, name)
        try:
            kept._journal = EvaluationJournal.create()
            client.keep_bundle(name + JOURNAL_SUFFIX, [kept._journal.descriptor])
        except OSError as error:
            kept._fail(error)
        return kept

    @property
    def is_open(self) -> bool:
        """Whether another process of the daemon could go on with the evaluation."""
        return self._journal is not None

    def write_snapshot(self, snapshot: EvaluationSnapshot) -> None:
        """Write a snapshot if it differs from the last."""
        packed = snapshot.pack()
        digest = zlib.crc32(packed)
        if digest != self._saved:
            self._saved = digest
            self._call(EvaluationJournal.write_snapshot, packed)

    def write_events(self, batch: JournaledBatch) -> None:
        """Write events before a client can see them."""
        self._call(EvaluationJournal.write_events, batch)

    def discard_acknowledged_events(
        self,
        acknowledged_cursor: int,
        take_snapshot: Callable[[], EvaluationSnapshot],
        needed_cursor: int | None = None,
    ) -> None:
        """Note that the events before the cursor `acknowledged_cursor` are acknowledged.

        Those after the cursor `needed_cursor` stay all the same.
        """
        self._call(
            EvaluationJournal.discard_acknowledged_events,
            acknowledged_cursor,
            lambda: take_snapshot().pack(),
            needed_cursor,
        )

    def drop_old_snapshots(self, take_snapshot: Callable[[], EvaluationSnapshot]) -> None:
        """Give back the memory of old snapshots, if they take much.

        An ended evaluation, which gets no events any more, never gives it back otherwise.
        """
        old = self._journal
        if old is None or old.superseded_bytes <= _SUPERSEDED:
            return
        with suppress(OSError):  # then the old one stays
            journal = old.copy_live_events(take_snapshot().pack())
            try:
                self._client.keep_bundle(self._name + JOURNAL_SUFFIX, [journal.descriptor])
            except OSError:
                journal.close()
                raise
            self._journal = journal
            old.close()

    def hand_over(self) -> None:
        """Close the journal here: another process of the daemon goes on."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def discard(self) -> None:
        """Close the journal here and in the keeper: the evaluation is forgotten with the daemon."""
        if self._journal is not None:
            self._client.drop_bundle(self._name + JOURNAL_SUFFIX)
            self.hand_over()

    def _call(self, write: Callable[..., None], *arguments: Any) -> None:
        if self._journal is None:
            return
        try:
            write(self._journal, *arguments)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        words = "{evaluation}: the evaluation ends with the daemon: no journal: {error}"
        log.error(words, evaluation=self._name, error=error)
        self.discard()
