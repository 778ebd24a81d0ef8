"""The client libraries by themselves: the wheel of tawebeval-client, and the package of npm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tests.cases.patience import LONG_PATIENCE
from tests.integration.cutting_proxy import CuttingProxy, Place
from tests.integration.harness import DaemonTestCase

ROOT = Path(__file__).resolve().parent.parent.parent
NODE = shutil.which("node")
WITHOUT_NODE = None if NODE else "Node.js is not installed"

# What the client may need, directly or not; the last three with some versions of the others.
ALLOWED = {
    *("attrs", "httpx", "msgspec", "anyio", "certifi", "h11", "httpcore", "idna"),
    *("sniffio", "typing-extensions", "exceptiongroup"),
}

# Imports all modules, and uses the client.
USE = """\
import sys, pkgutil, tawebeval, tawebeval.client, tawebeval.core
from pathlib import Path
for package in (tawebeval.client, tawebeval.core):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        __import__(module.name)
once = tawebeval.core.backoff.Backoff(1, 0, 0)
client = tawebeval.client.Client("http://127.0.0.1:9", request_backoff=once)
try:
    client.status("x")
except tawebeval.client.Unavailable as error:
    print(error)
print(hasattr(tawebeval.client, "AsyncClient"), hasattr(tawebeval.client, "None"))
print(Path(tawebeval.__file__).parent.parent, {"twisted", "klein"} & {*sys.modules})
"""

# Prints what the module has, without what begins with an underscore.
NAMES = """\
import * as client from "tawebeval-client";
const methods = (kind) => Object.getOwnPropertyNames(kind.prototype);
console.log(JSON.stringify([Object.keys(client), methods(client.Client), methods(client.Refused)]));
"""

FOLLOW = """\
import { Client, Refused } from "tawebeval-client";
const [server, cut, repository, commit] = process.argv.slice(2);
const form = new FormData();
form.append("submission[source]", new Blob(["x"]), "x.txt");
form.append("repository[url]", repository);
form.append("commit_oid", commit);
form.append("evaluator_cmd", "seq 20000");
const client = new Client({ server: cut });
const id = await client.evaluate(form, { tries: 100 });
let printed = "";
for await (const event of client.events(id, { limit: 8000 })) printed += event.payload;
form.set("evaluator_cmd", "sleep 600");
const direct = new Client({ server });
const other = await direct.evaluate(form);
await direct.cancel(other);
const last = [];
for await (const event of direct.events(other)) last.push(event.payload.reason);
const { status } = await direct.status("x").catch((error) => error);
console.log(JSON.stringify({ printed, last, status }));
"""


def find_requirements(requirements: list[str]) -> set[str]:
    """Return the names of all distributions that these need, directly or not, without extras."""
    found: set[str] = set()
    rest = [Requirement(one) for one in requirements]
    while rest:
        one = rest.pop()
        name = canonicalize_name(one.name)
        if name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        rest += [Requirement(text) for text in distribution(name).requires or ()]
    return found


class WheelTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.run_command(sys.executable, ROOT / "scripts" / "client_wheel", self.folder)
        (self.wheel,) = self.folder.glob("*.whl")

    def run_command(self, *command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=LONG_PATIENCE
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_wheel_works_with_its_requirements_alone(self) -> None:
        self.run_command(sys.executable, "-m", "venv", "--without-pip", self.folder / "venv")
        (site,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        with zipfile.ZipFile(self.wheel) as wheel:
            wheel.extractall(site)
        ours = json.loads(
            self.run_command(
                self.folder / "venv" / "bin" / "python",
                "-c",
                "import importlib.metadata as m, json;"
                " print(json.dumps(m.distribution('tawebeval-client').requires))",
            )
        )
        needed = find_requirements(ours)
        self.assertLessEqual(needed, ALLOWED)
        for name in needed:
            for file in distribution(name).files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (site / top).exists():
                    (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
        python = self.folder / "venv" / "bin" / "python"
        printed = self.run_command(python, "-I", "-c", USE)
        self.assertEqual(
            printed.splitlines(),
            [
                "cannot connect to http://127.0.0.1:9: connection refused",
                "True False",
                f"{site} set()",
            ],
        )

    def test_wheel_has_the_version_and_requirements_of_the_daemon(self) -> None:
        self.assertEqual(self.wheel.name, f"tawebeval_client-{__version__}-py3-none-any.whl")
        with zipfile.ZipFile(self.wheel) as wheel:
            self.assertIn("tawebeval/py.typed", wheel.namelist())
            for name in wheel.namelist():
                if name.startswith("tawebeval/"):
                    self.assertEqual(wheel.read(name), (ROOT / name).read_bytes())
            (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            text = wheel.read(metadata).decode()
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        daemon = {str(Requirement(one)) for one in project["dependencies"]}
        for one in re.findall(r"^Requires-Dist: ([^;\n]+)$", text, re.MULTILINE):
            self.assertIn(str(Requirement(one)), daemon)


class NodeTests(DaemonTestCase):
    skip = WITHOUT_NODE

    async def setUp(self) -> None:
        await super().setUp()
        subprocess.run([sys.executable, ROOT / "scripts" / "npm_package", self.folder], check=True)
        (package,) = self.folder.glob("*.tgz")
        self.module = self.folder / "node_modules" / "tawebeval-client"
        with tarfile.open(package) as file:
            file.extractall(self.folder / "unpacked")
        self.module.parent.mkdir()
        (self.folder / "unpacked" / "package").rename(self.module)

    async def run_node(self, program: str, *arguments: str) -> object:
        script = self.folder / "program.mjs"
        script.write_text(program)
        output, errors, status = await getProcessOutputAndValue(
            str(NODE),
            [str(script), *arguments],
            {"PATH": os.environ.get("PATH", os.defpath)},
            str(self.folder),
            reactor,
        )
        self.assertEqual(status, 0, errors.decode())
        return json.loads(output)

    async def test_types_name_exactly_what_the_module_exports(self) -> None:
        types = (self.module / "client.d.ts").read_text()
        exports, methods, refused = await self.run_node(NAMES)  # type: ignore[misc]
        declared = re.findall(r"^export (?:class|function) (\w+)", types, re.MULTILINE)
        self.assertEqual(sorted(declared), sorted(exports))
        (client,) = re.findall(r"^export class Client \{(.*?)^\}", types, re.MULTILINE | re.DOTALL)
        self.assertEqual(sorted(re.findall(r"^  (\w+)\(", client, re.MULTILINE)), sorted(methods))
        self.assertEqual(refused, ["constructor"])
        description = json.loads((self.module / "package.json").read_text())
        self.assertEqual(description["version"], __version__)
        for name in description["files"]:
            self.assertTrue((self.module / name).exists(), name)

    async def test_client_follows_over_cut_connections_and_cancels(self) -> None:
        proxy = CuttingProxy(self.daemon.port, 5, (Place.WITHIN_RESPONSES,), 40_000, 20_000)
        self.addCleanup(proxy.stop)
        cut = f"http://127.0.0.1:{await proxy.listen()}/"
        result = await self.run_node(
            FOLLOW, f"{self.daemon.url}/", cut, self.repository.url, self.commit
        )
        assert isinstance(result, dict)
        self.assertEqual(result["printed"], "".join(f"{n}\n" for n in range(1, 20_001)))
        self.assertEqual((result["last"], result["status"]), (["cancelled"], 404))
        self.assertGreater(proxy.cuts.total(), 2)
