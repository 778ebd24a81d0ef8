"""Large uploads of a client without a token: by treq, curl and byte by byte."""

from __future__ import annotations

import json
import subprocess
from io import BytesIO

from tests.cases.patience import PATIENCE
from tests.integration.client import Client
from tests.integration.harness import CONFIGURATION, Daemon, RepositoryTestCase, new_token
from tests.integration.raw import Connection, head_of


class CallersTests(RepositoryTestCase):
    """A daemon with a token that the client does not have."""

    async def setUp(self) -> None:
        await super().setUp()
        file = self.folder / "tokens"
        file.write_text(new_token("alice")[1])
        self.daemon = Daemon(f"{CONFIGURATION}\n[callers]\ntokens = '{file}'\n")
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        await self.daemon.ready()
        self.client = Client(self.daemon.url)
        self.addCleanup(self.client.close)

    async def test_wrong_token_is_refused_within_a_large_upload(self) -> None:
        with Connection(self.daemon.port) as connection:
            answer = connection.ask(head_of(50_000_000))
            answer.problem(401)
            self.assertEqual(answer.headers["www-authenticate"], "Bearer")
        large = self.folder / "large"
        large.write_bytes(b"x" * 40_000_000)
        for expect in ("Expect:", "Expect: 100-continue"):
            curl = subprocess.run(
                [
                    *("curl", "-sS", "-o", "-", "-w", "\n%{http_code} %{size_upload}"),
                    *("-H", expect, "-H", "Authorization: Bearer wrong"),
                    *("-F", f"submission[s]=@{large}", f"{self.daemon.url}/evaluate"),
                ],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            body, _, figures = curl.stdout.rpartition("\n")
            self.assertEqual(figures.split()[0], "401", curl)
            self.assertEqual(json.loads(body)["status"], 401)
        files = [("submission[s]", ("s", "text/plain", BytesIO(large.read_bytes())))]
        (await self.client.request("POST", "/evaluate", files=files)).problem(401)
        self.assertEqual(list((self.daemon.state / "uploads").iterdir()), [])
        await self.daemon.stop()
