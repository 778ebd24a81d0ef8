"""The service under a systemd that has booted: what an operator relies on."""

from __future__ import annotations

from tawebeval.callers import new_token
from tests.fakes import straw
from tests.integration.machine import wait_until
from tests.integration.service_case import (
    CONFIGURATION,
    LINE,
    SERVICE,
    SOCKET,
    TOKENS,
    ServiceTestCase,
    reasons,
    text,
)

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
    *("/var/lib/private/another/secret", "/dev/kmsg", "/proc/1/environ"),
)
PLACES = (
    *("/", "/usr", "/usr/local/lib/tawebeval", "/etc", "/etc/tawebeval", "/var/lib", "/var/log"),
    *("/srv", "/srv/problem", "/root", "/home/somebody", "/run", "/boot", "/dev", "/dev/shm"),
    *("/proc/sys/kernel", "/sys", "/opt"),
)


class StartTests(ServiceTestCase):
    """How it comes to serve."""

    def test_activation(self) -> None:
        """The first request starts the daemon, and is answered when it is ready."""
        self.assertEqual(self.show("ActiveState"), "inactive")
        self.healthy()
        self.assertEqual(self.show("ActiveState"), "active")
        self.assertEqual(self.show("StatusText"), "0 running, 0 queued")
        self.assertEqual(text(self.follow(self.begin("cat $SUBMISSION_FILE_SOLUTION"))), "42\n")

    def test_quiet(self) -> None:
        """Nothing is wrong with a start, but for what this machine's kernel does not limit."""
        self.healthy()
        words = ("warn", "error", "critical", "Unable", "Traceback")
        lines = [line for line in self.journal().splitlines() if any(w in line for w in words)]
        self.assertEqual([line for line in lines if "#warn] limits: " not in line], [])

    def test_readiness(self) -> None:
        """Who waits for the start waits until the sandbox was tried: a broken one is no start."""
        self.override("ProtectHostname=yes", "Restart=no")  # bubblewrap sets one, in its namespace
        done = self.machine.attempt("systemctl", "start", SERVICE)
        self.assertEqual((done.returncode, self.show("Result")), (1, "exit-code"))
        self.assertIn("bubblewrap does not work here", self.journal())
        self.assertNotIn("Traceback", self.journal())

    def test_tokens_are_needed(self) -> None:
        """Without a file of tokens there is no start, and nobody may call without one."""
        self.assertEqual(self.machine.connection().ask("GET", "/evaluations").answer()[0], 401)
        self.control("stop", SERVICE)
        self.machine.run("rm", TOKENS)
        self.override("Restart=no")
        done = self.machine.attempt("systemctl", "start", SERVICE)
        self.assertEqual((done.returncode, self.show("ExecMainStatus")), (1, "243"))

    def test_mended(self) -> None:
        """A mistake keeps it from starting as long as it is there, however often it is tried."""
        self.configure("nonsense = 1")
        waiting = self.ask("GET", "/health")
        self.override("RestartSec=10ms")
        wait_until(lambda: int(self.show("NRestarts")) > 6, "it was tried again and again")
        self.assertIn("nonsense: there is no such setting", self.journal())
        self.assertEqual(self.show("ActiveState", SOCKET), "active")
        self.configure(CONFIGURATION)
        self.assertEqual(waiting.answer()[0], 200)


class LifeTests(ServiceTestCase):
    """What happens to it while it serves."""

    def test_status(self) -> None:
        """`systemctl status` shows how many evaluations run and how many wait."""
        running = self.begin("echo ready; exec sleep 60")
        self.printed(running, "ready")
        waiting = self.begin("true")
        self.until("StatusText", "1 running, 1 queued")
        for identifier in (running, waiting):
            self.assertEqual(self.ask("DELETE", f"/evaluation/{identifier}").answer()[0], 204)
        self.until("StatusText", "0 running, 0 queued")

    def test_watchdog(self) -> None:
        """A reactor that hangs is noticed, where is logged, and clients are served by the next."""
        self.configure(f'{CONFIGURATION}\n[callers]\ntokens = "{TOKENS}"')
        self.machine.run("chmod", "644", TOKENS)
        self.override("WatchdogSec=1", "LoadCredential=")
        before = self.start()
        self.machine.run("sh", "-c", f"rm {TOKENS} && mkfifo -m 644 {TOKENS}")
        # It opens the file, and waits for somebody to write.
        reload = self.machine.begin("systemctl", "reload", SERVICE)
        self.addCleanup(reload.wait)
        self.until("ActiveState", "reloading")
        wait_until(lambda: "Watchdog timeout" in self.journal(), "it is noticed")
        waiting = self.ask("GET", "/health")
        self.machine.run("rm", TOKENS)
        self.write(TOKENS, LINE)
        self.machine.run("chmod", "644", TOKENS)
        self.assertEqual(waiting.answer()[0], 200)
        self.assertNotEqual(int(self.show("MainPID")), before)
        self.assertIn("Fatal Python error: Aborted", self.journal())
        self.assertIn("in read_secrets", self.journal())

    def test_reload(self) -> None:
        """A reload brings new tokens, and ends nothing."""
        self.configure(f'{CONFIGURATION}\n[callers]\ntokens = "{TOKENS}"')
        self.machine.run("chmod", "644", TOKENS)
        before = self.start()
        identifier = self.begin("echo ready; exec sleep 60")
        self.printed(identifier, "ready")
        bob, line = new_token("bob", straw(1))
        theirs = {"Authorization": f"Bearer {bob}"}
        self.assertEqual(self.ask("GET", "/evaluations", **theirs).answer()[0], 401)
        self.write(TOKENS, f"{LINE}\n{line}\n")
        self.control("reload", SERVICE)
        wait_until(
            lambda: self.ask("GET", "/evaluations", **theirs).answer()[0] == 200,
            "the new token counts",
        )
        self.until("ActiveState", "active")
        self.assertEqual(int(self.show("MainPID")), before)
        status = self.ask("GET", f"/evaluation/{identifier}").answer()
        self.assertEqual(status[1]["state"], "running")

    def test_restart(self) -> None:
        """Who waits at a restart is told of the end, and who comes meanwhile by the next daemon."""
        before = self.start()
        identifier = self.begin("echo ready; exec sleep 60")
        after = self.printed(identifier, "ready")
        waiting = self.wait_for_events(identifier, after)
        restart = self.machine.begin("systemctl", "restart", SERVICE)
        self.addCleanup(restart.wait)
        status, page = waiting.answer()
        self.assertEqual(status, 200)
        events = page["data"] + self.follow(identifier, page["end"])
        self.assertEqual(reasons(events), ["shutdown"])
        coming = [self.ask("GET", "/health") for _ in range(20)]
        self.assertEqual([one.answer()[0] for one in coming], [200] * 20)
        self.assertEqual(restart.wait(30), 0)
        self.assertNotEqual(int(self.show("MainPID")), before)
        self.assertEqual(self.ask("GET", f"/evaluation/{identifier}").answer()[0], 410)


