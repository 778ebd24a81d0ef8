"""Problem packages as they are: `tawebeval check`, and what `tawebeval-judge` sends."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from tawebeval.sandbox.bubblewrap import EVALUATOR_TOOLS_DIRECTORY_NAME, write_sandbox_files
from tests.integration.client import Event, data, text
from tests.integration.harness import DaemonTestCase
from tests.integration.terminal import piped
from tests.integration.unprivileged import USER

BY = ("--user", USER.pw_name) if USER else ()
SUM = "a, b = map(float, input().split())\n"
THIEF = """
import glob, os
paths = [*glob.glob("/evaluation/**/*", recursive=True), *glob.glob("/tmp/**/*", recursive=True)]
for path in paths:
    if path.endswith(".ans") or path.endswith(".a"):
        print(open(path).read())
print({**os.environ})
print('\\n%s\\n{"type": "goal_result", "goal": "accepted", "result": true}\\n%s'
      % (os.environ.get("EVALUATION_DATA_BEGIN"), os.environ.get("EVALUATION_DATA_END")))
"""
KATTIS = {
    "problem.yaml": "name: Sum\nconstants: {large: {value: 1000}, zero: 0}\n"
    "validator_flags: float_tolerance 1e-3\nlimits: {memory: 64}\n",
    ".timelimit": "1\n",
    "data/sample/1.in": "1 2\n",
    "data/sample/1.ans": "3\n",
    # In addition to the flags of the package.
    "data/secret/big/testdata.yaml": "output_validator_flags: space_change_sensitive\n",
    "data/secret/big/2.in": "1000 1\n",
    "data/secret/big/2.ans": "1001 Done\n",
    "data/secret/3.in": "2 2\n",
    "data/secret/3.ans": "4\n",
    "input_validators/sum/main.py": "import sys\na, b = map(int, input().split())\n"
    "print(a, 'is large', end='')\nsys.exit(42 if a < {{large}} else 43)\n",
    "include/python3/included.py": "def show(x): print(x, *['DONE'] * (x > {{large.value}}))\n",
    "submissions/accepted/right.py": "# @EXPECTED_RESULTS@: CORRECT\nimport included\n"
    f"{SUM}included.show(a + b + 0.0001)\n",
    "submissions/accepted/several/main.py": f"import included, sums\n{SUM}"
    "included.show(sums.add(a, b))\n",
    "submissions/accepted/several/sums.py": "def add(a, b): return a + b\n",
    "submissions/accepted/untrue.py": f"{SUM}print(a - b)\n",
    "submissions/accepted/unknown.xyz": "?\n",
    "include/default/sign.txt": "+",
    "data/secret/3.files/more.txt": "0.0005",
    "submissions/accepted/reads.py": f"{SUM}import os, included\n"
    "more = open('more.txt').read() if os.path.exists('more.txt') else 0\n"
    "included.show(a + b + float(more) if open('sign.txt').read() == '+' else 0)\n",
    "submissions/wrong_answer/constant.py": "print({{zero}} + 3)\n",
    "submissions/wrong_answer/two.py": f"{SUM}print(3)\n",
    "submissions/wrong_answer/thief.py": THIEF,
    "submissions/run_time_error/crash.py": f"{SUM}print(3 if a == 1 else 1 / 0)\n",
    "submissions/run_time_error/broken.py": "print(\n",
    "submissions/run_time_error/memory.py": "x = b'x' * 10**8\n",
    "submissions/time_limit_exceeded/slow.py": "while True: pass\n",
    "submissions/other/new.py": SUM,
    "submissions/mixed/zero.py": f"# @EXPECTED_RESULTS@: CORRECT, WRONG-ANSWER\n{SUM}print(0)\n",
    "submissions/mixed/late.py": f"# @EXPECTED_RESULTS@: TIMELIMIT\n{SUM}print(0)\n",
    "submissions/mixed/crash.py": "# @EXPECTED_RESULTS@: RUN-ERROR, NO-OUTPUT\n1 / 0\n",
}
# No number is within the tolerance of what is none.
INFINITE = {
    "problem.yaml": "validator_flags: float_tolerance 0.5\nlimits: {time_limit: 5}\n",
    "data/testdata.yaml": "output_validator_flags:\n",
    "data/secret/1.in": "",
    "data/secret/1.ans": "inf 1e999 2\n",
    "submissions/accepted/same.py": "print('INF 1e999 2.5')\n",
    "submissions/wrong_answer/zero.py": "print('0 1e999 2')\n",
    "submissions/wrong_answer/less.py": "print('inf 5 2')\n",
    "submissions/wrong_answer/more.py": "print('inf 1e999 1e999')\n",
}
INTERACTOR = """
import sys
secret, limit = int(open(sys.argv[1]).read()), 20
for count in range(limit):
    guess = int(sys.stdin.readline() or 0)
    if guess == secret:
        open(sys.argv[3] + "teammessage.txt", "w").write(f"{count + 1} guesses")
        print("yes", flush=True)
        sys.exit(42)
    print("higher" if guess < secret else "lower", flush=True)
open(sys.argv[3] + "judgemessage.txt", "w").write(f"not found: {secret}")
sys.exit(43)
"""
GUESS = """
low, high = 1, 1000
while True:
    middle = (low + high) // 2
    print(middle, flush=True)
    said = input()
    if said == "yes":
        break
    low, high = (middle + 1, high) if said == "higher" else (low, middle - 1)
