"""Attacks by URL and by repository. After each the daemon is well, and nothing is left."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SkipTest

from tawebeval.core.hosts import HostPolicy, ResolvedGitRemote
from tawebeval.git.command import GitRunner
from tawebeval.git.remotes import RemoteResolver
from tawebeval.git.repository import create_repository
from tawebeval.linux.child import spawn_child
from tawebeval.pinned_agent import CheckedResolver
from tests.cases.patience import PATIENCE
from tests.fakes.resolver import FakeResolver
from tests.integration.client import failure, text
from tests.integration.harness import (
    CONFIGURATION,
    DaemonTestCase,
    RepositoryTestCase,
    until,
)
from tests.integration.repositories import (
    ENVIRONMENT,
    GitDaemon,
    GitRepository,
    HttpServer,
    ScriptedServer,
    git,
    stop_after,
)

MIB = 2**20


def make_object(repository: Path, kind: str, content: bytes) -> str:
    """Write an object, however malformed; return its OID."""
    done = subprocess.run(
        ["git", "hash-object", "-t", kind, "-w", "--stdin", "--literally"],
        cwd=repository,
        env=ENVIRONMENT,
        input=content,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def make_commit(repository: Path, tree: str) -> str:
    """Commit a tree in the branch main; return the commit's OID."""
    oid = git(repository, "commit-tree", "-m", "An attack", tree)
    git(repository, "update-ref", "refs/heads/main", oid)
    return oid


def entry(mode: str, name: str, oid: str) -> bytes:
    """Return an entry of a tree object."""
    return f"{mode} {name}\0".encode() + bytes.fromhex(oid)


def varint(number: int) -> bytes:
    """Return a size as deltas have it: seven bits at a time, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def pack_entry(kind: int, content: bytes, base: bytes = b"") -> bytes:
    """Return an object of a pack; `kind` 3 is a blob, 7 a delta to `base`."""
    size = len(content)
    head = varint(size >> 4) if size > 15 else b""
    first = kind << 4 | size & 15 | (128 if head else 0)
    return bytes([first]) + head + base + zlib.compress(content)


def blob_oid(content: bytes) -> str:
    """Return the OID of a blob."""
    return sha1(b"blob %d\0" % len(content) + content).hexdigest()


class TurningServer(HttpServer):
    """A git server that has plain files when it is asked again; `objects` were asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, dumb=True)
        self.objects: list[str] = []
        self._advertised = False

    def answer(self, handler: BaseHTTPRequestHandler, path: str, body: bytes) -> bool:
        if "/objects/" in path:
            self.objects.append(path)
        if self._advertised or not path.endswith("/info/refs"):
            return False
        self._advertised = True
        line = b"1" * 40 + b" HEAD\0shallow ofs-delta agent=x\n"
        handler.send_response(200)
        handler.send_header("Content-Type", "application/x-git-upload-pack-advertisement")
        handler.end_headers()
        first = b"001e# service=git-upload-pack\n0000"
        handler.wfile.write(b"%b%04x%b0000" % (first, len(line) + 4, line))
        return True


class AttackTestCase(DaemonTestCase):
    async def refuse(self, url: str, commit: str | None = None, reason: str = "repository") -> Any:
        """Check that an evaluation fails for that reason, and an honest one then does not."""
        identifier = await self.client.evaluate(url, commit or self.commit, "echo never")
        error = failure(await self.client.follow(identifier), reason)
        await self.honest()
        return error

    async def honest(self) -> None:
        """Check that the daemon answers, and an honest evaluation ends right."""
        self.assertEqual((await self.client.get("/health")).code, 200)
        await self.daemon.nothing_left()


