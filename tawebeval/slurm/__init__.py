"""Evaluators on the nodes of a Slurm cluster (`runner.kind = "slurm"`).

The daemon runs one srun(1) for each evaluator, as its child; the evaluator ends with the daemon.
The job that srun starts is `python -m tawebeval.slurm`. It runs the evaluator in the node's own
bubblewrap, by the same code as a daemon without a cluster, and sends stdout, stderr and the outcome
as frames by its stdout. The daemon's commands come by its stdin. Trees and submissions reach the
nodes by a shared directory (`runner.shared`) under the same paths, or by the stdin of srun.

- `frames`: the messages between daemon and node, in both directions.
- `job_description`: what a node needs to know, a file.
- `job_transfer`, `tree_stream`: the way of the job description and its files without a shared
  directory.
- `pipe_writer`: `PipeWriter`, for jobs and frames.
- `tree_cache`: the trees that a node without a shared directory keeps.
- `node_files`: `NodeFileReader`, which has such a node read files.
- `node`: the program on the node.
- `jobs`: the options of srun; names and states of jobs; why a job was lost.
- `job_counters`: `JobCounters`, for the daemon's metrics.
- `commands`: squeue, scontrol and scancel, each with a deadline.
- `transport`: `NodeTransport`, the process of a run: one srun, or two after the loss of a node.
- `cluster`: `SlurmSandbox`, and `SlurmRun`, the parts of its runs.
- `checks`: the checks of start and doctor, from here and by a job.

`daemon.assembly` makes the `SlurmSandbox` beside the daemon's own sandbox, in which git runs.
"""
