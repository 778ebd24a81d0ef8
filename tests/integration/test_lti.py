"""The tool of examples/integrations/lti, between a daemon and a platform that the tests play."""

from __future__ import annotations

import base64
import functools
import json
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from twisted.trial.unittest import SkipTest

from tests.integration.browser_case import WITHOUT, start_browser
from tests.integration.client import Client
from tests.integration.harness import CONFIGURATION, RepositoryTestCase, new_token, until
from tests.integration.ports import free_port, listens
from tests.integration.unprivileged import give
from tests.run import ROOT

FOLDER = ROOT / "examples" / "integrations" / "lti"
LTI, GRADES = (f"https://purl.imsglobal.org/spec/{name}" for name in ("lti/claim", "lti-ags"))
DEEP_LINKING = "https://purl.imsglobal.org/spec/lti-dl/claim"
ROLE = "http://purl.imsglobal.org/vocab/lis/v2/membership#{}"
JUDGE = r"""read points <"$SUBMISSION_FILE_SOURCE"; [ "$points" != wait ] || sleep 1000
[ "$points" != broken ] || exit 3
printf '\n%s\n{"type": "score", "score": %s, "maximum": 10}\n%s\n' \
    "$EVALUATION_DATA_BEGIN" "$points" "$EVALUATION_DATA_END"
"""


@functools.cache
def make_key(owner: str) -> rsa.RSAPrivateKey:
    """Return the key of an owner, made once for all tests."""
    return rsa.generate_private_key(65537, 2048)


class Platform(ThreadingHTTPServer):
    """Keys, logins that sign launches, tokens, scores and the return of deep linking."""

    def __init__(self, tool: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.tool = f"http://127.0.0.1:{self.server_port}", tool
        self.key = make_key("platform")
        self.claims: dict[str, Any] = {}  # that replace those of a launch
        self.signature: tuple[Any, str] = self.key, "RS256"
        self.has_failed, self.fails = False, False
        self.scores: list[dict[str, Any]] = []
        self.returned: list[dict[str, Any]] = []
        self.hints = {"login_hint": "7", "client_id": "client", "lti_message_hint": "3"}
        self.start = f"{tool}/login?{urlencode({'iss': self.url, **self.hints})}"

    def sign_launch(self, nonce: str) -> str:
        """Return a launch, by a key that may be a stranger's."""
        place = {"scope": [f"{GRADES}/scope/score"], "lineitem": f"{self.url}/lineitem?type=1"}
        claims = {
            "iss": self.url,
            "aud": "client",
            "sub": "ann",
            "name": "Ann <b>\n",
            "nonce": nonce,
            "iat": time.time(),
            "exp": time.time() + 60,
            f"{LTI}/version": "1.3.0",
            f"{LTI}/message_type": "LtiResourceLinkRequest",
            f"{LTI}/deployment_id": "1",
            f"{LTI}/roles": [ROLE.format("Learner")],
            f"{LTI}/context": {"id": "5", "title": "Algorithms"},
            f"{LTI}/custom": {"problem": "judged"},
            f"{GRADES}/claim/endpoint": place,
            **self.claims,
        }
        return jwt.encode(claims, *self.signature, headers={"kid": "p"})

    def verify(self, token: str, audience: str) -> dict[str, Any]:
        """Return the claims of a message of the tool."""
        key = jwt.PyJWKClient(f"{self.tool}/keys").get_signing_key_from_jwt(token)
        return jwt.decode(token, key, ["RS256"], issuer="client", audience=audience)


class Handler(BaseHTTPRequestHandler):
    server: Platform

    def do_GET(self) -> None:
        platform, url = self.server, urlsplit(self.path)
        if url.path == "/keys":
            public = jwt.algorithms.RSAAlgorithm.to_jwk(platform.key.public_key(), as_dict=True)
            return self.answer(200, {"keys": [{**public, "kid": "p"}]})
        query = dict(parse_qsl(url.query))
        expected = {**platform.hints, "redirect_uri": f"{platform.tool}/launch", "prompt": "none"}
        assert expected.items() <= query.items(), query
        fields = {"id_token": platform.sign_launch(query["nonce"]), "state": query["state"]}
        inputs = "".join(f'<input name="{name}" value="{fields[name]}">' for name in fields)
        form = f'<form method="post" action="{platform.tool}/launch">{inputs}</form>'
        return self.answer(200, f'<body onload="document.forms[0].submit()">{form}')

    def do_POST(self) -> None:
        body, platform = self.rfile.read(int(self.headers["Content-Length"])), self.server
        form = dict(parse_qsl(body.decode()))
        if self.path == "/return":
            platform.returned.append(platform.verify(form["JWT"], platform.url))
            return self.answer(200, "returned")
        if self.path == "/token":
            claims = platform.verify(form["client_assertion"], f"{platform.url}/token")
            assert (claims["sub"], form["scope"]) == ("client", f"{GRADES}/scope/score")
            return self.answer(200, {"access_token": "access", "expires_in": 3600})
        authorization = self.headers["Authorization"]
        assert (self.path, authorization) == ("/lineitem/scores?type=1", "Bearer access")
        platform.has_failed |= platform.fails
        if not platform.fails:
            platform.scores.append(json.loads(body))
        return self.answer(503 if platform.fails else 200, {})

    def answer(self, status: int, content: Any) -> None:
        is_page = isinstance(content, str)
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if is_page else "application/json")
        self.end_headers()
        page = f'<!doctype html><link rel="icon" href="data:,">{content}'
        self.wfile.write((page if is_page else json.dumps(content)).encode())

    def log_message(self, *arguments: object) -> None:
        pass


