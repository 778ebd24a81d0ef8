"""One evaluation from the queue to its end, and the registry of all evaluations.

The layer `web` calls `EvaluationRegistry` with values and gets values; it never touches an
evaluation. `daemon.assembly` builds the one `EvaluationRegistry`; `tawebeval try` runs an
`Evaluation` without it.

- `registry`: `EvaluationRegistry` accepts, reads, cancels, expires and restores evaluations.
- `admission`: `AdmissionControl` refuses new evaluations when the daemon or a caller has too many;
  the queue for run slots is part of it. `lister`: `EvaluationLister`, the lists page by page.
- `records`: `RecordIndex`, the index of evaluations by identifier, caller and age.
- `readers`: `Subscription`, one stream; `EvaluationReaders`, the streams and pages of one
  evaluation, which decide when the ring may discard events.
- `details`: `EvaluationDetails`, what is known of an evaluation besides its events.
- `evaluation`: `Evaluation` goes through the states of `core.states`: it waits for a slot, has its
  commit checked out, starts the evaluator, ends and cleans up.
- `run_supervisor`: `RunSupervisor` starts the evaluator in its sandbox, or goes on with one that
  the keeper holds, and reads the files that it names.
- `run`: `EvaluatorRun` applies the limits to the evaluator's process.
- `stdout_pump`: `StdoutPump` feeds stdout to the parser and events to the ring, and pauses stdout
  while the ring is full.
- `eventlog`: `RecordedStdout`, an event log of files that outlive this process. No evaluation uses
  it yet; it is to replace the pump and the journals.
- `store`, `database`, `rows`: `EvaluationStore` keeps a row for each evaluation in SQLite, and the
  callbacks and links that outlive the daemon. Nothing uses it yet; it is to replace the journals
  and the index of the archive.
- `journal`, `handover_journal`, `snapshot`, `run_keeper`: what the keeper holds, so that
  evaluations outlive this process; `restart`: what an earlier process has left there.
- `command_hints`: hints about the files of the command, for `exit_messages`.
- `exit_messages`: the message about a bad exit, with a hint for the evaluator's author.
- `context`: `EvaluationContext`, the dependencies: clock, threads, sandbox, memory budget, and the
  source of checkouts. So this package knows nothing of git.
- `archive`: the archive, which the registry hands the events and ends of evaluations, and its
  absence. `archive_reader`: `ArchiveReader`, which reads archived evaluations.
- `uploads`: `UploadWriter` writes the files of a form as they arrive. `submission_store`:
  `SubmissionStore` counts them, and keeps those of ended evaluations for a rerun. `submitted_files`
  reads them for the API.
- `callbacks`: `EvaluationCallbacks` has the callback of an ended evaluation delivered.
- `status`: the status document. `log_lines`: the lines in the log. `filters`: the filter of a list.
  `shutdown`: the drain when the daemon stops.

Stdout reaches the ring through four modules: `linux.child` reads the pipe, `run` counts,
`stdout_pump` pumps, `core.segi` parses. An `EvaluatorRun` knows the evaluator only as a
`linux.child.ProcessTransport`, which delivers stdout, stderr and the exit, and can be paused.
`RunSupervisor` obtains it from `SandboxedRun.start_evaluator`, and from `Spawner.adopt_child` or,
if evaluators outlive the daemon, `KeeperSpawner.adopt_child`.
"""
