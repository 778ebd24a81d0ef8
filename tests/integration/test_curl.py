"""Forms as curl sends them: the client that everybody has."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

from twisted.internet.utils import getProcessOutputAndValue

from tests.cases.patience import PATIENCE
from tests.integration.client import data
from tests.integration.harness import DaemonTestCase
from tests.integration.uploads import DESCRIBE, MIB, described

CURL = shutil.which("curl")


class CurlTests(DaemonTestCase):
    configuration = f"""
        [repositories]
        protocols = ["file"]
        [limits]
        request_body = {34 * MIB}
        """

    async def describe(self, identifier: str) -> Any:
        """Return what the evaluator has said that it got."""
        (found,) = data(await self.client.follow(identifier))
        return found

    async def curl(self, *arguments: str) -> tuple[int, int, bytes]:
        """Return the status of the answer, how many bytes were sent for it, and its body."""
        self.assertIsNotNone(CURL, "these tests need curl: it is not installed")
        answer = self.folder / "answer"
        out, err, status = await getProcessOutputAndValue(
            CURL,
            [
                *("--silent", "--show-error", "--max-time", str(PATIENCE), "--noproxy", "*"),
                *("--output", str(answer), "--write-out", "%{http_code} %{size_upload}"),
                *arguments,
                f"{self.daemon.url}/evaluate",
            ],
        )
        self.assertEqual((status, err), (0, b""), "curl could not read the answer")
        code, sent = map(int, out.split())
        body = answer.read_bytes()
        if code == 200:
            self.client.evaluations.append(json.loads(body)["evaluation_id"])
        return code, sent, body

    def form(self, *files: tuple[str, str]) -> list[str]:
        """Return curl's arguments for a form with these files, by field and path."""
        return [
            *("--form-string", f"repository[url]={self.repository.url}"),
            *("--form-string", f"commit_oid={self.commit}"),
            *("--form-string", f"evaluator_cmd={DESCRIBE}"),
            *(item for field, path in files for item in ("--form", f"submission[{field}]=@{path}")),
        ]

    def write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        return str(path)

    async def test_large_file_arrives_exactly_in_little_memory(self) -> None:
        content = os.urandom(MIB) * 30
        small = self.daemon.memory
        form = self.form(("s", self.write("large", content)))
        for framing in ((), ("--header", "Transfer-Encoding: chunked")):
            _, _, body = await self.curl(*framing, *form)
            self.assertLess(self.daemon.memory - small, 20 * MIB)
            found = await self.describe(json.loads(body)["evaluation_id"])
            self.assertEqual(found, described(("s", "large", content)))

    async def test_over_the_limit_is_read_by_curl_before_it_has_sent_all(self) -> None:
        form = self.form(("s", self.write("large", b"x" * 60 * MIB)))
        for headers in ((), ("--header", "Expect:")):
            code, sent, body = await self.curl(*headers, *form)
            self.assertEqual(code, 413)
            self.assertIn("limit", json.loads(body)["message"])
            self.assertLess(sent, 40 * MIB)
