"""All that talks to the kernel.

- `child` is a child process with its pipes, which drives a `ProcessProtocol`; `starting` and
  `launcher_client` start one, the latter by the program `launcher`, which forks at less cost than
  the daemon and mounts overlays.
- `reaper` and `leftovers` find processes that nobody waits for, also those of a daemon that was
  killed.
- `cgroups` holds the limits of whole process trees; `rlimits` those of the daemon
  itself.
- `privileges` and `kernel` give up root for good; `ownership` and `secretfiles` look at whose a
  file is.
- `filetree`, `opening` and `copying` handle trees of files that a stranger has made, in which any
  name may be a link or change at any time.

`sandbox` and `git` build on this package. Functions that block say so, and run in threads.
"""
