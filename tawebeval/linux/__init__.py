"""The kernel's interfaces: child processes, cgroups, privileges, rlimits, directory trees.

The daemon starts thousands of programs that it does not trust, and must know the end of each, end
them with all their descendants, and remove what they have written. This package has the means; the
packages `sandbox` and `git` use them.

- `child`: `ChildProcess` drives a Twisted `ProcessProtocol` by a pidfd and two pipes; `Spawner`
  starts children and knows which still run.
- `keeper_owned_process`: `KeeperOwnedProcess` does the same for a child of the keeper, whose output
  the next daemon goes on reading.
- `tail`: `FileTail` reads a file that another process writes, such as stdout in a file.
- `launcher` and `launcher_client`: a small helper process that starts evaluators at less cost than
  the daemon could. `LauncherClient` takes a `LaunchSpec`, and `OverlayLayers` to mount. `launcher`
  imports nothing of tawebeval, for it runs as a program from a memfd.
- `keeper` and `keeper_client`: a process that outlives the daemon. It is the parent of evaluators,
  and holds descriptors for the next daemon. `keeper`, too, is a program that imports nothing.
- `reaper`: `OrphanReaper` are processes that have left their parent; `kill_stale_processes` ends
  those that a dead daemon has left.
- `cgroups`: limits and usage of whole process trees; `rlimits`: the limits of the daemon itself.
- `privileges`: `Privileges` gives up root for good; `CurrentProcess` is this process: its
  credentials and limits of privilege.
- `filetree`: walking, copying and removing directory trees made by strangers; `ownership`: owners
  and modes of files, and secret files.

Functions that block say so in their docstring; callers run them in threads, except those that
block "hardly", for less than a millisecond.
"""
