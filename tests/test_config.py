"""`config`, and `etc/tawebeval.toml` that shows it to operators."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    GIB,
    MIB,
    RESERVED_URL_PATHS,
    Configuration,
    ProblemSettings,
    add_problem_settings,
    parse_configuration,
)
from tawebeval.core.form import LimitRange, choose_limits
from tawebeval.errors import ConfigurationError, ProblemClosed
from tests.cases.settings import CREDENTIAL, EXAMPLE, list_settings, read_setting

DOCS = EXAMPLE.parent.parent / "docs"
CONFIGURE = DOCS / "configure.md"
UNITS = {"min": 60, "MiB": 1024**2, "GiB": GIB}
DOCUMENTED_DEFAULT = re.compile(
    r"`([a-z_]+\.[a-z_.]+)`(?:\]\([^)]*\))? \(([\d,.]+)(?: (\w+))?(?: [a-z][^)`]*)?\)"
)


class RefusalTestCase(SynchronousTestCase):
    """Configurations that are refused."""

    def check(self, text: str, start: str, end: str = "") -> None:
        """Hold that `text` is refused by a line that begins with `start`, and so ends."""
        error = self.assertRaises(ConfigurationError, parse_configuration, text)
        self.assertTrue(str(error).endswith(end), str(error))
        self.assertTrue(str(error).startswith(start), str(error))
        self.assertTrue(str(error).isprintable(), str(error))


class ParseTests(SynchronousTestCase):
    """What a file may say."""

    def test_settings_of_each_kind_are_read(self) -> None:
        configuration = parse_configuration(
            """
            listen = ["tcp:1", "unix:/run/x"]
            [repositories]
            protocols = ["file", "https", "http", "git", "ssh"]
            [evaluations]
            running = 3
            retain = 0.5
            environment = { PATH = "/bin", _x9 = "" }
            [limits]
            wall_clock = 10
            """
        )
        self.assertEqual(configuration.listen, ("tcp:1", "unix:/run/x"))
        self.assertEqual(
            configuration.repositories.protocols, ("file", "https", "http", "git", "ssh")
        )
        self.assertEqual(configuration.evaluations.running, 3)
        self.assertEqual(configuration.evaluations.retain, 0.5)
        self.assertEqual(configuration.evaluations.environment, {"PATH": "/bin", "_x9": ""})
        self.assertEqual(configuration.limits.wall_clock, 10)
        self.assertEqual(configuration.evaluations.queued, 1000)
        self.assertEqual(configuration.buffers, Configuration().buffers)

    def test_sizes_may_be_texts_as_in_requests(self) -> None:
        text = "[limits]\nmemory = '1.5G'\ndisk = '4096'\n[limits.maximum]\nmemory = '2GiB'"
        limits = parse_configuration(text).limits
        self.assertEqual((limits.memory, limits.disk), (3 * GIB // 2, 4096))
        self.assertEqual(limits.maximum.memory, 2 * GIB)
        self.assertEqual(parse_configuration("limits = { free_disk = '0' }").limits.free_disk, 0)
        lines = EXAMPLE.read_text("utf-8").splitlines()
        table = ""
        for number, line in enumerate(lines):
            if line.startswith("["):
                table = line
            name, _, value = line.partition(" = ")
            is_size = _read_comment(lines, number).startswith("# Bytes")
            if value.replace("_", "").isdigit():
                quoted = f'{table}\n{name} = "{value.replace("_", "")}"'
                if is_size:
                    self.assertEqual(parse_configuration(quoted), Configuration(), quoted)
                else:
                    self.assertRaises(ConfigurationError, parse_configuration, quoted)

    def test_minimum_and_maximum_of_each_setting_are_allowed(self) -> None:
        for text in (
            "evaluations = { running = 0, queued = 0 }",
            "evaluations = { running = 1_000_000, queued = 1_000_000 }",
            "limits = { disk = 1024, disk_files = 1, wall_clock = 0.001 }",
            f"limits = {{ disk = {2**50}, disk_files = 1_000_000_000, wall_clock = 1e9 }}",
            "sandbox = { readable = ['/opt', '/srv/a b/..c'] }",
            "service = { name = '' }",
            "service = { name = 'judge2' }",
            "service = { name = '0123456789abcdef' }",
            "service = { name = 'a', peers = { a = 'http://a', b = 'https://[::1]:1/judge' } }",
            "polls = { wait = 0 }",
            "polls = { wait = 3600 }",
            "service = { drain = 0 }",
            "callbacks = { private_networks = ['10.0.0.0/8', '::1/128'] }",
        ):
            parse_configuration(text)


class MaximumTests(SynchronousTestCase):
    """`[limits.maximum]`: what a request may choose."""

    def test_maximum_of_a_limit_is_its_default_unless_one_is_set(self) -> None:
        limits = Configuration().limits
        self.assertIs(choose_limits(limits, {}, limits.requestable_ranges), limits)
        self.assertEqual(limits.free_disk_for_readiness, 2 * limits.free_disk)
        self.assertEqual(limits.largest_requestable_limits, limits)
        ranges = limits.requestable_ranges
        self.assertEqual(ranges["memory"], LimitRange(16 * MIB, 512 * MIB))
        self.assertEqual(ranges["wall_clock"], LimitRange(0, 300))

    def test_limit_in_a_request_is_capped_at_the_maximum(self) -> None:
        limits = parse_configuration(
            "[limits]\ncpu = 10\nprocesses = 20\n[limits.maximum]\nprocesses = 40"
        ).limits
        wanted = {"cpu": 5, "processes": 50}
        chosen = choose_limits(limits, wanted, limits.requestable_ranges)
        self.assertEqual((chosen.cpu, chosen.processes), (5, 40))
        self.assertEqual(chosen.memory, limits.memory)
        self.assertEqual(
            (limits.largest_requestable_limits.cpu, limits.largest_requestable_limits.processes),
            (10, 40),
        )


class ProblemTests(RefusalTestCase):
    """`[problems.NAME]`, and the file of further ones."""

    problem = (
        f"repository = 'https://example.org/p.git'\ncommit = '{'a' * 40}'\ncommand = './run'\n"
    )

    def test_problem_times_require_an_offset_and_opens_before_closes(self) -> None:
        early, late = "2026-11-01T08:00:00+01:00", "2026-12-01T12:00:00Z"
        text = f"[problems.a]\n{self.problem}"
        found = parse_configuration(f"{text}opens = {early}\ncloses = {late}\nlate = true")
        problem = found.problems["a"]
        self.assertEqual(problem.opens, datetime.fromisoformat(early))
        self.assertEqual(problem.closes, datetime.fromisoformat(late))
        words = "write a time with its offset, such as 2026-12-01T12:00:00+01:00"
        for key in ("opens", "closes"):
            for value in (late[:-1], late[:10], "12:00:00", "3", "true"):
                self.check(
                    f"{text}{key} = {value}", f"problems.a.{key}: {value.replace('T', ' ')} ", words
                )
            self.check(f"{text}{key} = 'x'", f"problems.a.{key}: 'x' ", words)
        self.check(f"{text}opens = {late}\ncloses = {early}", "problems.a.closes: is before opens")
        self.check(f"{text}late = true", "problems.a.late: needs closes")
        self.check(f"{text}fields = ['own_input']", "problems.a.fields: own_input is reserved")
        for time in ("9999-12-31T23:59:59-05:00", "0001-01-01T00:00:00+05:00"):
            self.check(f"{text}closes = {time}", "problems.a.closes: the year is not 1970 to 9998")

    def test_problem_is_open_from_its_first_time_on_and_before_the_second(self) -> None:
        opens, closes = "opens = 2026-11-01T08:00:00+01:00\n", "closes = 2026-12-01T12:00:00Z\n"
        first, last = (datetime.fromisoformat(one.split()[2]) for one in (opens, closes))
        for settings, is_early, is_late in (
            ("", True, True), (opens, False, True), (closes, True, False),
            (opens + closes, False, False), (f"{opens}{closes}late = true", False, True),
        ):  # fmt: skip
            text = f"[problems.a]\n{self.problem}{settings}"
            problem = parse_configuration(text).problems["a"]
            for moment, is_open in (
                (first.timestamp() - 1, is_early), (first.timestamp(), True),
                (last.timestamp() - 1, True), (last.timestamp(), is_late),
            ):  # fmt: skip
                if moment >= first.timestamp():
                    problem.check_open("a", moment, for_reading=True)
                if is_open:
                    problem.check_open("a", moment)
                else:
                    self.assertRaises(ProblemClosed, problem.check_open, "a", moment)

    def test_problem_sets_fields_of_the_form(self) -> None:
        found = parse_configuration(
            f"[problems.a]\n{self.problem}limits = {{ memory = '256M', cpu = 2 }}\n"
            "directory = 'd'\n[problems.'b.1_c-2']\nrepository = 'https://example.org/q.git'\n"
            "command = 'x'\nbranch = 'main'\nfields = ['source', 'notes']\ntitle = 'Ü'\n"
            "environment = 'java'\n[environments.java]\nroot = '/srv/java'"
        ).problems
        self.assertEqual(
            found["a"].form_fields,
            {
                "repository[url]": "https://example.org/p.git",
                "commit_oid": "a" * 40,
                "directory": "d",
                "evaluator_cmd": "./run",
                "limits[memory]": "256M",
                "limits[cpu]": "2",
            },
        )
        other = found["b.1_c-2"]
        self.assertEqual(other.form_fields["repository[branch]"], "main")
        self.assertEqual(other.form_fields["environment"], "java")
        self.assertNotIn("commit_oid", other.form_fields)
        self.assertEqual((other.fields, other.title), (("source", "notes"), "Ü"))

    def test_invalid_setting_of_a_problem_is_named_with_its_path(self) -> None:
        for text, start in (
            (self.problem + "x = 1", "problems.b.x: unknown setting"),
            (self.problem + "comand = 1", "problems.b.comand: unknown setting; did you mean prob"),
            (self.problem + "branch = 'main'", "problems.b: set either commit or branch"),
            ("repository = 'x'\ncommand = 'y'", "problems.b: set either commit or branch"),
            ("command = 'y'", "problems.b: repository is required"),
            (self.problem + "title = 1", "problems.b.title: 1 is not allowed; write a text in"),
            (self.problem + "title = 'a\\u0007'".replace("'", '"'), "problems.b.title: "),
            (self.problem + "fields = ['A']", "problems.b.fields[0]: 'A' should be NAME of"),
            (self.problem + "extensions = ['.py']", "problems.b.extensions[0]: '.py' should be"),
            (self.problem + "environment = 'x'", "problems.b.environment: no environment 'x' here"),
            (self.problem + "directory = '../x'", "problems.b.directory: '../x' contains '..'"),
            (self.problem + "limits = { memroy = 1 }", "problems.b.limits.memroy: no such limit"),
            (self.problem + "limits = { cpu = 301 }", "problems.b.limits.cpu: 301 s is over the m"),
            (self.problem + "limits = { cpu = [1] }", "problems.b.limits.cpu: [1] is neither a"),
            (self.problem.replace("https", "file"), "problems.b.repository: this server does not"),
            (self.problem.replace("a" * 40, "a"), "problems.b.commit: 'a' is not a whole commit"),
            (
                self.problem.replace("commit", "branch").replace("a" * 40, "a..b"),
                "problems.b.branch: 'a..b' is not",
            ),
            (self.problem.replace("./run", " "), "problems.b.command: is empty"),
            (
                self.problem.replace("./run", "x" * 65537),
                "problems.b.command: is 64.1 KiB; the limit is 64 KiB",
            ),
        ):
            self.check(f"[problems.a]\n{self.problem}\n[problems.b]\n{text}", start)
        for name in ("A", "a b", "-a", "a" * 65, ""):
            self.check(
                f"[problems.'{name}']\n{self.problem}", f"problems: {name!r} should be a name"
            )

    def test_there_are_at_most_1000_problems(self) -> None:
        tables = "".join(f"[p{number}]\n{self.problem}" for number in range(1000))
        self.assertEqual(len(add_problem_settings(Configuration(), tables).problems), 1000)
        one = parse_configuration(f"[problems.a]\n{self.problem}")
        error = self.assertRaises(ConfigurationError, add_problem_settings, one, tables)
        self.assertEqual(str(error), "problems: 1001 tables; the limit is 1000")

    def test_adding_problems_from_a_file_does_not_recheck_existing_problems(self) -> None:
        right = parse_configuration(f"[problems.a]\n{self.problem}")
        wrong = Configuration(problems={"a": ProblemSettings("", "", branch="b")})
        for one in (right, wrong):
            both = add_problem_settings(one, f"[b]\n{self.problem}")
            self.assertEqual(list(both.problems), ["a", "b"])

    def test_problems_of_the_file_are_checked(self) -> None:
        one = parse_configuration(f"[problems.a]\n{self.problem}")
        for text, start in (
            (f"[a]\n{self.problem}", "problems.a: the configuration has this problem, too"),
            (f"[b]\n{self.problem}commit = 1", "the file is not TOML"),
            ("b = 1", "problems.b: 1 is not allowed; write a table"),
            (f"[b]\n{self.problem}fields = ['A']", "problems.b.fields[0]: "),
        ):
            error = self.assertRaises(ConfigurationError, add_problem_settings, one, text)
            self.assertTrue(str(error).startswith(start), str(error))


class ErrorTests(RefusalTestCase):
    """What stops the start, and what it says."""

    def test_wrong_key_or_value_is_named_with_its_path_and_the_right_form(self) -> None:
        key = f"{CREDENTIAL}callers = ['']"
        peer = "[service]\nname = 'a'\n[service.peers]\n%s = '%s'\n"
        peers = "".join(f"b{n} = 'http://b'\n" for n in range(15))
        slurm = '[runner]\nkind = "slurm"\n'
        shared = slurm + 'shared = "/shared"\n'
        root = "[environments.x]\nroot = '/a'\n"
        credential = "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\n"
        for text, start in (
            # Unknown keys, and the nearest setting.
            ("listne = ['tcp:1']", "listne: unknown setting; did you mean listen?"),
            ("[limit]\nfile = 2048", "limit: unknown setting; did you mean limits?"),
            ("[limits]\nmemroy = 1", "limits.memroy: unknown setting; did you mean limits.mem"),
            ("request_body = 1", "request_body: unknown setting; did you mean limits.request_b"),
            ("memory = 1", "memory: unknown setting; did you mean repositories.memory or limits"),
            ("[http]\nport = 8080", "http.port: unknown setting; etc/tawebeval.toml lists all"),
            (f"{credential}pasword_file = '/p'", "repositories.credentials[0].pasword_file: unk"),
            ("[limits]\n'a`b' = 1", "limits.a`b: unknown setting; "),
            ("'a` - at `$.b[...]' = 1", "a` - at `$.b[...]: unknown setting; "),
            ("[limits]\n'a` - at `$.b' = 1", "limits.a` - at `$.b: unknown setting; "),
            ('[limits]\n"a\\nb" = 1', "limits.a\\nb: unknown setting; "),
            # Another type.
            ("limits = 1", "limits: 1 is not allowed; write a table"),
            ("[limits]\nwall_clock = '5'", "limits.wall_clock: '5' is not allowed; write a number"),
            ("listen = 'tcp:1'", "listen: 'tcp:1' is not allowed; write a list"),
            ("listen = [8080]", "listen[0]: 8080 is not allowed; write a text in quotes"),
            ("[archive]\nenabled = 'no'", "archive.enabled: 'no' is not allowed; write true or"),
            ("[callers]\ntokens = ['a']", "callers.tokens: the value is not allowed; write a te"),
            ("[polls]\nwait = 0.5", "polls.wait: 0.5 is not allowed; write a whole number"),
            # Values out of their range, or that are none of the choices.
            ("listen = []", "listen: [] is not allowed; write a list of length >= 1"),
            ("[limits]\nmemory = '1K'", "limits.memory: '1K' is not allowed; write a whole number"),
            ("[limits]\ndisk = '2 MB'", "limits.disk: '2 MB' is not a size; write a number of by"),
            ("[limits.maximum]\ncpu = 10", "limits.maximum.cpu: 10 s is below limits.cpu, 300 s;"),
            ("[limits.maximum]\nmemory = '1P'", "limits.maximum.memory: '1P' is not a size; "),
            ("[limits]\nwall_clock = nan", "limits.wall_clock: "),
            ("[limits]\nwall_clock = inf", "limits.wall_clock: "),
            ("[sandbox]\nkind = 'docker'", "sandbox.kind: 'docker' is not allowed; allowed: auto,"),
            ("[repositories]\nprotocols = ['https', 'scp']", "repositories.protocols[1]: 'scp'"),
            # Texts.
            ("[service]\nname = 'A_b'", "service.name: 'A_b' should be up to 16 of the"),
            ("[service]\nname = 'a\\n'", "service.name: "),
            ("[service]\nname = '0123456789abcdefg'", "service.name: "),
            ("[sandbox]\nreadable = ['opt']", "sandbox.readable[0]: 'opt' should be an absolute"),
            ("[sandbox]\nreadable = ['/opt/../etc']", "sandbox.readable[0]: "),
            ("[sandbox]\nreadable = ['/opt/']", "sandbox.readable[0]: "),
            ("[callers]\norigins = ['x']", "callers.origins[0]: 'x' should be an origin"),
            ("[repositories]\nallow_hosts = ['a b']", "repositories.allow_hosts[0]: "),
            ("[repositories]\nallow_hosts = ['*']", "repositories.allow_hosts[0]: '*' should be"),
            ("[repositories]\nprivate_networks = ['10.0.0.1/8']", "repositories.private_networks"),
            # Variables.
            ("[evaluations.environment]\n1A = ''", "evaluations.environment: '1A' should be"),
            ('[evaluations.environment]\n"A\\n" = ""', "evaluations.environment: "),
            ('[evaluations.environment]\nA = "x\\u0000y"', "evaluations.environment.A: a variable"),
            ("[evaluations.environment]\nA = ''\nB = 1", "evaluations.environment.B: the value is"),
            ("[evaluations.environment]\nHOME = 'x'", "evaluations.environment.HOME: tawebeval s"),
            ("[evaluations.environment]\nSUBMISSION_FILE_A = 'x'", "evaluations.environment.SUBM"),
            # Credentials.
            ("[repositories]\ncredentials = [{}]", "repositories.credentials[0]: host is required"),
            (credential, "repositories.credentials[0]: set either password_file or key_file"),
            (f"{CREDENTIAL}key_file = '/k'", "repositories.credentials[0]: set either password_f"),
            (f"{credential}key_file = '/k'", "repositories.credentials[0]: set key_file and know"),
            (f"{CREDENTIAL}known_hosts_file = '/k'", "repositories.credentials[0]: set key_file "),
            (f"{CREDENTIAL}port = 65536", "repositories.credentials[0].port: "),
            (CREDENTIAL.replace("'u'", "'-x'"), "repositories.credentials[0].username: '-x' sh"),
            (CREDENTIAL.replace("'u'", "'a:b'"), "repositories.credentials[0].username: "),
            (key, "repositories.credentials[0].callers[0]: '' sh"),
            (CREDENTIAL.replace("'/p'", "'a b'"), "repositories.credentials[0].password_file: the"),
            # Peers.
            ("[service.peers]\nb = 'http://b'", "service.peers: needs service.name"),
            (peer % ("B", "http://b"), "service.peers: 'B' should be a daemon's name"),
            (peer % ("b", "http://b/"), "service.peers.b: 'http://b/' should be a URL"),
            (peer % ("b", "http://u:p@b"), "service.peers.b: the URL should be a URL"),
            (peer % ("b", "http://b:0"), "service.peers.b: 'http://b:0' has an invalid port"),
            (peer % ("b", "http://b") + peers, "service.peers: has 16 other daemons; the limit is"),
            # Environments.
            ("environments.x = 1", "environments.x: 1 is not allowed; write a table"),
            ("[environments.x]", "environments.x: root is required"),
            ("[environments.x]\nroot = 'a'", "environments.x.root: 'a' should be an absolute path"),
            ("[environments.'x.y']\nroot = 1", 'environments."x.y".root: 1 is not allowed'),
            ("[environments.x]\nrot = '/a'", "environments.x.rot: unknown setting; did you me"),
            (f"{root}variables = {{ A = '', B = 1 }}", "environments.x.variables.B: the value is"),
            (f"{root}variables = {{ HOME = '/' }}", "environments.x.variables.HOME: tawebeval se"),
            (f"{root}variables = {{ A = '{'a' * 2**16}' }}", "environments.x.variables: names and"),
            (f'{root}description = "a\\nb"', "environments.x.description: 'a\\nb' should be one l"),
            ("[environments.X]\nroot = '/a'", "environments: 'X' should be a name of up to 64"),
            ("[environments.default]\nroot = '/a'", "environments.default: the name of the mach"),
            (f"[sandbox]\nkind = 'none'\n{root}", "environments: an environment needs a sandbox"),
            ("".join(root.replace("x", f"x{n}") for n in range(101)), "environments: 101 tables;"),
            # Slurm.
            (slurm, "runner.shared: "),
            (shared + '[sandbox]\nkind = "none"\n', "runner.kind: "),
            (shared + 'arguments = ["--uid=0"]\n', "runner.arguments[0]: "),
            (shared + 'arguments = ["--qos=low;x"]\n', "runner.arguments[0]: "),
            (shared + 'arguments = ["--partition=a b"]\n', "runner.arguments[0]: "),
            (shared + "retries = 2\n", "runner.retries: "),
        ):  # fmt: skip
            self.check(text, start)
        parse_configuration(shared)

    def test_each_setting_refuses_a_date_and_names_its_path(self) -> None:
        for path in list_settings(Configuration):
            table, _, name = path.rpartition(".")
            start = f"[{table}]\n" if table else ""
            self.check(f"{start}{name} = 1979-05-27", path)
            try:
                parse_configuration(f"{start}{name} = '?'")
            except ConfigurationError as error:
                self.assertTrue(str(error).startswith(path), str(error))

    def test_each_number_refuses_values_outside_its_range(self) -> None:
        for path in list_settings(Configuration):
            if type(read_setting(Configuration(), path)) in (int, float):
                table, _, name = path.rpartition(".")
                for value in (-1, 10**30):
                    self.check(f"[{table}]\n{name} = {value}", f"{path}: ")

    def test_base_path_is_a_path_outside_the_api(self) -> None:
        for path in ("", "/judge", "/a/b.c/~d-e_f"):
            http = parse_configuration(f"[http]\nbase_path = '{path}'").http
            self.assertEqual(http.base_path, path)
        for path in ("judge", "/judge/", "/", "/a//b", "/a b", "/..", "/a/./b", "/%41", "/ä"):
            self.check(
                f"[http]\nbase_path = '{path}'",
                f"http.base_path: '{path}' should be a path such as '/judge', with a slash before"
                " each part and none at the end",
            )
        for name in RESERVED_URL_PATHS:
            for path in (f"/{name}", f"/{name}/x"):
                self.check(
                    f"[http]\nbase_path = '{path}'",
                    f"http.base_path: '{path}' begins with a path of the API; choose another path",
                )

    def test_trusted_proxies_are_addresses_networks_or_unix(self) -> None:
        listed = ("127.0.0.1", "10.0.0.0/29", "::1", "2001:db8::/48", "unix")
        text = f"[http]\ntrusted_proxies = {list(listed)}"
        self.assertEqual(parse_configuration(text).http.trusted_proxies, listed)
        for wrong, why in (
            ("localhost", "'localhost' does not appear to be an IPv4 or IPv6 network"),
            ("10.0.0.1/8", "10.0.0.1/8 has host bits set"),
            ("", "'' does not appear to be an IPv4 or IPv6 network"),
        ):
            self.check(
                f"[http]\ntrusted_proxies = ['{wrong}']",
                f"http.trusted_proxies: {why}; allowed: IP addresses, networks and 'unix'",
            )

    def test_text_that_is_not_toml_is_refused_with_the_line(self) -> None:
        for text in ("listen", "x = 1\nx = 2"):
            self.check(text, "the configuration is not TOML: ")
        error = self.assertRaises(ConfigurationError, parse_configuration, "a = 1\nb = = 2")
        self.assertIn("line 2", str(error))
        self.check("[limits]\ndisk = " + "1" * 5000, "the configuration")


def list_keys(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key, those of a table in place of the table's own."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from list_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _read_comment(lines: Sequence[str], number: int) -> str:
    """Return the comment right above a line of `etc/tawebeval.toml`."""
    comment = ""
    while lines[number - 1].startswith("#"):
        number -= 1
        comment = lines[number] + comment
    return comment


class ExampleTests(SynchronousTestCase):
    """`etc/tawebeval.toml` shows what the code has, and explains it."""

    def test_example_has_all_settings_in_the_order_of_the_code(self) -> None:
        shown = tomllib.loads(EXAMPLE.read_text("utf-8"))
        self.assertEqual(list(list_keys(shown)), list(list_settings(Configuration)))

    def test_values_of_the_example_are_the_defaults_literally(self) -> None:
        shown = tomllib.loads(EXAMPLE.read_text("utf-8"))
        self.assertEqual(shown, msgspec.json.decode(msgspec.json.encode(Configuration())))
        self.assertEqual(parse_configuration(EXAMPLE.read_text("utf-8")), Configuration())

    def test_each_setting_of_the_example_has_a_comment_with_its_unit(self) -> None:
        lines = EXAMPLE.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            if re.match(r"\[|\w+ = ", line):
                comment = _read_comment(lines, number)
                self.assertTrue(comment, line)
                if re.search(r"= [\d_]+$", line):
                    self.assertRegex(comment, r"^# (Bytes|Seconds|Number)\b", line)


class DocumentedDefaultTests(SynchronousTestCase):
    """The pages in docs, which name a default in brackets behind its setting."""

    def test_defaults_in_the_documents_are_those_of_the_code(self) -> None:
        shown = set()
        for page in DOCS.glob("*.md"):
            text = " ".join(page.read_text("utf-8").split())
            for setting, number, unit in DOCUMENTED_DEFAULT.findall(text):
                found = read_setting(Configuration(), setting)
                written = float(number.replace(",", "")) * UNITS.get(unit, 1)
                self.assertEqual(written, found, f"{page.name}: {setting}")
                shown.add(setting)
        self.assertGreater(len(shown), 5)


class ExamplesTests(SynchronousTestCase):
    """`etc/examples`: whole configurations for a contest and for a public instance."""

    def read(self, name: str) -> Configuration:
        """Return what an example says."""
        text = (EXAMPLE.parent / "examples" / f"{name}.toml").read_text("utf-8")
        return parse_configuration(text)

    def test_examples_are_valid_documented_and_safe(self) -> None:
        names = [path.stem for path in sorted((EXAMPLE.parent / "examples").iterdir())]
        self.assertEqual(names, ["class", "contest", "public"])
        for name in names:
            found = self.read(name)
            self.assertTrue(f"etc/examples/{name}.toml" in CONFIGURE.read_text("utf-8"), name)
            self.assertFalse(found.callers.open)
            self.assertEqual((found.sandbox.network, found.sandbox.kind == "none"), (False, False))
            if name == "class":  # without a unit
                continue
            # The unit hands these over, for its user cannot read what only root can.
            self.assertEqual(found.callers.tokens, "")
            for entry in found.repositories.credentials:
                self.assertEqual(Path(entry.password_file).name, entry.password_file)
            # Nobody has opened that where no unit hands over tokens: it does not start without.
            self.assertEqual(found.listen, ("systemd:domain=INET:index=0",))
            if name == "public":
                self.assertEqual(found.repositories.private_networks, ())
                self.assertLess(0, found.callers.running)
                self.assertLess(found.callers.running, found.evaluations.running)
                self.assertLess(found.callers.queued, found.evaluations.queued)
            self.assertEqual(found.repositories.protocols, ("https",))

    def test_examples_fit_into_their_machines(self) -> None:
        for name, memory in (("contest", 32 * GIB), ("public", 16 * GIB)):
            found = self.read(name)
            running, limits = found.evaluations.running, found.limits
            waiting = running + found.evaluations.queued
            used = running * limits.memory + found.buffers.total
            used += running * 2 * found.repositories.memory / 4  # seldom all fetch at once
            self.assertLess(used, memory)
            disk = running * (limits.disk + found.repositories.tree_bytes)
            disk += waiting * limits.request_body + found.repositories.cache
            disk += found.buffers.disk
            self.assertLess(disk, 100 * 10**9)

    def test_example_for_a_class_has_the_problems_of_the_repository(self) -> None:
        for name, problem in self.read("class").problems.items():
            folder = EXAMPLE.parent.parent / "examples" / "problems" / name
            example = tomllib.loads((folder / "problem.toml").read_text("utf-8"))
            self.assertEqual(problem.command, example["evaluator_cmd"])
            self.assertEqual(problem.title, example["title"])
            self.assertEqual(problem.fields, (example["field"],))
            self.assertTrue((folder / "statement.md").is_file())
            self.assertEqual(problem.statement, "statement.md")
