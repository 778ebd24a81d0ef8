"""What the tests of forms share: an evaluator that says what it got, and forms by hand."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from tests.integration.client import data, python
from tests.integration.harness import DaemonTestCase
from tests.integration.raw import Connection, RawAnswer, body_of, head_of, part

MIB = 2**20

# Says what it got: for each field the file's name, its size and its digest.
DESCRIBE = python(
    r"""
import hashlib, json, os
found = {}
for name, path in os.environ.items():
    if name.startswith("SUBMISSION_FILE_"):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[name[16:]] = [os.path.basename(path), os.path.getsize(path), digest]
print("\n%s\n%s\n%s" % (os.environ["EVALUATION_DATA_BEGIN"], json.dumps(found),
                         os.environ["EVALUATION_DATA_END"]))
"""
)


def described(*files: tuple[str, str, bytes]) -> dict[str, list[Any]]:
    """Return what an evaluator should say of these files."""
    return {
        field.upper(): [name, len(content), sha256(content).hexdigest()]
        for field, name, content in files
    }


class UploadTestCase(DaemonTestCase):
    """Tests with forms, the limit of which is small enough to go over it."""

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

    def fields(self) -> list[bytes]:
        """Return the parts that any form needs."""
        return [
            part("repository[url]", self.repository.url.encode()),
            part("commit_oid", self.commit.encode()),
            part("evaluator_cmd", DESCRIBE.encode()),
        ]

    def post(self, parts: list[bytes], *headers: str) -> RawAnswer:
        body = body_of(parts)
        with Connection(self.daemon.port) as connection:
            answer = connection.ask(head_of(len(body), *headers) + body)
        if answer.code == 200:
            self.client.evaluations.append(identifier_of(answer))
        return answer


def identifier_of(answer: RawAnswer) -> str:
    """Return the identifier of the evaluation that has begun."""
    assert answer.code == 200, answer
    return str(json.loads(answer.body)["evaluation_id"])
