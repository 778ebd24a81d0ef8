"""The kernel's interfaces: child processes, cgroups, privileges, limits, directory trees.

The daemon starts thousands of programs that it does not trust, and must know the end of each, end
them with all their descendants, and remove what they have written. This package has the means; the
packages `sandbox` and `git` use them.

- `child`: `ChildProcess` drives a Twisted `ProcessProtocol` by a pidfd and two pipes; `spawn_child`
  starts children, such as git. `kill_directory_processes` ends processes that have left their
  parent, or that a dead daemon has left.
- `starter`: the parent of evaluators, a process that outlives the daemon and stores what they
  print. `starter_client`: `StarterClient` takes a `LaunchSpec`.
- `tail`: `FileTail` reads a file that another process writes; `TailedProcess` drives a
  `ProcessProtocol` from the files that the starter writes.
- `kernel_files`: processes by /proc, and cgroups by their directories.
- `cgroups`: limits and usage of whole process trees, and what the operator is told of them;
  `daemon_limits`: the limits of the daemon itself.
- `privileges`: root is refused, or becomes another user; rights are dropped; owners and modes of
  files, and secret files.
- `filetree`: walking, copying and removing directory trees made by strangers.

Functions that block say so in their docstring; callers run them in threads, except those that
block "hardly", for less than a millisecond.
"""