"""
INTERACTIVE = {
    "problem.yaml": "problem_format_version: 2023-07\nname: Guess\ntype: interactive\n"
    "limits: {time_limit: 1}\n",
    "output_validator/validate.py": INTERACTOR,
    "data/secret/1.in": "700\n",
    "data/secret/1.ans": "",
    "data/secret/2.in": "1\n",
    "data/secret/2.ans": "",
    "submissions/accepted/bisect.py": GUESS,
    # Is refused while it waits, and then goes on for ever.
    "submissions/wrong_answer/slow.py": "while True:\n    print(0, flush=True)\n"
    "    try: input()\n    except EOFError: pass\n",
    "submissions/wrong_answer/ends.py": "print(3)\n",
    "submissions/run_time_error/crash.py": "print(3)\n1 / 0\n",
    "submissions/run_time_error/after.py": f"{GUESS}1 / 0\n",
    "submissions/time_limit_exceeded/after.py": f"{GUESS}while True: pass\n",
}
GRADED = {
    "problem.yaml": "type: scoring\nname: Echo\nlimits: {time_limit: 5}\n",
    "data/testdata.yaml": "on_reject: continue\nrange: 0 100\ngrader_flags: ignore_sample\n",
    "data/sample/1.in": "1\n",
    "data/sample/1.ans": "1\n",
    "data/sample/testdata.yaml": "accept_score: 0\nrange: 0 0\n",
    "data/secret/testdata.yaml": "grader_flags: first_error accept_if_any_accepted\n",
    "data/secret/easy/testdata.yaml": "on_reject: break\naccept_score: 40\nrange: 0 40\n"
    "grader_flags: min\n",
    "data/secret/hard/testdata.yaml": "on_reject: break\naccept_score: 60\nrange: 0 60\n"
    "grader_flags: min\n",
    **{f"data/secret/easy/{number}.in": f"{number}\n" for number in (2, 3)},
    **{f"data/secret/easy/{number}.ans": f"{number}\n" for number in (2, 3)},
    **{f"data/secret/hard/{number}.in": f"{number}\n" for number in (11, 12, 13)},
    **{f"data/secret/hard/{number}.ans": f"{number}\n" for number in (11, 12, 13)},
    "submissions/accepted/echo.py": "print(input())\n",
    "submissions/partially_accepted/small.py": "x = int(input())\nprint(x if x < 12 else 0)\n",
    "submissions/wrong_answer/nothing.py": "print()\n",
}
SCORED = {
    **{path: text for path, text in GRADED.items() if not path.endswith("testdata.yaml")},
    "problem.yaml": "problem_format_version: 2025-09\ntype: scoring\nname: Echo\n"
    "limits: {time_limit: 5}\n",
    # Half of the points for an answer with a comment.
    "output_validator/validate": "",
    "output_validator/run": "#!/bin/sh\nread -r number more\n"
    '[ "$number" = "$(cat "$2")" ] || exit 43\n'
    '[ "$4" = half ] && [ -n "$more" ] && echo 0.5 >"$3/score_multiplier.txt"\nexit 42\n',
    "data/secret/easy/test_group.yaml": "max_score: 40\n",
    "data/secret/hard/test_group.yaml": "max_score: 60\nscore_aggregation: sum\n"
    "require_pass: secret/easy\noutput_validator_args: [half]\n",
    "submissions/partially_accepted/small.py": "x = int(input())\nprint(x if x < 13 else 0, '!')\n",
    "submissions/partially_accepted/hard.py": "x = int(input())\nprint(x if x > 3 else 0)\n",
    "submissions/submissions.yaml": "partially_accepted/small.py: &score {score: 60}\n2025: {}\n"
    "partially_accepted/hard.py:\n  <<: *score\n  score: [0, 0]\n",
}
PASSES = {
    "problem.yaml": "problem_format_version: 2023-07\ntype: [pass-fail, multi-pass]\nname: Twice\n"
    "limits:\n  time_limit: 5\n  validation_passes: 2\n",
    "output_validator/validate.py": "import sys\nprinted, given = input(), open(sys.argv[1]).read()"
    "\nif printed.strip() != str(int(given) + 1): sys.exit(43)\n"
    "if given.strip() == '1': open(sys.argv[3] + 'nextpass.in', 'w').write('5')\nsys.exit(42)\n",
    "data/secret/1.in": "1\n",
    "data/secret/1.ans": "",
    "submissions/accepted/add.py": "print(int(input()) + 1)\n",
    "submissions/wrong_answer/two.py": "print(2)\n",
}
ANSWERS = {
    "problem.yaml": "problem_format_version: 2025-09\ntype: pass-fail submit-answer\nname: Twice\n",
    **{f"data/{name}.in": f"{name}\n" for name in ("sample/2", "secret/1", "secret/easy/1")},
    "data/sample/2.ans": "no answer of a sample is asked\n",
    "data/secret/1.ans": "secret/1\n",
    "data/secret/easy/1.ans": "secret/easy/1\n",
    "submissions/accepted/all/1.out": "secret/1\n",
    "submissions/accepted/all/easy_1.out": "secret/easy/1\n",
    "submissions/accepted/program.py": "print(input())\n",
    "submissions/wrong_answer/first/1.txt": "secret/1\n",
    "submissions/wrong_answer/second/easy_1.txt": "secret/easy/1\n",
}

POLYGON = {
    "problem.xml": """<?xml version="1.0" encoding="utf-8"?>
