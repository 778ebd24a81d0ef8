"""`core.url_slips`: the URL that was probably meant."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.url_slips import guess_repository_url

_PROBLEMS = "https://github.com/me/problems"
_GROUP = "https://gitlab.com/group/sub/problems"
_SLIPS = {
    f"{_PROBLEMS}/tree/main": _PROBLEMS,
    f"{_PROBLEMS}/tree/main/sums/?tab=readme-ov-file#limits": _PROBLEMS,
    f"{_PROBLEMS}/blob/main/judge.py": _PROBLEMS,
    f"{_PROBLEMS}/commit/{'1' * 40}": _PROBLEMS,
    f"{_PROBLEMS}/pull/7": _PROBLEMS,
    f"{_PROBLEMS}?tab=readme-ov-file": _PROBLEMS,
    f"{_PROBLEMS}#readme": _PROBLEMS,
    f"{_GROUP}/-/tree/main/sums?ref_type=heads": _GROUP,
    "https://bitbucket.org/me/problems/src/main/": "https://bitbucket.org/me/problems",
    "https://codeberg.org/me/problems/src/branch/main": "https://codeberg.org/me/problems",
    "https://raw.githubusercontent.com/me/problems/main/judge.py": _PROBLEMS,
    f"git clone {_PROBLEMS}.git": f"{_PROBLEMS}.git",
    f"git clone --depth 1 {_PROBLEMS}.git sums": f"{_PROBLEMS}.git",
    f"$ git clone '{_PROBLEMS}'": _PROBLEMS,
    "git clone git@github.com:me/problems.git": f"{_PROBLEMS}.git",
    "git@github.com:me/problems.git ": f"{_PROBLEMS}.git",
    "ssh://git@github.com/me/problems.git": f"{_PROBLEMS}.git",
    "ssh://git@github.com:22/me/problems.git": f"{_PROBLEMS}.git",
    "https://git@github.com:me/problems.git": f"{_PROBLEMS}.git",
    "https://me@bitbucket.org/me/problems.git": "https://bitbucket.org/me/problems.git",
    "https://me:secret@github.com/me/problems": _PROBLEMS,
    "github.com/me/problems": _PROBLEMS,
    "www.example.org/problems.git": "https://www.example.org/problems.git",
    "//github.com/me/problems": None,
    "https:/github.com/me/problems": _PROBLEMS,
    "https//github.com/me/problems": _PROBLEMS,
    "https:\\\\github.com/me/problems": _PROBLEMS,
    "https://https://github.com/me/problems": _PROBLEMS,
    "HTTPS://GitHub.com/me/problems": _PROBLEMS,
    f" {_PROBLEMS}\n": _PROBLEMS,
    f"<{_PROBLEMS}>": _PROBLEMS,
    f'"{_PROBLEMS}"': _PROBLEMS,
    "http://git.example.org:3000/me/problems/issues": "http://git.example.org:3000/me/problems",
    # These are what they are, or nobody knows.
    _PROBLEMS: None,
    f"{_PROBLEMS}.git": None,
    f"{_PROBLEMS}/": None,
    "https://example.org/tree/main": None,
    "https://github.com": None,
    "/srv/git/problems.git": None,
    "problems": None,
    "C:\\problems": None,
    "": None,
    "my problems": None,
}


class GuessTests(SynchronousTestCase):
    def test_slips(self) -> None:
        for text, expected in _SLIPS.items():
            self.assertEqual(guess_repository_url(text, ("https", "http")), expected, text)

    def test_guess_is_of_an_allowed_protocol(self) -> None:
        self.assertIsNone(guess_repository_url(f"{_PROBLEMS}/tree/main", ("ssh", "http")))

    def test_guess_of_a_guess_is_none(self) -> None:
        for guess in filter(None, _SLIPS.values()):
            self.assertIsNone(guess_repository_url(guess, ("https", "http")))

    def test_nothing_is_guessed_for_long_texts_and_control_characters(self) -> None:
        fitting = f"{_PROBLEMS}/tree/".ljust(2048, "x")
        self.assertEqual(guess_repository_url(fitting, ("https",)), _PROBLEMS)
        for text in (
            f"{fitting}x",
            f"{_PROBLEMS}/tree/{'x' * 65536}",
            f"git clone {_PROBLEMS} {'a@' * 32768}",
            f"{_PROBLEMS}/tree/\n.",
            f"git clone\t{_PROBLEMS}",
        ):
            self.assertIsNone(guess_repository_url(text, ("https",)), text[:80])

    def test_texts_that_make_patterns_backtrack_are_no_url(self) -> None:
        for begin, repeated, end in (
            ("git clone ", "a@", "\nx"),
            ("git clone ", "a@", " x"),
            ("git clone ", "a", ""),
            ("git clone ", "a ", ""),
            ("", "https:", ""),
            ("", "https:/", ""),
            ("", "http\\", ""),
            ("http", " ", ""),
            ("git@a.b", "/", " x"),
            ("git@a.b", ":1", " x"),
            ("git@", "a.", " /x"),
            ("git@", "a", ""),
            ("", "a.", ""),
            ("", "a-", "@"),
            ("", "a", "/"),
        ):
            text = begin + repeated * ((2048 - len(begin + end)) // len(repeated)) + end
            self.assertIsNone(guess_repository_url(text, ("https", "http")), text[:80])
