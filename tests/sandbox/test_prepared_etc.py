"""`sandbox.prepared_etc`: the copies of the machine's files that sandboxes show as /etc."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox.prepared_etc import PreparedEtc


class PreparedEtcTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.machine = self.root / "machine"
        for name in ("fonts/conf.d", "ssl/private", "java"):
            (self.machine / name).mkdir(parents=True)
        for name in ("hosts", "fonts/fonts.conf", "ssl/openssl.cnf", "ssl/private/key", "shadow"):
            (self.machine / name).write_text(f"{name}\n")
        (self.machine / "hosts").chmod(0o755)
        (self.root / "zone").write_text("Rome\n")
        (self.machine / "localtime").symlink_to("../zone")
        (self.machine / "fonts/conf.d/link").symlink_to("../nowhere")
        os.mkfifo(self.machine / "fonts/fifo")
        self.etc = self.make()
        self.etc.update()

    def make(self, *places: str) -> PreparedEtc:
        return PreparedEtc(
            self.root / "etc",
            ("fonts", "hosts*", "localtime", "resolv.conf", "ssl/openssl.cnf"),
            {"passwd": b"evaluator\n"},
            [f"{self.machine}/{place}" for place in places],
            str(self.machine),
        )

    def read(self) -> dict[str, str]:
        """Return all names with their content: of a link where it leads, of a directory nothing."""
        return {
            os.path.relpath(path, self.root / "etc"): (
                f"-> {os.readlink(path)}"
                if path.is_symlink()
                else path.read_text()
                if path.is_file()
                else ""
            )
            for path in (self.root / "etc").rglob("*")
        }

    def test_content_is_that_of_the_machine(self) -> None:
        whole = {
            "fonts": "",
            "fonts/conf.d": "",
            "fonts/conf.d/link": "-> ../nowhere",
            "fonts/fonts.conf": "fonts/fonts.conf\n",
            "hosts": "hosts\n",
            "localtime": "Rome\n",
            "passwd": "evaluator\n",
            "ssl": "",
            "ssl/openssl.cnf": "ssl/openssl.cnf\n",
        }
        self.assertEqual(self.read(), whole)
        self.assertEqual({path.name for path in self.root.iterdir()}, {"machine", "zone", "etc"})
        for name, mode in (("hosts", 0o755), ("passwd", 0o644), ("fonts", 0o755), (".", 0o755)):
            self.assertEqual(stat.S_IMODE((self.root / "etc" / name).stat().st_mode), mode, name)

    def test_changes_of_the_machine_are_copied_into_the_same_directory(self) -> None:
        directory = (self.root / "etc").stat().st_ino
        (self.machine / "hosts").write_text("other\n")
        (self.machine / "resolv.conf").symlink_to(self.root / "zone")
        (self.machine / "fonts/fonts.conf").unlink()
        (self.machine / "fonts/fonts.conf").mkdir()
        (self.machine / "fonts/conf.d/link").unlink()
        (self.machine / "fonts/conf.d/link").symlink_to("elsewhere")
        (self.machine / "ssl/openssl.cnf").rename(self.machine / "hosts.old")
        self.etc.update()
        self.assertEqual(
            self.read(),
            {
                "fonts": "",
                "fonts/conf.d": "",
                "fonts/conf.d/link": "-> elsewhere",
                "fonts/fonts.conf": "",
                "hosts": "other\n",
                "hosts.old": "ssl/openssl.cnf\n",
                "localtime": "Rome\n",
                "passwd": "evaluator\n",
                "resolv.conf": "Rome\n",
            },
        )
        self.assertEqual((self.root / "etc").stat().st_ino, directory)
        (self.root / "zone").write_text("Paris\n")  # beyond the links
        self.etc.update()
        self.assertEqual(self.read()["localtime"], "Paris\n")

    def test_file_that_is_open_stays_whole(self) -> None:
        with (self.root / "etc/hosts").open() as file:
            (self.machine / "hosts").write_text("other\n")
            self.etc.update()
            self.assertEqual(file.read(), "hosts\n")

    def test_next_daemon_corrects_the_directory(self) -> None:
        whole, directory = self.read(), (self.root / "etc").stat().st_ino
        (self.root / "etc/hosts").write_text("other\n")
        (self.root / "etc/more").mkdir()
        (self.root / "etc/more/file").write_text("more\n")
        (self.root / "etc/passwd").unlink()
        (self.root / "etc/passwd").symlink_to("hosts")
        (self.root / "etc.new").symlink_to(self.root / "zone")  # of a daemon that was killed
        self.etc = self.make()
        self.etc.update()
        self.assertEqual(self.read(), whole)
        self.assertEqual((self.root / "etc").stat().st_ino, directory)
        self.assertEqual((self.root / "zone").read_text(), "Rome\n")

    def test_next_daemon_exchanges_no_file_that_is_right(self) -> None:
        self.etc = self.make("java/policy")
        (self.machine / "java/policy").write_text("secret\n")
        self.etc.update()
        names = ("hosts", "passwd", "java/policy", "fonts/fonts.conf")
        before = [(self.root / "etc" / name).stat().st_ino for name in names]
        self.etc = self.make("java/policy")
        self.etc.update()
        self.assertEqual([(self.root / "etc" / name).stat().st_ino for name in names], before)

    def test_file_of_same_size_and_time_is_compared(self) -> None:
        other = self.root / "other"
        other.write_text("Bern\n")
        status = (self.root / "zone").stat()
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.etc = self.make()
        self.etc.update()
        (self.machine / "localtime").unlink()
        (self.machine / "localtime").symlink_to(other)
        self.etc.update()
        self.assertEqual(self.read()["localtime"], "Bern\n")

    def test_nothing_is_made_through_a_link(self) -> None:
        (self.root / "outside/below").mkdir(parents=True)
        (self.root / "outside/below/file").write_text("precious\n")
        (self.machine / "fonts/out").symlink_to(self.root / "outside")
        self.etc = self.make("fonts/out/below/file", "fonts/out/below")
        self.etc.update()
        self.assertEqual((self.root / "outside/below/file").read_text(), "precious\n")

    def test_file_that_vanishes_is_left_out(self) -> None:
        (self.machine / "fonts/other").symlink_to("nowhere")
        read = os.readlink

        def vanish(path: bytes) -> bytes:
            if os.path.basename(path) == b"other":
                raise FileNotFoundError(path)
            return read(path)

        self.patch(os, "readlink", vanish)
        self.etc.update()
        self.assertNotIn("other", os.listdir(self.root / "etc/fonts"))

    def test_removed_directory_is_made_again(self) -> None:
        whole = self.read()
        (self.root / "etc").rename(self.root / "old")
        self.etc.update()
        self.assertEqual(self.read(), whole)

    def test_unreadable_file_is_empty_and_unreadable(self) -> None:
        (self.machine / "hosts").chmod(0)
        read = Path.read_bytes

        def read_as_user(path: Path) -> bytes:
            if not path.stat().st_mode & stat.S_IRUSR:
                raise PermissionError(path)
            return read(path)

        self.patch(Path, "read_bytes", read_as_user)
        self.etc.update()
        self.assertEqual(stat.S_IMODE((self.root / "etc/hosts").stat().st_mode), 0)
        self.assertEqual((self.root / "etc/hosts").stat().st_size, 0)
        before = (self.root / "etc/hosts").stat().st_ino
        (self.machine / "fonts/fonts.conf").write_text("other\n")
        self.etc.update()
        self.assertEqual((self.root / "etc/hosts").stat().st_ino, before)

    def test_mount_points_are_empty(self) -> None:
        self.etc = self.make("java", "ssl/private/key", "hosts", ".", "../zone", "missing")
        self.etc.update()
        found = self.read()
        self.assertEqual(
            {name: found[name] for name in ("java", "ssl/private", "ssl/private/key", "hosts")},
            {"java": "", "ssl/private": "", "ssl/private/key": "", "hosts": "hosts\n"},
        )
        self.assertNotIn("missing", found)
