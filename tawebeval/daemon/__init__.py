"""Puts everything together for twistd, systemd, Prometheus and the operator.

`tap` reads the command line of `twistd tawebeval` and gives up root; `assembly` makes all parts and
the tree of services. At the start `startup` looks at directories, git and the sandbox; then
`housekeeping` does once a second what is due.

- What the operator says: `reload` (SIGHUP), `control` (`tawebeval reload`), `interrupts` (SIGTERM).
- What the operator sees: `logging`, `metrics`, `health`, and `doctor` with its checks.
- The process itself: `runtime`, `collector`, `monotonic`, `polling`, `preload`, `systemd`.

Only this package and `cli` know all others.
"""