class EndTests(ServiceTestCase):
    """How it ends, by order or by violence."""

    def patience(self) -> None:
        """Let evaluations end by themselves."""
        self.configure(CONFIGURATION.replace("drain = 0", "drain = 30"))

    def test_drain(self) -> None:
        """What runs may end by itself, also where the unit would have less patience."""
        self.patience()
        self.override("TimeoutStopSec=100ms")
        self.start()
        identifier = self.begin("echo ready; sleep 2; echo done")
        self.printed(identifier, "ready")
        stop = self.machine.begin("systemctl", "stop", SERVICE)
        self.addCleanup(stop.wait)
        self.until("StatusText", "stopping: 1 running, 0 queued")
        events = self.follow(identifier)
        self.assertEqual((text(events), reasons(events)), ("ready\ndone\n", []))
        self.assertEqual(stop.wait(30), 0)
        self.assertEqual((self.show("Result"), self.show("ActiveState")), ("success", "inactive"))

    def test_killed(self) -> None:
        """Nothing of a daemon that was killed is left, and it starts anew by itself."""
        before = self.start()
        identifier = self.begin("echo ready; exec sleep 12345")
        self.printed(identifier, "ready")
        self.machine.run("pgrep", "--full", "sleep 12345")
        held = "/var/lib/tawebeval/evaluations"
        self.assertEqual(len(self.machine.run("ls", held).split()), 1)
        self.control("kill", "--kill-whom=main", "--signal=KILL", SERVICE)
        self.until("NRestarts", "1")
        self.healthy()
        self.assertNotEqual(int(self.show("MainPID")), before)
        self.assertEqual(self.machine.attempt("pgrep", "--full", "sleep 12345").stdout, "")
        self.assertEqual(self.machine.run("ls", held), "")
        self.assertEqual(self.ask("GET", f"/evaluation/{identifier}/events").answer()[0], 410)
        self.assertEqual(text(self.follow(self.begin("echo again"))), "again\n")

    def test_nothing_is_left(self) -> None:
        """A stopped service has no process, and no group of them."""
        self.patience()
        identifier = self.begin("sleep 54321 & echo ready; exec sleep 54321")
        self.printed(identifier, "ready")
        group = self.machine.path(f"/sys/fs/cgroup{self.show('ControlGroup')}")
        self.assertTrue(group.is_dir())
        stop = self.machine.begin("systemctl", "stop", SERVICE)
        self.addCleanup(stop.wait)
        self.until("ActiveState", "deactivating")
        # Who is in a hurry does not wait for the drain.
        self.control("kill", "--kill-whom=main", "--signal=TERM", SERVICE)
        self.assertEqual(reasons(self.follow(identifier)), ["shutdown"])
        self.assertEqual(stop.wait(30), 0)
        self.assertFalse(group.exists())
        self.assertEqual(self.machine.attempt("pgrep", "--full", "sleep 54321").stdout, "")


class HardeningTests(ServiceTestCase):
    """What it can get at: its directories, and what everybody may read."""

    def setUp(self) -> None:
        super().setUp()
        for path in SECRETS:
            if path.endswith("/secret"):
                self.write(path, "secret")

    def probe(self, read: tuple[str, ...], write: tuple[str, ...]) -> str:
        """Return the assignments that a probe wants, and the probe."""
        return f"READ='{' '.join(read)}'; WRITE='{' '.join(write)}'\n{PROBE}"

    def test_daemon(self) -> None:
        """The daemon's place writes to its own directories alone, and reads no secrets."""
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

    def test_evaluator(self) -> None:
        """An evaluator has its own directories, and sees nothing of the daemon's."""
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
