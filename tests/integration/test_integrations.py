"""The examples of integrations: in Django, FastAPI, continuous integration, and of callbacks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
from twisted.internet import reactor
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue

from tests.integration.harness import CALLBACK_SECRET, CONFIGURATION, RepositoryTestCase, until
from tests.integration.ports import free_port, listens

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
JUDGE = 'cat "$SUBMISSION_FILE_SOURCE"; grep -q good "$SUBMISSION_FILE_SOURCE"'

DJANGO = """\
import os, sys
import django
from django.conf import settings
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import RequestFactory

server, folder = sys.argv[1:]
settings.configure(
    TAWEBEVAL_SERVER=server,
    TAWEBEVAL_TOKEN=None,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/db"}},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()
import json
import django_view as view

with connection.schema_editor() as editor:
    editor.create_model(view.Attempt)

def submit(problem, content=b"good"):
    file = SimpleUploadedFile("a.py", content)
    request = RequestFactory().post("/submit", {"file": file, "problem": problem})
    response = view.submit(request)
    return response.status_code, json.loads(response.content)

print(submit("other")[0], submit("judged", b"x" * 70_000)[0])
status, answer = submit("judged")
child = os.fork()  # a worker, of a server that forks
if child == 0:
    view.read_events(view.Attempt.objects.get(pk=answer["attempt"]))
    os._exit(0)
os.waitpid(child, 0)
shown = view.show(RequestFactory().get("/"), answer["attempt"])
print(status, json.loads(shown.content))
status, answer = submit("judged", b"bad")
view.read_events(view.Attempt.objects.get(pk=answer["attempt"]))
attempt = view.Attempt.objects.get(pk=answer["attempt"])
print(attempt.state)
attempt.state = "running"  # the worker crashed after the last page
view.read_events(attempt)
print(attempt.state)
"""

VIEWERS = """\
import asyncio, sys
import httpx

async def follow(client, identifier):
    lines = []
    async with client.stream("GET", f"/evaluations/{identifier}/events") as response:
        async for line in response.aiter_lines():
            lines += [line] if line.startswith("data: ") else []
    return "".join(lines)

async def main(url):
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits()) as client:
        url = "/problems/{}/submit?filename=a"
        response = await client.post(url.format("judged"), content=b"good\\n" * 9)
        identifier = response.json()["evaluation"]
        shown = await asyncio.gather(*[follow(client, identifier) for _ in range(50)])
        refused = await client.post(url.format("none"), content=b"x")
        large = await client.post(url.format("judged"), content=b"x" * 70_000)
        unknown = await client.get("/evaluations/none/events")
    print(len(shown), {text.count('"good"') for text in shown}, refused.status_code)
    print(large.status_code, unknown.status_code)

asyncio.run(main(sys.argv[1]))
"""


class IntegrationTests(RepositoryTestCase):
    """Each example beside a daemon with a problem, whose evaluator wants the word "good"."""

    async def setUp(self) -> None:
        await super().setUp()
        await self.start_own(
            f"{CONFIGURATION}\n[problems.judged]\nrepository = '{self.repository.url}'\n"
            f"commit = '{self.commit}'\ncommand = '''{JUDGE}'''\nfields = ['source']\n"
            f"{self.configure_callbacks()}"
        )
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": str(EXAMPLES),
            "TAWEBEVAL_SERVER": self.daemon.url,
            "WEBHOOK_SECRET": CALLBACK_SECRET,
        }

    async def run_program(self, *arguments: str) -> tuple[str, int]:
        output, errors, status = await getProcessOutputAndValue(
            sys.executable, arguments, self.environment, str(self.folder), reactor
        )
        self.assertNotIn("Traceback", errors.decode())
        return output.decode(), status

    def start_server(self, *arguments: str) -> None:
        server = subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=(self.folder / "printed").open("wb"),
            stderr=subprocess.DEVNULL,
        )
        self.addCleanup(server.wait)
        self.addCleanup(server.terminate)

    async def test_django_view_stores_events_read_by_a_forked_worker(self) -> None:
        output, status = await self.run_program("-c", DJANGO, self.daemon.url, str(self.folder))
        self.assertEqual(
            (output.splitlines(), status),
            (["400 400", "201 {'state': 'finished', 'output': 'good'}", "failed", "failed"], 0),
        )

    async def test_fifty_viewers_get_all_events(self) -> None:
        port = free_port()
        self.start_server("-m", "uvicorn", "fastapi_events:app", "--port", str(port))
        await until(lambda: listens(port), "the site listens")
        output, status = await self.run_program("-c", VIEWERS, f"http://127.0.0.1:{port}")
        self.assertEqual((output.splitlines(), status), (["50 {9} 502", "413 404"], 0))

    async def test_class_script_fails_when_a_student_fails(self) -> None:
        for name, content in (("ann", "good\n"), ("bob", "bad\n")):
            folder = self.folder / "class" / name
            folder.mkdir(parents=True)
            (folder / "a.py").write_text(content)
        program = str(EXAMPLES / "judge_class.py")
        output, status = await self.run_program(program, "judged", "class")
        self.assertEqual(
            (output.splitlines(), status),
            (
                [
                    "student ann: passed: good",
                    "student bob: FAILED: exit: the evaluator exited with status 1",
                    "1 of 2 passed",
                ],
                1,
            ),
        )
        (self.folder / "class" / "bob" / "a.py").unlink()
        output, status = await self.run_program(program, "judged", "class")
        self.assertIn("student bob: FAILED: 0 files instead of one", output)
        # Links of students could lead to solutions of others, and to secrets of the job.
        (self.folder / "class" / "bob" / "a.py").symlink_to("../ann/a.py")
        (self.folder / "class" / "eve").symlink_to("ann")
        (self.folder / "class" / "zoe").mkdir()
        # No name makes a line of its own, which a continuous integration would obey.
        (self.folder / "class" / "x\n::stop-commands::x").mkdir()
        Path(os.fsdecode(bytes(self.folder / "class" / "zoe") + b"/\xff")).write_text("good")
        output, status = await self.run_program(program, "judged", "class")
        self.assertEqual(status, 1)
        self.assertIn("student bob: FAILED: 0 files instead of one", output)
        self.assertNotIn("eve", output)
        self.assertIn("student zoe: FAILED: ", output)
        self.assertIn("student x ::stop-commands::x: FAILED: 0 files", output)
        self.assertIn("1 of 4 passed", output)

    async def test_webhook_receiver_accepts_only_signed_callbacks(self) -> None:
        port = free_port()
        self.start_server(str(EXAMPLES / "webhook_receiver.py"), str(port))
        await until(lambda: listens(port), "the receiver listens")
        url = f"http://127.0.0.1:{port}/"
        identifier = await self.begin("true", callback_url=url)
        printed = self.folder / "printed"
        expected = f"{identifier}: finished\n"
        await until(lambda: expected in printed.read_text(), "the callback is printed")
        headers = {"webhook-id": "x", "webhook-timestamp": "1", "webhook-signature": "v1"}
        for more in ({}, headers, {**headers, "webhook-timestamp": str(int(time.time()))}):
            response = await deferToThread(
                lambda more=more: httpx.post(url, content=b"{}", headers=more)
            )
            self.assertEqual(response.status_code, 401)
        self.assertEqual(printed.read_text().count(identifier), 1)