class LtiTests(RepositoryTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        token, line = new_token("lti")
        tokens = self.folder / "tokens"
        tokens.write_text(line)
        give(tokens)
        problem = (
            f"repository = '{self.repository.url}'\ncommit = '{self.commit}'\n"
            f"command = '''{JUDGE}'''\nfields = ['source']\nextensions = ['py']\n"
        )
        await self.start_own(
            f"{CONFIGURATION}\n[callers]\ntokens = '{tokens}'\n"
            f"[problems.judged]\ntitle = 'Points </script>'\n{problem}[problems.other]\n{problem}"
            f"[problems.closed]\ncloses = 2020-01-02T03:04:05Z\n{problem}"
        )
        self.client = Client(self.daemon.url, token)
        self.addCleanup(self.client.close)
        self.tool = f"http://127.0.0.1:{free_port()}"
        self.platform = Platform(self.tool)
        threading.Thread(target=self.platform.serve_forever, daemon=True).start()
        self.addCleanup(self.platform.server_close)
        self.addCleanup(self.platform.shutdown)
        kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = make_key("tool").private_bytes(serialization.Encoding.PEM, kind, plain)
        (self.folder / "key.pem").write_bytes(pem)
        urls = "".join(f"{n} = '{self.platform.url}/{n}'\n" for n in ("login", "token", "keys"))
        (self.folder / "lti.toml").write_text(
            f"url = '{self.tool}'\nkey = 'key.pem'\ndatabase = 'lti.sqlite'\n[platform]\n"
            f"issuer = '{self.platform.url}'\nclient_id = 'client'\ndeployments = ['1']\n{urls}"
        )
        self.environment = {"TAWEBEVAL_SERVER": self.daemon.url, "TAWEBEVAL_TOKEN": token}
        await self.start_tool()

    async def start_tool(self) -> None:
        port = self.tool.rpartition(":")[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "--port", port, "--app-dir", FOLDER, "tool:app"],
            env={**self.environment, "LTI_CONFIG": "lti.toml"},
            cwd=self.folder,
            stderr=(self.folder / "log").open("ab"),
            stdout=subprocess.DEVNULL,
        )
        self.addCleanup(self.process.wait)
        self.addCleanup(self.process.kill)
        await until(lambda: listens(int(port)), "the tool listens")

    def log_in(self, claims: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the cookie and the form with which the browser comes back from the platform."""
        self.platform.claims = claims
        begun = httpx.get(self.platform.start)
        cookie, _, attributes = begun.headers["Set-Cookie"].partition("; ")
        self.assertIn("Secure; HttpOnly", attributes)
        shown = httpx.get(begun.headers["Location"]).text
        return {"Cookie": cookie}, dict(re.findall(r'name="(\w+)" value="(.*?)"', shown))

    def launch(self, claims: dict[str, Any]) -> dict[str, Any]:
        """Return the content of the page after a launch."""
        cookie, form = self.log_in(claims)
        answer = httpx.post(f"{self.tool}/launch", data=form, headers=cookie)
        self.assertEqual(answer.status_code, 200, answer.text)
        (data,) = re.findall(r'application/json">(.*?)</script>', answer.text)
        return json.loads(data)

    def submit(self, session: str, text: str, field: str = "source") -> httpx.Response:
        headers = {"Authorization": f"Bearer {session}"}
        url = f"{self.tool}/submit?problem=other&student=bob"
        return httpx.post(url, content=json.dumps({field: ["a.py", text]}), headers=headers)

    def ask_result(self, session: str, evaluation: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {session}"}
        return httpx.get(f"{self.tool}/result/{evaluation}", headers=headers)

    async def submit_and_wait(self, session: str, text: str) -> tuple[str, float | None]:
        """Return state and score once the platform has the score, or will get none."""
        return await self.wait(session, self.submit(session, text).json()["evaluation"])

    async def wait(self, session: str, evaluation: str) -> tuple[str, float | None]:
        def find() -> tuple[str, float | None] | None:
            state, score = self.ask_result(session, evaluation).json().values()
            return None if state in ("running", "sending") else (state, score)

        return await until(find, "the score is passed")

    def make_deep_linking(self, **settings: str) -> dict[str, Any]:
        settings["deep_link_return_url"] = f"{self.platform.url}/return"
        kind = {f"{LTI}/message_type": "LtiDeepLinkingRequest"}
        return {**kind, f"{DEEP_LINKING}/deep_linking_settings": settings}

    async def test_evaluation_has_labels_and_a_link_for_the_browser(self) -> None:
        sent = self.submit(self.launch({})["session"], "7.5").json()
        headers = {"Authorization": f"Bearer {sent['link']}", "Accept": "application/jsonl"}
        url = f"{self.daemon.url}/evaluation/{sent['evaluation']}"
        (event,) = httpx.get(f"{url}/events", headers=headers).text.splitlines()
        self.assertEqual(json.loads(event)["payload"]["score"], 7.5)
        status = httpx.get(url, headers=headers).json()
        labels = {"course": "Algorithms", "student": "Ann <b>", "student_id": "ann"}
        self.assertEqual((status["problem"], status["metadata"]), ("judged", labels))

    async def test_best_score_of_a_student_reaches_the_platform(self) -> None:
        session = self.launch({})["session"]
        ended = [await self.submit_and_wait(session, text) for text in ("5", "2", "broken", "20")]
        self.assertEqual(ended, [("sent", 0.5), ("worse", 0.2), ("unscored", None), ("sent", 1)])
        sent = [(score["userId"], score["scoreGiven"]) for score in self.platform.scores]
        self.assertEqual(sent, [("ann", 50), ("ann", 100)])
        teacher = self.launch({f"{LTI}/roles": [ROLE.format("Instructor")], "sub": "eve"})
        self.assertEqual(await self.submit_and_wait(teacher["session"], "3"), ("unscored", 0.3))

    async def test_score_is_repeated_after_failures_and_a_restart(self) -> None:
        self.platform.fails = True
        session = self.launch({})["session"]
        evaluation = self.submit(session, "4").json()["evaluation"]
        await until(lambda: self.platform.has_failed, "the platform refuses the score")
        self.process.kill()
        self.process.wait()
        self.platform.fails = False
        await self.start_tool()
        self.assertEqual(await self.wait(session, evaluation), ("sent", 0.4))
        self.assertEqual([score["scoreGiven"] for score in self.platform.scores], [40])

    async def test_teacher_chooses_a_problem_by_deep_linking(self) -> None:
        page = self.launch(self.make_deep_linking(data="x"))
        self.assertEqual(
            [one["title"] for one in page["choices"]], ["closed", "Points </script>", "other"]
        )
        self.assertNotIn("session", page)
        httpx.post(page["return_url"], data={"JWT": page["choices"][2]["message"]})
        (returned,) = self.platform.returned
        (item,) = returned[f"{DEEP_LINKING}/content_items"]
        self.assertEqual(returned[f"{DEEP_LINKING}/data"], "x")
        self.assertEqual((item["url"], item["title"]), (f"{self.tool}/launch", "other"))
        self.assertEqual(item["lineItem"]["scoreMaximum"], 100)
        self.assertEqual(self.launch({f"{LTI}/custom": item["custom"]})["problem"]["name"], "other")

    async def test_forged_replayed_and_foreign_launches_are_refused(self) -> None:
        said = "this launch is not valid; open the activity again"

        def check(headers: dict[str, str], form: dict[str, str], status: int = 403) -> None:
            answer = httpx.post(f"{self.tool}/launch", data=form, headers=headers)
            self.assertEqual((answer.status_code, answer.text == said), (status, status == 403))

        (cookie, form), (other_cookie, other) = self.log_in({}), self.log_in({})
        check(cookie, {**form, "state": "x"})
        check(cookie, {**form, "id_token": other["id_token"]})
        for without in ({}, other_cookie):
            answer = httpx.post(f"{self.tool}/launch", data=form, headers=without)
            self.assertIn("allow cookies", answer.text)
        check(cookie, form, 200)
        check(cookie, form)
        deployment, version = {f"{LTI}/deployment_id": "2"}, {f"{LTI}/version": "1.1"}
        old, party = {"exp": time.time() - 60}, {"aud": ["client", "b"], "azp": "b"}
        issuer = {"iss": "https://other.example"}
        for claims in (deployment, version, old, party, issuer, {"aud": "b"}, {"nonce": "b"}):
            check(*self.log_in(claims))
        public = self.platform.key.public_key().public_numbers().n.to_bytes(256)
        for signature in ((make_key("stranger"), "RS256"), (public, "HS256"), (None, "none")):
            self.platform.signature = signature
            check(*self.log_in({}))
        unknown = f"{self.tool}/login?{urlencode({**issuer, **self.platform.hints})}"
        self.assertEqual(httpx.get(unknown).status_code, 400)

    async def test_lti_session_is_valid_for_one_student_and_one_problem_only(self) -> None:
        ann, bob = (self.launch({"sub": name})["session"] for name in ("ann", "bob"))
        evaluation = self.submit(ann, "wait").json()["evaluation"]
        self.assertEqual(self.submit(ann, "1").status_code, 429)
        self.assertEqual(self.ask_result(ann, evaluation).json()["state"], "running")
        self.assertEqual(self.ask_result(bob, evaluation).status_code, 404)
        head, body, signature = ann.split(".")
        content = json.loads(base64.urlsafe_b64decode(body + "==")) | {"problem": "other"}
        changed = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
        forged = f"{head}.{changed}.{signature}", jwt.encode(content, "x" * 32)
        for session in ("x", self.log_in({})[1]["state"], *forged):
            self.assertEqual(self.submit(session, "1").status_code, 401)
        await self.client.cancel(evaluation)

    async def test_page_submits_and_shows_the_score_in_a_browser(self) -> None:
        if WITHOUT:
            raise SkipTest(WITHOUT)
        browser = start_browser()
        await browser.open(self.platform.start)
        await browser.shows("h1", "Points </script>")
        self.assertEqual(await browser.violations(), [])
        await browser.write("textarea", "5")
        await browser.click("button")
        await browser.shows("p[role]", "50 of 100 points: the score is in your course")
        self.platform.claims = self.make_deep_linking()
        await browser.open(self.platform.start)
        await browser.shows("button", "")
        await browser.click("button")
        await browser.shows("body", "returned")
        self.assertEqual(await browser.complaints(), [])
        await browser.open("about:blank")