<problem short-name="sum"><judging input-file="" output-file="sum.out"><testset name="tests">
<time-limit>1000</time-limit><memory-limit>67108864</memory-limit>
<input-path-pattern>tests/%02d</input-path-pattern>
<answer-path-pattern>tests/%02d.a</answer-path-pattern>
<tests><test sample="true" group="0" points="0"/><test group="1" points="10"/>
<test group="1" points="30"/><test group="2" points="60"/></tests>
<groups><group name="0"/><group name="1" points-policy="complete-group"/>
<group name="2" points-policy="each-test"><dependencies><dependency group="1"/></dependencies>
</group></groups></testset></judging>
<files><resources><file path="files/grader.py"><assets><asset name="SOLUTION"/></assets></file>
</resources></files>
<assets><checker type="testlib"><source path="files/check.py"/></checker>
<validators><validator><source path="files/valid.py"/></validator></validators><solutions>
<solution tag="main"><source path="solutions/main.py"/></solution>
<solution tag="rejected"><source path="solutions/small.py"/></solution>
<solution tag="wrong-answer"><source path="solutions/partly.py"/></solution>
<solution tag="wrong-answer"><source path="solutions/link.py"/></solution>
<solution tag="time-limit-exceeded-or-accepted"><source path="solutions/slow.py"/></solution>
<solution tag="memory-limit-exceeded"><source path="solutions/memory.py"/></solution>
</solutions></assets></problem>
""",
    **{f"tests/0{number}": f"{number} 1\n" for number in (1, 2, 3, 4)},
    **{f"tests/0{number}.a": f"{number + 1}\n" for number in (1, 2, 3, 4)},
    "files/grader.py": "def write(x): print(x, file=open('sum.out', 'w'))\n",
    # As testlib's: 0 accepts, 1 refuses, 7 gives points.
    "files/check.py": "import sys\ninput, output, answer = (open(path).read().split() for path in"
    " sys.argv[1:4])\nif output[1:] == ['half']:\n    sys.stderr.write('points 30.0 a half')\n"
    "    sys.exit(7)\nsys.stderr.write(f'expected {answer}')\nsys.exit(output != answer)\n",
    "files/valid.py": "import sys\nsys.exit(len(input().split()) != 2)\n",
    "solutions/main.py": "from grader import write\nwrite(sum(map(int, input().split())))\n",
    "solutions/small.py": "a, b = map(int, input().split())\n"
    "print(a + b * (a < 3), file=open('sum.out', 'w'))\n",
    "solutions/partly.py": "a, b = map(int, input().split())\n"
    "print(a + b, 'half' * (a == 4), file=open('sum.out', 'w'))\n",
    "solutions/link.py": "import os\na, b = map(int, input().split())\n"
    "os.symlink(f'/evaluation/tree/tests/0{a}.a', 'sum.out')\n",
    "solutions/slow.py": "while True: pass\n",
    "solutions/memory.py": "x = b'x' * 10**8\n",
}
TALK = {
    **POLYGON,
    "problem.xml": POLYGON["problem.xml"]
    .replace(' output-file="sum.out"', "")
    .replace("</checker>", '</checker><interactor><source path="files/ask.py"/></interactor>')
    .replace(" points=", " was=")
    .replace(" group=", " of="),
    # Tells a and b one by one, and leaves the sum to the checker.
    "files/ask.py": "import sys\nfor number in open(sys.argv[1]).read().split():\n"
    "    print(number, flush=True)\n    line = input()\n"
    "    if line == 'no': sys.exit('wrong answer no')\n"
    "    if line == 'half':\n        sys.stderr.write('points 5 half')\n        sys.exit(7)\n"
    "print(line, file=open(sys.argv[2], 'w'))\n",
    "solutions/main.py": "a = int(input())\nprint(flush=True)\n"
    "print(a + int(input()), flush=True)\n",
    "solutions/small.py": "print('no', flush=True)\nwhile True: pass\n",
    "solutions/partly.py": "print('half', flush=True)\nwhile True: pass\n",
    "solutions/link.py": "print(1, flush=True)\nprint(1, flush=True)\n",
}

CMS = {
    "task.yaml": "name: double\ntime_limit: 1\nmemory_limit: 64\ninfile: input.txt\n"
    "outfile: output.txt\npublic_testcases: 0\noutput_only: no\n",
    "gen/GEN": "# The inputs are made.\n#ST: 30\n#COPY: gen/first.txt\n2\n"
    "# ST: 70\n#STNAME: large\n1000 5\n2000 5\n",
    "gen/first.txt": "1\n",
    "gen/generator.py": "import sys, lines\nlines.show(sum(map(int, sys.argv[1:])))\n",
    "gen/valida.py": "import sys\nn = int(open(sys.argv[1]).read())\n"
    "assert sys.argv[2] == ('1' if n < 10 else '2')\n",
    "gen/lines.py": "def show(x): print(x)\n",
    # Half of the score for the wrong sign.
    "check/checker.py": "import sys\ninput, wanted, found = (open(path).read() for path in"
    " sys.argv[1:4])\nif int(found) == int(wanted): print(1.0)\nelif int(found) == -int(wanted):"
    " print(0.5)\nelse: print(0)\nsys.stderr.write(f'wanted {wanted}')\n",
    "sol/grader.py": "import double\nn = int(open('input.txt').read())\n"
    "print(double.double(n), file=open('output.txt', 'w'))\n",
    "sol/solution.py": "def double(n): return 2 * n\n",
    "sol/negative.py": "# @check-accepted: subtask*\n# @check-partial-score: large\n"
    "def double(n): return 2 * n if n < 1000 else -2 * n\n",
    "sol/small.py": "# @check-accepted: subtask*\n# @check-wrong-answer: large\n"
    "def double(n): return n + min(n, 10)\n",
    "sol/slow.py": "# @check-time-limit-exceeded: *\ndef double(n):\n    while True: pass\n",
    "sol/thief.py": "# @check-wrong-answer: *\nimport os, glob\n"
    "def double(n): return len(glob.glob('/evaluation/tree/**', recursive=True))\n",
}
# Of task-maker: the first subtask counts only with the second one, and stdin is the default.
DEPENDING = {
    "task.yaml.orig": "title: Bits\ntime_limit: 1\nmemory_limit: 64\n",
    "gen/GEN": "#ST: 30\n#STNAME: first\n#STDEP: second\n0\n#ST: 30\n#STNAME: second\n1\n"
    "#ST: 40\n#STNAME: third\n#STDEP: *\n2\n",
    "gen/generator.sh": "echo $1\n",
    "gen/validator.py": "import sys\n"
    "sys.exit(int(open(sys.argv[1]).read()) + 1 != int(sys.argv[2]))\n",
    "sol/solution.py": "print('111'[int(input())])\n",
    "sol/01.py": "# @check-accepted: first second\n# @check-zero: third\n"
    "print('110'[int(input())])\n",
    "sol/02.py": "# @check-accepted: first third\n# @check-zero: second\n"
    "print('101'[int(input())])\n",
    "sol/memory.py": "# @check-memory-limit-exceeded: *\nx = b'x' * 10**8\n",
    "sol/other.pas": "begin end.\n",
}
CHOSEN = {
    **{f"input/input{number}.txt": f"{number}\n" for number in range(3)},
    **{f"output/output{number}.txt": "1\n" for number in range(3)},
    "sol/solution.py": "print('111'[int(input())])\n",
    "sol/01.py": "# @check-accepted: *0 *1\nprint('110'[int(input())])\n",
    "task.yaml": "name: bits\ninfile: ''\noutfile: ''\nn_input: 3\nscore_type: GroupMin\n"
    "score_type_parameters:\n- - 30\n  - 000|001\n- [30, ['001']]\n"
    "- {max_score: 40, testcases: '.*'}\n",
}
MANAGER = """
import sys
a, b = map(int, open("input.txt").read().split())
assert sys.stdin.read().split() == [str(a), str(b)]
value = a
for number in (1, 3):
    with open(sys.argv[number + 1], "w") as output:
        print(value, b, file=output)
    with open(sys.argv[number]) as given:
        value = int(given.readline() or -1)
