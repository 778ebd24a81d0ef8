"""A daemon whose state and cache lie on disks that stop, and fail, as real ones do.

Each is an ext4 in a file, mounted in a mount namespace of the daemon's own. The kernel itself lets
all writing wait (fsfreeze(8)) or refuses it after an error (ext4(5), `errors=remount-ro`). Only
root can do that.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.harness import TWISTD, Daemon
from tests.integration.small_disks import PRIVATE, SmallDisks
from tests.integration.unprivileged import USER

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_MAKE = (
    'truncate -s "$TEST_SIZE" "$place.ext4" && mkfs.ext4 -q -E "root_owner=$TEST_OWNER"'
    ' "$place.ext4" && mkdir -p "$place"'
    ' && mount -o loop,errors=remount-ro "$place.ext4" "$place"'
    ' && rmdir "$place/lost+found" && chmod 700 "$place" || exit 1\n'
)
_MOUNT = f'for place in "$STATE_DIRECTORY" "$CACHE_DIRECTORY"; do {_MAKE}done\nexec "$@"'
# The disk goes on as soon as the test lets it, or has ended.
_FREEZE = 'fsfreeze --freeze "$0" && echo frozen && read -r _; fsfreeze --unfreeze "$0"'


@functools.cache
def missing() -> str:
    """Return what this machine lacks for such disks, "" if there is nothing."""
    if USER is None:
        return "only root can mount file systems of its own for a daemon"
    with tempfile.TemporaryDirectory(prefix="tawebeval-disk-") as folder:
        variables = {"PATH": _PATH, "TEST_SIZE": "16M", "TEST_OWNER": "0:0", "place": folder + "/x"}
        command = [*PRIVATE, _MAKE]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return f"no ext4 can be mounted here: {done.stderr.strip()}" if done.returncode else ""


class FaultyDisks(SmallDisks):
    """Such a daemon."""

    _failed = False

    program = (*(*PRIVATE, _MOUNT, "sh"), str(TWISTD))

    def __init__(self, configuration: str, size: int) -> None:
        assert USER is not None, "only root can mount"
        owner = f"{USER.pw_uid}:{USER.pw_gid}"
        Daemon.__init__(self, configuration, TEST_SIZE=str(size), TEST_OWNER=owner)

    def remains(self) -> list[str]:
        """Return what is left of evaluations, as far as that can still be read."""
        return list(map(str, self.used_groups())) if self._failed else super().remains()

    @contextmanager
    def frozen(self, place: Path) -> Iterator[None]:
        """Within it whatever writes there waits."""
        nsenter = ("nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "sh", "-c", _FREEZE, str(place))
        with subprocess.Popen(
            nsenter, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": _PATH}
        ) as freezer:
            assert freezer.stdin is not None and freezer.stdout is not None
            assert freezer.stdout.readline() == b"frozen\n"
            try:
                yield
            finally:
                freezer.stdin.close()
        assert freezer.returncode == 0

    def fail(self, place: Path) -> None:
        """Let the kernel find an error there: from then on it takes nothing any more."""
        self._failed = True
        device = self._device(place)
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test\n")

    def _device(self, place: Path) -> str:
        number = os.stat(self.seen(place)).st_dev
        link = os.readlink(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        return os.path.basename(link)
