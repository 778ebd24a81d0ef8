"""What is fetched, as an evaluator finds it: commits, submodules, and a damaged cache again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.integration.client import Event, joined, text
from tests.integration.harness import DaemonTestCase
from tests.integration.repositories import GitRepository, HttpServer, git, stop_after

EVALUATOR = """\
#!/bin/sh
echo "judging $(basename "$SUBMISSION_FILE_SOLUTION")"
printf 'case 1: '
test "$(cat "$SUBMISSION_FILE_SOLUTION")" = 42 && echo right || echo wrong
printf '\\n%s\\n{"goal": "correct", "points": 1.50}\\n%s\\n' \\
    "$EVALUATION_DATA_BEGIN" "$EVALUATION_DATA_END"
printf 'done'
"""

EVENTS = [
    "judging solution.txt\ncase 1: right\n",
    [{"goal": "correct", "points": 1.5}],
    "done",
]


class FetchingTests(DaemonTestCase):
    """One repository: an old commit, a tip, and a branch beside."""

    async def setUp(self) -> None:
        await super().setUp()
        self.repository.write("judge/evaluator.sh", EVALUATOR, 0o755)
        self.old = self.repository.commit()
        self.tips = self.repository.history("later")
        self.repository.branch("beside", self.old)
        self.beside = self.repository.history("beside")
        self.tag = self.repository.tag("v1")
        git(self.repository.folder, "checkout", "--quiet", "main")

    def http(self, *, v2: bool = True) -> tuple[HttpServer, str]:
        server = stop_after(self, HttpServer(self.folder, v2=v2))
        return server, f"{server.url}/repository/.git"

    async def judge(self, url: str, commit: str, **fields: str) -> None:
        identifier = await self.client.evaluate(
            url, commit, "./evaluator.sh", directory="judge", **fields
        )
        status = await self.client.ended(identifier)
        self.assertEqual(joined(await self.client.follow(identifier)), EVENTS)
        self.assertEqual(status["state"], "finished")
        self.assertEqual(status["commit_oid"], commit.lower())
        self.assertEqual(
            status["tree_oid"], git(self.repository.folder, "rev-parse", f"{commit}^{{tree}}")
        )

    async def test_newest_and_old_commits_branches_and_depths_are_fetched(self) -> None:
        server, url = self.http()
        await self.judge(url, self.tips[-1])
        await self.judge(url, self.old)
        await self.judge(url, self.beside[1], repository_branch="beside")
        await self.judge(url, self.tips[1].upper(), repository_depth="2")
        await self.judge(url, self.beside[2], repository_branch="beside", repository_depth="2")
        self.assertEqual(server.fetches, 5)

    async def test_protocol_v0_server_sends_the_branch_or_else_all_branches(self) -> None:
        server, url = self.http(v2=False)
        await self.judge(url, self.beside[0], repository_branch="beside")
        asked = server.fetches
        await self.judge(url, self.beside[1], repository_branch="beside")
        self.assertEqual(server.fetches, asked, "the branch was there already")
        await self.judge(url, self.tips[0])
        self.assertGreater(server.fetches, asked, "the other branch was not")
        for fields in (
            {"repository_branch": "missing"},
            {"repository_branch": "beside", "repository_depth": "1"},
        ):
            _, url = self.http(v2=False)
            await self.judge(url, self.beside[0], **fields)

    async def test_annotated_tag_is_resolved_to_its_commit(self) -> None:
        folder = self.repository.folder
        git(folder, "tag", "--annotate", "--message=A mark of a mark", "nested", "v1")
        commit = git(folder, "rev-parse", "v1^{commit}")
        tags = self.tag, git(folder, "rev-parse", "nested").upper()
        before = len(list(self.daemon.cache.glob("repositories/*.tree")))
        servers = self.http(), self.http(v2=False)
        for url in (self.repository.url, *(url for _, url in servers)):
            for oid in (*tags, commit):
                identifier = await self.client.evaluate(
                    url, oid, "./evaluator.sh", directory="judge"
                )
                status = await self.client.ended(identifier)
                self.assertEqual(joined(await self.client.follow(identifier)), EVENTS)
                self.assertEqual(status["commit_oid"], commit)
        trees = list(self.daemon.cache.glob("repositories/*.tree"))
        self.assertEqual(len(trees) - before, 3)


class SubmoduleTests(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.server = stop_after(self, HttpServer(self.folder))

    def make(self, name: str) -> GitRepository:
        """Return a new repository with a file `code`, which has the name, and a link."""
        made = GitRepository(self.folder / name)
        made.write("code", f"code of {name}\n")
        made.link("outside", "/etc/passwd")
        made.commit()
        return made

    def add(self, parent: GitRepository, name: str, url: str) -> str:
        """Add the newest commit of a repository as a submodule; return the parent's new commit."""
        commit = git(self.folder / name, "rev-parse", "HEAD")
        for key, value in (("path", f"lib/{name}"), ("url", url)):
            setting = f"submodule.{name}.{key}"
            git(parent.folder, "config", "--file", ".gitmodules", setting, value)
        git(parent.folder, "update-index", "--add", "--cacheinfo", f"160000,{commit},lib/{name}")
        git(parent.folder, "add", ".gitmodules")
        git(parent.folder, "commit", "--quiet", "--message=A submodule")
        return git(parent.folder, "rev-parse", "HEAD")

    async def look(self, commit: str, url: str | None = None) -> list[Event]:
        command = "find . -name code | sort | xargs cat"
        identifier = await self.client.evaluate(
            url or f"{self.server.url}/problem/.git", commit, command
        )
        return await self.client.follow(identifier)

    async def test_evaluator_finds_nested_submodules_after_one_fetch(self) -> None:
        problem, one = self.make("problem"), self.make("one")
        self.make("two")
        self.add(one, "two", "../../two/.git")
        commit = self.add(problem, "one", "../../one/.git")
        expected = "code of problem\ncode of one\ncode of two\n"
        self.assertEqual(text(await self.look(commit)), expected)
        fetches = self.server.fetches
        await self.daemon.stop()
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual(text(await self.look(commit)), expected)
        self.assertEqual(self.server.fetches, fetches)

    async def test_local_repository_has_local_submodules(self) -> None:
        problem = self.make("problem")
        commit = self.add(problem, "one", self.make("one").url)
        events = await self.look(commit, problem.url)
        self.assertEqual(text(events), "code of problem\ncode of one\n")


