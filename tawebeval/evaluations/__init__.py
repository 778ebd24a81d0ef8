"""One evaluation from the queue to its end, and the registry of all evaluations.

The layer `web` calls `EvaluationRegistry` with values and gets values; it never touches an
evaluation. `daemon.assembly` builds the one `EvaluationRegistry`; `tawebeval try` runs an
`Evaluation` without it.

The life of an evaluation:

- `lifecycle`: `Evaluation`, its state, the reason to stop it, and the end: the removal of processes
  and directories. `EvaluationIndex`, the index by identifier, caller and age.
- `starting`: fetch, run slot, workspace, start of the evaluator; evaluations of an earlier process.
- `run`: `Run`, the one owner of the evaluator's process: it feeds stdout to the parser, applies the
  limits and interprets the exit. It knows the process only as a `linux.tail.TailedProcess`.

Its events:

- `eventlog`: `RecordedStdout` makes events of stdout, and writes down what a later process of the
  daemon needs to make the same ones again; `EventFiles` are these files. `EvaluationEvents` reads.
- `reading`: pages, requests that wait, and streams, by identifiers; status documents, lists and
  submitted files. `ArchiveReader` finds the same in the archive.

All evaluations:

- `service`: `EvaluationRegistry` accepts, finds, cancels, expires and restores evaluations. It has
  the queue for run slots, and refuses new evaluations when the daemon or a caller has too many.
  Callbacks, and the drain when the daemon stops. `SubmissionStore` counts submitted files, and
  keeps those of ended evaluations for a rerun.
- `store`: `EvaluationDetails`, what is known of an evaluation besides its events, and what outlives
  the daemon, as rows in SQLite.
- `context`: `EvaluationContext`, the dependencies, so that this package knows nothing of git.
"""
