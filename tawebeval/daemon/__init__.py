"""The daemon: builds all parts and connects them to twistd, systemd, Prometheus and the operator.

`tap.makeService` is called by `twistd tawebeval` (and by `tawebeval serve`). It prepares the
process, reads the configuration, opens the directories and calls `assembly.build_daemon`, which
builds all parts and returns a `Daemon`, the parent of all services.

- `configuration`: reads the file, and checks the paths that it names; `process`: reactor, clock,
  signals, allocator. `tawebeval try` uses both.
- `startup`: state and cache directories, the starter of evaluators; `StartupChecks` starts first
  and stops last.
- `endpoints`: listens, and tells who reaches a daemon without tokens.
- `reload`: `ReloadService` reads all `ReloadableFiles` again on SIGHUP; `SystemdNotifier` and
  `Watchdog` report to systemd.
- `metrics`: `DaemonMetrics` (Prometheus), `Readiness`; `logging`: the log.
- `doctor`: `CHECKS` is the table of `tawebeval doctor`.

Only this package and `cli` import all other packages. docs/design/daemon.md explains the reload.
"""
