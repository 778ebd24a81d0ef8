"""The libraries for evaluators in Python, shell and C++: what they do with real programs."""

from __future__ import annotations

import re
import shutil
from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.client import data, python, text
from tests.integration.harness import UNSANDBOXED, DaemonTestCase

SUBMISSION = "print(sum(map(int, input().split())))\n"
BROKEN = "print(\n"

PYTHON = r"""
import os, pathlib, resource, sys
sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi

segi.require(1)
home = os.environ["HOME"]
with open(home + "/large", "wb") as file:
    file.truncate(64 * segi.MIB)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(segi.run(["wc", "-c"], pathlib.Path(home + "/large")).stdout)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024 < 32)
solution = segi.prepare(segi.find_submission("source"))
result = solution.run("3 4\n", time=30)
segi.send_case("sum", result.fault or segi.compare_tokens(result.stdout, "7"), result, points=2)
print(segi.prepare(segi.find_submission("broken")).fault.message)
with open(home + "/slow.py", "w") as file:
    file.write("x = 1\n" * 300_000)
print(segi.prepare(pathlib.Path(home, "slow.py"), wall=0.3).fault.message)
done = segi.run(["sh", "-c", "cat; echo $A >&2; exit 3"], "x" * 10**6, environment={"A": "b"})
print(len(done.stdout), done.stderr, done.exit_status)
open(home + "/own", "w").write("own")
os.symlink(home + "/own", home + "/link")
print(segi.run(["cat", home + "/own"], read=[home + "/own"]).stdout)
for reason, command, options in (
    ("output", ["yes"], {"output": 1000}),
    ("wall", ["sleep", "60"], {"wall": 0.3}),
    ("time", ["sh", "-c", "while :; do :; done"], {"time": 1, "wall": 200}),
):
    done = segi.run(command, **options)
    assert done.reason == reason, done
    print(reason, len(done.stdout), done.fault.verdict)
print({segi.run(["echo", "12345678901"], output=10).reason for _ in range(20)})
print(segi.run(["sh", "-c", "kill -11 $$"]).fault.message)

program = "while True: print(int(input()) + 1, flush=True)"
with segi.start(["python3", "-c", program], time=30) as talk:
    for number in range(20):
        talk.write(f"{number}\n")
        assert talk.read_line() == str(number + 1)
    talk.write("1\n\n")
    done = talk.finish()
    assert done.stdout == b"2\n" and done.fault.verdict == "runtime_error", done
copy = "for line in open(0): print(line, end='', flush=True)"
with segi.start(["python3", "-c", copy], time=30, wall=60) as talk:
    talk.write("".join(f"{number}\n" for number in range(100000)))  # more than pipes hold
    talk.close_input()
    print(sum(1 for line in iter(talk.read_line, None)), talk.finish().fault)
with segi.start(["sleep", "600"], wall=0.3) as talk:
    talk.write("x" * 100000)
    print(talk.finish().reason)
with segi.start(["sh", "-c", "exec >&-; wc -c >&2"], wall=60) as talk:
    talk.write("x" * 1000000)
    print(talk.finish().stderr)
with segi.start(["sh", "-c", "printf 'a\n\nb'; yes | head -c 100000"]) as talk:
    print([talk.read_line() for _ in range(3)], len(talk.read_line(1000)))
with segi.start(["sleep", "600"]) as talk:
    pass
with segi.start(["sleep", "600"], wall=0.3) as talk:
    print(talk.read_line(), talk.finish().reason)
with segi.start(["sh", "-c", "echo a; sleep 600"]) as talk:
    talk.read_line()
    talk.kill()
    talk.kill()
    print(talk.finish().fault.message, talk.finish().reason)
with segi.start(["true"]) as talk:
    talk.read_line()
    talk.finish()
    talk.kill()
    print(talk.finish().fault)

os.mkdir("out")
writes = "echo 7 | tee plain >one; ln one two"
done = segi.run(["sh", "-c", writes], write=["out"], directory=os.path.abspath("out"))
for name in "plain", "one":
    output = segi.read_output(pathlib.Path("out") / name)
    fault = done.fault or output.fault
    print(fault.message if fault else output.content)
for text in b"print(7) # \xe9", b"# coding: latin-1\nprint(7) # \xe9":
    pathlib.Path("a.py").write_bytes(text)
    ready = segi.prepare(pathlib.Path("a.py").absolute())
    print(ready.fault and (ready.fault.verdict, ready.fault.message[:20]))
print(len(os.listdir("/proc/self/fd")))
"""
PYTHON_PRINTS = r"""b'67108864\n'
True
  File "broken", line 1
    print(
         ^
SyntaxError: '(' was never closed
stopped after SECONDS
1000000 b'b\n' 3
b'own'
output 1000 output_limit
wall 0 time_limit
time 0 time_limit
{'output'}
killed by SIGSEGV
100000 None
wall
b'1000000\n'
['a', '', 'by'] 1
None wall
killed by SIGKILL None
None
b'7\n'
one is a link or no readable file
('compile_error', 'SyntaxError: invalid')
None
4
"""