class UrlTests(AttackTestCase):
    """A daemon that fetches over the network, and from public addresses only."""

    configuration: ClassVar[str] = '[repositories]\nprotocols = ["http", "git", "ssh"]\n'

    @contextmanager
    def listener(self) -> Iterator[tuple[socket.socket, int]]:
        """Listen where nobody may come."""
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            silent.setblocking(False)
            yield silent, silent.getsockname()[1]
            with self.assertRaises(BlockingIOError):
                silent.accept()

    async def test_private_addresses_are_not_connected_to(self) -> None:
        with self.listener() as (_, port):
            for url in (
                f"http://127.0.0.1:{port}/x",
                f"http://localhost:{port}/x",
                f"http://[::ffff:127.0.0.1]:{port}/x",
                f"git://127.0.0.1:{port}/x",
                f"git://localhost:{port}/x",
                f"ssh://localhost:{port}/x",
                "localhost:x",
                "http://169.254.169.254/latest/meta-data",
                "http://[::1]/x",
                "http://0.0.0.0/x",
            ):
                error = await self.refuse(url)
                self.assertIn("repositories.private_networks", error["message"])

    async def honest(self) -> None:
        """Check that the daemon answers; there is nothing here that it could fetch."""
        self.assertEqual((await self.client.get("/health")).code, 200)


class PinTests(RepositoryTestCase):
    """A name that leads to one address when it is checked and to another one afterwards."""

    async def fetch(self, route: ResolvedGitRemote) -> str:
        """Fetch by a route, as the cache does; return what git said."""
        spawn = partial(spawn_child, reactor)
        runner = GitRunner(reactor, spawn, ("http", "git", "ssh"))
        path = self.folder / "pinned.git"
        if not path.exists():
            create_repository(path)
        fetch = ("fetch", "--quiet", "--end-of-options", route.url, f"{self.commit}:refs/x")
        outcome = await runner.run_command(
            path, *fetch, environment=route.environment_variables, timeout=PATIENCE
        )
        return outcome.stderr if outcome.status else ""

    async def route(self, url: str) -> ResolvedGitRemote:
        """Return the route to a name which no real resolver knows."""
        resolver = FakeResolver(["127.0.0.1"], ["127.0.0.2"])
        policy = HostPolicy(allowed_private_networks=["127.0.0.0/8"])
        remotes = RemoteResolver(CheckedResolver(policy, resolver, reactor))
        found, _ = await remotes.resolve_remote(url)
        return found

    async def test_git_connects_to_the_pinned_address(self) -> None:
        server = stop_after(self, GitDaemon(self.repository.folder.parent))
        url = server.url.replace("127.0.0.1", "pinned.invalid") + "/repository"
        self.assertEqual(await self.fetch(await self.route(url)), "")
        self.assertIn("pinned.invalid", await self.fetch(ResolvedGitRemote(url)), "without the pin")

    async def test_ssh_connects_to_the_pinned_address(self) -> None:
        if not Path("/usr/bin/ssh").exists():
            raise SkipTest("needs ssh")
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            server.setblocking(False)
            url = f"ssh://git@pinned.invalid:{server.getsockname()[1]}/x"
            self.assertIn(
                "pinned.invalid", await self.fetch(ResolvedGitRemote(url)), "without the pin"
            )
            fetching = Deferred.fromCoroutine(self.fetch(await self.route(url)))

            def accept() -> socket.socket | None:
                try:
                    return server.accept()[0]
                except BlockingIOError:
                    return None

            connection = await until(accept, "ssh has come")
            with connection:
                connection.setblocking(True)
                connection.settimeout(PATIENCE)
                self.assertTrue(connection.recv(100).startswith(b"SSH-2.0"))
            self.assertTrue(await fetching)


