"""Evaluators on the nodes of a Slurm cluster (`runner.kind = "slurm"`).

Each evaluator is a job with one srun(1), which the daemon's starter runs. Daemon and nodes share a
directory (`runner.shared`): there the daemon writes what a node has to start, and the node what the
evaluator prints and how it ends. The daemon reads these files as those of local runs. Neither srun
nor the daemon has to live for that.

- `node`: the program on the node, of the standard library alone.
- `job`: `SlurmSandbox`, and `SlurmRun`, one run of it; `JobWorkspace`, the files of one job;
  `PollingFileWatcher`, which tells that files of other machines have changed.
- `commands`: the options of srun; squeue and scancel, each with a deadline; why a job was lost;
  `JobCounters`, for metrics; the checks of start and doctor, from here and by a job.

`daemon.assembly` makes the `SlurmSandbox` beside the daemon's own sandbox, in which git runs.
"""
