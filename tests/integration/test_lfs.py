"""Files in Git LFS: pointers of the real git-lfs, and servers that hand out what they stand for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from unittest import skipIf

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred

from tawebeval.core.evaluations import Commit
from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationFailure
from tawebeval.git.remotes import Credential
from tawebeval.linux.filetree import remove_tree
from tests.integration.bare_repositories import BareRepositoryCase
from tests.integration.client import Event, failure, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.repositories import (
    GitRepository,
    HttpServer,
    ScriptedServer,
    git,
    stop_after,
)

LARGE = os.urandom(3_000_000)
SHA = hashlib.sha256(LARGE).hexdigest()
LOOK = "stat -c '%a %s' data/large.bin; sha256sum <data/large.bin; cat README"


class LfsServer(HttpServer):
    """A server of repositories and of their files in Git LFS (git-lfs, docs/api/batch.md).

    Downloads are at `elsewhere`, or here, and need the header `Token` with the value `token`.
    `sent` is what a download has, None for the file; `error` is the error of each object,
    `batch` what is sent in place of all of them.
    With `cut` only half of a file is sent, with `holds_files` the other half after `release`.
    """

    def __init__(self, root: Path, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.elsewhere = self.url
        self.token = "for downloads alone"
        self.sent: bytes | None = None
        self.error = ""
        self.batch: bytes | None = None
        self.cut = self.holds_files = False
        self.seen: list[Mapping[str, str]] = []

    def answer(self, handler: BaseHTTPRequestHandler, path: str, body: bytes) -> bool:
        """Answer the requests of the batch API, and downloads."""
        kind = "application/octet-stream"
        if path.endswith("/info/lfs/objects/batch"):
            kind = "application/vnd.git-lfs+json"
            asked = json.loads(body)
            assert asked["operation"] == "download"
            self.half_sent.clear()
            if self.holds_files:
                self.hold()
            assert handler.headers["Accept"] == handler.headers["Content-Type"] == kind
            content = json.dumps({"objects": [self.offer(each) for each in asked["objects"]]})
            answer = content.encode() if self.batch is None else self.batch
        elif path.startswith("/download/"):
            self.seen.append(dict(handler.headers))
            assert handler.headers["Token"] == self.token
            (file,) = self.root.glob(f"*/.git/lfs/objects/*/*/{path.rpartition('/')[2]}")
            answer = file.read_bytes() if self.sent is None else self.sent
        else:
            return False
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        half = len(answer) // 2
        with contextlib.suppress(OSError):  # of a client that has gone
            handler.wfile.write(answer[:half])
            if path.startswith("/download/"):
                self.send_half()
            if not self.cut or not path.startswith("/download/"):
                handler.wfile.write(answer[half:])
        return True

    def offer(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.error:
            return {**asked, "error": {"code": 410, "message": self.error}}
        headers = {"Token": self.token, "Host": "evil.example", "Content-Length": "7"}
        url = f"{self.elsewhere}/download/{asked['oid']}?signature=secret"
        return {**asked, "actions": {"download": {"href": url, "header": headers}}}


def add_large_file(repository: GitRepository) -> str:
    """Commit `LARGE` in Git LFS; return the commit."""
    git(repository.folder, "lfs", "install", "--local")
    git(repository.folder, "lfs", "track", "*.bin")
    repository.write("data/large.bin", LARGE, 0o755)
    repository.write("README", "read me\n")
    return repository.commit()


class LfsCase(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.large = GitRepository(self.folder / "large")
        self.commit = add_large_file(self.large)
        self.server = self.serve()

    def serve(self, **settings: Any) -> LfsServer:
        return stop_after(self, LfsServer(self.folder, **settings))

    @property
    def url(self) -> str:
        return f"{self.server.url}/large/.git"

    async def look(self, url: str = "", commit: str = "") -> list[Event]:
        identifier = await self.client.evaluate(url or self.url, commit or self.commit, LOOK)
        return await self.client.follow(identifier)

    async def refuse(self, *where: str) -> Any:
        """Return the error of an evaluation that names the file."""
        error = failure(await self.look(*where), "repository")
        self.assertEqual(error["path"], "data/large.bin")
        self.assertIn("'data/large.bin' is stored in Git LFS, ", error["message"])
        return error


@skipIf(shutil.which("git-lfs") is None, "needs git-lfs")
class LfsTests(LfsCase):
    configuration: ClassVar[str] = CONFIGURATION.replace(
        "[evaluations]", "tree_bytes = 8_000_000\nfetch_bytes = 6_000_000\n[evaluations]"
    )

    async def test_evaluator_finds_the_file_after_one_download(self) -> None:
        expected = f"755 3000000\n{SHA}  -\nread me\n"
        self.assertEqual(text(await self.look()), expected)
        self.large.write("README", "again\n")
        commit = self.large.commit()
        await self.daemon.stop()
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual(text(await self.look()), expected)
        self.assertIn("again", text(await self.look(commit=commit)))
        self.assertEqual(len(self.server.seen), 1)
        (headers,) = self.server.seen
        self.assertEqual(headers["Host"], self.server.url.partition("://")[2])
        self.assertNotIn("Content-Length", headers)

    async def test_download_from_another_host_obeys_the_rules_for_hosts_and_protocols(self) -> None:
        other = self.serve()
        self.server.elsewhere = other.url
        self.assertIn(SHA, text(await self.look()))
        self.assertEqual((len(self.server.seen), len(other.seen)), (0, 1))
        for url, words in (
            ("http://10.1.2.3", "has a private address"),
            ("http://[::1]:9", "has a private address"),
            ("https://localhost", "does not fetch over https"),
            ("file:///etc/passwd?", "does not"),
            ("http://me:secret@127.0.0.1", "cannot contain credentials"),
            ("http://127.0.0.1:1", "cannot connect to 127.0.0.1"),
            ("http://127.0.0.1/\u00e9", "is not valid"),
        ):
            self.server.elsewhere = url
            self.large.write("data/large.bin", os.urandom(1000))
            message = (await self.refuse("", self.large.commit()))["message"]
            self.assertIn(words, message)
            self.assertNotIn("signature", message)

    async def test_wrong_content_is_refused_and_leaves_nothing(self) -> None:
        for sent, words in (
            (LARGE[:-1], "does not announce 3000000 bytes"),
            (LARGE[:-1] + b"?", "has another SHA-256"),
        ):
            self.server.sent = sent
            self.assertIn(words, (await self.refuse())["message"])
        self.server.sent = None
        self.server.error = "a secret"
        message = (await self.refuse())["message"]
        self.assertTrue(message.endswith("the LFS server does not have the file"), message)
        self.server.error = ""
        self.assertIn(SHA, text(await self.look()))

    async def test_server_without_lfs_is_refused_with_the_reason(self) -> None:
        plain = stop_after(self, HttpServer(self.folder))
        message = (await self.refuse(f"{plain.url}/large/.git"))["message"]
        self.assertIn("answered with status 404; it has no LFS there", message)
        moved = stop_after(self, ScriptedServer(self.folder, ("/large/.git/info/lfs", 301, "/x")))
        message = (await self.refuse(f"{moved.url}/large/.git"))["message"]
        self.assertIn("answered with status 301; redirects are not followed", message)
        message = (await self.refuse(self.large.url))["message"]
        self.assertIn("fetches over https and http only", message)

    async def test_lfs_files_over_the_fetch_or_tree_limit_are_not_downloaded(self) -> None:
        self.large.write("data/two.bin", os.urandom(2_500_000))
        fitting = self.large.commit()
        self.large.write("README", os.urandom(1_000_000))
        fetched = self.large.commit()
        self.large.write("data/copy.bin", LARGE)
        for commit, limit in (
            (fetched, "repositories.fetch_bytes"),
            (self.large.commit(), "repositories.tree_bytes"),
        ):
            error = failure(await self.look(commit=commit), "repository")
            self.assertEqual(error["limit"], limit)
        self.assertEqual(self.server.seen, [])
        self.assertIn(SHA, text(await self.look(commit=fitting)))

    async def test_pointer_without_gitattributes_is_refused(self) -> None:
        self.assertIn(SHA, text(await self.look()))
        (self.large.folder / ".gitattributes").unlink()
        pointer = git(self.large.folder, "show", f"{self.commit}:data/large.bin") + "\n"
        self.large.write("data/large.bin", pointer)
        message = (await self.refuse("", self.large.commit()))["message"]
        self.assertIn("but not tracked in .gitattributes", message)


@skipIf(shutil.which("git-lfs") is None, "needs git-lfs")
class DownloadTests(BareRepositoryCase):
    """Downloads into a cached repository, without a daemon."""

    def setUp(self) -> None:
        self.make()
        self.commit = add_large_file(self.source)
        self.addCleanup(self.settle)

    async def settle(self) -> None:
        """Wait until the connections are closed, which have timers."""
        await until(
            lambda: (
                not any(
                    "_abort" in repr(call.func)  # type: ignore[attr-defined]
                    for call in reactor.getDelayedCalls()
                )
            ),
            "no connection is left",
        )

    def fetch(self, server: LfsServer, credential: Credential | None = None) -> Deferred[Commit]:
        repository = Repository(f"{server.url}/source/.git")
        return Deferred.fromCoroutine(self.bare.fetch_commit(repository, self.commit, credential))

    def serve(self, **settings: Any) -> LfsServer:
        return stop_after(self, LfsServer(self.folder, **settings))

    async def test_credential_is_sent_only_to_the_server_of_the_repository(self) -> None:
        for is_elsewhere in (False, True):
            server, other = self.serve(login="me:secret"), self.serve()
            server.elsewhere = other.url if is_elsewhere else server.url
            port = int(server.url.rpartition(":")[2])
            await self.fetch(server, Credential("127.0.0.1", port, "me", (), "secret"))
            (headers,) = server.seen + other.seen
            self.assertEqual("Authorization" in headers, not is_elsewhere)
            self.assertEqual(set(server.authorizations), {"Basic bWU6c2VjcmV0"})
            self.assertEqual((self.path / "lfs" / SHA).read_bytes(), LARGE)
            remove_tree(self.path)

    async def test_download_syncs_the_file_and_its_directory_to_the_disk(self) -> None:
        synced: list[str] = []
        fsync = os.fsync

        def record(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        self.patch(os, "fsync", record)
        await self.fetch(self.serve())
        objects = str(self.path / "lfs")
        self.assertEqual(synced, [f"{objects}/{SHA}.new", objects])

    async def test_cancelled_download_leaves_nothing(self) -> None:
        server = self.serve()
        server.holds_files = True
        fetching = self.fetch(server)
        await until(lambda: server.seen and server.half_sent.is_set(), "half of the file is sent")
        fetching.cancel()
        with self.assertRaises(CancelledError):
            await fetching
        self.assertEqual(list((self.path / "lfs").iterdir()), [])
        self.assertIs(self.bare.find_fetched_commit(self.commit), None)
        server.holds_files = False
        server.release()
        self.assertGreater((await self.fetch(server)).size, len(LARGE))
        self.assertEqual(len(server.seen), 2)

    async def test_malformed_answers_about_objects_are_errors(self) -> None:
        server = self.serve()
        for server.batch, words in (
            (b"[", "is malformed"),
            (b"[" * 50_000, "is malformed"),
            (b'{"objects": 7}', "is malformed"),
            (b'{"objects": [], "transfer": "ssh"}', "no basic transfers"),
            (b'{"objects": []}', "does not have the file"),
            (b'{"objects": [{"oid": "%s"}]}' % SHA.encode(), "does not have the file"),
            (b" " * 70_000, "is cut, or too long"),
        ):
            with self.assertRaises(EvaluationFailure) as caught:
                await self.fetch(server)
            self.assertIn(words, caught.exception.message)

    async def test_files_with_the_same_content_are_downloaded_once(self) -> None:
        for number in range(20):
            self.source.write(f"data/{number}.bin", str(number % 19))
        self.commit = self.source.commit()
        server = self.serve()
        found = await self.fetch(server)
        self.assertEqual(len(server.seen), 20)
        self.assertEqual(sum("batch" in request for request in server.requests), 2)
        tree, index = self.folder / "tree", self.folder / "index"
        tree.mkdir()
        index.mkdir()
        await self.bare.check_out_commit(found, tree, index)
        self.assertEqual((tree / "data/19.bin").read_text(), "0")
        size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
        self.assertEqual(size, found.size)

    async def test_file_lost_from_the_cache_is_fetched_again(self) -> None:
        server = self.serve()
        for _ in range(2):
            commit = await self.fetch(server)
            self.assertIsNot(self.bare.find_fetched_commit(self.commit), None)
            (self.path / "lfs" / SHA).unlink()
            place = Path(tempfile.mkdtemp(dir=self.folder))
            with self.assertRaises(EvaluationFailure) as caught:
                await self.bare.check_out_commit(commit, place, place)
            self.assertIn("lost from the cache", caught.exception.message)
            self.assertIs(self.bare.find_fetched_commit(self.commit), None)
        self.assertEqual(len(server.seen), 2)

    async def test_cached_file_of_wrong_size_is_fetched_again_unless_the_pointer_is_wrong(
        self,
    ) -> None:
        server = self.serve()
        commit = await self.fetch(server)
        os.truncate(self.path / "lfs" / SHA, 1000)
        (self.path / "commits" / self.commit).unlink()
        self.assertEqual(await self.fetch(server), commit)
        self.assertEqual((self.path / "lfs" / SHA).read_bytes(), LARGE)
        pointer = git(self.source.folder, "show", f"{self.commit}:data/large.bin") + "\n"
        git(self.source.folder, "lfs", "uninstall", "--local")
        self.source.write("data/large.bin", pointer.replace("size 3000000", "size 1"))
        self.commit = self.source.commit()
        with self.assertRaises(EvaluationFailure) as caught:
            await self.fetch(server)
        self.assertIn("does not announce 1 bytes", caught.exception.message)

    async def test_connection_that_ends_early_is_an_error(self) -> None:
        server = self.serve()
        server.cut = True
        with self.assertRaises(EvaluationFailure) as caught:
            await self.fetch(server)
        self.assertIn("the answer is cut", caught.exception.message)
        self.assertEqual(list((self.path / "lfs").iterdir()), [])
