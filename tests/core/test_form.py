"""`core.form`: the rules of the form, and the limits that a request chooses (docs/api.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

import attrs
from hyperlink import EncodedURL
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import URI

from tawebeval.core.form import (
    LIMIT_UNITS,
    MAX_FILENAME_BYTES,
    MAX_SEED,
    OWN_INPUT_FIELD,
    PERMITTED_PROBLEM_FORM_FIELDS,
    PERMITTED_RERUN_FORM_FIELDS,
    TEXT_FIELD_SIZE_LIMITS,
    EvaluationRequest,
    FormPreset,
    LimitRange,
    Repository,
    SubmissionFile,
    build_form_fields,
    draw_seed,
    find_field_size_limit,
    get_base_name,
    pack_request,
    parse_form,
    parse_limits,
    parse_submission_file,
    unpack_request,
)
from tawebeval.core.hosts import parse_server_address
from tawebeval.errors import InvalidField
from tests.cases.strategies import file_names

OID = "0123456789abcdef0123456789abcdef01234567"
ALL = ("https", "http", "git", "ssh", "file")
LEAST = {"repository[url]": "https://host/x.git", "commit_oid": OID, "evaluator_cmd": "./run"}
SUBMISSION = (SubmissionFile("source", "a.cpp"),)
RANGES = dict.fromkeys(LIMIT_UNITS, LimitRange(16, 2**20))


def parse(
    changes: Mapping[str, str | None] | None = None, protocols: Sequence[str] = ALL
) -> EvaluationRequest:
    """Return what the smallest form says with some fields changed, or without those of None."""
    changed = {**LEAST, **(changes or {})}
    fields = {name: value for name, value in changed.items() if value is not None}
    return parse_form(fields, SUBMISSION, protocols, RANGES)


class Tables(SynchronousTestCase):
    """One field at a time."""

    def check_refused(self, field: str, *values: str | None, words: str = "") -> None:
        """Hold that values (None: a field that is missing) are refused and the field named."""
        for value in values:
            error = self.assertRaises(InvalidField, parse, {field: value})
            self.assertEqual(error.extra_members, {"field": field}, value)
            self.assertTrue(error.detail.startswith(f"{field}: "), error.detail)
            self.assertTrue(error.detail.isprintable(), error.detail)
            self.assertIn(words, error.detail)


class PresetTests(SynchronousTestCase):
    def test_problem_form_refuses_fields_of_the_problem_and_unexpected_files(self) -> None:
        preset = FormPreset("the problem 'p'", "p", {}, PERMITTED_PROBLEM_FORM_FIELDS, ("a", "b"))
        for name in ("callback_url", "metadata[x]"):
            preset.check_text_field(name)
        for name in ("seed", "limits[cpu]", "commit_oid", "evaluator_cmd", "repository[url]"):
            error = self.assertRaises(InvalidField, preset.check_text_field, name)
            self.assertIn("the problem 'p' sets this field", error.detail)
        preset.check_submission_field("a")
        error = self.assertRaises(InvalidField, preset.check_submission_field, "c")
        self.assertIn("its fields: submission[a], submission[b]", error.detail)
        preset.check_required_files(["b", "a"])
        error = self.assertRaises(InvalidField, preset.check_required_files, ["a"])
        self.assertEqual(error.extra_members, {"field": "submission[b]"})

    def test_own_input_is_a_further_file_where_the_problem_permits_it(self) -> None:
        for fields in ((), ("a",)):
            preset = FormPreset("the problem 'p'", "p", {}, frozenset(), fields)
            error = self.assertRaises(InvalidField, preset.check_submission_field, OWN_INPUT_FIELD)
            self.assertIn("runs no own input", error.detail)
            preset = attrs.evolve(preset, permits_own_input=True)
            preset.check_submission_field(OWN_INPUT_FIELD)
            preset.check_required_files(["a"])
        preset = FormPreset()  # of an own evaluator, where all is allowed
        preset.check_submission_field(OWN_INPUT_FIELD)
        preset.check_text_field("evaluator_cmd")
        preset.check_required_files([])

    def test_preset_can_refuse_the_callback_and_nothing_else(self) -> None:
        preset = FormPreset(
            permitted_text_fields=PERMITTED_PROBLEM_FORM_FIELDS, has_restricted_token=True
        )
        preset.check_text_field("metadata[x]")
        error = self.assertRaises(InvalidField, preset.check_text_field, "callback_url")
        self.assertIn("restricted to problems", error.detail)

    def test_form_for_a_rerun_has_limits_and_no_files(self) -> None:
        preset = FormPreset("the evaluation", None, {}, PERMITTED_RERUN_FORM_FIELDS, None)
        preset.check_text_field("limits[cpu]")
        preset.check_required_files(["a"])
        self.assertRaises(InvalidField, preset.check_submission_field, "a")


class ListTests(SynchronousTestCase):
    def test_fields_built_from_a_request_parse_to_the_same_request(self) -> None:
        every = {
            "repository[branch]": "main",
            "repository[depth]": "2",
            "directory": "a",
            "seed": "0",
            "limits[wall_clock]": "20.000000001",
            "limits[cpu]": "20",
            "limits[memory]": "1K",
            "environment": "java",
            "metadata[a]": "b",
            "callback_url": "https://example.org/",
        }
        for form in ({}, every):
            request = parse_form({**LEAST, **form}, SUBMISSION, ALL, RANGES, ["java"])
            again = parse_form(build_form_fields(request), SUBMISSION, ALL, RANGES, ["java"])
            self.assertEqual(again, attrs.evolve(request, callback_url=None))

    def test_only_the_form_of_a_problem_may_have_a_branch_without_a_commit(self) -> None:
        form = {"repository[url]": "https://example.org/a", "repository[branch]": "main"}
        form["evaluator_cmd"] = "x"
        request = parse_form(form, SUBMISSION, ALL, RANGES, problem_name="one")
        self.assertEqual((request.commit_oid, request.problem_name), ("", "one"))
        again = parse_form(build_form_fields(request), SUBMISSION, ALL, RANGES, problem_name="one")
        self.assertEqual(again, request)
        self.assertRaises(InvalidField, parse_form, form, SUBMISSION, ALL, RANGES)
        del form["repository[branch]"]
        self.assertRaises(InvalidField, parse_form, form, SUBMISSION, ALL, RANGES, "one")


class SubmissionTests(SynchronousTestCase):
    def test_submitted_file_gets_its_base_name_or_else_the_field_name_with_txt(self) -> None:
        long = "a" * 251
        for name, filename, expected in (
            ("a", "x", "x"),
            ("a1", "C:\\x\\a.cpp", "a.cpp"),
            ("z9_", "../d/a.cpp", "a.cpp"),
            ("source_code", None, "source_code.txt"),
            (long, None, f"{long}.txt"),
        ):
            file = parse_submission_file(f"submission[{name}]", filename)
            self.assertEqual(file, SubmissionFile(name, expected))

    def test_name_is_a_lower_case_word(self) -> None:
        for name in (
            "submission", "submission[]", "submission[A]", "submission[1a]", "submission[_a]",
            "submission[a-b]", "submission[a b]", "submission[a", "submission[a]x",
            "submission[a]\n", "submission[a\n]", "submission[a][b]", "submission[é]",
            "submission[a\u0661]", "submissions[a]", "submission.a", "submission[a].txt",
            f"submission[{'a' * 252}]",
        ):  # fmt: skip
            for filename in ("x", None):
                error = self.assertRaises(InvalidField, parse_submission_file, name, filename)
                self.assertEqual(error.extra_members, {"field": name[:80]})
        error = self.assertRaises(InvalidField, parse_submission_file, "submission[a]", "..")
        self.assertEqual(error.extra_members, {"field": "submission[a]"})
        name = "submission" + "x" * 10**6
        error = self.assertRaises(InvalidField, parse_submission_file, name, None)
        self.assertLess(len(error.detail), 300)

    def test_fields_of_other_names_are_not_in_the_submission(self) -> None:
        for name in ("", "seed", "Submission[a]", "my_submission[a]", "[a]", " submission[a]"):
            self.assertIs(parse_submission_file(name, "x"), None)
            self.assertIs(parse_submission_file(name, None), None)

    def test_form_without_a_submission_is_refused(self) -> None:
        error = self.assertRaises(InvalidField, parse_form, LEAST, (), ALL, RANGES)
        self.assertEqual(error.extra_members, {"field": "submission"})


class FormTests(Tables):
    def test_url_commit_command_and_submission_are_enough(self) -> None:
        repository = Repository("https://host/x.git", None, None)
        expected = EvaluationRequest(repository, OID, "", "./run", None, SUBMISSION)
        self.assertEqual(parse(), expected)

    def test_each_field_sets_its_member_of_the_request(self) -> None:
        fields = {
            "repository[url]": "ssh://git@host/x",
            "repository[branch]": "main",
            "repository[depth]": "3",
            "commit_oid": OID,
            "directory": "problems/sum",
            "evaluator_cmd": "python3 evaluator.py",
            "seed": "7",
            "environment": "java",
            "callback_url": "https://site.example.org/ended?x=1",
        }
        limits = {f"limits[{name}]" for name in LIMIT_UNITS}
        self.assertEqual(set(fields) | limits, set(TEXT_FIELD_SIZE_LIMITS))
        files = [SubmissionFile("a", "a"), SubmissionFile("b", "b")]
        self.assertEqual(
            parse_form(fields, files, ["ssh"], RANGES, ["java"]),
            EvaluationRequest(
                repository=Repository("ssh://git@host/x", "main", 3),
                commit_oid=OID,
                directory="problems/sum",
                evaluator_cmd="python3 evaluator.py",
                seed=7,
                submission=(SubmissionFile("a", "a"), SubmissionFile("b", "b")),
                callback_url="https://site.example.org/ended?x=1",
                environment_name="java",
            ),
        )

    def test_default_environment_can_be_named(self) -> None:
        for value in ("", "default"):
            self.assertEqual(parse({"environment": value}).environment_name, None)
        form = {**LEAST, "environment": "jav"}
        with self.assertRaisesRegex(InvalidField, "'jav' here; allowed: default, java, rust"):
            parse_form(form, SUBMISSION, ALL, RANGES, ["java", "rust"])

    def test_url_commit_and_command_are_required_and_not_empty(self) -> None:
        for field in LEAST:
            self.check_refused(field, None, words="required")
            self.check_refused(field, "", " ", "\t\n", words="empty")

    def test_error_about_a_missing_field_names_the_most_similar_unknown_field(self) -> None:
        fields = {name: value for name, value in LEAST.items() if name != "commit_oid"}
        for names, words in (((), "required"), (("x", "comit"), "; 'comit' is no known field")):
            with self.assertRaises(InvalidField) as caught:
                parse_form(fields, SUBMISSION, ALL, RANGES, unknown_names=names)
            self.assertIn(words, str(caught.exception))

    def test_optional_fields_may_be_empty(self) -> None:
        for field in TEXT_FIELD_SIZE_LIMITS.keys() - LEAST.keys():
            self.assertEqual(parse({field: ""}), parse())

    def test_commit_is_40_hexadecimal_digits(self) -> None:
        self.assertEqual(parse({"commit_oid": OID.upper()}).commit_oid, OID)
        self.check_refused(
            "commit_oid", OID[1:], OID + "0", OID[1:] + "g", OID[1:] + "\n", OID + "\n",
            " " + OID[1:], "--help" + OID[6:], OID[1:] + "\u0661", OID[1:] + "\uff41", OID * 2,
        )  # fmt: skip
        for words in ("'main'", "git rev-parse COMMIT", "git ls-remote URL BRANCH"):
            self.check_refused("commit_oid", "main", words=words)
        self.check_refused("commit_oid", "a" * 64, words="--object-format=sha1")

    def test_any_command_without_a_nul_byte_is_accepted(self) -> None:
        for command in (" ./run 'a b' $X\n", "é", "-x", "\r\n./run"):
            self.assertEqual(parse({"evaluator_cmd": command}).evaluator_cmd, command)
        self.check_refused("evaluator_cmd", "./run\0")

    def test_seed_is_a_whole_number_from_0_to_2_31_1(self) -> None:
        for text, seed in (("0", 0), ("7", 7), ("0007", 7), ("2147483647", MAX_SEED)):
            self.assertEqual(parse({"seed": text}).seed, seed)
        self.check_refused(
            "seed", "-1", "+1", "2147483648", "9" * 5000, "1.0", "1e3", "0x1", " 1", "1\n", "x",
            "1_000", "\u0661", "\xb2", " ", "None",
        )  # fmt: skip

    def test_depth_is_a_whole_number_from_1_to_2_31_minus_2(self) -> None:
        most = 2**31 - 2
        for depth in (1, 50, most):
            self.assertEqual(parse({"repository[depth]": str(depth)}).repository.depth, depth)
        wrong = ("0", "-1", str(most + 1), "9" * 5000, "1.0", "x", "1\n", "\u0661")
        self.check_refused("repository[depth]", *wrong)


class SeedTests(SynchronousTestCase):
    @given(st.binary(min_size=4, max_size=4))
    def test_generated_seed_is_accepted_by_the_form(self, drawn: bytes) -> None:
        seed = draw_seed(lambda size: drawn[:size])
        self.assertEqual(seed, int.from_bytes(drawn, "big") % (MAX_SEED + 1))
        self.assertEqual(parse({"seed": str(seed)}).seed, seed)


class DirectoryTests(Tables):
    def test_directory_is_normalized(self) -> None:
        for text, directory in (
            ("a", "a"), ("a/b", "a/b"), ("a/b/", "a/b"), ("./a//b/.", "a/b"), (".", ""),
            ("./", ""), ("...", "..."), ("a..b/..c", "a..b/..c"), ("a\\..\\b", "a\\..\\b"),
            (" a ", " a "), ("-x", "-x"), ("é", "é"), ("~", "~"), ("a\nb", "a\nb"),
        ):  # fmt: skip
            self.assertEqual(parse({"directory": text}).directory, directory)

    def test_absolute_paths_parent_directories_and_nul_are_refused(self) -> None:
        wrong = ("/", "/a", "//a", "..", "../a", "a/..", "a/../b", "./..", "a\0", "\0")
        self.check_refused("directory", *wrong)

    @given(
        st.one_of(
            st.text(),
            st.text("./\\a\0 ~\n"),
            st.lists(st.sampled_from(["..", ".", "", "a"])).map("/".join),
        )
    )
    def test_accepted_directory_stays_below_the_root(self, text: str) -> None:
        bad = text.startswith("/") or "\0" in text or ".." in text.split("/")
        try:
            directory = parse({"directory": text}).directory
        except InvalidField as error:
            assert bad
            assert error.extra_members == {"field": "directory"}
            return
        assert not bad
        assert not directory.startswith("/")
        assert directory == "" or not {"", ".", ".."} & set(directory.split("/"))
        assert parse({"directory": directory}).directory == directory


def is_branch(name: str) -> bool:
    """Tell by the rules of git-check-ref-format(1), and that of no option, what is a branch."""
    name = name.removeprefix("refs/heads/")
    components = name.split("/")
    return (
        not any(c.startswith(".") or c.endswith(".lock") or not c for c in components)
        and ".." not in name
        and not any(ord(c) < 0x20 or c in "\x7f ~^:?*[\\" for c in name)
        and not name.endswith(".")
        and "@{" not in name
        and name != "@"
        and not name.startswith("-")
    )


class BranchTests(SynchronousTestCase):
    def check(self, name: str) -> None:
        """Hold that a name is taken if it is a branch by the rules above."""
        try:
            branch = parse({"repository[branch]": name}).repository.branch
        except InvalidField as error:
            assert not is_branch(name), name
            self.assertEqual(error.extra_members, {"field": "repository[branch]"})
        else:
            assert is_branch(name), name
            assert branch == name.removeprefix("refs/heads/")

    def test_branch_names_are_accepted_or_refused_by_the_rules_of_git(self) -> None:
        for name in (
            "main", "feature/x", "v1.0", "a.lock.b", "lock", "@a", "a@", "{", "é", "a-",
            "refs/heads", "locks/a", "a.locker", "refs/heads/a/b", "refs/tags/v1",
            "-x", "--upload-pack=x", "a b", "a..b", "a:b", ":a", "+a:b", "a~1", "a^", "a?", "a*",
            "a[b", "a\\b", "a\n", "\na", "a\x7f", "a\0", "/a", "a/", "a//b", ".a", "a/.b", "a.",
            "a.lock", "a.lock/b", "@", "@{-1}", "a@{1}", " ", ".", "refs/heads/", "refs/heads/-x",
        ):  # fmt: skip
            self.check(name)

    @given(
        st.one_of(
            st.text(min_size=1),
            st.text("a/.-@{~:\n\\", min_size=1),
            st.lists(st.sampled_from([".lock", "/", ".", "a", "@", "-"]), min_size=1).map("".join),
        )
    )
    def test_any_branch_name_is_accepted_exactly_if_the_rules_of_git_allow_it(
        self, name: str
    ) -> None:
        self.check(name)


class UrlTests(Tables):
    def test_error_about_another_protocol_names_the_https_url_of_the_repository(self) -> None:
        for url, protocol, https in (
            ("git@github.com:me/p.git", "ssh", "https://github.com/me/p.git"),
            ("github.com:/me/p.git", "ssh", "https://github.com/me/p.git"),
            ("ssh://git@gitlab.com:22/me/p.git", "ssh", "https://gitlab.com/me/p.git"),
            ("git://github.com/me/p", "git", "https://github.com/me/p"),
            ("http://example.org:8000/p?a=b", "http", "https://example.org/p"),
        ):
            words = f"this server does not fetch over {protocol} (allowed: https); try {https}"
            with self.assertRaisesRegex(InvalidField, re.escape(words) + "$"):
                parse({"repository[url]": url}, ("https",))
        for url, protocols, words in (
            ("/srv/p.git", ("https",), "(repositories.protocols)"),
            ("ssh://[::1]/x", ("https",), "(repositories.protocols)"),
            ("https://host/x", (), "none"),
            ("x", ("https",), "https://example.org/problems.git"),
        ):
            error = self.assertRaises(InvalidField, parse, {"repository[url]": url}, protocols)
            self.assertIn(words, error.detail)

    def test_each_form_of_a_repository_url_is_accepted(self) -> None:
        for url, protocol in (
            ("https://host/x.git", "https"),
            ("https://host:8443/a/b@c", "https"),
            ("https://host/x?a=b@c#d@e", "https"),
            ("https://host?a@b", "https"),
            ("https://host#a@b", "https"),
            ("http://127.0.0.1:8000/x", "http"),
            ("https://[::1]/x", "https"),
            ("git://host/x", "git"),
            ("ssh://git@host/x", "ssh"),
            ("ssh://host:22/x", "ssh"),
            ("file:///srv/x", "file"),
            ("/srv/x y", "file"),
            ("git@host:x/y.git", "ssh"),
            ("host:x", "ssh"),
        ):
            request = parse({"repository[url]": url}, (protocol,))
            self.assertEqual(request.repository, Repository(url))
            others = tuple(other for other in ALL if other != protocol)
            error = self.assertRaises(InvalidField, parse, {"repository[url]": url}, others)
            self.assertIn(f"over {protocol} ", error.detail)
            self.assertIn("https" if protocol != "https" else "file", error.detail)

    def test_urls_with_unknown_protocols_options_or_control_characters_are_refused(self) -> None:
        self.check_refused(
            "repository[url]",
            # Unknown protocols, and remote helpers of git, which run any command.
            "ftp://host/x", "HTTPS://host/x", "svn+ssh://host/x", "ext://x", "ext::sh -c x",
            "fd::0", "https::x", "x::y",
            # Options of git, or of ssh behind it.
            "-x", "--upload-pack=x", "-x:y", "ssh://-oProxyCommand=x/y", "ssh://-x@host/y",
            "https://-x/y", "-x@host:y", "git@-oProxyCommand=x:y", "ssh://git@-oProxyCommand=x/y",
            # Control characters, and spaces around.
            "https://host/x\n", "https://host/\nx", "https://host/\0", "https://host/\x7f",
            " https://host/x", "https://host/x ", "host:x\ty", "\u2028https://host/x",
            # Neither a URL nor a path nor ssh's short form.
            "host", "./x", "../x", "a/b:c", "host: x", ":x", "@host:x", "é:x",
        )  # fmt: skip

    def test_urls_with_users_or_passwords_are_refused(self) -> None:
        for url in (
            "https://user@host/x", "https://user:secret@host/x", "https://:secret@host/x",
            "http://token@host", "https://a@b@host/x", "ssh://user:secret@host/x",
            "ssh://:secret@host/x", "git://user@host/x", "https://user@host?x", "https://user@host#x",
        ):  # fmt: skip
            self.check_refused("repository[url]", url, words="credentials")
            with self.assertRaisesRegex(InvalidField, "^(?!.*secret)"):
                parse({"repository[url]": url})

    @given(
        st.one_of(
            st.text(),
            st.text("https:/@-a.\n?#"),
            st.from_regex(r"(ssh|https)://[-@a:/?#]{0,9}", fullmatch=True),
        )
    )
    def test_accepted_url_has_no_control_character_option_or_remote_helper(self, url: str) -> None:
        try:
            accepted = parse({"repository[url]": url}).repository.url
        except InvalidField:
            return
        assert accepted == url
        assert not re.search(r"[\x00-\x1f\x7f]", url)
        assert not url.startswith("-")
        assert not re.match(r"[A-Za-z0-9]*::", url)
        scheme, found, rest = url.partition("://")
        authority = re.split(r"[/?#]", rest)[0]
        if found and scheme in ("https", "http", "git"):
            assert "@" not in authority.lstrip("@")
        host = authority.rpartition("@")[2] if found and scheme in ALL else ""
        assert not host.startswith("-")


class CallbackTests(Tables):
    def test_http_url_is_kept_as_it_was_written(self) -> None:
        for url in (
            "https://host", "http://host:8080/", "https://host/a/b?c=d&e=%20", "https://host?x",
            "https://[2001:db8::1]:8443/x", "http://127.0.0.1/x@y", "https://host/;(a)*!$',+~",
        ):  # fmt: skip
            self.assertEqual(parse({"callback_url": url}).callback_url, url)

    def test_malformed_and_ambiguous_urls_are_refused(self) -> None:
        self.check_refused(
            "callback_url",
            "x", "/x", "host/x", "ftp://host/", "HTTP://host/", "https:/host", "https://",
            "https:///x", "https://user@host/", "https://user:secret@host/", "https://@host/",
            "https://host/#x", "https://host#x", "https://host/ x", "https://host/x\n",
            "https://host/\r\nX: y", "https://host\\x/", "https://host/\\x", "https://h\u00f6st/",
            "https://host/\u00e9", "https://host/\0", " https://host/", "https://0x7f.1/",
            "https://2130706433/", "https://127.1/", "https://host:0/", "https://host:99999/",
            "https://host:x/", "https://[::1/", "https://[fe80::1%25eth0]/", "https://::1/",
            "https://a..b/", "https://-x/", "https://host/\"x", "file:///x", "https://%68ost/",
            "https://host/[x]", "https://host/%zz", "https://host/%", "https://host/?%4",
        )  # fmt: skip

    def test_error_about_credentials_in_the_url_omits_the_password(self) -> None:
        error = self.assertRaises(InvalidField, parse, {"callback_url": "https://a:secret@h/"})
        self.assertIn("credentials", error.detail)
        self.assertNotIn("secret", error.detail)

    @given(
        st.one_of(
            st.text(),
            st.from_regex(r"https?://[-a.:\[\]0-9@]{1,9}[/?#%\[\] -~]{0,9}", fullmatch=True),
        )
    )
    def test_accepted_url_has_the_same_host_and_port_in_the_parser_of_twisted(
        self, url: str
    ) -> None:
        try:
            accepted = parse({"callback_url": url}).callback_url
        except InvalidField:
            return
        if accepted is None:
            assert url == ""
            return
        assert accepted == url
        assert re.fullmatch(r"[\x21-\x7e]+", url)
        read = URI.fromBytes(url.encode())
        ours = parse_server_address(url)
        assert ours is not None
        host = read.host.decode().strip("[]").lower()
        assert (read.scheme.decode(), read.port) == (ours.protocol, ours.port)
        assert host == ours.host or ip_address(host) == ours.ip_address
        try:
            encoded = EncodedURL.from_text(url).to_uri().to_text()
        except UnicodeError:  # no name by the rules of IDNA; not asked then
            return
        asked = URI.fromBytes(encoded.encode())
        path = read.originForm if read.originForm.startswith(b"/") else b"/" + read.originForm
        assert (asked.originForm, asked.port) == (path, read.port)
        assert asked.host == read.host.lower()


class LimitTests(Tables):
    def test_request_has_only_the_limits_that_the_form_has(self) -> None:
        self.assertEqual(parse().limits, {})
        form = {"limits[memory]": "64K", "limits[cpu]": "", "limits[wall_clock]": "20"}
        self.assertEqual(parse(form).limits, {"memory": 65536, "wall_clock": 20})

    def test_unpacked_request_has_integer_limits_as_integers(self) -> None:
        request = parse({"limits[cpu]": "20", "limits[wall_clock]": "20.5"})
        limits = unpack_request(pack_request(request)).limits
        self.assertEqual(repr(limits), "{'wall_clock': 20.5, 'cpu': 20}")
        self.assertEqual(request.drop_start_only_fields().limits, {})

    def test_invalid_limit_value_is_refused(self) -> None:
        self.check_refused("limits[memory]", "much")

    def test_unknown_limit_is_refused_with_the_names_of_all_limits(self) -> None:
        for name in ("limits[memroy]", "limits[", "limits[data_value]"):
            error = self.assertRaises(InvalidField, find_field_size_limit, name)
            self.assertEqual(error.extra_members, {"field": name})
            self.assertIn("NAME is wall_clock, cpu, memory,", error.detail)
        for name in ("limit", "limits", "metadata", "other"):
            self.assertIs(find_field_size_limit(name), None)
        self.assertEqual(find_field_size_limit("evaluator_cmd"), 65536)
        self.assertEqual(find_field_size_limit("limits[cpu]"), 64)


class LabelTests(Tables):
    def test_labels_are_parsed_and_kept_after_the_evaluation_has_started(self) -> None:
        form = {
            "metadata[contest]": "finals",
            "metadata[a.b-c_1]": "x = 'é' 😀",
            "metadata[no]": "",
        }
        request = parse(form)
        self.assertEqual(request.metadata, {"contest": "finals", "a.b-c_1": "x = 'é' 😀"})
        packed = pack_request(request.drop_start_only_fields())
        self.assertEqual(unpack_request(packed).metadata, request.metadata)

    def test_name_has_1_to_64_characters_of_a_few_kinds(self) -> None:
        for name in ("a", "a" * 64, "-._9"):
            self.assertEqual(find_field_size_limit(f"metadata[{name}]"), 256)
        for name in ("", "a" * 65, "A", "a b", "é", "a]", "a\n"):
            field = f"metadata[{name}]"
            error = self.assertRaises(InvalidField, find_field_size_limit, field)
            self.assertEqual(error.extra_members, {"field": field})

    def test_control_characters_and_more_than_16_labels_are_refused(self) -> None:
        self.check_refused("metadata[a]", "a\nb", "\x1b[31m", "\x7f")
        many = {f"metadata[a{number}]": "x" for number in range(16)}
        self.assertEqual(len(parse(many).metadata), 16)
        error = self.assertRaises(InvalidField, parse, {**many, "metadata[b]": "x"})
        self.assertEqual(error.detail, "metadata: 17 labels were sent; the limit is 16")


MIB = 1024**2


class ChosenLimitTests(SynchronousTestCase):
    def parse(self, name: str, value: str, least: float = 0, most: float = 2**40) -> float:
        return parse_limits({name: value}, {name: LimitRange(least, most)})[name]

    def test_limit_of_each_unit_is_parsed(self) -> None:
        for name, value, number in (
            ("wall_clock", "10", 10),
            ("wall_clock", "0.25", 0.25),
            ("cpu", "3", 3),
            ("processes", "64", 64),
            ("memory", "64k", 65536),
            ("file_size", "7B", 7),
            ("disk", "1.5GiB", 1536 * MIB),
            ("output", "2MB", 2 * MIB),
            ("stderr", "1T", 2**40),
        ):
            found = self.parse(name, value)
            self.assertEqual(found, number)
            self.assertIs(type(found), float if name == "wall_clock" else int)
        self.assertEqual(parse_limits(dict.fromkeys(LIMIT_UNITS, ""), {}), {})

    def test_error_about_a_limit_names_the_syntax_or_the_bound(self) -> None:
        size = "a size: bytes, or a number with K, M, G or T (of 1024), such as 65536 or 256M"
        seconds = ("-1", "1e3", "ten", "inf", "nan", " 1", "1.", ".5", "9" * 11, "\u0661")
        for name, values, words in (
            ("wall_clock", seconds, "is not a number of seconds, such as 10 or 2.5"),
            ("cpu", ("2.5", "+1"), "is not a whole number of seconds, such as 10"),
            ("processes", ("1K", "0x10"), "is not a whole number, such as 100"),
            ("memory", ("1 M", "M", "1MM", "1P", "1x", "1_0", "\n"), f"is not {size}"),
            ("memory", ("1M",), "is below the minimum, 16 MiB"),
            ("cpu", ("0",), "is not above 0"),
            ("memory", ("2G",), "2 GiB is over the maximum, 1 GiB (limits.maximum.memory)"),
            ("wall_clock", ("10.5",), "10.5 s is over the maximum, 10 s (limits.maximum.wall"),
            ("processes", ("1000001",), "1000001 is over the maximum, 1000000 (limits.maximum.p"),
        ):
            least, most = {"memory": (16 * MIB, 2**30), "wall_clock": (0, 10)}.get(name, (0, 10**6))
            for value in values:
                error = self.assertRaises(InvalidField, self.parse, name, value, least, most)
                self.assertIn(words, error.detail)
                self.assertEqual(error.extra_members["field"], f"limits[{name}]")
                bound = most if "over" in words else least
                self.assertEqual(error.extra_members.get("limit", bound), bound)
        for value in ("16M", "1G"):
            self.parse("memory", value, 16 * MIB, 2**30)


class BaseNameTests(SynchronousTestCase):
    def test_plain_file_name_stays_unchanged_even_with_odd_characters(self) -> None:
        for name in (
            "a.cpp", ".bashrc", "a b", "...", "-rf", "ö😀", "a\n", "~", "x" * MAX_FILENAME_BYTES,
        ):  # fmt: skip
            self.assertEqual(get_base_name(name), name)

    def test_directories_before_a_slash_or_backslash_are_dropped(self) -> None:
        for directory in ("/", "d/", "../", "/etc/../", "C:\\d\\", "d\\e/", "d/e\\", "//"):
            self.assertEqual(get_base_name(directory + "a"), "a")
        for directory in ("d" * 1000, "\0\ud800"):
            self.assertEqual(get_base_name(directory + "/a"), "a")

    def test_empty_or_too_long_file_name_or_directory_name_is_refused(self) -> None:
        self.assertEqual(MAX_FILENAME_BYTES, 255)
        for name in (
            "", ".", "..", "/", "a/", "a/.", "a\\..", "a\0", "\0", "a\0/..",
            "x" * (MAX_FILENAME_BYTES + 1), "é" * 128, "\ud800",
        ):  # fmt: skip
            self.assertRaises(ValueError, get_base_name, name)

    @given(file_names)
    def test_any_accepted_base_name_is_a_valid_file_name(self, name: str) -> None:
        try:
            base = get_base_name(name)
        except ValueError as error:
            assert str(error).isprintable()
            return
        assert name.endswith(base)
        assert base not in ("", ".", "..")
        assert not set(base) & set("/\\\0")
        assert len(base.encode()) <= 255
        assert get_base_name(base) == base
