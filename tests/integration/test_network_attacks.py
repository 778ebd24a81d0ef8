"""Evaluators that reach for the network, where they have none and where they have one."""

from __future__ import annotations

import json
import os
import socket

from tests.integration.attacks import calls, views
from tests.integration.attacks.case import LIMITS, AttackCase
from tests.integration.harness import CONFIGURATION
from tests.integration.processes import new_word


class NetworkCase(AttackCase):
    """There are servers of each kind on this machine."""

    async def setUp(self) -> None:
        await super().setUp()
        self.abstract = new_word()
        self.path = self.folder / "socket"
        for family, address in (
            (socket.AF_UNIX, f"\0{self.abstract}"),
            (socket.AF_UNIX, str(self.path)),
        ):
            server = socket.socket(family)
            self.addCleanup(server.close)
            server.bind(address)
            server.listen()
        self.path.chmod(0o777)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.server.close)
        self.port = self.server.getsockname()[1]

    def addresses(self) -> tuple[str, ...]:
        """Return where those servers are, and others of the machine and the world."""
        return (
            *(f"127.0.0.1 {self.port}", f"127.0.0.1 {self.daemon.port}", f"::1 {self.port}"),
            *("192.0.2.1 80", "2001:db8::1 80", "169.254.169.254 80", "10.0.0.1 53"),
            *(f"@{self.abstract}", str(self.path)),
        )

    def check_unvisited(self) -> None:
        self.server.setblocking(False)
        self.assertRaises(BlockingIOError, self.server.accept)


class WithoutNetworkAttacks(NetworkCase):
    async def test_evaluator_without_network_reaches_no_address_and_no_name(self) -> None:
        attacked = await self.attack(views.CONNECT, *self.addresses())
        lines = attacked.text.splitlines()
        self.assertEqual(lines[-1], "no names")
        outcomes = {line.rsplit(" ", 1)[1] for line in lines[:-1]}
        self.assertLessEqual(outcomes, {"EAFNOSUPPORT", "ECONNREFUSED", "ENOENT"})
        self.assertIn("EAFNOSUPPORT", outcomes)
        self.check_unvisited()


class WithLoopbackAttacks(NetworkCase):
    configuration = CONFIGURATION + LIMITS + "[sandbox]\nloopback = true\n"

    async def test_loopback_of_an_evaluator_does_not_reach_the_machine(self) -> None:
        attacked = await self.attack(views.CONNECT, *self.addresses())
        lines = attacked.text.splitlines()
        self.assertEqual(lines[-1], "no names")
        found = {tuple(line.rsplit(" ", 1)) for line in lines[:-1]}
        # A datagram gets lost there.
        loopback = {name for name, outcome in found if outcome == "connected"}
        self.assertEqual(
            loopback, {name for name, _ in found if "DGRAM" in name and name[:3] in ("127", "::1")}
        )
        self.assertLessEqual(
            {outcome for _, outcome in found},
            {"connected", "ECONNREFUSED", "ENETUNREACH", "EADDRNOTAVAIL", "ENOENT"},
        )
        self.check_unvisited()

    async def test_programs_reach_each_other_over_loopback(self) -> None:
        attacked = await self.attack(views.SERVE)
        self.assertEqual(attacked.text, "hello\nhello\n")


class WithNetworkAttacks(NetworkCase):
    configuration = (
        CONFIGURATION + LIMITS + '[sandbox]\nnetwork = true\nreadable = ["/var/lib", "/srv"]\n'
    )

    async def test_evaluator_with_network_connects_to_tcp_but_to_no_socket_file(self) -> None:
        attacked = await self.attack(
            views.CONNECT, f"127.0.0.1 {self.port}", str(self.path), f"@{self.abstract}"
        )
        lines = attacked.text.splitlines()
        self.assertEqual(lines[0], f"127.0.0.1 {self.port} SOCK_STREAM connected")
        self.assertEqual(lines[2:4], [f"{self.path} ENOENT", f"@{self.abstract} connected"])

    async def test_rare_socket_families_and_raw_sockets_are_refused_with_network(self) -> None:
        refused = (calls.FAMILIES, calls.RAW, calls.PROTOCOLS)
        allowed = (calls.INTERNET, calls.ALLOWED)
        attacked = await self.attack(calls.CALLS, calls.calls_argument(*refused, *allowed))
        found = json.loads(attacked.text)
        for table in refused:
            self.assertNotIn(0, [found[name] for name in table])
        for table in allowed:
            self.assertEqual({found[name] for name in table}, {0})

    async def test_configured_readable_paths_are_visible_and_read_only(self) -> None:
        before = {*os.listdir("/var/lib")}
        attacked = await self.attack_by(
            "ls -d /var /var/* /srv /home /opt 2>/dev/null; echo; ls /var/lib; echo;"
            " for place in /var /var/lib /srv; do"
            " touch $place/{word} 2>/dev/null && echo $place; done; true"
        )
        places, names, written = attacked.text.split("\n\n")
        self.assertEqual(places.split(), ["/srv", "/var", "/var/lib"])
        self.assertEqual(written, "")
        now = {*os.listdir("/var/lib")}  # which others may change meanwhile
        self.assertLessEqual(before & now, {*names.splitlines()})

    async def test_evaluator_with_network_reads_resolv_conf_and_certificates(self) -> None:
        attacked = await self.attack_by("cat /etc/resolv.conf >/dev/null && ls -d /etc/ssl/*")
        self.assertNotIn("private", attacked.text)
