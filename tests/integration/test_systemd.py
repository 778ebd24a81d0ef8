"""The service under a systemd that has booted: what an operator relies on."""

from __future__ import annotations

from benchmarks.booted import wait_until
from tests.cases.documented import CONFIGURE, OPERATE, drop_ins, scripts
from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.service_case import (
    CONFIGURATION,
    GATE,
    SERVICE,
    SOCKET,
    STARTER,
    STATE,
    TOKENS,
    WAIT,
    ServiceTestCase,
    reasons,
    text,
)


class StartTests(ServiceTestCase):
    def test_first_request_starts_the_daemon(self) -> None:
        self.assertEqual(self.show("ActiveState"), "inactive")
        self.healthy()
        self.until("ActiveState", "active")
        self.until("StatusText", "0 running, 0 queued")
        self.assertEqual(text(self.follow(self.begin("cat $SUBMISSION_FILE_SOLUTION"))), "42\n")

    def test_service_and_socket_start_and_stop_together(self) -> None:
        self.control("stop", SOCKET)
        self.start()
        self.assertEqual(self.show("ActiveState", SOCKET), "active")
        self.healthy()
        self.control("stop", SOCKET)
        self.until("ActiveState", "inactive")

    def test_missing_tokens_fail_the_start(self) -> None:
        self.assertEqual(self.machine.connection().ask("GET", "/evaluations").answer()[0], 401)
        self.control("stop", SERVICE)
        self.machine.run("rm", TOKENS)
        self.override("Restart=no")
        done = self.machine.attempt("systemctl", "start", SERVICE)
        self.assertEqual((done.returncode, self.show("ExecMainStatus")), (1, "243"))

    def test_documented_override_adds_a_unix_socket(self) -> None:
        (unit,) = (unit for unit in drop_ins(CONFIGURE) if "--listen unix:" in unit)
        self.override(*unit.splitlines()[1:])
        self.configure(f'{CONFIGURATION}\n[http]\ntrusted_proxies = ["unix"]')
        self.start()
        asked = (
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/tawebeval/socket');"
            " s.sendall(b'GET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print(s.recv(999))"
        )
        proxy = "runuser", "-u", "www-data", "-g", "tawebeval", "--", "/usr/bin/python3"
        self.assertIn("200 OK", self.machine.run(*proxy, "-c", asked))
        self.healthy()

    def test_waiting_request_is_answered_after_the_configuration_is_fixed(self) -> None:
        self.configure("nonsense = 1")
        waiting = self.ask("GET", "/health")
        self.override("RestartSec=10ms")
        wait_until(
            lambda: int(self.show("NRestarts")) > 6, "it was tried again and again", LONG_PATIENCE
        )
        self.assertIn("nonsense: unknown setting", self.journal())
        self.assertEqual(self.show("ActiveState", SOCKET), "active")
        self.configure(CONFIGURATION)
        self.assertEqual(waiting.answer()[0], 200)


