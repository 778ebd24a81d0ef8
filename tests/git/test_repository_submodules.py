"""Submodules: `.gitmodules` and the URLs in it, which are strangers', and their checkouts."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from pathlib import Path
from socket import EAI_AGAIN, gaierror

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.evaluations import Commit, Submodule
from tawebeval.core.form import Repository
from tawebeval.core.hosts import parse_server_address
from tawebeval.errors import EvaluationFailure
from tawebeval.git.command import GitResult
from tawebeval.git.remotes import resolve_submodule_url
from tawebeval.git.repository import add_submodule_urls, build_submodule_list_command
from tests.cases.git import DONE, OTHER, URL, CacheTestCase, Command, failed
from tests.fakes.world import OID, TREE

PARENTS = (
    *("https://h/a/b.git", "https://h/a/b/", "ssh://git@h:22/a/b", "git@h:a/b.git"),
    *("git://h/a/b", "/srv/a/b", "file:///srv/a/b"),
)


def listed(modules: Mapping[str, Mapping[str, str]]) -> str:
    """Return what git prints of `.gitmodules`."""
    return "".join(
        f"submodule.{name}.{key}\n{value}\0"
        for name, settings in modules.items()
        for key, value in settings.items()
    )


class UrlsTests(SynchronousTestCase):
    def complete(self, printed: str, *paths: str) -> Commit:
        """Return a commit with submodules at `paths`, whose URLs git prints."""
        submodules = tuple(Submodule(path, "0") for path in paths)
        return add_submodule_urls(Commit(OID, TREE, submodules=submodules), printed)

    def test_each_submodule_has_url_of_its_path(self) -> None:
        printed = "core.bare\0plain\0" + listed(
            {
                "other": {"path": "gone", "url": "https://h/gone"},
                "a.b c": {"path": "lib/x", "url": "../x", "update": "!rm -rf ~"},
                "half": {"path": "lib/y"},
                "y": {"url": "https://h/y?\n", "path": "lib/y/", "branch": "main"},
            }
        )
        found = self.complete(printed, "lib/x", "lib/y")
        self.assertEqual([each.url for each in found.submodules], ["../x", "https://h/y?\n"])

    def test_submodule_path_with_invalid_utf_8_gets_its_url(self) -> None:
        printed = b"submodule.x.path\nd\xe9p\0submodule.x.url\n../x\0".decode(errors="replace")
        (found,) = self.complete(printed, "d\udce9p").submodules
        self.assertEqual((found.path, found.url), ("d\udce9p", "../x"))

    def test_error_about_a_submodule_without_url_names_its_path(self) -> None:
        for printed in ("", listed({"x": {"path": "x"}}), listed({"x": {"url": "https://h/x"}})):
            error = self.assertRaises(EvaluationFailure, self.complete, printed, "x")
            self.assertEqual((error.reason, error.extra_members), ("repository", {"path": "x"}))
            self.assertIn("the submodule at 'x' has no URL in .gitmodules", error.message)

    def test_gitmodules_over_60_kib_is_refused(self) -> None:
        self.complete("x" * 60 * 1024)
        error = self.assertRaises(EvaluationFailure, self.complete, "é" * 30 * 1024 + "x")
        self.assertEqual(error.message, "the commit's .gitmodules is over 60 KiB")

    @given(st.text(max_size=50))
    def test_any_output_of_git_raises_nothing_without_submodules(self, printed: str) -> None:
        self.complete(printed)

    def test_gitmodules_is_read_from_the_commit_without_includes(self) -> None:
        command = build_submodule_list_command(OID)
        self.assertIn(f"--blob={OID}:.gitmodules", command)
        self.assertIn("--no-includes", command)


class ResolveTests(SynchronousTestCase):
    def test_relative_submodule_url_is_resolved_against_url_of_parent(self) -> None:
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

    def test_absolute_submodule_url_stays_unchanged(self) -> None:
        for url in ("https://other/x", "git@other:x", "ssh://u@other/x"):
            for parent in PARENTS:
                self.assertEqual(resolve_submodule_url(url, parent), url)
        self.assertEqual(resolve_submodule_url("/srv/x", "/srv/a"), "/srv/x")

    def test_repository_on_the_network_cannot_have_a_local_submodule(self) -> None:
        for url in ("/srv/x", "file:///srv/x"):
            for parent in PARENTS[:5]:
                self.assertRaises(ValueError, resolve_submodule_url, url, parent)

    @given(st.sampled_from(PARENTS), st.lists(st.sampled_from([".", "..", "c", "@x:", ""])))
    def test_relative_url_never_leads_to_another_server(
        self, parent: str, parts: list[str]
    ) -> None:
        try:
            found = resolve_submodule_url("/".join(["..", *parts]), parent)
        except ValueError:
            return
        self.assertEqual(parse_server_address(found), parse_server_address(parent))


class CheckoutTests(CacheTestCase):
    most = 2
    url = "../lib.git"
    nested = False

    def script(self, command: Command) -> GitResult | Awaitable[GitResult]:
        words = " ".join(command.arguments)
        if command.name == "ls-tree" and (OID in words or self.nested):
            return GitResult(0, f"100644 blob 01 5\ta\x00160000 commit {OTHER} -\tlib\0", "")
        if command.name == "config":
            return GitResult(0, listed({"lib": {"path": "lib", "url": self.url}}), "")
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

    def test_files_of_submodule_are_in_checkout(self) -> None:
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

    def test_checkout_of_a_submodule_can_be_evicted_after_a_restart(self) -> None:
        self.get()
        self.release()
        self.capacity = 0
        self.restart()
        self.assertEqual(list(self.root.iterdir()), [])

    def test_fetches_of_a_commit_share_one_limit_of_bytes(self) -> None:
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

    def test_error_says_which_submodule_it_is_about(self) -> None:
        self.fetches = [DONE, failed("fatal: repository not found")]
        self.resolver.answers = [["8.8.8.8"], ["8.8.8.8"], gaierror(EAI_AGAIN, "no answer")]
        for reason in ("repository", "lost"):
            error = self.refuse()
            self.assertEqual((error.reason, error.extra_members["path"]), (reason, "lib"))
            self.assertTrue(error.message.startswith("submodule 'lib': "))

    def test_damaged_submodule_repository_does_not_affect_the_parent_repository(self) -> None:
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

    def test_submodule_urls_are_refused_like_repository_urls(self) -> None:
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

    def test_endless_chain_of_nested_submodules_is_refused(self) -> None:
        self.nested, self.url = True, "../problem.git"
        error = self.refuse()
        self.assertEqual(error.extra_members["path"], "lib/lib/lib")

    def test_repeated_fetch_of_a_damaged_repository_counts_its_submodules_once(self) -> None:
        self.most = 1
        self.restart()
        self.get()
        self.lose_trees()
        (parent,) = (p for p in self.root.glob("*.git") if "lib" not in (p / "url").read_text())
        (parent / "damaged").touch()
        script = self.git.script

        def break_parent(command: Command) -> GitResult | Awaitable[GitResult]:
            is_broken = command.name == "read-tree" and (command.repository / "damaged").exists()
            return failed("error: inflate: data stream error") if is_broken else script(command)

        self.git.script = break_parent
        self.get()
        self.assertFalse((parent / "damaged").exists())

    def test_fetches_of_all_submodules_share_one_timeout(self) -> None:
        self.grow = lambda repository: self.clock.advance(61)
        error = self.refuse()
        self.assertEqual(error.extra_members["limit"], "repositories.fetch_timeout")

    def test_commit_with_submodules_may_need_network(self) -> None:
        self.get()
        self.assertTrue(self.cache.checkout_needs_network(Repository(URL), OID))
