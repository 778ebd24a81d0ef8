"""The command `tawebeval`, built with click. docs/cli.md is its manual.

`main` imports a command when it is used. The client commands are thin layers over
`tawebeval.client.Client`, and import neither Twisted nor the daemon: `evaluate` (module
`evaluate`), `follow`, `status`, `cancel`, `list` and others (module `evaluations`). They share

- `evaluate` and `runtime`: shared options, the server and its token, signals, exit statuses;
- `login` and `servers`: stored servers, with tokens in the keyring or a file;
- `output`: `Screen`, which prints events on stdout and everything else on stderr; `cases` formats
  the cases of results;
- `follow`: `EvaluationReader`, which shows one evaluation to its end, `DownloadDirectory`, which
  saves the files that evaluators send, and `LiveStatus`, the line below the output of a terminal;
- `watch`, `json_fields`, `completion`: the options `--watch` and `--json`, and names for the shell.

`tawebeval try` (`try_command`) needs no server: `try_run` and `try_evaluation` run one `Evaluation`
with the daemon's own sandbox and limits on a copy of a working directory, and its events go through
the same `Screen`.

`operator_commands` has the commands of an operator: `serve`, `doctor`, `reload` and `token`;
`environment` those for environments. They import the daemon only when they run.

Nothing in the package imports `cli`. The console script `tawebeval` and `scripts/manpages` call
`main`.
"""

from tawebeval.cli.main import main

__all__ = ["main"]
