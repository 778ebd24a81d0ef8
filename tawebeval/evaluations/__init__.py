"""One evaluation from the queue to its end, and the registry of all evaluations.

The layer `web` calls `EvaluationRegistry` with values and gets values; it never touches an
evaluation. `daemon.assembly` builds the one `EvaluationRegistry`; `tawebeval try` runs an
`Evaluation` without it.

- `registry`: `EvaluationRegistry` accepts, lists, reads, cancels and expires evaluations.
  Admission, the queue for run slots and the callback at the end are part of it.
- `records`: `RecordIndex`, the index of evaluations by identifier, caller and age; `Subscription`,
  one stream; `EvaluationReaders`, the streams and pages of one evaluation, which decide when the
  ring may discard events.
- `evaluation`: `Evaluation` goes through the states of `core.states`: it waits for a slot, has its
  commit checked out, starts the evaluator, ends and cleans up.
- `run`: `Run` applies the limits to the evaluator's process. `StdoutPump` feeds stdout to the
  parser and events to the ring, and pauses stdout while the ring is full.
- `exits`: the message about a bad exit, with a hint for the evaluator's author.
- `context`: `EvaluationContext`, the dependencies: clock, threads, sandbox, memory budget, and the
  source of checkouts. So this package knows nothing of git.
- `uploads`: `UploadWriter` writes the files of a form as they arrive.
- `status`: the status document. `filters`: the filter of a list. `shutdown`: the drain when the
  daemon stops.

Stdout reaches the ring through three modules: `linux.child` reads the pipe, `run` counts and pumps,
`core.segi` parses. A `Run` knows the evaluator only as a `linux.child.ProcessTransport`, which
delivers stdout, stderr and the exit, and can be paused: the seam for evaluators that outlive the
daemon. `Evaluation` obtains it from `SandboxedRun.start_evaluator` and `Spawner.adopt_child`.
"""
