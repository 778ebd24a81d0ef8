"""`daemon.belongings`: what is the daemon's own is shown to nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    CallbackSettings,
    Callers,
    Configuration,
    CredentialSettings,
    Metrics,
    Repositories,
    Sandbox,
)
from tawebeval.daemon.belongings import check_readable
from tawebeval.errors import ConfigurationError


class BelongingsTests(SynchronousTestCase):
    """A daemon with directories, a configuration and secrets, each in a place of its own."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        for name in (
            "lib/state",
            "lib/cache",
            "etc",
            "tokens",
            "handed",
            "git",
            "ssh",
            "hooks",
            "readers",
            "free/x",
        ):
            (self.root / name).mkdir(parents=True)
        self.environment = {
            "STATE_DIRECTORY": f"{self.root}/lib/state",
            "CACHE_DIRECTORY": f"{self.root}/lib/cache",
            "CREDENTIALS_DIRECTORY": f"{self.root}/handed",
        }
        self.file: Path | None = self.root / "etc/tawebeval.toml"

    def check(self, *readable: str, kind: Any = "auto") -> None:
        """Look at a configuration that shows these."""
        entries = (
            CredentialSettings("a", "a", password_file=f"{self.root}/git/password"),
            CredentialSettings(
                "b", "b", key_file=f"{self.root}/ssh/id", known_hosts_file="/etc/ssh/known"
            ),
            CredentialSettings("c", "c", password_file="handed"),
        )
        configuration = Configuration(
            sandbox=Sandbox(kind, readable=readable),
            callers=Callers(tokens=f"{self.root}/tokens/file"),
            callbacks=CallbackSettings(secrets=f"{self.root}/hooks/secrets"),
            metrics=Metrics("tokens", f"{self.root}/readers/file"),
            repositories=Repositories(credentials=entries),
        )
        check_readable(configuration, self.file, self.environment)

    def refuse(self, path: str, what: str) -> None:
        """Hold that a path is refused, and that it is said where, and why."""
        with self.assertRaises(ConfigurationError) as caught:
            self.check(f"{self.root}/free", path)
        said = str(caught.exception)
        start = f"sandbox.readable[1]: {path} would show evaluators {what} ("
        self.assertTrue(said.startswith(start), said)

    def test_directories(self) -> None:
        """The state and the cache, what is in them, and what has them in it."""
        for name, what in (
            ("lib/state", "the state directory"),
            ("lib/state/evaluations/x", "the state directory"),
            ("lib/cache", "the cache directory"),
            ("lib/cache/repositories", "the cache directory"),
            ("lib", "the state directory"),
        ):
            self.refuse(f"{self.root}/{name}", what)

    def test_files(self) -> None:
        """The files of the configuration and of secrets, and the folders in which they are."""
        for name, what in (
            ("etc", "the configuration"),
            ("etc/tawebeval.toml", "the configuration"),
            ("tokens", "the tokens"),
            ("tokens/file", "the tokens"),
            ("hooks/secrets", "the secrets of callbacks"),
            ("readers", "the tokens of the metrics"),
            ("git/password", "a credential"),
            ("ssh", "a credential"),
            ("handed", "the credentials that systemd hands over"),
            ("handed/other", "the credentials that systemd hands over"),
        ):
            self.refuse(f"{self.root}/{name}", what)

    def test_kernel(self) -> None:
        """What tells of the machine's processes and devices, or holds that: the root, too."""
        for path in ("/proc", "/proc/self/fd", "/sys", "/sys/fs/cgroup", "/dev", "/dev/shm"):
            self.refuse(path, "what the kernel tells of processes and devices")
        self.refuse("/", "the state directory")

    def test_links(self) -> None:
        """A link is where it leads, on both sides, and where it stands."""
        (self.root / "free/link").symlink_to(self.root / "lib/state")
        self.refuse(f"{self.root}/free/link/uploads", "the state directory")
        (self.root / "free/kernel").symlink_to("/proc/1")
        self.refuse(f"{self.root}/free/kernel", "what the kernel tells of processes and devices")
        (self.root / "lib/cache/out").symlink_to(self.root / "free")
        self.refuse(f"{self.root}/lib/cache/out", "the cache directory")
        (self.root / "elsewhere").mkdir()
        (self.root / "lib/state").rmdir()
        (self.root / "lib/state").symlink_to(self.root / "elsewhere")
        self.refuse(f"{self.root}/elsewhere", "the state directory")
        self.refuse(f"{self.root}/lib/state", "the state directory")

    def test_others(self) -> None:
        """Anything else may be shown: names that just begin alike, and folders beside."""
        self.check()
        self.check("/usr/share", "/opt/x", f"{self.root}/lib/state2", f"{self.root}/tokens/file2")
        self.check(f"{self.root}/free/x", "/etc/ssh/known", "/device", f"{self.root}/ssh/id.pub")

    def test_nothing_to_hide(self) -> None:
        """What there is not hides nothing; relative names are no folder's."""
        self.file = None
        del self.environment["CREDENTIALS_DIRECTORY"]
        self.check(f"{self.root}/etc", f"{self.root}/handed")

    def test_no_sandbox(self) -> None:
        """Without a sandbox nothing is shown in particular."""
        self.check("/proc", kind="none")