SHELL = r"""
set -eu
. "$EVALUATION_TOOLS/lib/segi.sh"
segi_require 1
segi_find_submission source
echo 3 4 >input; echo 7 >expected
segi_run --time 30 --read "$segi_file" -- python3 "$segi_file" <input >output
segi_compare tokens output expected
segi_send_case sum 2
echo 8 >output; segi_compare tokens output expected
segi_send_case hidden
printf 'é%.0s' $(seq 120) >input; segi_send_case --show-expected --input input shown 1
echo 3 4 >input
for run in '--wall 0.3 -- sleep 60' '--output 10 -- yes' '-- sh -c exit\ 2' '-- no-such'; do
    eval "segi_run $run" >/dev/null 2>&1
    echo "$segi_verdict $segi_message"
done
for run in '--memory 1K -- true' '--no-such-option -- true'; do
    (segi_run $run >/dev/null 2>&1) 9>&1 || :
done
compare() {
    printf "$2" >output; printf "$3" >expected; segi_compare "$1" output expected
    echo "$segi_verdict $segi_message [$segi_expected] [$segi_printed]"
}
compare exact 'a\n' 'a\n'; compare exact 'a' 'a\n'; compare exact 'a\nb\n' 'a\nc\n'
compare tokens ' a  b' 'a\nb\n'; compare tokens 'a' 'a b'; compare tokens '1.0' '1'
compare floats '1.0000000001 x' '1 x'; compare floats '1.1' '1'; compare floats '0x1' '1'
compare floats '1e999' '1'; compare floats "$(printf %020000d 1)x" '1'
(awk() { return 2; }; segi_compare tokens output output; echo "$segi_verdict") 2>&1 || :
for wrong in 'tokens no-such expected' 'exact output no-such' 'exact / expected' \
    'token output expected'; do
    (segi_compare $wrong; echo "$segi_verdict") 2>&1 || :
done
mkfifo pipe; printf 'a\nb' >expected
for kind in exact tokens; do
    segi_compare $kind /dev/stdin expected <<'END'; echo "$segi_verdict $segi_message"
a
c
END
done
mkdir out; printf 7 >expected
segi_run --write "$PWD/out" --dir "$PWD/out" -- sh -c 'ln -s ../expected link; ln -s .. up
    mkfifo pipe; printf 7 >plain; printf 7 >one; ln one two' </dev/null
for each in plain link up/expected one pipe none; do
    segi_read_output "out/$each" copy; echo "$segi_verdict $segi_message [$(cat copy)]"
done
segi_read_output out/plain copy 0; echo "$segi_verdict $segi_message"
(segi_compare tokens out/link expected; echo "$segi_verdict") 2>&1 || :
(segi_compare tokens pipe expected; echo "$segi_verdict") 2>&1 || :
compare tokens "$(printf '\303')" x; compare tokens '7\000x' 7 | tr -d '\001'
compare exact y "x$(printf 'é%.0s' $(seq 120))"
(segi_verdict=; segi_send_case lost) 2>&1 || :
segi_compile --read "$segi_file" -- sh -c 'echo "error in $0" >&2; exit 1' "$segi_file"
echo "$segi_verdict $segi_message"
segi_compile --wall 0.3 -- sleep 60; echo "$segi_verdict $segi_message"
segi_send
segi_quote "$(printf 'a"\134\tb\nc\377')"; echo
segi_send_goal sum true; segi_send_progress 1 2; segi_send_score 1 2.5
segi_send_file table.csv input text/csv
segi_require 2 2>&1 || true
"""
SHELL_PRINTS = (
    r"""time_limit stopped after SECONDS
output_limit printed too much
runtime_error exit status 2
runtime_error exit status 127
segi_run: memory: 1024 bytes; at least 1048576 (1 MiB) are needed
segi_run: the program could not be run
accepted  [] []
wrong_answer line 1 differs [] []
wrong_answer line 2 differs [c] [b]
accepted  [] []
wrong_answer word 2 missing [b] []
wrong_answer word 1 differs [1] [1.0]
accepted  [] []
wrong_answer word 1 differs [1] [1.1]
wrong_answer word 1 differs [1] [0x1]
wrong_answer word 1 differs [1] [1e999]
wrong_answer word 1 differs [1] ["""
    + "0" * 100
    + r"""]
segi_compare: reading failed
segi_compare: no-such: cannot read the file
segi_compare: no-such: cannot read the file
segi_compare: /: cannot read the file
segi_compare: token: not exact, tokens or floats
wrong_answer line 2 differs
wrong_answer word 2 differs
accepted  [7]
wrong_answer link is a link or no readable file []
wrong_answer expected is a link or no readable file []
wrong_answer one is a link or no readable file []
wrong_answer pipe is a link or no readable file []
wrong_answer none is missing []
output_limit plain has over 0 bytes
segi_compare: link is a link or no readable file
segi_compare: pipe is a link or no readable file
wrong_answer word 1 differs [x] [�]
wrong_answer word 1 differs [7] [7x]
wrong_answer line 1 differs [x"""
    + "é" * 99
    + r"""] [y]
segi_send_case: no verdict; segi_run and segi_compare lose it in $( ) and in a pipe
compile_error error in source
compile_error stopped after SECONDS
"a\"\\\tb\nc�"
"""
)

