"""The command `tawebeval`, built with click. docs/cli.md is its manual.

`main` imports a command when it is used. The client commands are thin layers over
`tawebeval_client.Client`, and import neither Twisted nor the daemon: `evaluate` and
`rerun` (module `evaluate`), `follow`, `status`, `cancel`, `list` and others (module `evaluations`),
`login` and `logout` (module `servers`, which also finds the server and the token of a command).
They share

- `options`: options and arguments of several commands;
- `runtime`: signals, exit statuses, and the client of a command;
- `output`: `Screen`, which prints events on stdout and everything else on stderr, and tables;
- `follow`: `EvaluationReader`, which shows one evaluation to its end, and `DownloadDirectory`,
  which saves the files that evaluators send.

`tawebeval try` needs no server: `try_run` runs one `Evaluation` with the daemon's own sandbox and
limits on a copy of a working directory, and its events go through the same `Screen`.

`operator_commands` has the commands of an operator: `serve`, `starter`, `doctor`, `check`,
`token` and `environment`. They import the daemon only when they run.

Nothing in the package imports `cli`. The console script `tawebeval` and `scripts/manpages` call
`main`.
"""

from tawebeval.cli.main import main

__all__ = ["main"]