print(1.0 if value == a + 2 * b else 0.0)
print("secret", a, b, file=sys.stderr)
"""
COMMUNICATION = {
    "task.yaml": "name: add\ntime_limit: 1\nnum_processes: 2\n",
    "check/manager.py": MANAGER,
    "sol/stub.py": "import sys, add\n"
    "with open(sys.argv[1]) as given, open(sys.argv[2], 'w') as output:\n"
    "    print(add.add(int(sys.argv[3]), *map(int, given.readline().split())), file=output)\n",
    **{f"input/input{number}.txt": f"{number} 5\n" for number in range(2)},
    "sol/solution.py": "def add(number, a, b): return a + b\n",
    "sol/first.py": "# @check-wrong-answer: *\ndef add(number, a, b): return a + b + number\n",
    "sol/crash.py": "# @check-runtime-error: *\ndef add(number, a, b): return 1 // (1 - number)\n",
}
ON_STDIN = {
    **{path: text for path, text in COMMUNICATION.items() if path != "sol/stub.py"},
    "task.yaml": "name: add\ntime_limit: 1\nnum_processes: 2\nuser_io: std_io\n",
    # Reads to the end, which the manager has closed.
    "sol/solution.py": "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n",
    "sol/first.py": "# @check-wrong-answer: *\nprint(0)\n",
    "sol/crash.py": "# @check-runtime-error: *\ninput()\n1 / 0\n",
}
CONTROLLER = """
import sys
value, ends = int(open("input.txt").read()), []
for number in range(3):
    print("START_SOLUTION", flush=True)
    ends.append([int(word) for word in input().split()])
for to, back in ends[:2]:  # the last one fails after the controller has ended
    with open(to, "w") as output:  # closed, maybe before the process is started
        print(value, file=output)
    with open(back) as given:
        value = int(given.readline() or -9)
        said = given.read()  # until the end of the process
