"""What the unit keeps the daemon from, and all that it starts: tried, on a booted systemd."""

from __future__ import annotations

from tests.cases.units import read_unit
from tests.integration.service_case import SOCKET, STARTER, ServiceTestCase, text

# Tells of each path whether it can be read, and of each whether it can be written to.
PROBE = """\
for path in $READ; do
    if cat "$path" >/dev/null 2>&1; then echo "read $path"; fi
done
for path in $WRITE; do
    if (echo x >"$path/probe") 2>/dev/null; then echo "write $path"; rm "$path/probe"; fi
done
echo probed
"""
SECRETS = (
    *("/etc/shadow", "/etc/tawebeval/tokens", "/root/secret", "/home/somebody/secret"),
    *("/var/lib/private/another/secret", "/dev/kmsg", "/proc/kmsg", "/proc/1/environ"),
)
PLACES = (
    *("/", "/usr", "/usr/local/lib/tawebeval", "/etc", "/etc/tawebeval", "/var/lib", "/var/log"),
    *("/srv", "/srv/problem", "/root", "/home/somebody", "/run", "/boot", "/dev", "/dev/shm"),
    *("/proc/sys/kernel", "/sys", "/opt"),
)

# By line of the unit: what that line alone forbids an ordinary user, as Python that fails where it
# is forbidden.
ATTEMPTS = {
    "ProtectSystem": "open('/srv/open/probe', 'w')",
    "ProtectHome": "open('/home/somebody/open')",
    "PrivateTmp": "open('/tmp/open')",
    "PrivateDevices": "open('/dev/another')",
    "PrivateIPC": "assert len(open('/proc/sysvipc/shm').readlines()) > 1",
    "ProtectProc": "open('/proc/1/status')",
    "ProtectKernelModules": "open('/usr/lib/modules/open')",
    "RestrictAddressFamilies": "packets()",
    "LockPersonality": "call(libc.personality, 0x0040000)",  # addresses that are not random
    "SystemCallFilter": "call(libc.ptrace, 0, 0, 0, 0)",  # be traced
    "CapabilityBoundingSet": "assert int(status['CapBnd'], 16)",
    "NoNewPrivileges": "assert not int(status['NoNewPrivs'])",
}
TRIAL = """\
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))

def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

def packets():
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM).close()
    except PermissionError:
        pass  # of a family that is there, to others

try:
    exec(sys.argv[1])
except (OSError, AssertionError):
    print("forbidden")
else:
    print("possible")
"""


class HardeningTests(ServiceTestCase):
    def setUp(self) -> None:
        super().setUp()
        for path in SECRETS:
            if path.endswith("/secret"):
                self.write(path, "secret")

    def probe(self, read: tuple[str, ...], write: tuple[str, ...]) -> str:
        return f"READ='{' '.join(read)}'; WRITE='{' '.join(write)}'\n{PROBE}"

    def test_daemon_reads_no_secrets_and_writes_its_own_directories_alone(self) -> None:
        own = (
            *("/var/lib/tawebeval", "/var/cache/tawebeval", "/run/tawebeval"),
            *("/tmp", "/var/tmp", "/dev/shm"),
        )
        places = [place for place in PLACES if place not in own]
        script = self.probe((*SECRETS, "/etc/tawebeval/tawebeval.toml"), (*places, *own))
        self.write("/usr/local/bin/probe", script)
        self.override("ExecStartPre=/bin/sh /usr/local/bin/probe")
        self.start()
        lines = self.journal().splitlines()
        found = {line for line in lines if line.startswith(("read /", "write /"))}
        allowed = {"read /etc/tawebeval/tawebeval.toml", *(f"write {path}" for path in own)}
        self.assertEqual(found, allowed)
        self.assertIn("probed", self.journal())

    def test_evaluator_sees_nothing_of_the_daemon(self) -> None:
        own = ("/tmp", "/dev/shm", "$HOME", "$TEMPORARY_DIRECTORY", ".")
        hidden = (
            *("/etc/tawebeval/tawebeval.toml", "/var/lib/tawebeval/key", "/proc/1/environ"),
            "/run/credentials/tawebeval.service/tokens",
        )
        places = [place for place in PLACES if place not in own]
        script = self.probe((*SECRETS, *hidden, "README"), (*places, *own)).replace("'", '"')
        printed = text(self.follow(self.begin(script)))
        found = [line.split()[0] for line in printed.splitlines()]
        self.assertEqual(found, ["read"] + ["write"] * len(own) + ["probed"], printed)
        self.assertIn("read README\n", printed)


