"""LTI 1.3: a course platform such as Moodle opens problems of a daemon, and gets the scores.

    LTI_CONFIG=lti.toml TAWEBEVAL_SERVER=... TAWEBEVAL_TOKEN=... uvicorn tool:app --port 8001

README.md has the configuration. A launch is what the platform signs when somebody opens an
activity: it names person, course, problem and the place of the score. This tool signs them again,
as the session of the page: no later request can name another person or problem.

A submission is a row of SQLite from its start until the platform has taken its score. One thread
asks the daemon for the ends of evaluations, and repeats what fails, also after a restart.
"""

import hmac
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import jwt
import msgspec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse

from tawebeval_client import (
    Backoff,
    Client,
    ClientError,
    EvaluationGone,
    NamedFile,
    Refused,
    UnknownEvaluation,
)

MOST_BYTES = 1 << 20  # of a request
LOGIN_SECONDS, SESSION_SECONDS, SCORE_SECONDS = 600, 8 * 3600, 7 * 86400
SPECIFICATION = "https://purl.imsglobal.org/spec"
LTI, GRADES = f"{SPECIFICATION}/lti/claim/", f"{SPECIFICATION}/lti-ags/"
DEEP_LINKING = f"{SPECIFICATION}/lti-dl/claim/"
LEARNER = "http://purl.imsglobal.org/vocab/lis/v2/membership#Learner"
NONCES = "nonces(nonce TEXT PRIMARY KEY, expires REAL)"
SUBMISSIONS = """submissions(evaluation TEXT PRIMARY KEY, student TEXT, lineitem TEXT, created REAL,
    due REAL, state TEXT, score REAL)"""

log = logging.getLogger("uvicorn.error")
config = tomllib.loads(Path(os.environ["LTI_CONFIG"]).read_text("utf-8"))
platform, launch_url = config["platform"], f"{config['url']}/launch"
# A request waits in one of 40 threads: a daemon that is full must not stop launches, too.
daemon = Client(
    os.environ["TAWEBEVAL_SERVER"],
    os.environ["TAWEBEVAL_TOKEN"],
    request_backoff=Backoff(3, 0.5, 1, max_retry_after_seconds=2),
)
page = Path(__file__).with_name("page.html").read_text("utf-8")
pem = Path(config["key"]).read_bytes()
private_key: Any = load_pem_private_key(pem, None)
key_id = hmac.digest(pem, b"key identifier", "sha256").hex()[:16]
own_key = hmac.digest(pem, b"what this tool signs for itself", "sha256")
platform_keys = jwt.PyJWKClient(platform["keys"], timeout=5)
submitting: dict[str, object] = {}  # by student: the files of a request that has no answer


def query(statement: str, *values: object) -> list[sqlite3.Row]:
    """Execute a statement of SQL as a transaction, and return its rows."""
    with closing(sqlite3.connect(config["database"], timeout=10)) as database, database:
        database.row_factory = sqlite3.Row
        return database.execute(statement, values).fetchall()


def sign(seconds: int, claims: Mapping[str, Any]) -> str:
    """Return a message to the platform."""
    common = {"iss": platform["client_id"], "jti": secrets.token_hex(16), "iat": int(time.time())}
    message = {**common, "exp": common["iat"] + seconds, **claims}
    return jwt.encode(message, private_key, "RS256", {"kid": key_id})


def encode(kind: str, seconds: int, content: Mapping[str, Any]) -> str:
    """Return content that this tool signs for itself, for one purpose."""
    return jwt.encode({**content, "aud": kind, "exp": time.time() + seconds}, own_key, "HS256")


def decode(kind: str, token: str) -> dict[str, Any]:
    """Return such content. Raises jwt.PyJWTError."""
    return jwt.decode(token, own_key, ["HS256"], {"require": ["exp"]}, audience=kind)


def verify(token: str, nonce: str) -> dict[str, Any]:
    """Return the claims of a launch, once. Raises jwt.PyJWTError, KeyError, IntegrityError."""
    key = platform_keys.get_signing_key_from_jwt(token)
    required = {"require": ["exp", "iat", "sub", "nonce"]}
    audience, issuer = platform["client_id"], platform["issuer"]
    claims: dict[str, Any] = jwt.decode(
        token, key, ["RS256"], required, audience=audience, issuer=issuer, leeway=30
    )
    checks = (
        claims["nonce"] == nonce,
        claims.get("azp", audience) == audience,
        claims[f"{LTI}version"] == "1.3.0",
        claims[f"{LTI}deployment_id"] in platform["deployments"],
    )
    if not all(checks):
        raise jwt.InvalidTokenError("another login, tool, version of LTI or deployment")
    query("DELETE FROM nonces WHERE expires < ?", time.time())
    query("INSERT INTO nonces VALUES (?, ?)", nonce, time.time() + 2 * LOGIN_SECONDS)
    return claims


