"""The main job: a commit is fetched, and its evaluator is run."""

from __future__ import annotations

from tests.integration.client import failure, joined
from tests.integration.harness import DaemonTestCase
from tests.integration.repositories import HttpServer, git

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
        server = HttpServer(self.folder, v2=v2)
        self.addCleanup(server.stop)
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

    async def test_v0_server_gives_a_branch_or_everything_where_no_branch_helps(self) -> None:
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

    async def test_annotated_tag_is_its_commit(self) -> None:
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

    async def test_object_that_is_no_commit_is_named(self) -> None:
        folder = self.repository.folder
        git(folder, "tag", "--annotate", "--message=A mark", "tree", "HEAD^{tree}")
        git(folder, "tag", "--annotate", "--message=A mark", "blob", "HEAD:later")
        for url in (self.http()[1], self.repository.url, self.http(v2=False)[1]):
            for revision in ("tree", "blob", "HEAD^{tree}", "HEAD:later"):
                oid = git(folder, "rev-parse", revision)
                identifier = await self.client.evaluate(url, oid, "true")
                error = failure(await self.client.follow(identifier), "commit")
                # A v0 server hands out what it advertises.
                if ("^" not in revision and ":" not in revision) or url == self.repository.url:
                    self.assertIn(f"{oid} is a tree or a file", error["message"], url)
