"""`core.budget`: bytes of events and of uploads on the disk."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.budget import EventDiskBudget, SharedUpload, UploadBudget
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import CallerQuotaExceeded, ServerBusy


class EventDiskTests(SynchronousTestCase):
    """`EventDiskBudget`: bytes of events."""

    def test_one_caller_may_take_half_of_it(self) -> None:
        budget = EventDiskBudget(101)
        budget.add_bytes("alice", 49)
        self.assertFalse(budget.is_caller_quota_exhausted("alice"))
        budget.add_bytes("alice", 1)
        self.assertTrue(budget.is_caller_quota_exhausted("alice"))
        self.assertFalse(budget.is_caller_quota_exhausted("bob"))
        budget.add_bytes("alice", -1)
        self.assertFalse(budget.is_caller_quota_exhausted("alice"))

    def test_all_callers_together_exhaust_it(self) -> None:
        budget = EventDiskBudget(100)
        for caller, size in (("alice", 60), ("bob", 20), (ANONYMOUS_CALLER, 19)):
            budget.add_bytes(caller, size)
        self.assertFalse(budget.is_exhausted)
        budget.add_bytes("bob", 1)
        self.assertTrue(budget.is_exhausted)
        budget.add_bytes(ANONYMOUS_CALLER, -1)
        self.assertFalse(budget.is_exhausted)

    def test_clients_without_tokens_share_the_whole_of_it(self) -> None:
        budget = EventDiskBudget(100)
        budget.add_bytes(ANONYMOUS_CALLER, 99)
        self.assertFalse(budget.is_caller_quota_exhausted(ANONYMOUS_CALLER))

    def test_callers_without_bytes_are_not_kept(self) -> None:
        budget = EventDiskBudget(100)
        budget.add_bytes("alice", 7)
        budget.add_bytes("alice", -7)
        self.assertFalse(budget.is_caller_quota_exhausted("alice"))
        self.assertEqual((budget.used_bytes, dict(budget.bytes_by_caller)), (0, {}))


class SpoolTests(SynchronousTestCase):
    """`UploadBudget`: bytes of uploads."""

    def test_limit(self) -> None:
        """Bytes up to the limit fit, not one more; the error says when to retry."""
        spool = UploadBudget(100)
        spool.add_stored_bytes(60)
        spool.add_stored_bytes(40)
        error = self.assertRaises(ServerBusy, spool.add_stored_bytes, 1)
        self.assertGreater(error.retry_after, 0)
        self.assertEqual(spool.stored_bytes, 100)
        spool.remove_stored_bytes(10)
        spool.add_stored_bytes(10)

    def test_check(self) -> None:
        """A check of an announced size reserves nothing."""
        spool = UploadBudget(100)
        for _ in range(3):
            spool.check_space(100)
        self.assertEqual(spool.stored_bytes, 0)
        spool.add_stored_bytes(1)
        self.assertRaises(ServerBusy, spool.check_space, 100)
        spool.check_space(99)

    def test_refused(self) -> None:
        """A size that does not fit is not counted."""
        spool = UploadBudget(100)
        self.assertRaises(ServerBusy, spool.add_stored_bytes, 101)
        spool.add_stored_bytes(100)

    def test_kept(self) -> None:
        """What is only kept makes room, as much as is needed, and stays where it is too little."""
        kept = [30, 30, 30]

        def discard(size: int, caller: str | None = None) -> bool:
            if sum(kept) < size:
                return False
            end = spool.stored_bytes - size
            while spool.stored_bytes > end:
                spool.remove_stored_bytes(kept.pop())
            return True

        spool = UploadBudget(100, discard)
        spool.add_stored_bytes(sum(kept))
        spool.add_stored_bytes(10)
        self.assertEqual(len(kept), 3)
        spool.add_stored_bytes(40)
        self.assertEqual((len(kept), spool.stored_bytes), (1, 80))
        self.assertRaises(ServerBusy, spool.add_stored_bytes, 60)
        self.assertEqual((len(kept), spool.stored_bytes), (1, 80))

    def test_shared(self) -> None:
        """Bytes that several hold are given back by the last."""
        spool = UploadBudget(100)
        spool.add_stored_bytes(60)
        share = SharedUpload(spool, 60)
        share.add_reference()
        share.remove_reference()
        self.assertEqual((share.reference_count, spool.stored_bytes), (1, 60))
        share.remove_reference()
        self.assertEqual(spool.stored_bytes, 0)

    def test_one_caller_leaves_room_for_another(self) -> None:
        """Beyond its part a caller makes room by its own kept submissions, or is refused."""
        discarded: list[tuple[int, str | None]] = []

        def discard(size: int, caller: str | None = None) -> bool:
            discarded.append((size, caller))
            return caller == "carol"

        spool = UploadBudget(100, discard, max_bytes_per_caller=40)
        spool.add_stored_bytes(40, "alice")
        self.assertRaises(CallerQuotaExceeded, spool.check_space, 1, "alice")
        self.assertRaises(CallerQuotaExceeded, spool.add_stored_bytes, 1, "alice")
        self.assertEqual(discarded, [(1, "alice")] * 2)
        spool.add_stored_bytes(40, "bob")
        spool.release_share("alice", 10)
        spool.add_stored_bytes(10, "alice")
        spool.add_stored_bytes(3, "carol")
        self.assertEqual((spool.stored_bytes, len(discarded)), (93, 2))
        spool.max_bytes = 1000
        spool.add_stored_bytes(40, "carol")
        self.assertEqual(discarded[2:], [(3, "carol")])
        share = SharedUpload(spool, 40, caller="bob")
        share.remove_reference()
        self.assertEqual(dict(spool.bytes_by_caller), {"alice": 40, "carol": 43})

    def test_clients_without_tokens_have_no_part(self) -> None:
        """Nobody knows whether they are one."""
        spool = UploadBudget(100, max_bytes_per_caller=40)
        spool.add_stored_bytes(100)
        self.assertRaises(ServerBusy, spool.add_stored_bytes, 1)

    def test_crowded(self) -> None:
        """Forms must wait for the disk from 32 MiB in memory on."""
        spool = UploadBudget(100)
        self.assertFalse(spool.is_memory_full)
        spool.unwritten_bytes = 32 * 2**20
        self.assertTrue(spool.is_memory_full)

    def test_too_much_back(self) -> None:
        """More bytes than were added cannot be removed."""
        spool = UploadBudget(100)
        spool.add_stored_bytes(10)
        self.assertRaises(AssertionError, spool.remove_stored_bytes, 11)
        self.assertRaises(AssertionError, spool.remove_stored_bytes, -1)
