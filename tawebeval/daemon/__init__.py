"""Puts everything together for twistd, systemd, Prometheus and the operator.

`tap` reads the command line of `twistd tawebeval` and gives up root; `assembly` makes all parts and
the tree of services, with a builder for the parts of each package. At the start `startup` checks
directories, git and the sandbox.

- Operator's orders: `reload` (SIGHUP), `control` (`tawebeval reload`).
- Operator's view: `logging`, `metrics`, `health`, and `doctor` with its checks.
- The process itself: `runtime`, `polling`, `systemd`.

Only this package and `cli` know all others.
"""