def truncate(path: Path, size: int) -> None:
    """Cut a file off, though it is read-only."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(size)


def scribble(path: Path) -> None:
    """Overwrite bytes in the midst of a file."""
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


class DamagedRepositoryTests(DaemonTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        with open("/dev/urandom", "rb") as random:
            self.repository.write("large", random.read(100_000))
        self.commit = self.repository.commit()
        self.server = stop_after(self, HttpServer(self.folder))
        self.url = f"{self.server.url}/repository/.git"

    async def evaluate(self) -> str:
        identifier = await self.client.evaluate(self.url, self.commit, "cat README; wc -c <large")
        return text(await self.client.follow(identifier))

    def cached(self) -> Path:
        (found,) = (
            file.parent
            for file in self.daemon.cache.glob("repositories/*/url")
            if file.read_text().strip() == self.url
        )
        return found

    async def check(self, harm: Callable[[Path], object]) -> None:
        """Check that harm to the cache costs one more fetch, and nothing else."""
        await self.evaluate()
        asked = self.server.fetches
        self.lose_tree()
        harm(self.cached())
        self.assertEqual(await self.evaluate(), "an evaluator\n100000\n")
        self.assertEqual(self.server.fetches, asked + 1)
        await self.evaluate()
        self.assertEqual(self.server.fetches, asked + 1)
        self.assertEqual(list(self.daemon.cache.glob("repositories/*.old-*")), [])

    def lose_tree(self) -> None:
        """Remove what is checked out: without it git has to read the repository."""
        (checkout,) = self.cached().parent.glob(f"{self.cached().stem}-*.tree")
        shutil.rmtree(checkout)

    def each(self, pattern: str, harm: Callable[[Path], object]) -> Callable[[Path], None]:
        def all_of(repository: Path) -> None:
            files = list(repository.glob(pattern))
            self.assertTrue(files)
            for file in files:
                harm(file)

        return all_of

    async def test_damaged_packs_are_fetched_again(self) -> None:
        for pattern in ("objects/pack/*.pack", "objects/pack/*.idx"):
            await self.check(self.each(pattern, Path.unlink))
            await self.check(self.each(pattern, lambda file: truncate(file, 1000)))
            await self.check(self.each(pattern, lambda file: truncate(file, 0)))
        await self.check(self.each("objects/pack/*.pack", scribble))

    async def test_damaged_repository_is_fetched_again(self) -> None:
        for name in ("objects", "refs"):
            await self.check(lambda repository, name=name: shutil.rmtree(repository / name))
        await self.check(lambda repository: (repository / "HEAD").unlink())
        await self.check(lambda repository: (repository / "config").write_text("[x"))
        await self.check(shutil.rmtree)
