"""What an evaluator, or git, runs in.

`base.Sandbox` is made once, at the start, by `probe`, which also tries it out; it makes a cell for
each run. A cell has the command with which the run is started, the limits that hold it, and the
figures of what it has used. `bubblewrap` is the sandbox of every installation that has strangers;
`base.NoSandbox` is for those that trust all evaluators.

- `seccomp` and `bpf`: the system calls that are allowed.
- `workspace`, `overlay`, `disk`, `project_quotas`: the directories of a run, and how much it may
  write.
- `monitor` looks at what the kernel does not stop by itself.
- `commands` is the sandbox of git's commands.
"""
