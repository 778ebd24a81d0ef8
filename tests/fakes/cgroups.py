"""A machine whose cgroups are plain files below a temporary directory.

The kernel's part is played here: what a group has in it when it is made, when it may be
removed, which controllers the groups below have, who is in it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import attrs

from tawebeval.linux.cgroups.filesystem import CgroupOperations
from tawebeval.linux.cgroups.manager import CgroupManager, open_cgroups
from tawebeval.linux.container import Container

MEMORY_MOST = str(2**63 - 4096)

# `pids.peak` tells nothing until a test writes to it, as before Linux 6.6.
LEGACY_FILES = {
    "memory": {
        "memory.limit_in_bytes": MEMORY_MOST,
        "memory.memsw.limit_in_bytes": MEMORY_MOST,
        "memory.max_usage_in_bytes": "0",
        "memory.usage_in_bytes": "0",
        "memory.stat": "cache 0\nrss 0\nrss_huge 0\nshmem 0\ntotal_rss 0\ntotal_shmem 0\n",
        "memory.memsw.max_usage_in_bytes": "0",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "memory.swappiness": "60",
        "memory.use_hierarchy": "0",
    },
    "pids": {"pids.max": "max", "pids.events": "max 0\n", "pids.peak": ""},
    "cpuacct": {"cpuacct.usage": "0"},
    "cpu": {"cpu.shares": "1024"},
}

UNIFIED_FILES = {
    "": {
        "cgroup.kill": "",
        "cgroup.procs": "",
        "cgroup.subtree_control": "",
        "cgroup.type": "domain",
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


@attrs.define(eq=False)
class FakeMachine(CgroupOperations):
    """Write to it by its methods, then `open`.

    `refusals` has the errno for writing to paths that end in a certain way, or for making or
    removing them; `deaf` are the ends of paths where writing has no effect. `rounding` is
    added to what `memory.max` is set to. `lingering` is how many sleeps it takes until who was
    killed has gone. Without `gives` nothing can be given to another user. `run` is what systemd
    offers, and `policies` has its `OOMPolicy=` by the paths of groups.
    """

    root: Path
    refusals: dict[str, int] = attrs.field(factory=dict)
    deaf: set[str] = attrs.field(factory=set)
    delegated: bool = True
    run: str | None = None
    policies: dict[str, str] = attrs.field(factory=dict)
    gives: bool = True
    rounding: int = 0
    lingering: int = 0
    slept: float = 0
    given: list[tuple[str, tuple[int, int]]] = attrs.field(factory=list)
    container: Container | None = None
    _mounts: list[str] = attrs.field(factory=list)
    _membership: list[str] = attrs.field(factory=list)
    _trees: list[tuple[Path, frozenset[str] | None]] = attrs.field(factory=list)
    _dying: list[tuple[str, set[int]]] = attrs.field(factory=list)

    def mount_legacy(self, controllers: str, own: str = "/own") -> Path:
        """Add a hierarchy of version 1; return the group that the daemon is in."""
        top = self.root / "cgroup" / controllers
        names = frozenset(controllers.split(","))
        self._trees.append((top, names))
        return self._mount(top, own, f"cgroup cgroup rw,{controllers}", controllers)

    def mount_unified(self, controllers: str = "cpu memory pids", own: str = "/own") -> Path:
        """Add that of version 2, with these controllers; return the group of the daemon."""
        top = self.root / "cgroup" / "unified"
        self._trees.append((top, None))
        group = self._mount(top, own, "cgroup2 cgroup2 rw,nsdelegate", "")
        (group / "cgroup.controllers").write_text(controllers)
        return group

    def _mount(self, top: Path, own: str, kind: str, controllers: str) -> Path:
        number = len(self._mounts) + 1
        point = str(top).replace(" ", "\\040")  # as proc(5) says
        self._mounts.append(f"{number} 0 0:{number} / {point} rw shared:1 - {kind}\n")
        self._membership.append(f"{number}:{controllers}:{own}\n")
        group = top
        for part in ("", *filter(None, own.split("/"))):
            group = group / part
            if not group.exists():
                self.make_cgroup(str(group))
        if own == "/":  # as the kernel shows the top of all
            (top / "cgroup.type").unlink(missing_ok=True)
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
        return group

    def open(self, owner: tuple[int, int] | None = None, name: str = "x") -> CgroupManager:
        """Open the cgroups of a daemon."""
        return open_cgroups(name, owner, proc=self.write_proc(), files=self)

    def write_proc(self) -> Path:
        """Write what /proc/self has of all this; return the directory."""
        proc = self.root / "proc"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "mountinfo").write_text(
            "".join(["1 0 0:1 / / rw - ext4 /dev/x rw\n", *self._mounts])
        )
        (proc / "cgroup").write_text("".join(self._membership))
        return proc

    def groups(self) -> list[str]:
        """Return all groups that are the daemon's own doing, by paths from their first name on."""
        found = (str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_dir())
        return sorted(path.partition("/tawebeval-")[2] for path in found if "/tawebeval-" in path)

    def is_unified(self, path: str) -> bool:
        """Tell whether a path is in the tree of version 2."""
        return any(
            controllers is None and path.startswith(str(top)) for top, controllers in self._trees
        )

    # What the daemon does to it.

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        if self.lingering:
            self.lingering -= 1
        if not self.lingering:
            for path, pids in self._dying:
                self._leave(path, pids)

    def write_file(self, path: str, text: str) -> None:
        self._refuse(path)
        if any(path.endswith(end) for end in self.deaf):
            return
        name = os.path.basename(path)
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if name == "cgroup.procs":
            self._move(path, os.getpid() if text == "0" else int(text))
        elif name == "cgroup.subtree_control":
            self._switch(path, text[0], text[1:])
        elif name == "cgroup.kill":
            for file in Path(path).parent.rglob("cgroup.procs"):
                self._die(str(file), set(map(int, file.read_text().split())))
        else:
            if name == "memory.max":
                text = str(int(text) + self.rounding)
            Path(path).write_text(f"{text}\n")

    def make_cgroup(self, path: str) -> None:
        self._refuse(path)
        os.makedirs(path)
        files = {"cgroup.procs": ""}
        for top, controllers in self._trees:
            if path.startswith(str(top)) and controllers is not None:
                files["tasks"] = ""
                for controller in controllers:
                    files |= LEGACY_FILES[controller]
        if self.is_unified(path):
            files |= UNIFIED_FILES[""]
            above = Path(path).parent / "cgroup.subtree_control"
            enabled = above.read_text().split() if above.exists() else []
            files["cgroup.controllers"] = " ".join(enabled)
            for controller in enabled:
                files |= UNIFIED_FILES[controller]
        for name, text in files.items():
            Path(path, name).write_text(text)

    def remove_cgroup(self, path: str) -> None:
        self._refuse(path)
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        group = Path(path)
        if (group / "cgroup.procs").read_text() or any(each.is_dir() for each in group.iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        shutil.rmtree(path)

    def change_owner(self, path: str, owner: tuple[int, int]) -> None:
        if not self.gives:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        self.given.append((path.partition("/tawebeval-")[2], owner))

    def kill_processes(self, pids: Collection[int], still: Callable[[], Collection[int]]) -> None:
        for file in self.root.rglob("cgroup.procs"):
            self._die(str(file), set(pids) & set(still()))

    def is_delegated(self, path: str) -> bool:
        return self.delegated

    def query_oom_policy(self, path: str) -> str:
        return self.policies.get(path, "")

    def find_container(self) -> Container | None:
        """Return the container that the test has set."""
        return self.container

    def find_systemd_run(self) -> str | None:
        return self.run

    # How that comes about.

    def _refuse(self, path: str) -> None:
        for end, number in self.refusals.items():
            if path.endswith(end):
                raise OSError(number, os.strerror(number), path)

    def _die(self, path: str, pids: set[int]) -> None:
        if os.getpid() in pids:
            raise AssertionError("the daemon has killed itself")
        if self.lingering:
            self._dying.append((path, pids))
        else:
            self._leave(path, pids)

    def _leave(self, path: str, pids: set[int]) -> None:
        if os.path.exists(path):
            left = set(map(int, Path(path).read_text().split())) - pids
            Path(path).write_text("".join(f"{pid}\n" for pid in sorted(left)))

    def _move(self, path: str, pid: int) -> None:
        tree = next(top for top, _ in self._trees if path.startswith(str(top)))
        for file in tree.rglob("cgroup.procs"):
            self._leave(str(file), {pid})
        with open(path, "a") as joined:
            joined.write(f"{pid}\n")

    def _switch(self, path: str, sign: str, controller: str) -> None:
        group = Path(path).parent
        if (
            sign == "+"
            and (group / "cgroup.procs").read_text()
            and (group / "cgroup.type").exists()
        ):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        if sign == "+" and controller not in (group / "cgroup.controllers").read_text().split():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        enabled = set(Path(path).read_text().split()) - {controller}
        if sign == "+":
            enabled.add(controller)
        Path(path).write_text(" ".join(sorted(enabled)))
        for below in group.iterdir():
            if below.is_dir():
                (below / "cgroup.controllers").write_text(" ".join(sorted(enabled)))
                for name, text in UNIFIED_FILES[controller].items() if sign == "+" else ():
                    (below / name).write_text(text)
