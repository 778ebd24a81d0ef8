"""The command `tawebeval`.

`main` is the group of all commands. Those that talk to a server use `client`: `evaluate`, `follow`
and what is in `evaluations`; `runtime` has what they share (server, token, reactor, signals, exit
statuses) and `output` what people and programs see. `try_command` runs an evaluator in the sandbox
without a daemon, by `try_evaluation`. `operate` has the commands of an operator: `serve`,
`doctor`, `reload`, `token`, `quota`.
"""

from tawebeval.cli.main import main

__all__ = ["main"]