class LifeTests(ServiceTestCase):
    def test_reload_of_a_broken_file_changes_nothing(self) -> None:
        before = self.start()
        problem = f"repository = 'file:///srv/p'\ncommit = '{'c' * 40}'\ncommand = 'x'"
        self.configure(f"{CONFIGURATION}\n[log]\nformat = 'json'\n[problems.known]\n{problem}\n")
        self.control("reload", SERVICE)
        self.logged("log.format: changed; takes effect after a restart")
        self.logged("is a copy that systemd made at the start (LoadCredential=)")
        (listed,) = self.ask("GET", "/problems").answer()[1]["data"]
        self.assertEqual(listed["name"], "known")
        self.configure(f"{CONFIGURATION}\n[log]\nlevel = 'loud'\n")
        done = self.machine.attempt("systemctl", "reload", SERVICE)
        self.assertEqual(done.returncode, 1)
        self.logged("tawebeval: /etc/tawebeval/tawebeval.toml: log.level: ")
        self.configure("[log")
        self.assertEqual(self.machine.attempt("systemctl", "reload", SERVICE).returncode, 1)
        self.assertEqual(int(self.show("MainPID")), before)
        self.healthy()

    def test_restart_answers_all_clients(self) -> None:
        before = self.start()
        identifier = self.begin("echo ready; exec sleep 600")
        after = self.printed(identifier, "ready")
        waiting = self.wait_for_events(identifier, after)
        restart = self.machine.begin("systemctl", "restart", SERVICE)
        self.addCleanup(restart.wait)
        status, page = waiting.answer()
        self.assertEqual(status, 200)
        coming = [self.ask("GET", "/health") for _ in range(20)]
        self.assertEqual([one.answer()[0] for one in coming], [200] * 20)
        self.assertEqual(restart.wait(PATIENCE), 0)
        self.assertNotEqual(int(self.show("MainPID")), before)
        self.assertEqual(self.ask("DELETE", f"/evaluation/{identifier}").answer()[0], 204)
        self.assertEqual(reasons(self.follow(identifier, page["end"])), ["cancelled"])

    def test_documented_backup_restores_the_service(self) -> None:
        drop_in = "/etc/systemd/system/tawebeval.service.d/local.conf"
        self.write(drop_in, "[Service]\nNice=3\n")
        self.addCleanup(self.machine.run, "rm", "-r", drop_in.rpartition("/")[0])
        self.control("daemon-reload")
        identifier = self.begin("true")
        self.control("stop", SOCKET, SERVICE)
        backup, restore = scripts(OPERATE, "Back up and restore")
        self.machine.run("sh", "-ec", backup)
        self.machine.run("rm", "-r", "/etc/tawebeval", f"{STATE}/key", drop_in)
        self.machine.run("sh", "-ec", restore)
        self.start()
        self.assertEqual(self.show("Nice"), "3")
        self.assertEqual(self.ask("GET", f"/evaluation/{identifier}").answer()[0], 200)


GATED = f"{GATE}; echo ready; {WAIT}; sleep 23456"


class StarterTests(ServiceTestCase):
    def is_running(self) -> bool:
        return self.machine.attempt("pgrep", "--full", "^sleep 23456").returncode == 0

    def begin_and_wait(self, command: str) -> tuple[str, str]:
        """Begin an evaluation that prints `ready`; return its identifier and the cursor then."""
        identifier = self.begin(command)
        return identifier, self.printed(identifier, "ready")

    def fail_to_start(self) -> None:
        """Have the daemon fail at its start, several times."""
        self.override("RestartSec=10ms", "ExecStartPre=/bin/false")
        self.machine.attempt("systemctl", "restart", SERVICE)
        wait_until(lambda: int(self.show("NRestarts")) > 3, "it was tried again and again")
        self.override()

    def test_evaluator_outlives_restarts_of_the_daemon_until_a_stop(self) -> None:
        identifier, after = self.begin_and_wait(GATED)
        for end in (
            lambda: self.control("kill", "--signal=KILL", SERVICE),
            lambda: self.control("restart", SERVICE),
            self.fail_to_start,
            lambda: self.control("restart", SERVICE),
        ):
            daemon = int(self.show("MainPID"))
            end()
            self.healthy()
            self.assertNotEqual(int(self.show("MainPID")), daemon)
        self.let_go()
        self.assertEqual(self.printed(identifier, "done"), str(int(after) + 2))
        wait_until(self.is_running, "it goes on")
        (pid,) = self.machine.run("pgrep", "--full", "^sleep 23456").split()
        group = self.machine.run("cat", f"/proc/{pid}/cgroup").rpartition("::")[2].strip()
        self.assertTrue(group.startswith(self.show("ControlGroup", STARTER)), group)
        self.control("stop", SERVICE)
        wait_until(lambda: not self.is_running(), "the evaluator has ended")
        wait_until(lambda: self.show("ActiveState", STARTER) == "inactive", "the starter has ended")

    def test_lost_starter_is_started_again(self) -> None:
        identifier, _ = self.begin_and_wait(GATED)
        self.control("kill", "--kill-whom=main", "--signal=KILL", STARTER)
        wait_until(lambda: self.show("NRestarts", STARTER) == "1", "another starter is there")
        wait_until(lambda: self.show("ActiveState", STARTER) == "active", "it listens")
        wait_until(lambda: self.post("echo again")[0] == 200, "evaluations are accepted again")
        self.assertEqual(reasons(self.follow(identifier)), ["lost"])
