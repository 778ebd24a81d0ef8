"""The routes over evaluations that are gone from memory and in the archive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred

from tawebeval.archive import files
from tawebeval.archive.archive import EvaluationArchive
from tawebeval.config import ArchiveSettings, Configuration, EventBufferSettings
from tawebeval.evaluations import reading
from tawebeval.evaluations.reading import _make_entry as make_entry
from tests.cases.settings import with_constants
from tests.cases.web import END, CallerTestCase, WebTestCase, payload
from tests.fakes.clients import Service, form, parts
from tests.fakes.streams import FOLLOWERS

COUNT = 60
PRINTED = b"".join(b"line %d\n" % number for number in range(COUNT // 2))
PAYLOADS = [payload(number) for number in range(COUNT)]


class ArchiveTestCase(WebTestCase):
    """A service with an archive, and an evaluation that was read to its end."""

    configuration = Configuration(
        archive=ArchiveSettings(enabled=True),
        buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
    )

    def settle(self) -> None:
        self.service.reactor.pump([0.1, 0.1])

    def archive(self, *texts: bytes) -> str:
        identifier = self.evaluate()
        for text in texts or (PRINTED,):
            self.child.print(text)
        self.finish()
        self.request("GET", f"/evaluation/{identifier}/events?after=end")
        self.settle()
        return identifier

    def restart(self) -> None:
        root = self.service.root / "new"
        root.mkdir()
        (self.service.root / "archive").rename(root / "archive")
        self.service = Service(root, self.configuration, store=self.service.store)
        self.client, self.agent = self.service.treq()

    def read_all(self, identifier: str, query: str = "") -> list[dict[str, Any]]:
        """Return all events by pages, whose cursors lead from one to the next."""
        events, after = [], None
        while after != END:
            following = f"?after={after}" if after else "?"
            page = self.page(identifier, following + query)
            self.assertEqual(page["begin"], after)
            events += page["data"]
            after = page["end"]
        self.assertEqual(
            self.page(identifier, "?after=end"), {"begin": END, "end": None, "data": []}
        )
        return events


class PageTests(ArchiveTestCase):
    def test_pages_of_any_size_have_all_events_from_any_cursor(self) -> None:
        identifier = self.archive()
        for query in ("", "&limit=1", "&limit=200", "&wait=5", "&times=1"):
            events = self.read_all(identifier, query)
            self.assertEqual([event["payload"] for event in events], PAYLOADS)
            self.assertEqual("time" in events[0], "times" in query)
        page = self.page(identifier, "?after=7&limit=1")
        self.assertEqual((page["begin"], page["end"], page["data"][0]["payload"]), ("7", "8", "\n"))

    def test_evaluation_still_in_memory_is_not_read_from_the_archive(self) -> None:
        identifier = self.evaluate(PRINTED)
        self.finish()
        self.settle()
        self.page(identifier, "?after=10")
        self.request("GET", f"/evaluation/{identifier}/events", 410)

    def test_cursor_after_the_newest_event_or_malformed_is_400(self) -> None:
        identifier = self.archive()
        for after in (COUNT + 1, "x", "-1"):
            answer = self.request("GET", f"/evaluation/{identifier}/events?after={after}", 400)
            self.assertIn("after: ", answer.json()["detail"])
        page = self.page(identifier, f"?after={COUNT}")
        self.assertEqual(page, {"begin": str(COUNT), "end": END, "data": []})

    def test_expired_evaluation_that_nobody_read_is_archived(self) -> None:
        identifier = self.evaluate(PRINTED)
        self.finish()
        self.service.reactor.advance(10_000)
        self.service.registry.expire_evaluations()
        self.assertEqual([event["payload"] for event in self.read_all(identifier)], PAYLOADS)

    def test_error_event_is_archived(self) -> None:
        identifier = self.evaluate(b"a")
        self.finish(3)
        self.page(identifier, "?after=end")
        self.settle()
        events = self.read_all(identifier)
        self.assertEqual([event["type"] for event in events], ["text", "data"])
        self.assertEqual(events[1]["payload"]["reason"], "exit")


class DamagedFileTests(ArchiveTestCase):
    def test_evaluation_with_removed_archive_files_has_only_its_status(self) -> None:
        identifier = self.archive()
        for path in self.root.rglob("*.zst"):
            path.unlink()
        for path in ("/events", "/events?after=3", "/events?wait=5", "/submission"):
            self.request("GET", f"/evaluation/{identifier}{path}", 410)
        answer = self.request("POST", f"/evaluation/{identifier}/rerun", 410)
        self.assertIn("the files of the evaluation are discarded", answer.json()["detail"])
        status = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual((status["state"], status["archived"]), ("finished", True))
        events = {"Accept": "text/event-stream"}
        for method in ("GET", "HEAD"):
            self.request(method, f"/evaluation/{identifier}/events", 410, headers=events)

    def damage(self, *, begins: int = 0, ends: int = 0) -> None:
        path = next(self.root.rglob("*.jsonl.zst"))
        content = bytearray(path.read_bytes())
        content[begins : begins + 8] = bytes(8 if begins else 0)
        path.write_bytes(content[: len(content) - ends])

    def check_lost(self, events: Sequence[dict[str, Any]], count: int) -> None:
        """Hold that the first events come, and then once and at last that the others are lost."""
        self.assertEqual([event["payload"] for event in events[:-1]], PAYLOADS[:count])
        self.assertEqual(events[-1]["payload"]["type"], "evaluation_error")
        self.assertEqual(events[-1]["payload"]["reason"], "lost")

    def test_truncated_archive_file_is_reported_as_lost_or_damaged(self) -> None:
        identifier = self.archive()
        self.damage(ends=30)
        self.check_lost(self.read_all(identifier), 0)
        self.assertEqual(self.request("GET", f"/evaluation/{identifier}").status, 200)
        self.request("GET", f"/evaluation/{identifier}/submission")
        submission = next(self.root.rglob("*.tar.zst"))
        submission.write_bytes(submission.read_bytes()[:-30])
        for method, path in (("POST", "/rerun"), ("GET", "/submission")):
            answer = self.request(method, f"/evaluation/{identifier}{path}", 410).json()
            self.assertIn("is damaged", answer["detail"])

    def test_unreadable_file_is_503_with_the_reason(self) -> None:
        identifier = self.archive()
        path = next(self.root.rglob("*.jsonl.zst"))
        path.rename(path.with_suffix(".away"))
        path.symlink_to(path.with_suffix(".away"))
        for accept in ("application/json", "text/event-stream"):
            answer = self.request(
                "GET", f"/evaluation/{identifier}/events", 503, headers={"Accept": accept}
            ).json()
            self.assertIn("the archive cannot be read: Too many levels", answer["detail"])

    def test_damaged_archive_file_ends_pages_and_streams_with_one_error_event(self) -> None:
        lines = [b"%d%s\n" % (number, b"x" * 200) for number in range(2000)]
        identifier = self.archive(*lines)
        with files._open(next(self.root.rglob("*.jsonl.zst"))) as file:
            offset, count = file.locate(1)
        self.damage(begins=offset + 40)
        events = self.read_all(identifier, "&limit=100000")
        self.assertEqual((len(events), events[-1]["payload"]["reason"]), (count + 1, "lost"))
        self.assertEqual(self.page(identifier, f"?after={count + 2}")["data"], events[-1:])
        for kind in FOLLOWERS:
            follower = kind(self.service, identifier, "?after=5")
            for _ in range(800):
                follower.step()
            self.assertTrue(follower.complete)
            self.assertEqual(follower.events, events[5:])


class StatusTests(ArchiveTestCase):
    def test_archived_status_equals_the_status_at_the_end(self) -> None:
        identifier = self.evaluate(PRINTED)
        self.finish()
        before = self.request("GET", f"/evaluation/{identifier}").json()
        self.page(identifier, "?after=end")
        self.settle()
        after = self.request("GET", f"/evaluation/{identifier}").json()
        self.assertEqual(after.pop("archived"), True)
        self.assertEqual(after.pop("events"), {"buffered": COUNT, "discarded": 0})
        self.assertEqual(after.pop("buffered_bytes"), 0)
        for name in ("events", "buffered_bytes"):
            del before[name]
        self.assertEqual(after, before)

    def listed(self, query: str = "") -> list[str]:
        found, after = [], ""
        while True:
            listing = self.request("GET", f"/evaluations?{query}{after}").json()
            found += [one["evaluation_id"] for one in listing["data"]]
            if listing["end"] is None:
                return found
            after = f"&after={listing['end']}"

    def test_archived_evaluations_are_listed_once_in_order_of_acceptance(self) -> None:
        identifiers = []
        for number in range(6):
            if number % 2:
                identifiers.append(self.archive())
            else:
                identifiers.append(self.evaluate())
                self.finish()
                self.settle()
        self.assertEqual(self.listed(), identifiers)
        self.assertEqual(self.listed("state=finished"), identifiers)
        self.assertEqual(self.listed("state=failed"), [])

    def test_restarted_daemon_lists_and_reads_archived_evaluations(self) -> None:
        identifiers = [self.archive() for _ in range(3)]
        self.restart()
        self.service.registry.records.last_sequence_number = 10**12
        self.assertEqual(self.listed(), identifiers)
        self.assertEqual(self.page(identifiers[1])["data"][0]["payload"], "line 0")

    def test_list_page_makes_only_one_entry_beyond_those_it_shows(self) -> None:
        stuck: list[Deferred[bool]] = [Deferred() for _ in range(4)]
        self.patch(EvaluationArchive, "store_evaluation", mock.Mock(side_effect=stuck))
        identifiers = []
        for _ in range(4):
            identifiers.append(self.evaluate())
            self.finish()
            self.request("GET", f"/evaluation/{identifiers[-1]}/events?after=end")
        waiting = self.service.registry.archive_reader.evaluations_to_archive
        self.assertEqual(list(waiting), identifiers)
        made: list[object] = []
        with (
            mock.patch.object(reading, "MAX_PAGE_EVALUATIONS", 1),
            mock.patch.object(
                reading, "_make_entry", lambda *given: made.append(given) or make_entry(*given)
            ),
        ):
            self.assertEqual(self.listed(), identifiers)
        self.assertEqual(len(made), 2 + 2 + 2 + 1)  # that it shows, and one that tells of a rest

    def test_list_pages_go_on_through_archive_and_memory(self) -> None:
        identifiers = [self.archive(b"x") for _ in range(110)]
        identifiers += [self.evaluate() for _ in range(2)]
        self.assertEqual(self.listed(), identifiers)

    def test_filters_hold_for_archived_evaluations(self) -> None:
        identifiers = []
        for number in range(3):
            fields = {f"metadata[{name}]": b"%d" % number for name in ("a", "b")}
            answer = self.post(body=form(parts(**fields)))
            identifiers.append(answer.json()["evaluation_id"])
            self.finish()
            self.page(identifiers[-1], "?after=end")
            self.settle()
            self.service.reactor.advance(100)
        self.assertEqual(self.listed("metadata[a]=1&metadata[b]=1"), identifiers[1:2])
        self.assertEqual(self.listed("metadata[a]=1&metadata[b]=2"), [])
        self.assertEqual(self.listed("problem=none"), [])
        created = self.request("GET", f"/evaluation/{identifiers[1]}").json()["created"]
        created = created.replace("+00:00", "Z")
        self.assertEqual(self.listed(f"since={created}"), identifiers[1:])
        self.assertEqual(self.listed(f"until={created}"), identifiers[:1])


class StreamTests(ArchiveTestCase):
    def test_stream_has_all_events_or_those_after_a_cursor(self) -> None:
        for kind in FOLLOWERS:
            identifier = self.archive()
            for query, expected in (
                ("", PAYLOADS),
                ("?after=7", PAYLOADS[7:]),
                ("?after=7&skip=3", PAYLOADS[10:]),
                (f"?after={COUNT}", []),
            ):
                follower = kind(self.service, identifier, query)
                for _ in range(20):
                    follower.step()
                self.assertEqual(follower.payloads, expected, (kind, query))
                self.assertTrue(follower.complete)


class RerunTests(ArchiveTestCase):
    configuration = Configuration(archive=ArchiveSettings(enabled=True))

    def test_rerun_has_the_same_files_and_fields_and_leaves_no_files(self) -> None:
        identifier = self.archive()
        before = self.request("GET", f"/evaluation/{identifier}").json()
        seed = form([part for part in parts(seed=b"9") if part.name == "seed"])
        rerun = f"/evaluation/{identifier}/rerun"
        again = self.post(200, seed, rerun).json()["evaluation_id"]
        status = self.request("GET", f"/evaluation/{again}").json()
        self.assertEqual(status["seed"], 9)
        for name in ("repository", "commit_oid", "evaluator_cmd", "limits", "metadata"):
            self.assertEqual(status[name], before[name])
        files = [path.name for path in (self.root / "evaluations").rglob("submission/*/*")]
        self.assertEqual(len(files), 1)
        self.assertEqual(len(list((self.root / "evaluations").iterdir())), 1)
        self.finish()
        self.page(again, "?after=end")
        self.settle()
        self.assertEqual(self.service.registry.submissions.budget.used, 0)
        self.assertEqual(list((self.root / "evaluations").iterdir()), [])

    def test_reading_archived_files_displaces_no_kept_files(self) -> None:
        identifier = self.archive()
        self.evaluate()
        self.finish()
        budget = self.service.registry.submissions.budget
        kept, budget.total = budget.used, budget.used
        self.assertTrue(kept)
        self.request("GET", f"/evaluation/{identifier}/submission", 503)
        self.assertEqual(budget.used, kept)
        budget.total = 3 * kept
        shown = self.request("GET", f"/evaluation/{identifier}/submission").json()["files"]
        self.assertEqual([file["text"] for file in shown], ["print()\n"])
        self.assertEqual(budget.used, kept)
        self.assertEqual(len(list(self.root.rglob("submission/*/*"))), 1)


class CallerTests(CallerTestCase):
    configuration = Configuration(archive=ArchiveSettings(enabled=True))

    def test_callers_read_list_and_rerun_only_their_own(self) -> None:
        identifier = self.begin("alice").json()["evaluation_id"]
        self.child.print(PRINTED)
        self.finish()
        self.call("GET", f"/evaluation/{identifier}/events?after=end", 200, "alice")
        self.service.reactor.pump([0.1, 0.1])
        page = self.call("GET", f"/evaluation/{identifier}/events", 200, "alice").json()
        self.assertEqual([event["payload"] for event in page["data"]], PAYLOADS)
        for path in ("", "/events"):
            self.call("GET", f"/evaluation/{identifier}{path}", 404, "bob")
            self.call("GET", f"/evaluation/{identifier}{path}", 401, None)
        self.call("POST", f"/evaluation/{identifier}/rerun", 404, "bob")
        self.assertEqual(self.call("GET", "/evaluations", 200, "bob").json()["data"], [])
        listing = self.call("GET", "/evaluations", 200, "alice").json()["data"]
        self.assertEqual([one["evaluation_id"] for one in listing], [identifier])
        self.call("POST", f"/evaluation/{identifier}/rerun", 200, "alice")