def compute_share(results: Mapping[str, Any] | None) -> float | None:
    """Return the score, or the share of goals, from 0 to 1; None if the evaluator sent neither."""
    score = results and results["score"]
    if score and score["maximum"] and score["maximum"] > 0:
        return max(0.0, min(score["score"] / score["maximum"], 1.0))
    goals = list(results["goals"].values()) if results else []
    return sum(goals) / len(goals) if goals else None


def send_score(row: sqlite3.Row) -> None:
    """Pass a score to the platform. Raises httpx.HTTPError, KeyError, ValueError."""
    form = {
        "grant_type": "client_credentials",
        "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
        "client_assertion": sign(60, {"sub": platform["client_id"], "aud": platform["token"]}),
        "scope": f"{GRADES}scope/score",
    }
    answer = httpx.post(platform["token"], data=form).raise_for_status()
    score = {
        "userId": row["student"],
        "scoreGiven": round(100 * row["score"], 4),
        "scoreMaximum": 100,
        "activityProgress": "Completed",
        "gradingProgress": "FullyGraded",
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    headers = {
        "Authorization": f"Bearer {answer.json()['access_token']}",
        "Content-Type": "application/vnd.ims.lis.v1.score+json",
    }
    url = urlsplit(row["lineitem"])  # may have a query
    url = url._replace(path=f"{url.path.rstrip('/')}/scores")
    httpx.post(url.geturl(), json=score, headers=headers).raise_for_status()


def advance(row: sqlite3.Row) -> tuple[str, float | None]:
    """Do the next step of a submission; return its state and score."""
    if row["state"] == "running":
        try:
            status = daemon.status(row["evaluation"])
        except (EvaluationGone, UnknownEvaluation):  # unknown to a token of another caller
            return "lost", None
        if status["state"] in ("queued", "fetching", "running"):
            return "running", None
        share = compute_share(status["results"]) if status["state"] == "finished" else None
        return "unscored" if share is None or row["lineitem"] is None else "sending", share
    sent = "SELECT 1 FROM submissions WHERE state = 'sent' AND student = ? AND lineitem = ?"
    if query(f"{sent} AND score >= ?", row["student"], row["lineitem"], row["score"]):
        return "worse", row["score"]
    send_score(row)
    return "sent", row["score"]


def work() -> None:
    """Advance submissions until the process ends, at any moment: repeat all that fails."""
    while True:
        time.sleep(0.5)
        try:  # running ones first: the daemon forgets what nobody asks for
            due = "state IN ('running', 'sending') AND due < ? ORDER BY state, due LIMIT 20"
            for row in query(f"SELECT * FROM submissions WHERE {due}", time.time()):
                age = time.time() - row["created"]
                try:
                    state, score = advance(row)
                except Exception:
                    log.exception("evaluation %s", row["evaluation"])
                    state = row["state"] if age < SCORE_SECONDS else "refused"
                    score = row["score"]
                wait = min(1 + age / 5, 60) if state == row["state"] else 0
                query(
                    "UPDATE submissions SET state = ?, score = ?, due = ? WHERE evaluation = ?",
                    *(state, score, time.time() + wait, row["evaluation"]),
                )
        except sqlite3.Error:
            log.exception("the database %s", config["database"])


@asynccontextmanager
async def run(_: FastAPI) -> AsyncIterator[None]:
    """Prepare the database, and run the thread that passes the scores."""
    for table in (NONCES, SUBMISSIONS):
        query(f"CREATE TABLE IF NOT EXISTS {table}")
    threading.Thread(target=work, daemon=True).start()
    yield


app = FastAPI(lifespan=run, docs_url=None, redoc_url=None, openapi_url=None)


@app.exception_handler(HTTPException)
@app.exception_handler(ClientError)
async def explain(_: Request, error: HTTPException | ClientError) -> PlainTextResponse:
    """Tell people why a request is refused. Other errors of the daemon are only in the log."""
    if isinstance(error, HTTPException):
        return PlainTextResponse(error.detail, error.status_code)
    if isinstance(error, Refused) and error.status in (400, 403, 404, 413):
        return PlainTextResponse(str(error), error.status)
    log.warning("the daemon: %s", error)
    return PlainTextResponse("the judge is away; try again in a minute", 503)


async def read_body(request: Request) -> bytes:
    """Return the body of a request."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"send at most {MOST_BYTES} bytes")
    return bytes(body)


def read_session(authorization: Annotated[str, Header()] = "") -> dict[str, Any]:
    """Return what the launch of the page has said."""
    try:
        return decode("session", authorization.removeprefix("Bearer "))
    except jwt.PyJWTError:
        raise HTTPException(401, "open the activity in your course again") from None


def read_fields(request: Request, body: Annotated[bytes, Depends(read_body)]) -> dict[str, str]:
    """Return the fields of a query or a form."""
    try:
        return dict(parse_qsl(f"{request.url.query}&{body.decode()}", max_num_fields=50))
    except ValueError:
        raise HTTPException(400, "send a form of at most 50 fields") from None


Body = Annotated[bytes, Depends(read_body)]
Session = Annotated[dict[str, Any], Depends(read_session)]
Fields = Annotated[dict[str, str], Depends(read_fields)]


@app.get("/keys")
def show_keys() -> dict[str, Any]:
    """Return the public key, by which the platform verifies messages of this tool."""
    public = jwt.algorithms.RSAAlgorithm.to_jwk(private_key.public_key(), as_dict=True)
    return {"keys": [{**public, "kid": key_id, "alg": "RS256", "use": "sig"}]}


@app.api_route("/login", methods=["GET", "POST"])
def login(fields: Fields) -> RedirectResponse:
    """Begin a launch: send the browser back to the platform. Stores nothing."""
    asked = fields.get("iss"), fields.get("client_id", platform["client_id"])
    if asked != (platform["issuer"], platform["client_id"]):
        raise HTTPException(400, "this platform is not registered here")
    nonce = secrets.token_hex(16)
    parameters = {
        "scope": "openid",
        "response_type": "id_token",
        "response_mode": "form_post",
        "prompt": "none",
        "client_id": platform["client_id"],
        "redirect_uri": launch_url,
        "login_hint": fields.get("login_hint", ""),
        "lti_message_hint": fields.get("lti_message_hint", ""),
        "state": encode("login", LOGIN_SECONDS, {"nonce": nonce}),
        "nonce": nonce,
    }
    # Partitioned: browsers keep the cookie also in a frame of the platform.
    cookie = f"__Host-lti-{nonce[:8]}={nonce}; Path=/; Max-Age={LOGIN_SECONDS}"
    cookie += "; Secure; HttpOnly; SameSite=None; Partitioned"
    url = f"{platform['login']}?{urlencode(parameters)}"
    return RedirectResponse(url, 302, {"Set-Cookie": cookie})


@app.post("/launch")
def launch(request: Request, fields: Fields) -> HTMLResponse:
    """End a launch: show the problem of the activity, or let a teacher choose one."""
    try:
        nonce = decode("login", fields.get("state", ""))["nonce"]
        if request.cookies.get(f"__Host-lti-{nonce[:8]}") != nonce:
            raise HTTPException(403, "allow cookies, and open the activity in a new window")
        claims = verify(fields.get("id_token", ""), nonce)
    except (jwt.PyJWTError, KeyError, sqlite3.IntegrityError) as error:
        log.warning("refused launch: %r", error)
        raise HTTPException(403, "this launch is not valid; open the activity again") from None
    kind = claims.get(f"{LTI}message_type")
    if kind == "LtiDeepLinkingRequest":
        return let_choose(claims)
    problem = claims.get(f"{LTI}custom", {}).get("problem")
    if kind != "LtiResourceLinkRequest" or not problem:
        raise HTTPException(400, "this activity has no problem; select one in its settings")
    grades = claims.get(f"{GRADES}claim/endpoint", {})
    can_score = f"{GRADES}scope/score" in grades.get("scope", ())
    is_learner = LEARNER in claims.get(f"{LTI}roles", ())
    course = claims.get(f"{LTI}context", {})
    labels = {
        "course": course.get("title") or course.get("id"),
        "student": claims.get("name") or claims["sub"],
        "student_id": claims["sub"],
    }
    session = {
        "student": claims["sub"],
        "problem": problem,
        "lineitem": grades.get("lineitem") if can_score and is_learner else None,
        "labels": {name: cut_label(text) for name, text in labels.items() if text},
    }
    signed = encode("session", SESSION_SECONDS, session)
    found, wanted = daemon.problem(problem), ("name", "title", "statement", "fields", "extensions")
    shown = {name: found[name] for name in wanted}
    return show(session=signed, server=daemon.server, problem=shown)


def cut_label(text: str) -> str:
    """Return text as the daemon takes it for a label: of 256 bytes, without control characters."""
    return "".join(filter(str.isprintable, text)).encode()[:256].decode(errors="ignore")


def let_choose(claims: Mapping[str, Any]) -> HTMLResponse:
    """Show the problems, each with the message that tells the platform the choice."""
    settings = claims[f"{DEEP_LINKING}deep_linking_settings"]
    choices = []
    for problem in daemon.problems():
        name, title = problem["name"], problem["title"] or problem["name"]
        item = {
            "type": "ltiResourceLink",
            "title": title,
            "url": launch_url,
            "custom": {"problem": name},
            "lineItem": {"label": title, "scoreMaximum": 100, "resourceId": name},
        }
        message = {
            "aud": platform["issuer"],
            "nonce": secrets.token_hex(16),
            f"{LTI}message_type": "LtiDeepLinkingResponse",
            f"{LTI}version": "1.3.0",
            f"{LTI}deployment_id": claims[f"{LTI}deployment_id"],
            f"{DEEP_LINKING}content_items": [item],
        }
        if "data" in settings:
            message[f"{DEEP_LINKING}data"] = settings["data"]
        choices.append({"title": title, "message": sign(LOGIN_SECONDS, message)})
    return show(choices=choices, return_url=settings["deep_link_return_url"])


def show(**content: Any) -> HTMLResponse:
    """Return the page, whose script shows the content as text."""
    nonce, server = secrets.token_hex(16), urlsplit(daemon.server)
    sources = f"{server.scheme}://{server.netloc}"
    policy = f"default-src 'none'; base-uri 'none'; connect-src 'self' {sources}"
    policy += f"; script-src 'nonce-{nonce}' {sources}; style-src 'nonce-{nonce}'; img-src data:"
    data = json.dumps(content).replace("<", "\\u003c")
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
    return HTMLResponse(page.replace("NONCE", nonce).replace("DATA", data), headers=headers)


@app.post("/submit")
def submit(session: Session, body: Body) -> dict[str, str]:
    """Submit for the student and the problem of the session; return a link to the evaluation."""
    try:
        sent = msgspec.json.decode(body, type=dict[str, tuple[str, str]])
        files = {field: NamedFile(name, text.encode()) for field, (name, text) in sent.items()}
    except (ValueError, RecursionError):
        raise HTTPException(400, "send the name and the text of each file") from None
    student, wait = session["student"], HTTPException(429, "wait for your last submission to end")
    if submitting.setdefault(student, files) is not files:
        raise wait
    try:
        if query("SELECT 1 FROM submissions WHERE student = ? AND state = 'running'", student):
            raise wait
        evaluation = daemon.evaluate_problem(session["problem"], files, metadata=session["labels"])
        now = time.time()
        useless = "state IN ('worse', 'unscored', 'lost') AND created < ?"
        query(f"DELETE FROM submissions WHERE {useless}", now - SESSION_SECONDS)
        row = evaluation, student, session["lineitem"], now, now
        query("INSERT INTO submissions VALUES (?, ?, ?, ?, ?, 'running', NULL)", *row)
    finally:
        del submitting[student]
    return {"evaluation": evaluation, "link": daemon.make_link(evaluation, lifetime=86400)["link"]}


@app.get("/result/{evaluation}")
def show_result(evaluation: str, session: Session) -> dict[str, Any]:
    """Return the state and score of an evaluation of the session's student."""
    own = "SELECT state, score FROM submissions WHERE evaluation = ? AND student = ?"
    rows = query(own, evaluation, session["student"])
    if not rows:
        raise HTTPException(404, "no such evaluation of yours")
    # The page has read its events to the end: ask the daemon now.
    soon = "state = 'running' AND due > ?1 + 1 AND evaluation = ?2"
    query(f"UPDATE submissions SET due = ?1 WHERE {soon}", time.time(), evaluation)
    return dict(rows[0])