class RepositoryTests(AttackTestCase):
    """Repositories that are made to do harm, with small limits."""

    configuration: ClassVar[str] = CONFIGURATION.replace(
        "[evaluations]",
        f"fetch_bytes = {4 * MIB}\nmemory = {96 * MIB}\ntree_bytes = {8 * MIB}\n[evaluations]",
    )

    async def setUp(self) -> None:
        await super().setUp()
        self.evil = GitRepository(self.folder / "evil").folder

    async def honest(self) -> None:
        """Check that the daemon answers, and an honest evaluation ends right."""
        await super().honest()
        self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")
        await self.daemon.nothing_left()

    async def attack(self, tree: str, reason: str = "repository") -> Any:
        commit = make_commit(self.evil, tree)
        return await self.refuse(f"file://{self.evil}", commit, reason)

    async def test_errors_faked_by_a_url_or_server_leave_the_daemon_ready(self) -> None:
        (self.folder / "loop").symlink_to("loop")
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            words = b"ERR x\nfatal: No space left on device"

            def answer() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"%04x%b" % (len(words) + 4, words))

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            for url, reason in (
                (f"file://{self.folder}/{'x' * 300}", "repository"),
                (f"file://{self.folder}/loop/x", "repository"),
                (f"file://{self.folder}/No space left on device", "lost"),
                (f"git://127.0.0.1:{server.getsockname()[1]}/x", "lost"),
            ):
                identifier = await self.client.evaluate(url, self.commit, "echo never")
                failure(await self.client.follow(identifier), reason)
                self.assertEqual((await self.client.get("/health/ready")).code, 200, url)
            thread.join()
        await self.honest()

    def limit(self, error: Any, name: str, value: int) -> None:
        self.assertEqual((error["limit"], error["value"]), (f"repositories.{name}", value))

    def cached(self, url: str) -> int:
        """Return how many bytes of objects the cache keeps of a URL."""
        for file in self.daemon.cache.glob("repositories/*/url"):
            if file.read_text().strip() == url:
                found = (file.parent / "objects").rglob("*")
                return sum(one.stat().st_size for one in found if one.is_file())
        return 0

    async def test_a_tree_bomb_is_not_checked_out(self) -> None:
        for leaf in ("blob", "tree"):  # with a file in each, and with nothing at all
            oid = make_object(self.evil, leaf, b"")
            mode = "100644" if leaf == "blob" else "40000"
            for _ in range(10):
                content = b"".join(entry(mode, f"d{i}", oid) for i in range(10))
                oid, mode = make_object(self.evil, "tree", content), "40000"
            error = await self.attack(oid)
            self.assertIn("over 100000 files and directories", error["message"])

    async def test_a_deep_tree_is_not_checked_out(self) -> None:
        oid = make_object(self.evil, "blob", b"")
        mode = "100644"
        for _ in range(60):
            oid, mode = make_object(self.evil, "tree", entry(mode, "d" * 100, oid)), "40000"
        self.assertIn("path", (await self.attack(oid))["message"])

    async def starve(self, tree: str) -> None:
        commit = make_commit(self.evil, tree)
        url = f"file://{self.evil}"
        self.limit(await self.refuse(url, commit), "memory", 96 * MIB)
        self.assertLess(self.cached(url), 10_000)

    async def test_a_huge_tree_object_does_not_take_the_memory(self) -> None:
        blob = make_object(self.evil, "blob", b"")
        name = "x" * (200 * MIB)
        await self.starve(make_object(self.evil, "tree", entry("100644", name, blob)))

    async def test_a_delta_bomb_does_not_take_the_memory(self) -> None:
        base = bytes(64 * 1024)
        copies = 8 * 1024
        delta = varint(len(base)) + varint(len(base) * copies) + b"\x80" * copies
        oid = blob_oid(base * copies)
        pack = b"PACK" + struct.pack(">II", 2, 2)
        pack += pack_entry(3, base) + pack_entry(7, delta, bytes.fromhex(blob_oid(base)))
        pack += sha1(pack).digest()
        subprocess.run(
            ["git", "index-pack", "--stdin"],
            cwd=self.evil,
            env=ENVIRONMENT,
            input=pack,
            capture_output=True,
            check=True,
        )
        await self.starve(make_object(self.evil, "tree", entry("100644", "x", oid)))

    async def test_a_huge_blob_is_not_checked_out(self) -> None:
        blob = make_object(self.evil, "blob", bytes(9 * MIB))
        error = await self.attack(make_object(self.evil, "tree", entry("100644", "x", blob)))
        self.limit(error, "tree_bytes", 8 * MIB)

    async def test_a_giant_fetch_leaves_no_bytes(self) -> None:
        with open("/dev/urandom", "rb") as random:
            blob = make_object(self.evil, "blob", random.read(6 * MIB))
        commit = make_commit(self.evil, make_object(self.evil, "tree", entry("100644", "x", blob)))
        server = stop_after(self, HttpServer(self.folder))
        for url in (f"file://{self.evil}", f"{server.url}/evil/.git"):
            self.limit(await self.refuse(url, commit), "fetch_bytes", 4 * MIB)
            self.assertLess(self.cached(url), 10_000)

    async def test_server_that_switches_from_smart_http_to_plain_files_is_refused(self) -> None:
        commit = make_commit(self.evil, make_object(self.evil, "tree", b""))
        git(self.evil, "update-server-info")
        server = stop_after(self, TurningServer(self.folder))
        url = f"{server.url}/evil/.git"
        error = await self.refuse(url, commit)
        self.assertIn("a server of plain files", error["message"])
        self.assertEqual(server.objects, [])
        self.assertLess(self.cached(url), 10_000)

    async def test_a_repository_of_another_user_is_served(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can give files to another user")
        canary = self.folder / "canary"
        git(self.evil, "config", "uploadpack.packObjectsHook", f"touch {canary};")
        git(self.evil, "config", "core.fsmonitor", f"touch {canary}")
        commit = make_commit(self.evil, make_object(self.evil, "tree", b""))
        self.folder.chmod(0o755)
        for path in (self.evil, *self.evil.rglob("*")):
            os.chown(path, 12345, 12345)  # neither ours nor the daemon's
        identifier = await self.client.evaluate(f"file://{self.evil}", commit, "echo judged")
        self.assertEqual(text(await self.client.follow(identifier)), "judged\n")
        self.assertFalse(canary.exists())

    async def test_alternates_of_this_machine_are_not_followed(self) -> None:
        other = GitRepository(self.folder / "other")
        other.write("private", "private\n")
        commit = other.commit()
        alternates = self.evil / ".git/objects/info/alternates"
        alternates.write_text(f"{other.folder}/.git/objects\n")
        git(self.evil, "update-ref", "refs/heads/main", commit)
        await self.refuse(f"file://{self.evil}", commit, "commit")
        inside = GitRepository(self.folder / "inside")
        (inside.folder / ".git/objects").rename(self.folder / "objects")
        (inside.folder / ".git/objects").symlink_to(other.folder / ".git/objects")
        git(inside.folder, "update-ref", "refs/heads/main", commit)
        await self.refuse(inside.url, commit)

    async def test_hooks_and_filters_do_not_run(self) -> None:
        canary = self.folder / "canary"
        for hook in ("post-checkout", "post-index-change", "reference-transaction", "pre-receive"):
            path = self.evil / ".git" / "hooks" / hook
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\ntouch {canary}\n")
            path.chmod(0o755)
        for name, value in {
            "core.fsmonitor": f"touch {canary}",
            "filter.evil.smudge": f"touch {canary}",
            "uploadpack.packObjectsHook": f"touch {canary};",
            "core.sshCommand": f"touch {canary};",
        }.items():
            git(self.evil, "config", name, value)
        repository = self.evil
        (repository / ".gitattributes").write_text("* filter=evil\n")
        (repository / ".gitmodules").write_text(
            f'[submodule "sub"]\n\tpath = sub\n\turl = ../{self.repository.folder.name}\n'
            "\tupdate = none\n"
        )
        git(repository, "-c", "core.fsmonitor=false", "-c", "filter.evil.smudge=cat", "add", ".")
        git(repository, "update-index", "--add", "--cacheinfo", f"160000,{self.commit},sub")
        commit = make_commit(repository, git(repository, "write-tree"))
        canary.unlink(missing_ok=True)
        for _ in range(2):
            identifier = await self.client.evaluate(f"file://{repository}", commit, "ls sub")
            self.assertNotEqual(text(await self.client.follow(identifier)), "")
        self.assertFalse(canary.exists())
        await self.honest()

    async def test_redirects_are_not_followed(self) -> None:
        target = stop_after(self, HttpServer(self.repository.folder.parent))
        for location in (f"file://{self.folder}", target.url, "http://169.254.169.254"):
            redirector = stop_after(
                self, ScriptedServer(self.folder, ("/repository", 302, f"{location}/repository"))
            )
            await self.refuse(f"{redirector.url}/repository/.git")
            self.assertNotEqual(redirector.requests, [])
        self.assertEqual(target.requests, [])