CPP = r"""
#include "segi.hpp"

void show(const segi::Judgement &one) {
    std::cout << one.verdict << " " << one.message << " [" << one.expected << "] [" << one.printed
              << "]" << std::endl;
}

int main() {
    segi::require(1);
    const auto source = segi::find_submission("source");
    segi::Limits limits;
    limits.time = 30;
    const auto result = segi::run({"python3", source}, "3 4\n", limits, {{source}});
    auto judgement = result.judge();
    if (judgement.is_accepted()) judgement = segi::compare_tokens(result.out, "7");
    segi::send_case("sum", judgement, &result, 2);
    std::string accents;
    for (int i = 0; i < 120; i++) accents += "\xc3\xa9";
    const auto wrong = segi::compare_tokens("8", "7");
    segi::send_case("hidden", wrong);
    segi::send_case("shown", wrong, nullptr, 1, {true, accents});
    show(segi::run({"sh", "-c", "kill -11 $$"}, "").judge());
    segi::Limits few;
    few.output = 10;
    const auto stopped = segi::run({"yes"}, "", few);
    show(stopped.judge());
    std::cout << stopped.out.size() << std::endl;
    show(segi::compare_exact("a\n", "a\n"));
    show(segi::compare_exact("a", "a\n"));
    show(segi::compare_tokens(" a  b", "a\nb\n"));
    show(segi::compare_tokens("a", "a b"));
    show(segi::compare_floats("1.0000000001 x", "1 x"));
    show(segi::compare_floats("1.1", "1"));
    show(segi::compare_floats("inf", "1"));
    show(segi::compare_tokens("\xc3(\xf0\x9f\x98\x80", "x\xc3\xa9"));
    std::cout << segi::quote("\xed\xa0\x80\xf4\x90") << std::endl;
    std::string many, line;
    for (int i = 0; i < 120; i++) many += "\xc3\xa9";
    show(segi::compare_exact("y", "x" + many));
    std::string lines;
    for (int i = 0; i < 100000; i++) lines += std::to_string(i) + "\n"; // more than pipes hold
    const std::string copy = "for line in open(0): print(line, end='', flush=True)";
    segi::Program echo({"python3", "-c", copy}, limits, {});
    echo.write(lines + "end\n");
    int count = 0;
    while (echo.read_line().value_or("end") != "end") count++;
    std::cout << count << " " << echo.finish().exit_status << std::endl;
    std::filesystem::create_directory("out");
    std::ofstream("expected") << 7;
    const auto out = std::filesystem::absolute("out");
    const std::string writes =
        "ln -s ../expected link; ln -s .. up; mkfifo pipe; printf 7 | tee plain >one; ln one two";
    show(segi::run({"sh", "-c", writes}, "", limits, {{}, {out}, out}).judge());
    for (const char *name : {"plain", "link", "up/expected", "one", "pipe", "none", "up"}) {
        const auto output = segi::read_output(segi::Path("out") / name);
        std::cout << output.text << " ";
        show(output.fault);
    }
    show(segi::read_output(out / "plain", 0).fault);
    const std::string program = "while True: print(int(input()) + 1, flush=True)";
    segi::Program talk({"python3", "-c", program}, limits, {});
    for (int i = 0; i < 20; i++) {
        talk.write(std::to_string(i) + "\n");
        if (talk.read_line() != std::to_string(i + 1)) return 1;
    }
    std::cout << talk.finish().exit_status << std::endl;
    { segi::Program forgotten({"sleep", "600"}, limits, {}); }
    const auto build = segi::environment("TEMPORARY_DIRECTORY") + "/build";
    show(segi::compile({"sh", "-c", "echo wrong $0 >&2; exit 1", source}, source, build));
    segi::Limits short_limits;
    short_limits.wall = 0.3;
    show(segi::compile({"sleep", "60"}, source, build, short_limits));
    std::cout << segi::quote("a\"\\\tb\n") << std::endl;
    segi::send_goal("sum", true);
    segi::send_progress(1, 2);
    segi::send_score(1, 2.5);
    segi::send_file("table.csv", "evaluator.cpp", "text/csv");
    try {
        segi::run({"true"}, "", {}, {{"/nowhere"}});
    } catch (const std::runtime_error &) {
        std::cout << "no run" << std::endl;
    }
    limits.memory = 1024;
    try {
        show(segi::run({"true"}, "", limits).judge());
    } catch (const std::runtime_error &error) {
        std::cout << error.what();
    }
}
"""
CPP_PRINTS = r"""runtime_error killed by signal 11 [] []
output_limit printed too much [] []
10
accepted  [] []
wrong_answer line 1 differs [a
] [a]
accepted  [] []
wrong_answer word 2 missing [b] []
accepted  [] []
wrong_answer word 1 differs [1] [1.1]
wrong_answer word 1 differs [1] [inf]
wrong_answer word 1 differs [xé] [�(😀]
"�����"
wrong_answer line 1 differs [xEXCERPT] [y]
100000 0
accepted  [] []
7 accepted  [] []
 wrong_answer link is a link or no readable file [] []
 wrong_answer expected is a link or no readable file [] []
 wrong_answer one is a link or no readable file [] []
 wrong_answer pipe is a link or no readable file [] []
 wrong_answer none is missing [] []
 wrong_answer up is a link or no readable file [] []
output_limit plain has over 0 bytes [] []
1
compile_error wrong source
 [] []
compile_error stopped after SECONDS [] []
"a\"\\\u0009b\u000a"
no run
tawebeval-run: memory: 1024 bytes; at least 1048576 (1 MiB) are needed
""".replace("EXCERPT", "é" * 99)

