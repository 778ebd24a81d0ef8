"""What the unit keeps the daemon from, and all that it starts: tried, on a booted systemd."""

from __future__ import annotations

from tests.integration.service_case import ServiceTestCase, text

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
