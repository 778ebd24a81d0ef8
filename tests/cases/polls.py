"""Requests for pages, and services of many configurations for them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from hypothesis import strategies as st

from tawebeval.config import CallerSettings, Configuration, HttpSettings, LogSettings
from tawebeval.config import ServiceSettings as Process
from tests.cases.settings import with_constants
from tests.cases.web import END

TOKEN = "tawebeval_a-token"
READ_TOKEN = "tawebeval_a-token-that-only-reads"
TOKENS = "".join(
    f"alice sha256:{sha256(token.encode()).hexdigest()}{kind}\n"
    for token, kind in ((TOKEN, ""), (READ_TOKEN, " read"))
)

CONFIGURATIONS = {
    "usual": Configuration(),
    "origins": Configuration(callers=CallerSettings(origins=("https://judge.example.org",))),
    "little": Configuration(
        http=with_constants(HttpSettings, max_headers=4, max_line_bytes=150, max_header_bytes=250)()
    ),
    "tokens": Configuration(callers=CallerSettings(requests_per_minute=3)),
    "named": Configuration(service=Process(name="a")),
    "below": Configuration(http=HttpSettings(base_path="/judge/a.b")),
    "proxied": Configuration(
        http=HttpSettings(trusted_proxies=("127.0.0.1",), connections_per_address=1),
        log=LogSettings(access=True),
    ),
}

PLAIN = (
    "Host: localhost",
    "Host: localhost:8080",
    "Host: judge.example.org",
    "host:localhost",
    "Accept: */*",
    "Accept: application/json",
    "Accept: text/html, application/json;q=0.5, */*;q=0.1",
    "Accept-Encoding: gzip, deflate",
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64)",
    "Connection: keep-alive",
    "Connection: Keep-Alive",
    "Prefer: wait=2",
    'Prefer: respond-async, wait="3"',
    "Prefer: wait=x",
    "Prefer: Wait=1; x, wait=3",
    "prefer:",
    "Origin: https://judge.example.org",
    "Origin: https://else.example.org",
    "Cookie: a=b; c",
    "X-Odd: \xff",
    "Last-Event-ID: 1",
    "Range: bytes=0-1",
    "If-None-Match: *",
    f"Authorization: Bearer {TOKEN}",
    f"Authorization: Bearer {READ_TOKEN}",
    "Authorization: Bearer another",
    "X-Forwarded-For: 192.0.2.1",
    "X-Forwarded-For: 192.0.2.2, 127.0.0.1",
    "X-Forwarded-For: 2001:db8::1",
    "X-Forwarded-For: 2001:db8::2",
    "X-Forwarded-For: unknown",
    "X-Forwarded-For: _a",
    "X-Forwarded-For: nobody",  # for which a proxy is refused
    "Forwarded: for=192.0.2.3",
)
NOT_PLAIN = (
    "Host: [::1",
    "Host: ..",
    "Host:",
    "Host: a b",
    "Host: other.example.org",  # as the second one
    "Accept: text/event-stream",
    "Accept: text/html",
    "Connection: close",
    "Connection: Upgrade",
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Expect: 100-continue",
    "Content-Length: 0",
    "Content-Length: 00",
    "Content-Length: 5",
    "Content-Length: x",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: identity",
    "X : y",
    " X: y",
    "no colon",
    ": y",
    "X: \0",
    "X: a\nb",
    "X: a\rb",
    "X: " + "y" * 4096,
)

QUERIES = (
    *("", "?", "?after=", "?after=0", "?after=1", "?after=2", "?after=4", f"?after={END}"),
    *("?wait=0", "?wait=2", "?after=0&wait=2", "?after=2&wait=3", "?after=4&wait=999999999"),
    *("?wait=2&after=1", "?after=1&", "?after=1&after=2", "?wait=1&wait=2", "?after=1wait=2"),
    *("?after=x", "?after=-1", "?after=99", "?after=00", "?after=%31", "?after=1&skip=1"),
    *("?wait=", "?wait=x", "?wait=2147483647", "?wait=1000000000000000", "?&"),
    *("?after=" + "9" * 200, "?after=1#x"),
    *("?limit=1", "?after=0&limit=40", "?after=&wait=2&limit=99", "?after=1&wait=2&limit=1"),
    *("?limit=1&after=1", "?wait=2&", "?limit=999999999999999", "?limit=1&", "?limit=01"),
    *("?limit=0", "?limit=", "?limit=-1", "?limit=x", "?limit=1000000000000000"),
    *("?limit=1&limit=1", "?limit=%31", "?after=1limit=1", "?after=1&wait=2limit=1"),
)

STARTS = st.sampled_from(["GET"] * 12 + ["HEAD", "POST", "get", "OPTIONS", "", "\r\nGET"])
VERSIONS = st.sampled_from(["HTTP/1.1"] * 12 + ["HTTP/1.0", "HTTP/1.2", "http/1.1", ""])

PATHS = st.sampled_from(
    ["/evaluation/ID/events"] * 12
    + ["/evaluation/NONE/events", "/evaluation/x/events", "//evaluation//ID/events"]
    + ["http://localhost/evaluation/ID/events", "/evaluation/ID/event%73", "/health"]
    + ["/judge/a.b/evaluation/ID/events"] * 4
    + ["//judge//a.b//evaluation/ID/events", "http://localhost/judge/a.b/evaluation/ID/events"]
    + ["/judge/a.b", "/judge/a_b/evaluation/ID/events", "/judge/a.b/judge/a.b/evaluation/ID/events"]
)

FIELDS = st.lists(
    st.sampled_from(PLAIN) | st.sampled_from(PLAIN + NOT_PLAIN), max_size=6, unique=True
)


def asking(query: str, *headers: str) -> bytes:
    """Return a request for a page."""
    first = f"GET /evaluation/ID/events{query} HTTP/1.1"
    return "\r\n".join([first, *with_host(headers), "", ""]).encode("latin-1")


def with_host(headers: Sequence[str]) -> list[str]:
    """Return headers, among them the name of a host."""
    named = any(header.lower().startswith("host:") for header in headers)
    return [*headers] if named else ["Host: localhost", *headers]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Draw a request, most of them for a page, many of them plain."""
    target = draw(PATHS) + draw(st.sampled_from(QUERIES))
    first = f"{draw(STARTS)} {target} {draw(VERSIONS)}"
    fields = draw(FIELDS)
    if draw(st.sampled_from([True] * 12 + [False])):
        fields = with_host(fields)
    return "\r\n".join([first, *fields, "", ""]).encode("latin-1")