class LineTests(ServiceTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.machine.run(
            *("sh", "-c", "umask 0; mkdir -p /srv/open /home/somebody /usr/lib/modules")
        )
        for path in ("/home/somebody/open", "/tmp/open", "/usr/lib/modules/open"):
            self.write(path, "")
            self.machine.run("chmod", "666", path)
        self.machine.run("sh", "-c", "umask 0; test -e /dev/another || mknod /dev/another c 1 3")
        self.machine.run("sh", "-c", "ipcs -m | grep -q 0x || ipcmk --shmem 1")

    def attempt(self, attempt: str, lines: dict[str, str]) -> str:
        """Try something with these lines of a unit, as an ordinary user; return what came of it."""
        properties = [f"--property={key}={value}" for key, value in lines.items()]
        return self.machine.run(
            *("systemd-run", "--quiet", "--pipe", "--wait", "--property=User=nobody", *properties),
            *("/usr/bin/python3", "-c", TRIAL, attempt),
        )

    def test_each_line_of_the_unit_forbids_something(self) -> None:
        unit = read_unit("tawebeval.service")["Service"]
        errors = {"SystemCallErrorNumber": unit["SystemCallErrorNumber"]}
        for key, attempt in ATTEMPTS.items():
            found = [self.attempt(attempt, {**lines, **errors}) for lines in ({}, {key: unit[key]})]
            self.assertEqual(found, ["possible", "forbidden"], key)

    def test_service_has_the_limits_of_its_unit(self) -> None:
        unit = read_unit("tawebeval.service")["Service"]
        self.start()
        for key in ("LimitNOFILE", "TasksMax", "OOMPolicy", "OOMScoreAdjust", "UMask"):
            self.assertEqual(self.show(key), unit[key])
        socket = read_unit("tawebeval.socket")["Socket"]
        for key in ("Backlog", "NoDelay"):
            self.assertEqual(self.show(key, SOCKET), socket[key])
        for folder in ("/var/lib/tawebeval", "/var/cache/tawebeval"):
            self.assertEqual(self.machine.run("stat", "--format=%a", folder), "700")
        memory = int(self.machine.run("awk", "/MemTotal/ {print $2}", "/proc/meminfo")) * 1024
        self.assertAlmostEqual(int(self.show("MemoryMax")) / memory, 0.3, places=2)
        self.assertAlmostEqual(int(self.show("MemoryMax", STARTER)) / memory, 0.6, places=2)

    def test_evaluation_has_a_cgroup_below_the_starter(self) -> None:
        self.printed(self.begin("echo ready; exec sleep 23456"), "ready")
        (process, *_) = self.machine.run("pgrep", "--full", "sleep 23456").split()
        its, daemons = (
            self.machine.run("cat", f"/proc/{pid}/cgroup").rpartition("::")[2].strip()
            for pid in (process, self.show("MainPID"))
        )
        self.assertTrue(its.startswith(self.show("ControlGroup", STARTER) + "/tawebeval-"), its)
        self.assertNotEqual(its, daemons)
        scores = [
            int(self.machine.run("cat", f"/proc/{pid}/oom_score_adj"))
            for pid in (process, self.show("MainPID"))
        ]
        script = "echo -500 2>&- >/proc/self/oom_score_adj; cat /proc/self/oom_score_adj"
        possible = int(self.machine.run("sh", "-c", script))  # 0 without CAP_SYS_RESOURCE
        self.assertEqual(scores, [500, possible])