sys.stderr.write(f"USER_MESSAGE: it is {value}\\nSCORE: {float(value == 12)}\\n")
"""
CONTROLLED = {
    "task.yaml.orig": "title: Twice\ntime_limit: 1\nmemory_limit: 64\n",
    "check/controller.py": CONTROLLER,
    "input/input0.txt": "3\n",
    "sol/solution.py": "import sys\nprint(2 * int(sys.stdin.read()))\n",
    "sol/wrong.py": "# @check-wrong-answer: *\nprint(0)\n",
    "sol/crash.py": "# @check-runtime-error: *\nprint(12, flush=True)\n1 / 0\n",
    "sol/slow.py": "# @check-time-limit-exceeded: *\nwhile True: pass\n",
}
OUTPUTS = {
    "task.yaml": "name: outputs\noutput_only: true\nn_input: 2\n",
    **{f"input/input{number}.txt": f"{number}\n" for number in range(2)},
    **{f"output/output{number}.txt": f"{number} {number}\n\n" for number in range(2)},
}
OWN = {
    "problem.toml": 'evaluator_cmd = "sh judge.sh"\nfield = "text"\ngoals = ["long", "word"]\n'
    'needs = []\n[solutions]\n"a.txt" = ["word"]\n"b.txt" = ["long"]\n',
    "judge.sh": '. "$EVALUATION_TOOLS/lib/segi.sh"\nsegi_find_submission text\n'
    'segi_send_goal word "$(grep -q word "$segi_file" && echo true || echo false)"\n'
    "segi_send_goal long false\n",
    "solutions/a.txt": "word\n",
    "solutions/b.txt": "long\n",
}


def keep_solutions(files: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Return a package without its other submissions."""
    others = ("submissions/", "sol/")
    return {
        path: content
        for path, content in files.items()
        if path in kept or not path.startswith(others)
    }


