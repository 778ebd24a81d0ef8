"""Objects as old importers and other programs have written them, fetched by a real git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tawebeval.core.evaluations import Commit
from tawebeval.core.form import Repository
from tawebeval.errors import EvaluationFailure
from tests.integration.bare_repositories import BareRepositoryCase
from tests.integration.repositories import ENVIRONMENT, git
from tests.integration.test_git_attacks import entry, make_object

PERSON = "A <a@example.org> 1287367363 +0000"

# By the message of git-fsck(1). In each git clone sees no fault.
OLD_COMMITS = {
    "badDate": (f"author {PERSON}", "committer A <a@example.org> 12x7367363 +0000"),
    "badDateOverflow": (f"author {PERSON}", f"committer A <a@example.org> {'9' * 20} +0000"),
    "badEmail": ("author A <a@example.org 1287367363 +0000", f"committer {PERSON}"),
    "badName": ("author A > B <a@example.org> 1287367363 +0000", f"committer {PERSON}"),
    "badTimezone": ("author A <a@example.org> 1287367363 -700", f"committer {PERSON}"),
    "missingAuthor": (f"committer {PERSON}",),
    "missingCommitter": (f"author {PERSON}",),
    "missingEmail": ("author A 1287367363 +0000", f"committer {PERSON}"),
    "missingNameBeforeEmail": ("author <a@example.org> 1287367363 +0000", f"committer {PERSON}"),
    "missingSpaceBeforeDate": (
        "author A <a@example.org>1287367363 +0000",
        f"committer {PERSON}",
    ),
    "missingSpaceBeforeEmail": (
        "author A<a@example.org> 1287367363 +0000",
        f"committer {PERSON}",
    ),
    "multipleAuthors": (f"author {PERSON}", f"author {PERSON}", f"committer {PERSON}"),
    "nulInCommit": (f"author {PERSON}", f"committer {PERSON}", "", "a\0b"),
    "zeroPaddedDate": ("author A <a@example.org> 01287367363 +0000", f"committer {PERSON}"),
}


class ObjectTests(BareRepositoryCase):
    def setUp(self) -> None:
        self.make()
        self.source.write("file", "content\n")
        self.good = self.source.commit()
        self.tree = git(self.source.folder, "rev-parse", "HEAD^{tree}")

    def commit(self, *lines: str, tree: str = "") -> str:
        """Write a commit with these lines after that of its tree; return its OID."""
        content = "\n".join([f"tree {tree or self.tree}", *lines])
        end = "" if "" in lines else "\n\nold\n"
        return make_object(self.source.folder, "commit", (content + end).encode())

    def check_objects(self) -> str:
        """Return the faults that git-fsck(1) finds in the repository to fetch from."""
        done = subprocess.run(
            ["git", "fsck", "--strict"],
            cwd=self.source.folder, env=ENVIRONMENT, capture_output=True, text=True,
        )  # fmt: skip
        return done.stderr

    async def fetch(self, oid: str) -> Commit:
        git(self.source.folder, "update-ref", "--no-deref", "refs/heads/old", oid)
        return await self.bare.fetch_commit(Repository(self.source.url), oid)

    async def check_out(self, commit: Commit) -> Path:
        out, index = self.folder / "out", self.folder / "index"
        for directory in (out, index):
            directory.mkdir()
        await self.bare.check_out_commit(commit, out, index)
        return out

    async def test_commits_with_faults_of_old_importers_are_fetched(self) -> None:
        for fault, lines in OLD_COMMITS.items():
            with self.subTest(fault):
                oid = self.commit(*lines)
                self.assertIn(fault, self.check_objects())
                self.assertEqual((await self.fetch(oid)).tree_oid, self.tree)

    async def test_tree_entry_with_a_zero_padded_mode_is_checked_out(self) -> None:
        blob = git(self.source.folder, "rev-parse", "HEAD:file")
        inner = make_object(self.source.folder, "tree", entry("100644", "x", blob))
        content = entry("040000", "d", inner) + entry("100644", "e", blob)
        tree = make_object(self.source.folder, "tree", content)
        commit = await self.fetch(self.commit(*OLD_COMMITS["badTimezone"], tree=tree))
        out = await self.check_out(commit)
        self.assertEqual((out / "d/x").read_text(), "content\n")

    async def test_malicious_tree_objects_are_refused(self) -> None:
        blob = git(self.source.folder, "rev-parse", "HEAD:file")
        url = make_object(
            self.source.folder, "blob", b'[submodule "a"]\n\tpath = a\n\turl = -u./payload\n'
        )
        for fault, content in {
            "hasDotgit": entry("40000", ".git", self.tree),
            "hasDotdot": entry("40000", "..", self.tree),
            "hasDot": entry("40000", ".", self.tree),
            "fullPathname": entry("100644", "a/b", blob),
            "gitmodulesUrl": entry("100644", ".gitmodules", url),
            "gitmodulesSymlink": entry("120000", ".gitmodules", blob),
            "duplicateEntries": entry("100644", "a", blob) * 2,
            "treeNotSorted": entry("100644", "b", blob) + entry("100644", "a", blob),
        }.items():
            with self.subTest(fault):
                tree = make_object(self.source.folder, "tree", content)
                with self.assertRaises(EvaluationFailure) as caught:
                    await self.fetch(self.commit(*OLD_COMMITS["badTimezone"], tree=tree))
                self.assertIn(fault, str(caught.exception.extra_members["stderr"]))

    async def test_checkout_has_the_bytes_that_git_writes(self) -> None:
        attributes = (
            "[attr]dos eol=crlf\n*.in text eol=crlf\n*.mac dos\n*.u16 text"
            " working-tree-encoding=UTF-16LE\n*.f filter=evil\n*.bad text"
            " working-tree-encoding=NONE\n"
        )
        self.source.write("sub/.gitattributes", "*.u32 working-tree-encoding=UTF-32BE eol=crlf\n")
        self.source.write(".gitattributes", attributes)
        git(self.source.folder, "add", ".gitattributes", "sub/.gitattributes")
        for name in ("a.in", "a.mac", "a.u16", "a.f", "a.bad", "sub/a.u32", "a.bin"):
            blob = make_object(self.source.folder, "blob", "1 é\n$Id$\n\n".encode())
            git(self.source.folder, "update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
        tree = git(self.source.folder, "write-tree")
        oid = git(self.source.folder, "commit-tree", "-m", "x", tree)
        commit = await self.fetch(oid)
        out = await self.check_out(commit)
        top = self.source.folder
        git(top, "checkout", "--quiet", "--force", "--detach", oid)
        found = {
            str(path.relative_to(top)): path.read_bytes()
            for path in top.rglob("*")
            if path.is_file() and ".git" not in path.relative_to(top).parts
        }
        self.assertIn(b"1 \xc3\xa9\r\n", found["a.in"])
        self.assertEqual(found["a.u16"][:4], b"1\0 \0")
        self.assertEqual({name: (out / name).read_bytes() for name in found}, found)
        self.assertEqual(commit.size, sum(map(len, found.values())))
        self.assertEqual(self.bare.find_fetched_commit(oid), commit)

    async def test_checkout_is_refused_if_eol_conversion_makes_it_too_large(self) -> None:
        self.source.write(".gitattributes", "* text eol=crlf\n")
        for number in range(4):
            self.source.write(f"{number}.txt", f"{number}" + "\n" * 3 * 2**19)
        with self.assertRaises(EvaluationFailure) as caught:
            await self.fetch(self.source.commit())
        self.assertEqual(caught.exception.extra_members["limit"], "repositories.tree_bytes")
        self.assertFalse((self.path / "lfs/checkout").exists())
