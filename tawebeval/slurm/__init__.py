"""Evaluators on the nodes of a Slurm cluster (`runner.kind = "slurm"`).

Each evaluator is a job with one srun(1), which the daemon's starter runs. Daemon and nodes share a
directory (`runner.shared`): there the daemon writes what a node has to start, and the node what the
evaluator prints and how it ends. The daemon reads these files as those of local runs. Neither srun
nor the daemon has to live for that.

- `node`: the program on the node, of the standard library alone.
- `attempts`: `Attempt`, one job with its directory and files.
- `polling_watcher`: `PollingWatcher` tells that files of other machines have changed.
- `node_process`: `NodeProcess`, the process of a run: one job, or two after the loss of a node.
- `cluster`: `SlurmSandbox`, and `SlurmRun`, the parts of its runs.
- `jobs`: the options of srun; names and states of jobs; why a job was lost.
- `commands`: squeue and scancel, each with a deadline; `JobCounters`, for metrics.
- `checks`: the checks of start and doctor, from here and by a job.

`daemon.assembly` makes the `SlurmSandbox` beside the daemon's own sandbox, in which git runs.
"""
