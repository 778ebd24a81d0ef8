"""`daemon.reload`: files of any bytes, and settings of any value in any place."""

from __future__ import annotations

import datetime
import json
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration
from tawebeval.daemon.configuration import read_configuration
from tawebeval.errors import ConfigurationError
from tests.cases.settings import CREDENTIAL, EXAMPLE, list_settings
from tests.cases.strategies import mutated

CREDENTIALS = {"host": "h", "username": "u", "password_file": "/p"}
PATHS = (
    *(tuple(path.split(".")) for path in list_settings(Configuration)),
    *(("repositories", "credentials", 0, name) for name in (*CREDENTIALS, "port", "callers")),
    *(("evaluations", "environment", name) for name in ("A", "PATH", "TURINGARENA_SEED")),
)
KEYS = st.sampled_from(
    ["x", "", " ", "a.b", "a\nb", "`", "`$.a`", " - at `$.x`", '"', "\\", "ü", "running", "\x7f"]
)
TEXTS = st.sampled_from(
    [
        *("", "\n", "x", "/", "/etc", "..", "*", "a b", "unix", "10.0.0.0/8", "::1", "[::1]"),
        "a\nb",
        *("https://a.example", "tcp:1", "`", " - at `$.x`", "\x7f", "😀", "x" * 300, "127.0.0.1/8"),
        *("Expected `int`", "Object contains unknown field `x`", ".a: b", "auto", "none", "http"),
    ]
) | st.text(max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.booleans(),
        st.sampled_from(
            [0, 1, -1, 7, 1023, 1024, 2**50, 2**50 + 1, 2**63, 2**64, -(2**64), 10**30]
        ),
        st.sampled_from([0.0, 0.5, -0.0, 1e9, 1e300, math.inf, -math.inf, math.nan]),
        TEXTS,
        st.just(datetime.datetime(2026, 1, 1)) | st.just(datetime.time(1)),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXTS, inner, max_size=2),
    max_leaves=4,
)

FILES = (
    re.sub(r"(?m)^# ?(?=[\w\[].*(=|\]$))", "", EXAMPLE.read_text()).encode(),
    EXAMPLE.read_bytes(),
    CREDENTIAL.encode(),
    b"[limits]\ncpu = 1\n[evaluations]\nenvironment = { A = 'b' }\n",
)


def written(value: Any) -> str:
    """Return a value as TOML has it."""
    if isinstance(value, Mapping):
        pairs = (f"{key(name)} = {written(inner)}" for name, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, bool | str):
        return key(value)
    return value.isoformat() if isinstance(value, datetime.datetime | datetime.time) else str(value)


def key(name: str | bool) -> str:
    """Return a text, as a key or as a value."""
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def document(path: tuple[str | int, ...], value: Any) -> str:
    """Return a file with one setting; credentials have all that they need."""
    for name in reversed(path):
        value = [{**CREDENTIALS, **value}] if name == 0 else {name: value}
    return "".join(f"{key(name)} = {written(inner)}\n" for name, inner in value.items())


PIECES = (
    *(b"[", b"]", b"[[", b"{", b"}", b"=", b'"', b"'", b'"""', b"\n", b"\r", b".", b",", b"#"),
    b" ",
    *(b"\\u", b"\\", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"1e999", b"0x", b"nan"),
    *(b"[limits]\n", b"[http.x]\n", b"a.b.c = 1\n", b"1979-05-27", b"9" * 5000, b"[" * 2000),
    b"{a=" * 500,
)


class ConfigurationTests(SynchronousTestCase):
    def read(self, text: bytes) -> str | None:
        """Return why a file is refused, None if it is taken."""
        with tempfile.NamedTemporaryFile(prefix="tawebeval-test-") as file:
            file.write(text)
            file.flush()
            try:
                configuration = read_configuration(Path(file.name))
            except ConfigurationError as error:
                message = str(error)
                assert message.startswith(file.name), message
                message = message[len(file.name) :]
                assert message.isprintable(), message
                return message
        assert isinstance(configuration, Configuration)
        return None

    @given(mutated(st.sampled_from(FILES), PIECES))
    def test_any_bytes_are_a_configuration_or_a_configuration_error(self, text: bytes) -> None:
        self.read(text)

    @given(st.sampled_from(PATHS), VALUES)
    def test_error_about_a_setting_names_its_path(
        self, path: tuple[str | int, ...], value: Any
    ) -> None:
        message = self.read(document(path, value).encode())
        if message is not None:
            named = ".".join(str(name) for name in path if name != 0)
            found = re.sub(r"\[\d+\]", "", message.removeprefix(": ").partition(": ")[0])
            related = "repositories.credentials"  # settings that need one another
            assert found.startswith(named) or (found == related and related in named), message