SHELL_TOGETHER = r"""
. "$EVALUATION_TOOLS/lib/segi.sh"
echo 7 >expected
judge() { # NAME PRINTED STATUS
    segi_run --wall 60 -- sh -c "sleep 0.05; echo $2; exit $3" </dev/null >"out-$1"
    [ "$segi_verdict" != accepted ] || segi_compare tokens "out-$1" expected
    segi_send_case "$1"
}
for round in 1 2 3 4 5; do
    judge accepted 7 0 & judge wrong_answer 8 0 & judge runtime_error 7 3 & judge accepted 7 0 &
    wait
done
ls -A "$TEMPORARY_DIRECTORY"
"""


class LibraryCase(DaemonTestCase):
    """Runs an evaluator on two submissions in Python, one of them broken."""

    async def judge(self, command: str, prints: str) -> list[Any]:
        files = [
            ("source", "source.py", SUBMISSION.encode()),
            ("broken", "broken.py", BROKEN.encode()),
        ]
        events = await self.run_command(command, files=files)
        printed = re.sub(r"(?<=stopped after )\d+\.\d s", "SECONDS", text(events))
        self.assertEqual(printed, prints.replace('"broken"', '"broken.py"'), events[-1])
        return data(events)

    def check_case(self, case: dict[str, Any]) -> None:
        self.assertGreater(case.pop("time"), 0)
        self.assertGreater(case.pop("memory"), 0)
        self.assertEqual(case, {"type": "case", "case": "sum", "verdict": "accepted", "points": 2})

    async def check_python(self) -> None:
        (case,) = await self.judge(python(PYTHON), PYTHON_PRINTS)
        self.check_case(case)


