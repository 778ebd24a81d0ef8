"""The checks, run one after the other in the machine, as root: `checks.py [WORD...]`.

With WORDs only those run that have one of them in their names, and those that others need. Each
prints one line: `ok NAME`, or `FAILED NAME: why`. Indented lines explain a failure.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import service  # type: ignore[import-not-found]
from attacks import (  # type: ignore[import-not-found]
    ALL_MEMORY,
    ATTACKS,
    MIB,
    SOME_MEMORY,
    SPIN,
    Attack,
    limits,
)
from service import CACHE, SOCKET, STATE, UNIT, attempt, begin, begin_python, follow, run, show

PACKAGE = "/root/given/tawebeval.deb"
TOKENS = Path("/etc/tawebeval/tokens")
ALL = "all checks were run"
CUT = "the power is cut"
POWER_CUT = "power cut"
CGROUP_TESTS = "cgroups of an ordinary user"

# Of the unit and of evaluations, for three checks in a row: a start takes a quarter of a minute.
SMALL, PATIENT = "MemoryMax=384M", limits(cpu=600, memory=2048 * MIB)

# What the check of a power cut has begun, for that after the boot.
_MADE = Path("/root/given/made.json")
_SYNCED = 15  # seconds after which what was stored is on the disk
_PRINT = "seq 1000"

# Denies user namespaces to all that start bwrap or unshare, as Ubuntu does.
_DENYING = """
abi <abi/4.0>,
profile denying /usr/bin/{bwrap,unshare} flags=(attach_disconnected) {
  file, capability, network, mount, umount, pivot_root, signal, ptrace, unix, mqueue,
}
"""
# Runs four programs as submissions, and shows the report of each.
_SUBMISSIONS = r"""
apart() { tawebeval-run --wall 120 --report ~/report "$@" 2>/dev/null; cat ~/report; }
apart -- true
apart --memory 32M -- python3 -S -c "x = b'x' * 10**9"
apart --processes 5 -- sh -c 'for i in 1 2 3 4 5 6 7 8; do sleep 1 & done; wait; exit 1'
apart --time 0.5 -- sh -c 'while :; do :; done'
echo alive
"""
# Runs tests in a cgroup beside those of their daemons.
_IN_CGROUP = """
own=/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)
mkdir "$own/tests"
echo 0 >"$own/tests/cgroup.procs"
echo +cpu +memory +pids >"$own/cgroup.subtree_control"
export HOME=/home/tester TAWEBEVAL_TEST_CGROUP="$own" TAWEBEVAL_PATIENCE=1200
exec .venv/bin/python -m twisted.trial "$@"
"""
_PROFILE = Path("/etc/apparmor.d/tawebeval")
_KNOWS_NAMESPACES = Path("/sys/kernel/security/apparmor/features/namespaces/mask")


def machine() -> None:
    """Hold that the machine has what limits rest on: cgroups of version 2."""
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    assert {"cpu", "memory", "pids"} <= set(controllers), controllers


def install() -> None:
    """Install the package: the service comes up as its own user, without a warning."""
    done = attempt("dpkg", "-i", PACKAGE)
    assert done.returncode == 0 and "tawebeval: " not in done.stderr, done
    for unit in (SOCKET, UNIT):
        found = show("ActiveState", unit), show("UnitFileState", unit)
        assert found == ("active", "enabled"), f"{unit}: {found}"
    assert pwd.getpwnam("tawebeval").pw_shell == "/usr/sbin/nologin"
    check_directories()


def check_directories() -> None:
    """Hold that state and cache are where they belong, and are the service's user's alone."""
    for path in (STATE, STATE / "key", CACHE, CACHE / "repositories"):
        assert not path.is_symlink(), path
        assert path.owner() == path.group() == "tawebeval", f"{path} belongs to {path.owner()}"
        assert not path.stat().st_mode & 0o077, f"{path}: {path.stat().st_mode:o}"


def doctor() -> None:
    """Hold that the documented doctor finds all ok, with unit and configuration as shipped."""
    all_is_ok()
    assert service.is_ready()


def all_is_ok() -> list[str]:
    """Hold that the doctor finds all ok, and return what it says."""
    findings = service.examine()
    worse = [finding for finding in findings if finding["health"] != "ok"]
    assert not worse, worse
    return [finding["what"] for finding in findings]


def honest() -> None:
    """Hold that an evaluation is fetched, run and followed to its end."""
    service.configure(limits())
    outcome = follow(begin("cat $SUBMISSION_FILE_SOLUTION README"))
    assert (outcome.text, outcome.error) == ("42\nan evaluator\n", {}), vars(outcome)


def nothing_is_left() -> bool:
    """Tell whether no evaluation has a directory any more."""
    return not list((STATE / "evaluations").glob("*/tmp"))  # some keep their submission


def limit(attack: Attack) -> None:
    """Hold that the attack ends with its reason, and the daemon goes on."""
    daemon = show("MainPID")
    outcome = follow(begin_python(attack.program, attack.arguments))
    assert outcome.text == "", outcome.text
    error = outcome.error
    assert (error.get("reason"), error.get("value")) == (attack.reason, attack.value), error
    assert show("MainPID") == daemon, "the daemon has ended, too"
    service.wait_until(nothing_is_left, "its directory is removed")


def submissions() -> None:
    """Hold that submissions run apart, each within limits of its own, by cgroups of version 2."""
    service.override(SMALL)
    service.configure(PATIENT)
    lines = follow(begin(_SUBMISSIONS)).text.splitlines()
    assert lines[-1] == "alive", lines
    reports = [json.loads(line) for line in lines[:-1]]
    reasons = [report["reason"] for report in reports]
    assert reasons == [None, "memory", "processes", "time"], reports
    assert {each for report in reports for each in report["measured"].values()} == {"cgroup"}
    assert reports[1]["peak_memory_bytes"] <= 32 * MIB, reports


def processor_time(word: str) -> float:
    """Return the seconds of all processes whose last argument is this word."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if file.read_text().endswith(f"\0{word}\0"):
                fields = file.with_name("stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # utime and stime, see proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def processor_share() -> None:
    """Hold that two processes get as much processor time as the eight of another evaluation."""
    service.override(SMALL)
    service.configure(PATIENT)
    spinning = [begin_python(SPIN, words) for words in ("8 many", "2 few")]
    for identifier in spinning:
        follow(identifier, "spins")
    many, few = -processor_time("many"), -processor_time("few")
    time.sleep(10)
    many, few = many + processor_time("many"), few + processor_time("few")
    for identifier in spinning:
        service.ask("DELETE", f"/evaluation/{identifier}")
    # Among ten equal processes two would have a quarter of what eight have.
    assert few > 0.6 * many, f"two had {few:.1f} s, eight had {many:.1f} s"


def memory_killer() -> None:
    """Hold that the kernel, without memory left, kills an evaluator and not the daemon.

    First without any left for the unit, which has less than as shipped, so that it is soon full.
    Then as if the machine had none left, by a command to the kernel: one that really has none
    spends minutes on reading its programs from the disk again and again.
    """
    service.override(SMALL)
    service.configure(PATIENT)
    try:
        daemon = show("MainPID")
        hold_killed(begin_python(ALL_MEMORY), "takes all\n")
        identifier = begin_python(SOME_MEMORY)
        follow(identifier, "has some")
        Path("/proc/sysrq-trigger").write_text("f")
        hold_killed(identifier, "has some\n")
        assert follow(begin("echo again")).text == "again\n"
        assert show("MainPID") == daemon, "the daemon has ended, too"
    finally:
        service.override()
        service.configure(limits())


def hold_killed(identifier: str, printed: str) -> None:
    """Hold that an evaluator ends by KILL, and for no limit of its own."""
    outcome = follow(identifier)
    assert outcome.text == printed, outcome.text
    error = outcome.error
    assert (error.get("reason"), error.get("signal")) == ("exit", signal.SIGKILL), error


def restart() -> None:
    """Hold that evaluations go on over a restart, with their limits, and end at a stop."""
    before = show("MainPID")
    identifier = begin(f"{service.HOLD}; echo late; exec tail /dev/zero")
    follow(identifier, "ready")
    run("systemctl", "restart", UNIT)
    assert show("MainPID") != before
    service.let_go()
    found = follow(identifier)
    assert found.text == "ready\nlate\n", found.text
    assert found.error["reason"] == "memory", found.error
    assert follow(begin("echo again")).text == "again\n"
    follow(begin("echo ready; exec sleep 12345"), "ready")
    run("systemctl", "stop", UNIT)
    service.wait_until(
        lambda: not attempt("pgrep", "--full", "sleep 12345").stdout, "the evaluator has ended"
    )
    run("systemctl", "start", UNIT)


def watchdog() -> None:
    """Hold that a daemon that stands still is noticed, and another one serves."""
    before = show("MainPID")
    os.kill(int(before), signal.SIGSTOP)
    service.wait_until(lambda: show("MainPID") not in ("0", before), "there is another daemon")
    service.wait_until(service.is_ready, "it is ready")
    assert "Watchdog timeout" in service.journal()


def cut_power() -> None:
    """Reset the machine, as a power cut does, amid 50 evaluations; `look_after_the_cut` goes on."""
    own = 'private_networks = ["127.0.0.0/8"]'
    service.configure(f"{limits(running=6, more=own)}\n[archive]\nenabled = true\n")
    made: dict[str, list[str]] = {}
    made["ended"] = [begin(_PRINT) for _ in range(10)]
    made["archived"] = [begin(_PRINT) for _ in range(10)]
    for identifier in (*made["ended"], *made["archived"]):
        service.wait_for_state(identifier, "finished")
    for identifier in made["archived"]:
        follow(identifier)
    made["running"] = [begin("echo ready; exec sleep 12345") for _ in range(6)]
    for identifier in made["running"]:
        follow(identifier, "ready")
    made["queued"] = [begin("cat $SUBMISSION_FILE_SOLUTION") for _ in range(20)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/problem"
        made["fetching"] = [begin("true", url) for _ in range(4)]
        service.wait_for_state(made["fetching"][0], "fetching")
        time.sleep(_SYNCED)
        with _MADE.open("w") as file:
            json.dump(made, file)
            file.flush()
            os.fsync(file.fileno())
        print(CUT, flush=True)
        Path("/proc/sysrq-trigger").write_text("b")
        time.sleep(service.PATIENCE)


def look_after_the_cut() -> None:
    """Hold that after the power cut nothing is lost but what ran, and that is told."""
    made: dict[str, list[str]] = json.loads(_MADE.read_text())
    service.wait_until(service.is_ready, "it is ready")
    printed = "".join(f"{number}\n" for number in range(1, 1001))
    expected = {
        "ended": (printed, None),
        "archived": (printed, None),
        "running": ("ready\n", "lost"),
        "queued": ("42\n", None),
        "fetching": ("", "repository"),
    }
    for kind, identifiers in made.items():
        for identifier in identifiers:
            outcome = follow(identifier)
            found = outcome.text, outcome.error.get("reason")
            assert found == expected[kind], (kind, found)
    service.wait_until(nothing_is_left, "their directories are removed")
    service.configure(limits())
    assert follow(begin("echo again")).text == "again\n"


def apparmor() -> None:
    """Hold that it starts where user namespaces are denied to others, by its profile alone."""
    if not _KNOWS_NAMESPACES.exists():
        assert not _PROFILE.exists(), "this AppArmor cannot read the profile"
        assert attempt("systemctl", "is-active", "apparmor").stdout == "active\n"
        return
    confined = run("cat", f"/proc/{show('MainPID')}/attr/current")
    assert confined == "tawebeval (enforce)", confined
    run("apparmor_parser", "--replace", given=_DENYING)
    service.override("AppArmorProfile=", "Restart=no")
    assert attempt("systemctl", "restart", UNIT).returncode != 0
    said = service.journal()
    assert "Creating new namespace failed: Permission denied" in said, said[-2000:]
    assert "docs/security.md (Sandbox)" in said, said[-2000:]
    service.override()
    run("systemctl", "restart", UNIT)
    all_is_ok()
    assert follow(begin("cat README")).text == "an evaluator\n"
    run("apparmor_parser", "--remove", given=_DENYING)


def upgrade_package() -> None:
    """Install the package once more, and hold that another daemon comes up without a warning."""
    before = show("MainPID")
    done = attempt("dpkg", "-i", PACKAGE)
    assert done.returncode == 0 and "tawebeval: " not in done.stderr, done
    assert show("MainPID") not in ("0", before), done


def upgrade() -> None:
    """Hold that an upgrade keeps what runs, the operator's files, the cache and the socket."""
    kept = (service.CONFIGURATION, TOKENS)
    before = [path.read_text() for path in kept]
    fetched = {path.name for path in (CACHE / "repositories").iterdir()}
    assert fetched, "nothing is cached"
    opened = show("ActiveEnterTimestamp", SOCKET)
    identifier = begin(f"{service.HOLD}; echo late")
    follow(identifier, "ready")
    upgrade_package()
    service.let_go()
    assert show("ActiveEnterTimestamp", SOCKET) == opened, "the socket was closed meanwhile"
    assert follow(identifier).text == "ready\nlate\n"
    assert [path.read_text() for path in kept] == before
    assert fetched <= {path.name for path in (CACHE / "repositories").iterdir()}
    check_directories()


def failure() -> None:
    """Hold that an upgrade after which the service does not come up says so, and why."""
    configuration = service.CONFIGURATION.read_text()
    service.CONFIGURATION.write_text("nonsense = 1\n")
    done = attempt("dpkg", "-i", PACKAGE)
    assert done.returncode == 0, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("tawebeval: ")]
    assert len(lines) == 3, done
    assert "nonsense: unknown setting" in lines[1], lines
    service.configure(configuration)


def purge() -> None:
    """Hold that a purge leaves nothing."""
    run("dpkg", "--purge", "tawebeval")
    left = run("find", "/etc", "/usr", "/var", "-xdev", "-name", "*tawebeval*")
    assert not left, left
    assert attempt("getent", "passwd", "tawebeval").returncode == 2


def cgroup_tests() -> None:
    """Hold that the tests that need cgroups pass, as an ordinary user in a delegated unit."""
    run("useradd", "--create-home", "tester")
    run("rm", "-r", "/srv")
    Path("/root/given/checkout").rename("/srv")  # where its virtualenv was made
    run("chown", "-R", "tester:", "/srv")
    tests = Path("/root/given/cgroup_tests").read_text().split()
    unit = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--uid=tester")
    properties = ("Delegate=yes", "OOMPolicy=continue", "WorkingDirectory=/srv")
    options = [f"--property={each}" for each in properties]
    command = [*unit, *options, "sh", "-euc", _IN_CGROUP, "sh", *tests]
    last = ""
    with subprocess.Popen(command, stdout=-1, stderr=subprocess.STDOUT, text=True) as trial:
        for line in trial.stdout or ():
            print(f"    {line}", end="", flush=True)
            last = line.strip()
    assert last == f"PASSED (successes={len(tests)})", last


def _limited(attack: Attack) -> Callable[[], None]:
    def check() -> None:
        limit(attack)

    return check


# In this order: each relies on those before it, and the first ones are needed by all.
CHECKS: dict[str, Callable[[], None]] = {
    "machine": machine,
    "installation": install,
    "doctor": doctor,
    "honest evaluation": honest,
    **{f"limit: {attack.name}": _limited(attack) for attack in ATTACKS},
    "submissions": submissions,
    "limit: share of the processors": processor_share,
    "no memory left": memory_killer,
    "restart": restart,
    "watchdog": watchdog,
    POWER_CUT: cut_power,
    "AppArmor": apparmor,
    "upgrade": upgrade,
    "upgrade to a service that fails": failure,
    "purge": purge,
    CGROUP_TESTS: cgroup_tests,
}
_NEEDED = 4


def choose_checks(words: list[str]) -> dict[str, Callable[[], None]]:
    """Return the checks with one of these words, without any all; after a power cut the rest."""
    names = list(CHECKS)
    chosen = {
        name: check
        for number, (name, check) in enumerate(CHECKS.items())
        if not words or number < _NEEDED or any(word in name for word in words)
    }
    if not Path("/root/given/checkout").exists():
        chosen.pop(CGROUP_TESTS, None)
    if not _MADE.exists():
        return chosen
    done = names[: names.index(POWER_CUT) + 1]
    rest = {name: check for name, check in chosen.items() if name not in done}
    return {POWER_CUT: look_after_the_cut, **rest}


def main(words: list[str]) -> None:
    """Run the checks."""
    for name, check in choose_checks(words).items():
        began = time.monotonic()
        try:
            check()
        except Exception:  # noqa: BLE001  (whatever it is, the next check is run)
            *trace, why = traceback.format_exc().strip().splitlines()
            print(f"FAILED {name}: {why}")
            for line in (*trace[-4:], *attempt("journalctl", "-n30", "-ocat").stdout.splitlines()):
                print(f"    {line}")
        else:
            print(f"ok {name} ({time.monotonic() - began:.0f} s)", flush=True)
    print(ALL, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
