"""Submodules: `.gitmodules` and the URLs in it, which are strangers', and their checkouts."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from itertools import pairwise
from pathlib import Path
from socket import EAI_AGAIN, gaierror

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.checkout import Commit, Submodule
from tawebeval.core.form import Repository
from tawebeval.core.hosts import parse_server_address
from tawebeval.errors import EvaluationFailure
from tawebeval.git.command import GitResult
from tawebeval.git.submodules import (
    SubmoduleUrlParser,
    build_submodule_list_command,
    resolve_submodule_url,
)
from tests.cases.git import DONE, OTHER, URL, CacheTestCase, Command, failed
from tests.fakes.world import OID, TREE

PARENTS = (
    *("https://h/a/b.git", "https://h/a/b/", "ssh://git@h:22/a/b", "git@h:a/b.git"),
    *("git://h/a/b", "/srv/a/b", "file:///srv/a/b"),
)


def listed(modules: Mapping[str, Mapping[str, str]]) -> bytes:
    """Return what git prints of `.gitmodules`."""
    return b"".join(
        f"submodule.{name}.{key}\n{value}\0".encode()
        for name, settings in modules.items()
        for key, value in settings.items()
    )


class UrlsTests(SynchronousTestCase):
    """URLs of the submodules of a commit."""

    def complete(self, printed: bytes, *paths: str, cuts: list[int] | None = None) -> Commit:
        """Return a commit with submodules at `paths`, whose URLs git prints."""
        urls = SubmoduleUrlParser()
        edges = [0, *sorted(min(cut, len(printed)) for cut in cuts or ()), len(printed)]
        for start, end in pairwise(edges):
            urls.feed(printed[start:end])
        return urls.complete(
            Commit(OID, TREE, submodules=tuple(Submodule(path, "0") for path in paths))
        )

    @given(st.lists(st.integers(0, 200)))
    def test_found(self, cuts: list[int]) -> None:
        """Each submodule has the URL of its path, whatever its name; other settings are ignored."""
        printed = b"core.bare\0plain\0" + listed(
            {
                "other": {"path": "gone", "url": "https://h/gone"},
                "a.b c": {"path": "lib/x", "url": "../x", "update": "!rm -rf ~"},
                "half": {"path": "lib/y"},
                "y": {"url": "https://h/y?\n", "path": "lib/y/", "branch": "main"},
            }
        )
        found = self.complete(printed, "lib/x", "lib/y", cuts=cuts)
        self.assertEqual([each.url for each in found.submodules], ["../x", "https://h/y?\n"])

    def test_missing(self) -> None:
        """A submodule without a URL is an error that names its path."""
        for printed in (b"", listed({"x": {"path": "x"}}), listed({"x": {"url": "https://h/x"}})):
            error = self.assertRaises(EvaluationFailure, self.complete, printed, "x")
            self.assertEqual((error.reason, error.extra_members), ("repository", {"path": "x"}))
            self.assertIn("the submodule at 'x' has no URL in .gitmodules", error.message)

    def test_size(self) -> None:
        """A list over 64 KiB is refused while it is read."""
        self.complete(b"x" * 64 * 1024)
        error = self.assertRaises(EvaluationFailure, self.complete, b"x" * (64 * 1024 + 1))
        self.assertEqual(error.message, "the commit's .gitmodules is over 64 KiB")

    @given(st.binary(max_size=50))
    def test_any(self, printed: bytes) -> None:
        """Nothing that git prints is an error by itself."""
        self.complete(printed)

    def test_command(self) -> None:
        """The file is read in the commit, and no other."""
        command = build_submodule_list_command(OID)
        self.assertIn(f"--blob={OID}:.gitmodules", command)
        self.assertIn("--no-includes", command)


class ResolveTests(SynchronousTestCase):
    """URLs in `.gitmodules`, as git reads them."""

    def test_relative(self) -> None:
        """A relative URL leads from the URL of the parent."""
        for parent, url, expected in (
            ("https://h/a/b.git", "../c.git", "https://h/a/c.git"),
            ("https://h/a/b/", "../c", "https://h/a/c"),
            ("https://h/a/b", "./c", "https://h/a/b/c"),
            ("https://h:8080/a/b", "../../c/", "https://h:8080/c"),
            ("ssh://git@h/a/b", "../c", "ssh://git@h/a/c"),
            ("git@h:a/b.git", "../c.git", "git@h:a/c.git"),
            ("/srv/a/b", "../c", "/srv/a/c"),
            ("file:///srv/a/b", "../../c", "file:///srv/c"),
        ):
            self.assertEqual(resolve_submodule_url(url, parent), expected)

    def test_absolute(self) -> None:
        """Another URL stays as it is."""
        for url in ("https://other/x", "git@other:x", "ssh://u@other/x"):
            for parent in PARENTS:
                self.assertEqual(resolve_submodule_url(url, parent), url)
        self.assertEqual(resolve_submodule_url("/srv/x", "/srv/a"), "/srv/x")

    def test_path(self) -> None:
        """A repository on a network has no submodule on this machine."""
        for url in ("/srv/x", "file:///srv/x"):
            for parent in PARENTS[:5]:
                self.assertRaises(ValueError, resolve_submodule_url, url, parent)

    @given(st.sampled_from(PARENTS), st.lists(st.sampled_from([".", "..", "c", "@x:", ""])))
    def test_same_server(self, parent: str, parts: list[str]) -> None:
        """A relative URL never leads to another server."""
        try:
            found = resolve_submodule_url("/".join(["..", *parts]), parent)
        except ValueError:
            return
        self.assertEqual(parse_server_address(found), parse_server_address(parent))


class CheckoutTests(CacheTestCase):
    """Checkouts of `OID`, which has a submodule `lib` with `OTHER`, by default."""

    most = 2
    url = "../lib.git"
    nested = False

    def script(self, command: Command) -> GitResult | Awaitable[GitResult]:
        """Answer as git does for these commits."""
        words = " ".join(command.arguments)
        if command.name == "ls-tree" and (OID in words or self.nested):
            return GitResult(0, f"100644 blob 01 5\ta\x00160000 commit {OTHER} -\tlib\0", "")
        if command.name == "config":
            return GitResult(0, listed({"lib": {"path": "lib", "url": self.url}}).decode(), "")
        if command.name == "ls-tree":
            return GitResult(0, "100644 blob 02 6\tb\0", "")
        if command.name == "read-tree":
            tree = Path(command.arguments[0].partition("=")[2])
            if "lib" in (command.repository / "url").read_text():
                (tree / "b").write_text("submod")
            else:
                (tree / "a").write_text("super")
                (tree / "lib").mkdir()
        return super().script(command)

    def test_together(self) -> None:
        """The files of the submodule are in the checkout, which a restart keeps."""
        found = self.get()
        self.assertEqual((found.tree_oid, found.file_count, found.size), (TREE, 3, 11))
        for _ in range(2):
            path = self.checkouts[-1].path
            self.assertEqual((path / "lib/b").read_text(), "submod")
            self.assertEqual((path / "a").read_text(), "super")
            self.release()
            self.restart()
            self.git.commands.clear()
            self.get()
            self.assertEqual(self.names(), [])
            self.assertEqual(self.checkouts[-1].path, path)

    def test_released(self) -> None:
        """The submodule's own checkout is not in use by the whole one."""
        self.get()
        self.release()
        self.capacity = 0
        self.restart()
        self.assertEqual(list(self.root.iterdir()), [])

    def test_bytes(self) -> None:
        """Each fetch has the bytes that those before it have left, and none begins without any."""
        self.grow = lambda repository: (repository / "objects/new").write_bytes(b"x" * 40_960)
        self.get()
        sizes = [command.max_file_size for command in self.fetch_commands()]
        self.assertEqual(sizes, [10**9, 10**9 - 40_960])
        self.setUp()
        self.size = 40_960
        self.cache = self.make()
        self.grow = lambda repository: (repository / "objects/new").write_bytes(b"x" * 40_960)
        error = self.refuse()
        self.assertEqual(len(self.fetch_commands()), 1)
        self.assertEqual(
            error.message,
            "submodule 'lib': the repositories of the commit are over 40 KiB"
            " (repositories.fetch_bytes)",
        )

    def test_failed(self) -> None:
        """An error says which submodule it is about; that of the machine stays one."""
        self.fetches = [DONE, failed("fatal: repository not found")]
        self.resolver.answers = [["8.8.8.8"], ["8.8.8.8"], gaierror(EAI_AGAIN, "no answer")]
        for reason in ("repository", "lost"):
            error = self.refuse()
            self.assertEqual((error.reason, error.extra_members["path"]), (reason, "lib"))
            self.assertTrue(error.message.startswith("submodule 'lib': "))

    def test_damaged(self) -> None:
        """Damage in a submodule's repository costs that of its parent nothing."""
        self.get()
        self.release()
        cached = {path.name for path in self.root.glob("*.git")}
        (library,) = (
            path for path in self.root.glob("*.git") if "lib" in (path / "url").read_text()
        )
        (parent,) = cached - {library.name}
        library.rename(self.mktemp())
        self.lose_trees()
        self.present = {one for one in self.present if one[0] == parent}
        self.restart()
        self.fetches = [failed("error: inflate: data stream error") for _ in range(4)]
        self.git.commands.clear()
        self.assertEqual(self.refuse().extra_members["path"], "lib")
        self.assertTrue((self.root / parent / "commits" / OID).exists())
        self.assertEqual({one.repository.name for one in self.fetch_commands()}, {library.name})

    def test_forbidden(self) -> None:
        """The rules for URLs hold for those of submodules: nothing is asked there."""
        for self.url, words in (
            ("file:///etc/x", "is a path"),
            ("http://example.org/lib.git", "this server does not fetch over http"),
            ("https://127.0.0.1/lib.git", "private_networks"),
            ("https://u:p@example.org/lib.git", "cannot contain credentials"),
            ("-u:x", "has a host that is neither"),
            ("../../../../x", "leads out of its server"),
        ):
            before = len(self.fetch_commands())
            self.present.clear()
            self.restart()
            error = self.refuse(url=f"https://example.org/{before}.git")
            self.assertEqual((error.reason, error.extra_members["path"]), ("repository", "lib"))
            self.assertIn(words, error.message)
            self.assertEqual(len(self.fetch_commands()), before + 1)

    def test_nested(self) -> None:
        """Submodules of submodules count, and end an endless chain, with their path."""
        self.nested, self.url = True, "../problem.git"
        error = self.refuse()
        self.assertEqual(error.extra_members["path"], "lib/lib/lib")

    def test_late(self) -> None:
        """Fetches of all submodules together end in time."""
        self.grow = lambda repository: self.clock.advance(61)
        error = self.refuse()
        self.assertEqual(error.extra_members["limit"], "repositories.fetch_timeout")

    def test_off(self) -> None:
        """Without submodules allowed, the commit is refused with the path."""
        self.most = 0
        self.restart()
        error = self.refuse()
        self.assertEqual(error.extra_members["path"], "lib")

    def test_network(self) -> None:
        """A commit with submodules may need the network, also when it is known."""
        self.get()
        self.assertTrue(self.cache.checkout_needs_network(Repository(URL), OID))
