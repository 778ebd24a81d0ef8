"""`web`: the routes, through treq and our own site, in memory."""

from __future__ import annotations

import signal

from twisted.internet.defer import Deferred

from tawebeval.config import Configuration, HttpSettings
from tawebeval.config import ServiceSettings as Process
from tawebeval.sandbox.workspace import derive_directory_name
from tests.cases import described
from tests.cases.web import END, WebTestCase
from tests.fakes.clients import MULTIPART, form, parts
from tests.fakes.files import FakeStore

OVER = "1 GiB is over the maximum, 512 MiB (limits.maximum.memory); the operator can raise it"


class NameTests(WebTestCase):
    """A daemon that has a name, because there are others."""

    configuration = Configuration(service=Process(name="judge1"))

    def test_name(self) -> None:
        """Its identifiers begin with its name, stand in paths as they are, and do all they do."""
        identifier = self.evaluate()
        self.assertRegex(identifier, r"\Ajudge1-[a-z2-7]{40}\Z")
        path = f"/evaluation/{identifier}"
        self.assertEqual(self.request("GET", path).json()["evaluation_id"], identifier)
        self.finish()
        page = self.request("GET", f"{path}/events").json()
        self.assertEqual(page["end"], END)
        self.assertIsNone(self.request("GET", f"{path}/events?after={END}").json()["end"])
        self.request("GET", path, 410)

    def test_others(self) -> None:
        """Those of another daemon, or of none, it does not know."""
        identifier = self.evaluate()
        own = identifier.removeprefix("judge1-")
        for other in (own, f"judge2-{own}", f"judge1--{own}"):
            self.request("GET", f"/evaluation/{other}", 404)
            self.request("DELETE", f"/evaluation/{other}", 404)


class WrongPathTests(WebTestCase):
    """Paths, methods and identifiers that do not exist."""

    configuration = Configuration(http=HttpSettings(base_path="/judge"))

    def test_path(self) -> None:
        """404 names the nearest path."""
        for path, hint in (
            ("/evalaute", "; did you mean /judge/evaluate?"),
            ("/judge/evaluations/", "; did you mean /judge/evaluations?"),
            ("/evaluation/x/event", "; did you mean /judge/evaluation/ID/events?"),
            ("/zzz", "; GET /openapi.json lists all paths"),
        ):
            detail = self.request("GET", path, 404).json()["detail"]
            self.assertTrue(detail.startswith(f"no resource at {path.removeprefix('/judge')!r}"))
            self.assertTrue(detail.endswith(hint), detail)

    def test_method(self) -> None:
        """405 names the methods."""
        detail = self.request("PUT", "/evaluations", 405).json()["detail"]
        self.assertEqual(detail, "method 'PUT' is not allowed here; allowed: GET, HEAD")

    def test_identifier(self) -> None:
        """404 tells a malformed identifier from an unknown one."""
        for identifier, words in (("xyz", "40 characters"), ("a" * 40, "did not issue")):
            answer = self.request("GET", f"/evaluation/{identifier}", 404)
            self.assertIn(words, answer.json()["detail"])


