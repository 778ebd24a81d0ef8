"""The command `tawebeval`, built with click. docs/cli.md is its manual.

Commands that talk to a server are thin layers over `tawebeval.client`: `evaluate` (module
`evaluate`), and `follow`, `status`, `cancel` and `list` (module `evaluations`). They share

- `runtime`: the options for the server and its token, the reactor, signals and exit statuses;
- `output`: `Screen`, which prints events on stdout and everything else on stderr;
- `follow`: `EvaluationReader`, which shows one evaluation to its end, and `DownloadDirectory`,
  which saves the files that evaluators send.

`tawebeval try` (`try_command`) needs no server: `try_evaluation` runs one `Evaluation` with the
daemon's own sandbox and limits on a copy of a working directory, and its events go through the
same `Screen`. `hints` explains why it failed.

`operate` has the commands of an operator: `serve`, `doctor`, `reload`, `token` and `quota`;
`environment` those for environments. They import the daemon only when they run.

Nothing in the package imports `cli`. The console script `tawebeval` and `scripts/manpages` call
`main`.
"""

from tawebeval.cli.main import main

__all__ = ["main"]
