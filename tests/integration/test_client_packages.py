"""The JavaScript client as a package of npm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SkipTest

from tawebeval import __version__
from tests.integration.cutting_proxy import CuttingProxy, Place
from tests.integration.harness import DaemonTestCase

ROOT = Path(__file__).resolve().parent.parent.parent
NODE = shutil.which("node")
WITHOUT_NODE = None if NODE else "Node.js is not installed"

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


# The lines that end in "wrong" have an error.
TYPESCRIPT = """\
import { Client, Refused, type Status } from "tawebeval-client";

const client = new Client({ server: "http://127.0.0.1:8080/" });
const status: Status = await client.status("x");
const next: number = status.seed + 1;
console.log(status.sed); // wrong
const text: string = status.seed; // wrong
console.log(status.state === "finishd"); // wrong
for await (const summary of client.evaluations()) {
  console.log(summary.results.cases); // wrong
  console.log(summary.results?.cases.accepted, next, text);
}
for await (const { best } of client.standings()) console.log(best.evaluation); // wrong
for await (const event of client.events("x")) console.log(event.payload, event.kind); // wrong
console.log(new Refused(404, {}, 0).problem.message, (await client.makeLink("x")).link);
"""
LIBRARY = Path(sys.prefix, "npm", "typescript")


def install_package(folder: Path) -> Path:
    """Build the package of npm, and unpack it where programs in the folder find it."""
    subprocess.run([sys.executable, ROOT / "scripts" / "npm_package", folder], check=True)
    (package,) = folder.glob("*.tgz")
    (folder / "node_modules").mkdir()
    subprocess.run(["tar", "-xf", package, "-C", folder / "node_modules"], check=True)
    return (folder / "node_modules" / "package").rename(folder / "node_modules/tawebeval-client")


class NodeTests(DaemonTestCase):
    skip = WITHOUT_NODE

    async def setUp(self) -> None:
        await super().setUp()
        self.module = install_package(self.folder)

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
        cut = f"http://127.0.0.1:{proxy.listen()}/"
        result = await self.run_node(
            FOLLOW, f"{self.daemon.url}/", cut, self.repository.url, self.commit
        )
        assert isinstance(result, dict)
        self.assertEqual(result["printed"], "".join(f"{n}\n" for n in range(1, 20_001)))
        self.assertEqual((result["last"], result["status"]), (["cancelled"], 404))
        self.assertGreater(proxy.cuts.total(), 2)

    async def test_typescript_finds_wrong_members_of_documents(self) -> None:
        if not (LIBRARY / "tsc.js").exists():
            raise SkipTest("python3 scripts/bootstrap --npm typescript installs the compiler")
        (self.folder / "wrong.mts").write_text(TYPESCRIPT)
        options = ("--strict", "--noEmit", "--target", "es2024", "--module", "nodenext")
        printed, _, _ = await getProcessOutputAndValue(
            str(NODE),
            [str(LIBRARY / "tsc.js"), *options, "wrong.mts"],
            {},
            str(self.folder),
            reactor,
        )
        found = re.findall(r"(?m)^wrong\.mts\((\d+)\b.* error", printed.decode())
        lines = enumerate(TYPESCRIPT.splitlines(), 1)
        wrong = {number for number, line in lines if line.endswith(" wrong")}
        self.assertEqual({*map(int, found)}, wrong, printed.decode())