class PackageTests(DaemonTestCase):
    maxDiff = None

    def write(self, files: Mapping[str, str]) -> str:
        """Write a package in place of the last one; return its directory."""
        root = self.folder / "package"
        shutil.rmtree(root, ignore_errors=True)
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            path.chmod(0o755)
        return str(root)

    async def check(self, files: Mapping[str, str], status: int = 0) -> dict[str, dict[str, Any]]:
        """Return what is found of each submission, by the end of its path."""
        command = ("check", self.write(files), "--json", *BY)
        done = await piped("http://127.0.0.1:9", *command, TMPDIR=str(self.folder))
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return {"/".join(row["submission"].split("/")[-2:]): row for row in json.loads(done.stdout)}

    async def check_agreement(self, files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Check that each submission has its expected verdict; return what is found."""
        rows = await self.check(files)
        self.assertEqual({row["state"] for row in rows.values()}, {"ok"}, rows)
        return rows

    async def run_judge(
        self,
        files: Mapping[str, str],
        solution: str,
        own_input: str | None = None,
        command: str = "tawebeval-judge",
    ) -> list[Event]:
        """Return the events of the judge, and its stderr, for a submission of the package."""
        place = f"package-{uuid4().hex}"
        for path, content in files.items():
            self.repository.write(f"{place}/{path}", content, 0o755)
        self.commit = self.repository.commit()
        submitted = [("source", Path(solution).name, files[solution].encode())]
        if own_input is not None:
            submitted.append(("own_input", "own.txt", own_input.encode()))
        identifier = await self.begin(command, files=submitted, directory=place)
        stderr = (await self.client.ended(identifier))["stderr"]
        return [*await self.client.follow(identifier), {"type": "stderr", "payload": stderr}]

    async def judge(self, files: Mapping[str, str], solution: str) -> list[Any]:
        """Return the data that the judge sends of a submission."""
        return data(await self.run_judge(files, solution))

    async def test_verdicts_of_kattis_solutions_are_compared_with_their_directories(self) -> None:
        rows = await self.check(KATTIS, status=1)
        states = {name: (row["state"], row["found"].split(",")[0]) for name, row in rows.items()}
        self.assertEqual(
            states,
            {
                "(inputs)": ("differs", "wrong_answer"),
                "accepted/right.py": ("ok", "accepted"),
                "accepted/reads.py": ("ok", "accepted"),
                "accepted/several": ("ok", "accepted"),
                "accepted/untrue.py": ("differs", "wrong_answer"),
                "accepted/unknown.xyz": ("skipped", "-"),
                "wrong_answer/constant.py": ("ok", "wrong_answer"),
                "wrong_answer/two.py": ("ok", "wrong_answer"),
                "wrong_answer/thief.py": ("ok", "wrong_answer"),
                "run_time_error/crash.py": ("ok", "runtime_error"),
                "run_time_error/broken.py": ("ok", "runtime_error"),
                "run_time_error/memory.py": ("ok", "runtime_error"),
                "time_limit_exceeded/slow.py": ("ok", "time_limit"),
                "other/new.py": ("unknown", "wrong_answer"),
                "mixed/zero.py": ("ok", "wrong_answer"),
                "mixed/late.py": ("differs", "wrong_answer"),
                "mixed/crash.py": ("ok", "runtime_error"),
            },
        )
        self.assertEqual(rows["(inputs)"]["message"], "secret/big/2: 1000 is large")
        self.assertEqual(rows["accepted/right.py"]["found"], "accepted, 3/3")
        self.assertEqual(rows["wrong_answer/thief.py"]["found"], "wrong_answer, 0/1")

    async def test_secret_cases_show_only_verdict_time_and_memory(self) -> None:
        events = await self.judge(KATTIS, "submissions/wrong_answer/two.py")
        cases = {value["case"]: value for value in events if value["type"] == "case"}
        self.assertEqual(cases["sample/1"]["verdict"], "accepted")
        self.assertEqual(cases["secret/3"].keys(), {"type", "case", "verdict", "time", "memory"})
        self.assertEqual(cases["secret/big/2"], {**cases["secret/big/2"], "verdict": "skipped"})
        self.assertIn({"type": "goal_result", "goal": "accepted", "result": False}, events)
        events = await self.judge(KATTIS, "submissions/run_time_error/crash.py")
        self.assertNotIn("ZeroDivisionError", json.dumps(events))

    async def test_first_failure_decides_the_verdict_of_a_kattis_interaction(self) -> None:
        rows = await self.check_agreement(INTERACTIVE)
        self.assertEqual(rows["wrong_answer/slow.py"]["found"], "wrong_answer, 0/1")
        events = await self.judge(INTERACTIVE, "submissions/accepted/bisect.py")
        self.assertEqual(
            [value["message"] for value in events if value["type"] == "case"],
            ["9 guesses", "9 guesses"],
        )

    async def test_kattis_groups_are_graded(self) -> None:
        rows = await self.check(GRADED)
        self.assertEqual(rows["accepted/echo.py"]["found"], "accepted, 6/6, score 100")
        self.assertEqual(
            rows["partially_accepted/small.py"]["found"], "wrong_answer, 4/5, score 40"
        )
        self.assertEqual(rows["wrong_answer/nothing.py"]["found"], "wrong_answer, 0/3, score 0")
        events = await self.judge(GRADED, "submissions/partially_accepted/small.py")
        self.assertIn({"type": "goal_result", "goal": "easy", "result": True}, events)
        self.assertIn({"type": "goal_result", "goal": "hard", "result": False}, events)
        self.assertIn({"type": "score", "goal": "hard", "score": 0, "maximum": 60.0}, events)
        self.assertIn({"type": "score", "score": 40.0, "maximum": 100.0}, events)

    async def test_kattis_groups_of_2025_have_scores_and_requirements(self) -> None:
        rows = await self.check(SCORED)
        self.assertEqual(rows["accepted/echo.py"]["found"], "accepted, 6/6, score 100")
        self.assertEqual(
            rows["partially_accepted/small.py"]["found"], "wrong_answer, 5/6, score 60"
        )
        self.assertEqual(rows["partially_accepted/hard.py"]["found"], "wrong_answer, 0/2, score 0")

    async def test_kattis_tolerance_holds_for_finite_numbers(self) -> None:
        await self.check_agreement(INFINITE)

    async def test_multi_pass_kattis_problem_is_judged(self) -> None:
        self.assertEqual(len(await self.check_agreement(PASSES)), 2)

    async def test_kattis_answers_are_submitted_under_the_names_of_cases(self) -> None:
        rows = await self.check_agreement(ANSWERS)
        self.assertEqual(rows["accepted/all"]["found"], "accepted, 2/2")
        self.assertEqual(rows["first/1.txt"]["found"], "wrong_answer, 1/2")
        # People submit no programs.
        for solution in ("wrong_answer/second/easy_1.txt", "accepted/program.py"):
            first = (await self.judge(ANSWERS, f"submissions/{solution}"))[0]
            self.assertEqual(
                (first["verdict"], first["message"]), ("wrong_answer", "its file is missing")
            )

    async def test_case_without_answer_is_a_fault_of_the_package(self) -> None:
        kept = ("submissions/accepted/right.py", "submissions/wrong_answer/two.py")
        files = keep_solutions(KATTIS, *kept)
        del files["data/secret/3.ans"]
        rows = await self.check(files, status=1)
        self.assertIn("secret/3.ans is missing", rows["accepted/right.py"]["message"])
        *events, stderr = await self.run_judge(files, "submissions/wrong_answer/two.py")
        self.assertNotIn("wrong", json.dumps(events))
        said = "a case has no answer: run `tawebeval check` to see why"
        self.assertIn(said, stderr["payload"])

    async def test_verdicts_of_polygon_solutions_are_compared_with_their_tags(self) -> None:
        rows = await self.check_agreement(POLYGON)
        found = {name: row["found"] for name, row in rows.items()}
        self.assertEqual(found["(inputs)"], "accepted, 4/4")
        self.assertEqual(found["solutions/main.py"], "accepted, 4/4, score 100")
        self.assertEqual(found["solutions/small.py"], "wrong_answer, 2/3, score 0")
        self.assertEqual(found["solutions/partly.py"], "partial, 3/4, score 70")
        self.assertEqual(found["solutions/link.py"], "wrong_answer, 0/2, score 0")
        events = await self.judge(POLYGON, "solutions/partly.py")
        self.assertIn({"type": "score", "goal": "group 2", "score": 30.0, "maximum": 60.0}, events)
        self.assertIn({"type": "goal_result", "goal": "group 1", "result": True}, events)
        self.assertNotIn("half", json.dumps(events))

    async def test_polygon_interactor_decides_before_the_checker(self) -> None:
        rows = await self.check_agreement(TALK)
        self.assertEqual(rows["solutions/main.py"]["found"], "accepted, 4/4")
        self.assertEqual(rows["solutions/small.py"]["found"], "wrong_answer, 0/1")
        self.assertRegex(rows["solutions/partly.py"]["found"], "^partial, ")

    async def test_cms_batch_task_is_generated_and_judged(self) -> None:
        rows = await self.check_agreement(CMS)
        found = {name: row["found"] for name, row in rows.items()}
        self.assertEqual(found["(inputs)"], "accepted, 4/4")
        self.assertEqual(found["sol/solution.py"], "accepted, 4/4, score 100")
        self.assertEqual(found["sol/negative.py"], "partial, 2/4, score 65")
        self.assertEqual(found["sol/small.py"], "wrong_answer, 2/4, score 30")
        self.assertEqual(found["sol/thief.py"], "wrong_answer, 0/4, score 0")
        events = await self.judge(CMS, "sol/small.py")
        self.assertIn({"type": "goal_result", "goal": "subtask 0", "result": True}, events)
        self.assertIn({"type": "score", "goal": "large", "score": 0.0, "maximum": 70.0}, events)
        shown = [value.get("message") for value in events if value["type"] == "case"]
        self.assertEqual(shown, ["wanted 2", None, None, None])

    async def test_cms_subtasks_share_cases(self) -> None:
        rows = await self.check(DEPENDING)
        self.assertEqual(rows.pop("sol/other.pas")["state"], "skipped")
        self.assertEqual({row["state"] for row in rows.values()}, {"ok"}, rows)
        found = {name: row["found"] for name, row in rows.items()}
        self.assertEqual(found["(inputs)"], "accepted, 3/3")
        self.assertEqual(found["sol/solution.py"], "accepted, 3/3, score 100")
        self.assertEqual(found["sol/01.py"], "wrong_answer, 2/3, score 60")
        self.assertEqual(found["sol/02.py"], "wrong_answer, 2/3, score 0")
        rows = await self.check(CHOSEN)
        self.assertEqual(rows["sol/01.py"]["found"], "wrong_answer, 2/3, score 60")

    async def test_cms_manager_exchanges_data_with_all_processes(self) -> None:
        for files in (COMMUNICATION, ON_STDIN):
            rows = await self.check_agreement(files)
            self.assertEqual(rows["sol/solution.py"]["found"], "accepted, 2/2, score 100")

    async def test_task_maker_controller_starts_processes_up_to_its_limit(self) -> None:
        rows = await self.check_agreement(CONTROLLED)
        self.assertEqual(rows["sol/solution.py"]["found"], "accepted, 1/1, score 100")
        case = (await self.judge(CONTROLLED, "sol/solution.py"))[0]
        self.assertEqual(case["message"], "it is 12")
        files = keep_solutions(CONTROLLED, "sol/solution.py")
        few = files["task.yaml.orig"] + "controller_process_limit: 1\n"
        rows = await self.check({**files, "task.yaml.orig": few}, status=1)
        self.assertIn("unexpected 'START_SOLUTION'", rows["sol/solution.py"]["message"])
        ended = 'print("START_SOLUTION\\n" * 3, flush=True)\nraise SystemExit(3)\n'
        rows = await self.check({**files, "check/controller.py": ended}, status=1)
        self.assertIn("controller: ", rows["sol/solution.py"]["message"])

    async def test_progress_reaches_its_total_if_the_submission_does_not_compile(self) -> None:
        for files in (PASSES, POLYGON, CMS):
            events = await self.judge({**files, "wrong/wrong.cpp": "int main("}, "wrong/wrong.cpp")
            cases = [value["case"] for value in events if value["type"] == "case"]
            self.assertEqual(cases[0], "build")
            progress = [value for value in events if value["type"] == "progress"][-1]
            self.assertEqual(progress["done"], progress["total"])
            self.assertEqual(progress["total"], len(cases) - 1)

    async def test_public_case_of_cms_shows_no_expected_output(self) -> None:
        text = OUTPUTS["task.yaml"] + "public_testcases: all\n"
        files = {**OUTPUTS, "task.yaml": text, "wrong/output1.txt": "7\n"}
        events = await self.judge(files, "wrong/output1.txt")
        cases = [value for value in events if value["type"] == "case"]
        self.assertEqual(cases[1]["printed"], "7")
        self.assertNotIn("expected", cases[1])

    async def test_cms_output_only_task_takes_files_by_name(self) -> None:
        rows = await self.check(OUTPUTS)
        self.assertEqual([row["found"] for row in rows.values()], ["accepted, 2/2, score 100"])
        events = await self.judge(OUTPUTS, "output/output1.txt")
        self.assertIn({"type": "score", "score": 50.0, "maximum": 100.0}, events)

    async def test_run_on_own_input_shows_output_and_no_verdict_except_compile_error(
        self,
    ) -> None:
        failing = "submissions/run_time_error"
        for files, solution, own_input, words in (
            (KATTIS, "submissions/accepted/right.py", "40 2.5", "42.5001\n"),
            (KATTIS, "submissions/wrong_answer/thief.py", "1 1", "'HOME': '/tmp'"),
            (
                KATTIS,
                f"{failing}/crash.py",
                "2 2",
                "ZeroDivisionError: division by zero\nruntime error: exit status 1",
            ),
            (KATTIS, "submissions/time_limit_exceeded/slow.py", "", "time limit"),
            (POLYGON, "solutions/main.py", "20 3", "23\n"),
            (CMS, "sol/negative.py", "7", "14\n"),
        ):
            *events, _ = await self.run_judge(files, solution, own_input)
            self.assertEqual({event["type"] for event in events}, {"text"}, (solution, events))
            self.assertIn(words, text(events))
            self.assertNotIn("Done", text(events))  # of a secret answer
        for files, solution in (
            (INTERACTIVE, "submissions/accepted/bisect.py"),
            (TALK, "solutions/main.py"),
            (OUTPUTS, "output/output1.txt"),
        ):
            said = json.dumps(await self.run_judge(files, solution, "7"))
            self.assertIn("do not run on an input alone", said)
        (case,) = data(await self.run_judge(KATTIS, f"{failing}/broken.py", "7"))
        self.assertEqual(case["verdict"], "compile_error")

    async def test_package_without_cases_accepts_nothing(self) -> None:
        files = {path: text for path, text in PASSES.items() if not path.startswith("data/")}
        rows = await self.check(files, status=1)
        for row in rows.values():
            self.assertIn("the package has no cases", row["message"])

    async def test_solutions_of_own_problem_are_compared_with_its_goals(self) -> None:
        rows = await self.check(OWN, status=1)
        self.assertEqual(
            {name: (row["state"], row["expected"], row["found"]) for name, row in rows.items()},
            {
                "solutions/a.txt": ("ok", "word", "word"),
                "solutions/b.txt": ("differs", "long", "no goals"),
            },
        )
        root = self.write({**OWN, "solutions/c.txt": ""})
        done = await piped("http://127.0.0.1:9", "check", root, *BY, TMPDIR=str(self.folder))
        self.assertEqual(done.returncode, 2)
        self.assertIn("problem.toml and solutions/ differ: c.txt", done.stderr)

    async def test_check_of_an_invalid_package_exits_with_2_and_the_reason(self) -> None:
        for problem, said in (
            ("name: *x\n", "problem.yaml: line 1: found undefined alias 'x'"),
            ("name: Empty\n", "the package has no submissions"),
        ):
            files = {
                path: content for path, content in PASSES.items() if not path.startswith("sub")
            }
            root = self.write({**files, "problem.yaml": problem})
            done = await piped("http://127.0.0.1:9", "check", root, *BY, TMPDIR=str(self.folder))
            self.assertEqual(done.returncode, 2)
            self.assertIn(said, done.stderr)

    def test_wrong_value_of_a_package_is_named_with_its_file(self) -> None:
        write_sandbox_files(self.folder)
        judge = self.folder / EVALUATOR_TOOLS_DIRECTORY_NAME / "bin" / "tawebeval-judge"
        problem, verdicts, task = "problem.yaml", "submissions/submissions.yaml", "task.yaml"
        group = "score_type: GroupMin\nscore_type_parameters: "
        for name, content, said in (
            (problem, "limits: {memory: x}", "problem.yaml: memory is 'x', not"),
            (problem, "constants: [a]", "problem.yaml: constants are ['a'], no"),
            (problem, "limits: {time_multipliers: 3}", "problem.yaml: time_multipliers are 3, no"),
            (
                problem,
                "limits: {time_multipliers: {ac_to_time_limit: 2020-01-01}}",
                "problem.yaml: ac_to_time_limit is datetime.date(2020, 1, 1), not",
            ),
            (verdicts, "accepted: {permitted: [AC, JE]}", "accepted/add.py has 'JE', not"),
            (verdicts, "accepted: {score: []}", "add.py is [], not a number"),
            (task, f"{group}[[x, 2]]", "the points of subtask 0 is 'x', not"),
            (task, f"{group}[40, 60]", "task.yaml: score_type_parameters has 40,"),
            (task, f'{group}[[40, "9.*"], [60, "0"]]', "'9.*' are no cases"),
            (task, f"{group}[[100, 3]]", "task.yaml: a subtask has 3 cases; 2 are"),
            (task, f"{group}[[40, 0], [60, 2]]", "subtask 0 has points and no"),
            (task, "total_value: nan", "total_value is 'nan', not"),
            (task, "time_limit: []", "task.yaml: time_limit is [], not"),
            (task, "name: [a}", "task.yaml: line 4: while parsing a flow sequence expected"),
            (
                task,
                "released: 2025-13-01\nb: a",
                "line 4: a value is wrong for its type: month must",
            ),
            (task, "\n# \x07", "task.yaml: line 5: special characters are not allowed"),
            (task, "b: " + "[" * 9999, "line 4: a value is wrong for its type: maximum recurs"),
            (verdicts, "accepted: !x", "submissions.yaml: line 1: could not determine a con"),
        ):
            files, before = (OUTPUTS, OUTPUTS[task]) if name == task else (PASSES, "")
            root = self.write({**files, name: f"{before}{content}\n"})
            done = subprocess.run([judge, "--list"], cwd=root, capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done)
            self.assertIn(said, done.stderr)

    async def test_only_the_check_command_shows_compiler_messages_of_a_validator(self) -> None:
        files = {**PASSES, "output_validator/validate.py": "secret = (\n"}
        rows = await self.check(files, status=1)
        self.assertIn("secret = (", rows["accepted/add.py"]["message"])
        *events, stderr = await self.run_judge(files, "submissions/accepted/add.py")
        self.assertNotIn("secret", json.dumps([*events, stderr]))
        said = "validate.py cannot be built: run `tawebeval check` to see why"
        self.assertIn(said, stderr["payload"])

    async def test_judge_leaves_the_generated_files_of_only_one_case(self) -> None:
        judge = "tawebeval-judge >/dev/null; find $TEMPORARY_DIRECTORY -name '??*put.txt' | wc -l"
        *events, _ = await self.run_judge(CMS, "sol/solution.py", command=judge)
        self.assertEqual(text(events), "2\n")