class EvaluateTests(WebTestCase):
    """`POST /evaluate`."""

    def test_answer(self) -> None:
        """200, the identifier and the place, at once, whatever becomes of the evaluation."""
        self.service.world.repositories.gate.shut = True
        answer = self.post()
        identifier = answer.json()["evaluation_id"]
        self.assertRegex(identifier, r"\A[a-z2-7]{40}\Z")
        self.assertEqual(answer.headers["location"], f"/evaluation/{identifier}")
        self.request("GET", answer.headers["location"])
        self.assertEqual(answer.headers["access-control-expose-headers"].split(", ")[0], "Location")

    def test_files(self) -> None:
        """The upload becomes the evaluation's; its files are kept until it is forgotten."""
        identifier = self.evaluate()
        self.assertEqual(
            self.service.leftovers(), [f"evaluations/{derive_directory_name(identifier)}"]
        )
        path = (
            self.root
            / "evaluations"
            / derive_directory_name(identifier)
            / "submission/source/solution.py"
        )
        self.assertEqual(path.read_bytes(), b"print()\n")
        self.finish()
        self.assertEqual(path.read_bytes(), b"print()\n")
        self.page(identifier, "?after=end")
        self.assertEqual(self.service.leftovers(), [])

    def test_refused_form(self) -> None:
        """A form that is refused at its end is a problem that names the field; nothing is left."""
        answer = self.post(400, form(parts(commit_oid=None)))
        self.assertEqual(answer.json()["field"], "commit_oid")
        self.assertEqual(self.service.leftovers(), [])
        self.assertEqual(self.service.world.spawn.children, [])

    def test_seed(self) -> None:
        """The seed that is drawn is told."""
        identifier = self.evaluate()
        seed = self.request("GET", f"/evaluation/{identifier}").json()["seed"]
        self.assertEqual(self.child.environment["TURINGARENA_SEED"], str(seed))

    def test_limits(self) -> None:
        """A request chooses limits, which the status shows and the run has."""
        body = form(parts(**{"limits[memory]": b"64M", "limits[wall_clock]": b"2.5"}))
        identifier = self.post(body=body).json()["evaluation_id"]
        shown = self.request("GET", f"/evaluation/{identifier}").json()["limits"]
        self.assertEqual((shown["memory"], shown["wall_clock"], shown["cpu"]), (2**26, 2.5, 300))
        limits = self.service.world.sandbox.last.limits
        self.assertEqual((limits.memory, limits.wall_clock, limits.cpu), (2**26, 2.5, 300))
        self.service.reactor.advance(2.6)
        self.assertEqual(self.child.signals, [signal.SIGTERM])

    def test_refused_limits(self) -> None:
        """A limit that is malformed, over the maximum or unknown is 400, and names the field."""
        for name, value, words in (
            ("memory", b"1G", OVER),
            ("wall_clock", b"0", "'0' is not above 0"),
            ("cpu", b"2.5", "'2.5' is not a whole number of seconds, such as 10"),
            ("memroy", b"1M", "no such limit; write limits[NAME], where NAME is "),
        ):
            field = f"limits[{name}]"
            problem = self.post(400, form(parts(**{field: value}))).json()
            self.assertEqual(problem["field"], field)
            self.assertTrue(problem["detail"].startswith(f"{field}: {words}"), problem["detail"])
        self.assertEqual(problem.get("limit"), None)

    def test_idempotency_key(self) -> None:
        """The same key and form: the first answer. Another form: 422."""
        first = self.post(**{"Idempotency-Key": "k"})
        second = self.post(**{"Idempotency-Key": "k"})
        self.assertEqual(first.json(), second.json())
        self.assertEqual(first.headers["location"], second.headers["location"])
        self.assertEqual(len(self.service.leftovers()), 1)
        for changes in ({"seed": b"1"}, {"limits[cpu]": b"1"}):
            self.post(422, form(parts(**changes)), **{"Idempotency-Key": "k"})
        self.assertEqual(len(self.service.leftovers()), 1)
        self.assertEqual(len(self.service.world.spawn.children), 1)

    def test_repeated_form_is_answered_once_the_evaluation_is_stored(self) -> None:
        stored: Deferred[None] = Deferred()
        self.patch(FakeStore, "add", lambda store, row: stored)
        headers = {"Content-Type": MULTIPART, "Idempotency-Key": "k"}
        asked = [
            self.ask("POST", "/evaluate", data=form(parts()), headers=headers) for _ in range(2)
        ]
        self.agent.flush()
        for each in asked:
            self.assertNoResult(each)
        stored.callback(None)
        first, second = (self.answer(each).json() for each in asked)
        self.assertEqual(first, second)

    def test_broken_key(self) -> None:
        """A key has 1 to 255 characters."""
        self.post(**{"Idempotency-Key": "k" * 255})
        for key in ("", "k" * 256):
            self.post(400, **{"Idempotency-Key": key})

    def test_full(self) -> None:
        """503 with `Retry-After` when nobody more may wait; a known key is answered even then."""
        first = self.post(**{"Idempotency-Key": "k"})
        for _ in range(3):
            self.post()
        answer = self.post(503)
        self.assertGreater(int(answer.headers["retry-after"]), 0)
        self.post(503, **{"Idempotency-Key": "l"})
        self.assertEqual(self.post(**{"Idempotency-Key": "k"}).json(), first.json())
        self.assertEqual(len(self.service.leftovers()), 4)

    def test_query(self) -> None:
        """A query in the target makes no difference."""
        body = form(parts())
        self.request("POST", "/evaluate?x=1", data=body, headers={"Content-Type": MULTIPART})


class EventsTests(WebTestCase):
    """`GET /evaluation/{id}/events`."""

    def test_pages(self) -> None:
        """A page has its cursors and events; the end is told by null."""
        identifier = self.evaluate()
        self.assertEqual(self.page(identifier), {"begin": None, "end": "0", "data": []})
        self.child.print('ü"\n'.encode())
        text = {"type": "text", "payload": 'ü"'}
        self.assertEqual(self.page(identifier), {"begin": None, "end": "1", "data": [text]})
        self.assertEqual(
            self.page(identifier, "?after="), {"begin": None, "end": "1", "data": [text]}
        )
        self.finish()
        page = self.page(identifier, "?after=1")
        newline = {"type": "text", "payload": "\n"}
        self.assertEqual(page, {"begin": "1", "end": END, "data": [newline]})
        last = {"begin": END, "end": None, "data": []}
        for _ in range(2):
            self.assertEqual(self.page(identifier, f"?after={END}"), last)

    def test_refusals(self) -> None:
        """404, 410 and 400 are as the contract has them."""
        identifier = self.evaluate()
        self.child.print(b"a\nb\n")
        self.page(identifier, "?after=2")
        path = f"/evaluation/{identifier}/events"
        self.assertEqual(self.request("GET", path, 410).json()["oldest"], "2")
        self.request("GET", path + "?after=0", 410)
        for cursor in ("9", "x", "-1", "%00", "%ff", END):
            self.request("GET", f"{path}?after={cursor}", 400)
        self.request("GET", path + "?after=2&after=3", 400)
        self.finish()
        self.page(identifier, f"?after={END}")
        self.request("GET", path, 410)
        self.request("GET", "/evaluation/unknown/events", 404)

    def test_head(self) -> None:
        """HEAD answers as GET does, without the body."""
        identifier = self.evaluate()
        for path, status in (
            (f"/evaluation/{identifier}", 200),
            (f"/evaluation/{identifier}/events", 200),
            ("/health", 200),
            ("/evaluation/unknown", 404),
        ):
            connection = self.connect()
            connection.request(f"GET {path}")
            got = connection.answer()
            connection.request(f"HEAD {path}")
            answer = connection.answer("HEAD")
            self.assertEqual((answer.status, got.status), (status, status))
            self.assertEqual(answer.body, b"")
            self.assertEqual(int(answer.headers["Content-Length"]), len(got.body))
            self.assertEqual(answer.headers.keys(), got.headers.keys())
            described.check("HEAD", path, answer)