class LibraryTests(LibraryCase):
    async def test_python_evaluator_runs_compares_and_sends_by_the_library(self) -> None:
        await self.check_python()

    async def check(self, command: str, prints: str) -> None:
        """Hold that an evaluator prints a text, and sends one event of each kind."""
        case, hidden, shown, *events, file = await self.judge(command, prints)
        self.check_case(case)
        differs = {"type": "case", "verdict": "wrong_answer", "message": "word 1 differs"}
        excerpts = {"input": "é" * 100, "expected": "7", "printed": "8"}
        for name in ("time", "memory"):  # of the last run, in the shell
            for found in (hidden, shown):
                found.pop(name, None)
        self.assertEqual(hidden, {**differs, "case": "hidden", "printed": "8"})
        self.assertEqual(shown, {**differs, **excerpts, "case": "shown", "points": 1})
        self.assertEqual((file["type"], file["filename"]), ("file", "table.csv"))
        self.assertEqual(
            events,
            [
                {"type": "goal_result", "goal": "sum", "result": True},
                {"type": "progress", "done": 1, "total": 2},
                {"type": "score", "score": 1, "maximum": 2.5},
            ],
        )

    async def test_dash_and_bash_evaluators_run_compare_and_send_by_the_library(self) -> None:
        self.repository.write("evaluator.sh", SHELL)
        self.commit = self.repository.commit()
        for shell in ("dash", "bash"):
            need = "the evaluator needs version 2 of segi; this server has 1\n"
            prints = SHELL_PRINTS.replace("source\n", "source.py\n") + need
            await self.check(f"{shell} evaluator.sh || :", prints)

    async def test_cpp_evaluator_compiles_without_warnings_and_sends_by_the_library(self) -> None:
        if shutil.which("g++", path="/usr/bin:/bin") is None:
            raise SkipTest("there is no C++ compiler here (Debian package g++)")
        self.repository.write("evaluator.cpp", CPP)
        self.commit = self.repository.commit()
        build = 'g++ -std=c++17 -Wall -Wextra -Werror -I"$EVALUATION_TOOLS/lib" -o e evaluator.cpp'
        await self.check(f"{build} && ./e", CPP_PRINTS.replace("source\n", "source.py\n"))

    async def check_together(self, command: str) -> None:
        """Hold that 20 runs, four at a time, have the verdicts that are their names."""
        cases = await self.judge(command, "")
        self.assertEqual(len(cases), 20, cases)
        self.assertEqual([case["case"] for case in cases], [case["verdict"] for case in cases])

    async def test_concurrent_runs_of_a_shell_evaluator_share_no_file(self) -> None:
        self.repository.write("together.sh", SHELL_TOGETHER)
        self.commit = self.repository.commit()
        for shell in ("dash", "bash"):
            await self.check_together(f"{shell} together.sh")


JAVA = r"""
import os, pathlib, sys
sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi

main = "public static void main(String[] arguments) "
prints = main + "{ System.out.println(7); }"
garbage = '''class Garbage {
    static byte[] keep;
    %s {
        for (int i = 0; i < 2000; i++) {
            keep = new byte[1 << 20];
            for (int k = 0; k < keep.length; k += 4096) keep[k] = 1;
        }
    }
}'''
sources = {
    "solution": "public class Main { %s }" % prints,
    "Bom": "\ufeffpublic class Bom { %s }" % prints,
    "Pack": "package org.example; class Pack { %s }" % prints,
    "other": "class Other { %s }" % prints,
    "Garbage": garbage % main,
}
for name, text in sources.items():
    source = pathlib.Path(name + ".java").absolute()
    source.write_text(text)
    solution = segi.prepare(source)
    for memory in "8g", "128g":  # of the host
        host = {"JAVA_TOOL_OPTIONS": "-XX:MaxRAM=" + memory}
        fault = solution.fault or solution.run(time=60, memory=2**28, environment=host).fault
        print(name, fault and (fault.verdict, fault.message))
"""


class JavaTests(LibraryCase):
    async def test_java_program_runs_with_any_class_name_and_host_memory(self) -> None:
        if shutil.which("javac", path="/usr/bin:/bin") is None:
            raise SkipTest("there is no javac here (Debian package default-jdk-headless)")
        names = ("solution", "Bom", "Pack", "other", "Garbage")
        await self.judge(python(JAVA), "".join(f"{name} None\n" * 2 for name in names))


class UnsandboxedLibraryTests(LibraryCase):
    configuration = UNSANDBOXED

    async def test_python_evaluator_uses_the_library_without_a_sandbox(self) -> None:
        await self.check_python()
