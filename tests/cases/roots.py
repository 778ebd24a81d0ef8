"""Root file systems for tests of environments."""

from __future__ import annotations

from pathlib import Path


def make_root(root: Path) -> Path:
    """Make a root with the programs that a sandbox needs, as merged as Debian's."""
    for name in ("usr/bin", "etc", "opt/tool", "root", "dev", "proc"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for name in ("dash", "prlimit"):
        (root / "usr/bin" / name).write_bytes(b"#!\n")
        (root / "usr/bin" / name).chmod(0o755)
    (root / "usr/bin/sh").symlink_to("/bin/dash")
    (root / "etc/passwd").touch()
    (root / "file").touch()
    return root
