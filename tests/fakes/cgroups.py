"""A machine whose cgroups are plain files below a temporary directory.

The kernel's part is played here: what a group has in it when it is made, when it may be
removed, which controllers the groups below have, who is in it.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from tawebeval.linux.cgroups import CgroupManager, open_cgroups
from tawebeval.linux.kernel_files import CgroupDirectory

# `pids.peak` tells nothing until a test writes to it, as before Linux 6.6.
FILES = {
    "": {
        "cgroup.kill": "",
        "cgroup.procs": "",
        "cgroup.subtree_control": "",
        "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\n",
    },
    "memory": {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.oom.group": "0",
        "memory.peak": "0",
        "memory.current": "0",
        "memory.stat": "anon 0\nfile 0\nkernel 0\nshmem 0\n",
        "memory.events.local": "",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
    },
    "pids": {"pids.max": "max", "pids.events": "max 0\n", "pids.peak": ""},
    "cpu": {"cpu.weight": "100"},
}


class FakeMachine:
    """A machine with one group that is delegated to the daemon, `own`.

    `refusals` has the errno for writing to paths that end in a certain way, or for making or
    removing them. `lingering` is how many sleeps it takes until who was killed has gone.
    """

    def __init__(self, root: Path, controllers: str = "cpu memory pids") -> None:
        self.root = root
        self.refusals: dict[str, int] = {}
        self.lingering = 0
        self.slept = 0.0
        self._dying: list[Path] = []
        self.top = root / "cgroup"
        self.own = self.top / "own"
        self.make(self.top)
        for group in (self.top, self.own):
            if group is self.own:
                self.make(group)
            (group / "cgroup.controllers").write_text(controllers)
        (self.own / "cgroup.procs").write_text(f"{os.getpid()}\n")

    def directory(self, path: str) -> CgroupDirectory:
        return FakeDirectory(path, self)

    def open(self, name: str = "x") -> CgroupManager:
        return open_cgroups(name, self.directory(str(self.own)))

    def groups(self) -> list[str]:
        """Return all groups that are the daemon's own doing, by paths from their first name on."""
        found = (str(path) for path in self.own.rglob("*") if path.is_dir())
        return sorted(path.partition("/tawebeval-")[2] for path in found)

    def sleep(self, seconds: float) -> None:
        """Let time pass, in which killed processes go."""
        self.slept += seconds
        self.lingering = max(self.lingering - 1, 0)
        if not self.lingering:
            self._bury()

    # What a group does.

    def make(self, group: Path) -> None:
        self._refuse(group)
        group.mkdir(parents=group == self.top)
        above = group.parent / "cgroup.subtree_control"
        enabled = above.read_text().split() if above.exists() else []
        files = dict(FILES[""])
        files["cgroup.controllers"] = " ".join(enabled)
        for controller in enabled:
            files |= FILES[controller]
        for name, text in files.items():
            (group / name).write_text(text)

    def remove(self, group: Path) -> None:
        self._refuse(group)
        if not group.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(group))
        if (group / "cgroup.procs").read_text() or any(each.is_dir() for each in group.iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(group))
        shutil.rmtree(group)

    def write(self, file: Path, text: str) -> None:
        self._refuse(file)
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        if file.name == "cgroup.procs":
            pid = str(os.getpid()) if text == "0" else text
            for each in self.top.rglob("cgroup.procs"):
                others = (other for other in each.read_text().split() if other != pid)
                each.write_text("".join(f"{other}\n" for other in others))
            file.write_text(f"{file.read_text()}{pid}\n")
        elif file.name == "cgroup.subtree_control":
            for word in text.split():
                self._switch(file, word[0], word[1:])
        elif file.name == "cgroup.kill":
            self._dying += file.parent.rglob("cgroup.procs")
            if not self.lingering:
                self._bury()
        else:
            file.write_text(f"{text}\n")

    # How that comes about.

    def _refuse(self, path: Path) -> None:
        for end, number in self.refusals.items():
            if str(path).endswith(end):
                raise OSError(number, os.strerror(number), str(path))

    def _bury(self) -> None:
        for file in filter(Path.exists, self._dying):
            if f"{os.getpid()}\n" in file.read_text():
                raise AssertionError("the daemon has killed itself")
            file.write_text("")
        self._dying.clear()

    def _switch(self, file: Path, sign: str, controller: str) -> None:
        group = file.parent
        if sign == "+" and (group / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(file))
        if sign == "+" and controller not in (group / "cgroup.controllers").read_text().split():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        enabled = set(file.read_text().split()) - {controller}
        if sign == "+":
            enabled.add(controller)
        file.write_text(" ".join(sorted(enabled)))
        for below in filter(Path.is_dir, group.iterdir()):
            (below / "cgroup.controllers").write_text(" ".join(sorted(enabled)))
            for name, text in FILES[controller].items() if sign == "+" else ():
                (below / name).write_text(text)


class FakeDirectory(CgroupDirectory):
    """A group of a `FakeMachine`."""

    def __init__(self, path: str, machine: FakeMachine) -> None:
        super().__init__(path)
        self.machine = machine

    def __truediv__(self, name: str) -> CgroupDirectory:
        return FakeDirectory(f"{self.path}/{name}", self.machine)

    def write_file(self, name: str, value: object) -> None:
        self.machine.write(Path(self.path, name), str(value))

    def make_cgroup(self) -> None:
        self.machine.make(Path(self.path))

    def remove_cgroup(self) -> None:
        self.machine.remove(Path(self.path))
