"""The daemon: builds all parts and connects them to twistd, systemd, Prometheus and the operator.

`tap.makeService` is called by `twistd tawebeval` (and by `tawebeval serve`). It reads the
configuration, opens the directories and calls `assembly.build_daemon`,
which builds all parts (`DaemonBuilder`) and returns a `services.Daemon`.

- Services: `services` has the service tree: `Daemon`, `EvaluationService`, the listeners and the
  timer. `startup.StartupChecks` starts first and stops last: directories, git, sandbox, threads.
- Reload: `reload.ReloadService` reads all `ReloadableFiles` again on SIGHUP, or on a request to the
  `control_socket.ControlSocket` by `tawebeval reload`.
- Monitoring: `metrics` (Prometheus), `health` (readiness), `logging` (the log).
- `tawebeval doctor`: `doctor.CHECKS` is the table of its checks, `doctor_disk` has those of files.
- Process: `process_setup` (allocator, clock, signals, poller), `systemd` (readiness, watchdog),
  `directories` (state and cache directories), `starter_connection` (the starter of evaluators).

Only this package and `cli` import all other packages. docs/design/daemon.md explains the reload.
"""
