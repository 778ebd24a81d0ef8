"""The sandbox of evaluators and of git, with the directories and limits of each run.

The daemon has one `base.Sandbox`. `probe.open_sandbox` makes it by the setting `sandbox.kind`, and
`probe.check_sandbox_and_log_problems` runs a command in it before anything relies on it. For each
evaluation it makes a `SandboxedRun`, which starts the evaluator, checks its limits, ends its
processes and tells its exit and usage. `evaluations` calls these methods; other kinds of sandbox
implement them (`base`).

- `bubblewrap`: the sandbox of installations that strangers use. `base.NoSandbox` is for
  installations that trust all evaluators.
- `seccomp`: the policy of allowed system calls; `libseccomp`: its compiler.
- `prepared_etc`: the /etc of sandboxes, copied from the machine's.
- `workspace`: the directories of a run; `overlay`: the writable tree over a checkout.
- `disk_usage`: disk usage, counted or read from a quota; `project_quotas`: quotas that root sets
  up.
- `limit_monitor`: `LimitMonitor` checks, while runs go on, the limits that the kernel does not
  enforce.
- `environments`: root file systems in place of the machine's programs; `environment_store`: their
  import into the state directory.
- `helper_sandbox`: the sandbox of git commands, and of programs that unpack imports.
- `broker_client`: runs of submissions that an evaluator asks for; `broker`: the program that makes
  a sandbox for each; `tools`: what evaluators find at `EVALUATION_TOOLS`, `tawebeval-run` among it.
"""
