"""The sandbox of evaluators and of git, with the directories and limits of each run.

The daemon has one `base.Sandbox`. `probe.open_sandbox` makes it by the setting `sandbox.kind`, and
`probe.check_sandbox_and_log_problems` runs a command in it before anything relies on it. For each
evaluation it makes a `SandboxedRun`, which `evaluations` calls: it starts the evaluator, kills its
processes and tells its exit; its `RunLimits` have its limits and tell its usage. `LimitMonitor`
checks those that the kernel does not enforce. Other kinds of sandbox implement these (`base`).

- `bubblewrap`: the sandbox of installations that strangers use, and that of git commands and of
  imports. `base.NoSandbox` is for installations that trust all evaluators.
- `seccomp`: the filters of system calls, which libseccomp compiles.
- `workspace`: the directories of a run, with its writable tree over a checkout.
- `disk`: what a run takes of the disk.
- `environments`: root file systems in place of the machine's programs, and their import into the
  state directory.
- `broker`: the program by which an evaluator runs programs of submissions: it makes
  a sandbox for each.
- `tools`: what evaluators find at EVALUATION_TOOLS: `tawebeval-run`, which asks the broker, and
  `tawebeval-judge`, with their libraries.
"""
