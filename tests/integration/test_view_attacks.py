"""Programs that look for what is not theirs: files, processes, and what others have left."""

from __future__ import annotations

from tests.integration.attacks import views
from tests.integration.attacks.case import AttackCase
from tests.integration.client import data, python, text

SECRET = ("the-daemons-", "own-secret")


class ViewAttacks(AttackCase):
    environment = {"CANARY": "".join(SECRET)}  # noqa: RUF012

    async def test_evaluator_finds_no_file_of_the_daemon_or_another_evaluation(self) -> None:
        for folder in (self.daemon.state, self.daemon.cache, self.daemon.folder, self.folder):
            (folder / "".join(SECRET)).write_text("".join(SECRET))
            self.addCleanup((folder / "".join(SECRET)).unlink)
        other = await self.client.evaluate(
            self.repository.url,
            self.commit,
            "cp $SUBMISSION_FILE_S $HOME; cp $SUBMISSION_FILE_S /tmp; cp $SUBMISSION_FILE_S"
            " /dev/shm; echo ready; exec sleep 600",
            files=[("s", "".join(SECRET), "".join(SECRET).encode())],
        )
        await self.client.printed(other, "ready")
        outside = [
            *(self.daemon.folder, self.daemon.state, self.daemon.state / "key"),
            *(self.daemon.cache, self.daemon.folder / "tawebeval.toml", self.folder),
            *(f"/proc/{self.daemon.pid}/{name}" for name in ("environ", "root", "fd", "maps")),
            *("/root", "/home", "/var", "/opt", "/srv", "/sys", "/run", "/boot", "/mnt"),
            *("/etc/shadow", "/etc/ssh", "/etc/machine-id", "/etc/hostname", "/proc/1/root/var"),
        ]
        events = await self.run_command(python(views.SEARCH, *SECRET, *map(str, outside)))
        self.assertEqual(events, [])
        await self.client.cancel(other)

    async def test_evaluator_cannot_read_its_evaluation_identifier(self) -> None:
        identifier = await self.begin(
            "cat /proc/*/mountinfo /proc/*/cgroup /proc/*/environ 2>/dev/null; env; true"
        )
        events = await self.client.follow(identifier)
        self.assertIn("EVALUATION_DATA_BEGIN", text(events))
        self.assertNotIn(identifier, text(events))

    async def test_evaluator_sees_no_users_processes_or_devices_outside_the_sandbox(self) -> None:
        attacked = await self.attack_by(
            "for p in /proc/[0-9]*; do cat $p/comm; done; echo ---;"
            " cut -d: -f1 /etc/passwd /etc/group; id -un; hostname; echo ---;"
            " find /dev -type c; echo ---;"
            " for f in kernel/core_pattern vm/drop_caches kernel/hostname; do"
            " (echo x > /proc/sys/$f) 2>/dev/null && echo $f; done;"
            " (echo b > /proc/sysrq-trigger) 2>/dev/null && echo sysrq;"
            " (echo -1000 > /proc/self/oom_score_adj) 2>/dev/null && echo oom;"
            " find /dev -type b; mknod node b 1 1 2>/dev/null && echo node;"
            # The first process could let the sandbox end and live on, or print for the evaluator.
            f" {python(views.SHELL_MOUNT_POINT)}"
        )
        processes, users, devices, harm = attacked.text.split("---\n")
        self.assertEqual(sorted({*processes.split()}), ["init", "sh"])
        names = ["evaluator", "nobody", "evaluator", "nogroup", "evaluator", "evaluation"]
        self.assertEqual(users.split(), names)
        harmless = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
        self.assertLessEqual({*devices.split()}, {*harmless, "/dev/pts/ptmx"})
        self.assertEqual(harm, "")

    async def test_next_evaluation_finds_nothing_left_by_the_previous_evaluation(self) -> None:
        for _ in range(3):
            attacked = await self.attack(views.LEAVE)
            self.assertEqual(attacked.status["state"], "finished")
            self.assertEqual(attacked.text, "")


class PathAttacks(AttackCase):
    async def test_file_event_has_no_outside_file_if_the_path_is_swapped_for_a_link(self) -> None:
        secret = self.folder / "secret"
        secret.write_text("a secret")
        attacked = await self.attack(views.SWAP, str(secret))
        found = data(attacked.events)
        self.assertEqual(len(found), 300)
        kinds = {one.get("content_base64", one.get("reason")) for one in found}
        self.assertLessEqual(kinds, {"b3du", "protocol"})  # the former is base64 of `own`
