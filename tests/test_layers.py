"""The architecture, held against every import of the package.

Two rules besides the table: a module has at most 300 lines, and what a module of the core
takes from the standard library only computes. It reads no file, no clock and no source of
randomness, starts nothing, and knows nothing of the process that it runs in.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase


@attrs.frozen
class Layer:
    """Some modules, the layers that they may import besides their own, and what they may not."""

    modules: str
    below: str
    never: str = ""


LAYERS = {
    # The command: the only one who knows both the daemon and the client.
    "command": Layer("cli", below="face client web work core"),
    # For other people's programs, and the command; the daemon has no use for it.
    "client": Layer("client", below="core", never="klein werkzeug multipart"),
    # The daemon as twistd starts it, and the one place where all parts are put together.
    "face": Layer(
        "twisted.plugins tap doctor findings premises room service reloading interrupts ground"
        " preload allocator collector descriptors ceilings allowances monotonic repeats logs"
        " metrics vitals observing doors lag"
        " reconfiguring adapting supervisor reporting listening orders retrial housekeeping",
        below="web work core",
    ),
    # HTTP: routes, uploads, pages, errors as problem documents.
    "web": Layer("web", below="work core"),
    # Evaluations from their place in the queue to their end: git, directories, processes.
    "work": Layer(
        "registry acceptance admission status evaluation run intake process pipes orphans signals"
        " leftovers arrears records listing following closing chronicle readiness variables"
        " surroundings"
        " sandbox sandboxes bubblewrap bwrap seccomp cgroups disk watch access workspace removal"
        " opening directories diskfaults belongings"
        " git gitbox gitversion bare blank quota remotes addresses keyring repositories"
        " shared checkouts copying writable launcher launching reports starting"
        " callbacks deliveries posting rereading secretfiles pinned signing telling"
        " kernel privileges ownership cgroupfs cgrouphomes cgroups groups sparegroup controls",
        below="core",
        never="klein werkzeug multipart",
    ),
    # Bytes in, values out.
    "core": Layer(
        "__init__ errors events utf8 markers segi values fileblock filenames ring pages identity"
        " form config live settings outbound forwarded callers exposure hosts trees commits"
        " hierarchies credentials gitwords retention framing budget life spool backoff signatures"
        " callback tally",
        below="",
    ),
}

STANDARD_LIBRARY = (
    "__future__ abc base64 binascii bisect calendar codecs collections collections.abc dataclasses"
    " email.parser email.utils enum functools hashlib hmac ipaddress itertools json math operator"
    " re shlex string struct tomllib types typing urllib.parse"
)
CORE_MAY_IMPORT = frozenset([*STANDARD_LIBRARY.split(), "attrs", "msgspec", "orjson"])

NO_COMPUTATION = frozenset({"open", "print", "input", "breakpoint", "exec", "eval", "__import__"})

MOST_LINES = 300

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tawebeval"


@attrs.frozen
class Module:
    """A module by its dotted name, and what is written in it."""

    name: str
    source: str
    is_package: bool = False


def layer_of(name: str) -> str | None:
    """Return the layer that a module is in; None when the table does not have it."""
    for layer, row in LAYERS.items():
        for entry in row.modules.split():
            whole = entry if "." in entry else f"{PACKAGE}.{entry}"
            if name == whole or name.startswith(f"{whole}."):
                return layer
    # The package itself holds a version number, and belongs to everybody.
    return "core" if name == PACKAGE else None


def imports(module: Module, known: Iterable[str]) -> Iterator[str]:
    """Yield the modules that a module imports anywhere in it, `known` ones by their full name."""
    known = set(known)
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + module.is_package]
                start = ".".join([*parts, start] if start else parts)
            for alias in node.names:
                name = f"{start}.{alias.name}"
                yield name if name in known else start


def complaints(modules: Iterable[Module]) -> Iterator[str]:
    """Yield a sentence for each rule that is not kept."""
    modules = list(modules)
    known = [module.name for module in modules]
    for module in modules:
        lines = len(module.source.splitlines())
        if lines > MOST_LINES:
            yield f"{module.name} has {lines} lines: more than {MOST_LINES} are two ideas"
        layer = layer_of(module.name)
        if layer is None:
            yield f"{module.name} is in no layer: assign it in tests/test_layers.py"
            continue
        for imported in imports(module, known):
            if _is_ours(imported):
                other = layer_of(imported)
                if other not in (layer, *LAYERS[layer].below.split()):
                    yield f"{module.name} ({layer}) imports {imported} ({other})"
            elif imported.partition(".")[0] in LAYERS[layer].never.split():
                yield f"{module.name} ({layer}) imports {imported}"
            elif layer == "core" and imported not in CORE_MAY_IMPORT:
                yield f"{module.name} (core) imports {imported}"
        if layer == "core":
            for call in _calls(module.source) & NO_COMPUTATION:
                yield f"{module.name} (core) calls {call}()"


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith((f"{PACKAGE}.", "twisted.plugins.tawebeval"))


def _calls(source: str) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def project_modules() -> Iterator[Module]:
    """Yield the modules of the package, and the plugin where there is one."""
    paths = [*ROOT.glob(f"{PACKAGE}/**/*.py"), *ROOT.glob("twisted/plugins/tawebeval*.py")]
    for path in sorted(paths):
        *parents, name = path.relative_to(ROOT).with_suffix("").parts
        is_package = name == "__init__"
        dotted = ".".join(parents if is_package else [*parents, name])
        yield Module(dotted, path.read_text(encoding="utf-8"), is_package)


class ProjectTests(SynchronousTestCase):
    """The project as it is."""

    def test_architecture(self) -> None:
        """Imports point downward only, and no module has grown too long."""
        found = list(complaints(project_modules()))
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_modules_are_found(self) -> None:
        """The test above looks at something: the whole core is there."""
        names = {module.name for module in project_modules()}
        core = {f"{PACKAGE}.{name}" for name in LAYERS["core"].modules.split()[1:]}
        self.assertEqual(core - names, set())
        self.assertIn(PACKAGE, names)

    def test_core_takes_standard_modules_that_exist(self) -> None:
        """The list of what the core may import has no slip of the pen in it."""
        for name in STANDARD_LIBRARY.split():
            self.assertIn(name.partition(".")[0], sys.stdlib_module_names)


class RuleTests(SynchronousTestCase):
    """The rules see what they are there for."""

    def check(self, name: str, source: str, *words: str, is_package: bool = False) -> None:
        """Hold that a module is complained of once, with these words; or not, without any."""
        others = ("web", "web.routes", "segi", "ring", "process", "tap", "client", "cli")
        known = [Module(f"tawebeval.{other}", "") for other in others]
        found = list(complaints([*known, Module(f"tawebeval.{name}", source, is_package)]))
        self.assertEqual(len(found), bool(words), found)
        for word in words:
            self.assertIn(word, found[0])

    def test_downward(self) -> None:
        """A layer may import itself and what is below it."""
        self.check("pages", "from tawebeval.ring import Ring\nfrom tawebeval import ring")
        self.check("run", "import os\nfrom twisted.internet import defer\nimport tawebeval.ring")
        self.check("web.site", "import klein\nfrom tawebeval import __version__, registry")
        self.check("service", "import klein, tawebeval.web, tawebeval.process, tawebeval.ring")
        self.check("cli", "import tawebeval.client, tawebeval.tap, tawebeval.web, tawebeval.ring")
        self.check("client.client", "import treq, tawebeval.ring")

    def test_upward(self) -> None:
        """No layer imports one above it, however the import is written."""
        self.check("pages", "import tawebeval.process", "pages (core)", "process (work)")
        self.check("pages", "from tawebeval import process", "process (work)")
        self.check("pages", "from .process import x", "process (work)")
        self.check("pages", "from . import process", "process (work)")
        self.check("pages", "def f():\n    from tawebeval.process import x", "process (work)")
        self.check("run", "from tawebeval.web.routes import x", "web.routes (web)")
        self.check("run", "from tawebeval import tap", "tap (face)")
        self.check("web.site", "import tawebeval.tap", "tap (face)")
        self.check("tap", "import tawebeval.cli", "cli (command)")
        self.check("tap", "import tawebeval.client", "client (client)")
        self.check("client", "import tawebeval.process", "process (work)")
        self.check("web.site", "from .. import tap", "tap (face)")
        self.check("web", "from ..tap import x", "tap (face)", is_package=True)

    def test_frameworks(self) -> None:
        """The web's framework stays in the web, and the core has none at all."""
        self.check("run", "import klein", "imports klein")
        self.check("run", "from werkzeug.routing import x", "imports werkzeug.routing")
        self.check("pages", "from twisted.internet import defer", "twisted.internet")

    def test_core_only_computes(self) -> None:
        """The core imports nothing with which it could reach the world."""
        for name in ("os", "sys", "time", "socket", "random", "secrets", "pathlib", "email"):
            self.check("pages", f"import {name}", f"imports {name}")
        for name in NO_COMPUTATION:
            self.check("pages", f"def f():\n    {name}('x')", f"calls {name}()")

    def test_unassigned(self) -> None:
        """A new module has to be given its layer."""
        self.check("novelty", "", "novelty is in no layer", "assign it")
        self.check("webhooks", "", "webhooks is in no layer")

    def test_length(self) -> None:
        """A module has 300 lines at most."""
        self.check("pages", "x = 1\n" * 300)
        self.check("pages", "x = 1\n" * 301, "301 lines")
