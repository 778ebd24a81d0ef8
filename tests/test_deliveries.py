"""`webhooks.deliveries`: what is too much, by properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.webhooks.callback import Callback
from tawebeval.webhooks.deliveries import Deliveries, Delivery

some_deliveries = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9000)), max_size=12)


def deliveries_of(drawn: list[tuple[str, int]]) -> list[Delivery]:
    """Return one for each pair of a caller and the length of a document."""
    return [
        Delivery(Callback("http://receiver", caller), "some", bytes(length), f"evt_{number}")
        for number, (caller, length) in enumerate(drawn)
    ]


def size_of(deliveries: list[Delivery], caller: str) -> int:
    """Return the bytes of one caller's."""
    return sum(one.size for one in deliveries if one.callback.caller == caller)


class DeliveriesTests(SynchronousTestCase):
    """Some are added, and some are removed."""

    @given(some_deliveries, st.data())
    def test_sum(self, drawn: list[tuple[str, int]], data: st.DataObject) -> None:
        """They are as many as are there, of that size together, the oldest first."""
        all_of_them = Deliveries()
        there = deliveries_of(drawn)
        for delivery in there:
            all_of_them.add(delivery)
        while True:
            self.assertEqual(list(all_of_them), there)
            self.assertEqual(len(all_of_them), len(there))
            self.assertEqual(all_of_them.size, sum(one.size for one in there))
            if not there:
                break
            gone = there.pop(data.draw(st.integers(0, len(there) - 1)))
            all_of_them.remove(gone)

    @given(some_deliveries, st.data(), st.integers(0, 60_000))
    def test_excess(self, drawn: list[tuple[str, int]], data: st.DataObject, bound: int) -> None:
        """One after the other goes the oldest of who has most then, until the rest fits."""
        all_of_them = Deliveries()
        there = deliveries_of(drawn)
        for delivery in there:
            all_of_them.add(delivery)
        if there:
            gone = there.pop(data.draw(st.integers(0, len(there) - 1)))
            all_of_them.remove(gone)
        for delivery in all_of_them.take_excess(bound):
            self.assertGreater(sum(one.size for one in there), bound)
            caller = delivery.callback.caller
            most = max(size_of(there, one.callback.caller) for one in there)
            self.assertEqual(size_of(there, caller), most)
            oldest = next(one for one in there if one.callback.caller == caller)
            self.assertIs(delivery, oldest)
            there.remove(delivery)
        self.assertLessEqual(sum(one.size for one in there), bound)

    @given(some_deliveries, st.integers(0, 60_000))
    def test_taken_out(self, drawn: list[tuple[str, int]], bound: int) -> None:
        """What was taken out does not count any more, and is there until it is removed."""
        all_of_them = Deliveries()
        there = deliveries_of(drawn)
        for delivery in there:
            all_of_them.add(delivery)
        excess = all_of_them.take_excess(bound)
        left = sum(one.size for one in there if one not in excess)
        self.assertEqual(all_of_them.size, left)
        self.assertEqual(all_of_them.take_excess(bound), [])
        self.assertEqual(list(all_of_them), there)
        for delivery in excess:
            all_of_them.remove(delivery)
            self.assertEqual(all_of_them.size, left)
        self.assertEqual(list(all_of_them), [one for one in there if one not in excess])

    def test_first_reason(self) -> None:
        """Why one is given up does not change any more."""
        (delivery,) = deliveries_of([("a", 0)])
        delivery.mark("too many")
        delivery.mark("stopped")
        self.assertEqual(delivery.given_up, "too many")
