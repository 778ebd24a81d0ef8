"""One evaluation from the queue to its end, and the registry of all evaluations.

The layer `web` calls `EvaluationRegistry` with values and gets values; it never touches an
evaluation. `daemon.assembly` builds the one `EvaluationRegistry`; `tawebeval try` runs an
`Evaluation` without it.

The life of an evaluation:

- `details`: `EvaluationDetails`, what is known of an evaluation besides its events, and its lines
  in the log.
- `lifecycle`: `Evaluation`, its state, the reason to stop it, and the end: the removal of processes
  and directories.
- `starting`: fetch, run slot, workspace, start of the evaluator.
- `run`: `Run`, the one owner of the evaluator's process: it feeds stdout to the parser, applies the
  limits and interprets the exit. It knows the process only as a `linux.child.ProcessTransport`.
- `exit_messages`: the message about a bad exit, with a hint for its author.

Its events:

- `eventlog`: `RecordedStdout` makes events of stdout, and writes down what a later process of the
  daemon needs to make the same ones again; `EventFiles` are these files.
- `reading`: `EvaluationEvents`, the events of one evaluation; `Subscription`, one stream.
- `event_requests`: `EventRequests`, pages, requests that wait, and streams, by identifiers.

All evaluations:

- `registry`: `EvaluationRegistry` accepts, finds, cancels, expires and restores evaluations.
- `admission`: `AdmissionControl` refuses new evaluations when the daemon or a caller has too many;
  the queue for run slots is part of it.
- `records`: `RecordIndex`, the index by identifier, caller and age. `lister`: the lists by pages,
  with their filter.
- `store`, `database`: what outlives the daemon, as rows in SQLite. `restoring`: evaluations of an
  earlier process.
- `archive_reader`: `ArchiveReader`, pages and streams of the archive.
- `uploads`: `UploadWriter` writes the files of a form as they arrive. `submission_store` counts
  them, keeps those of ended evaluations for a rerun, and reads them for the API.
- `callbacks`: the callbacks of ended evaluations. `shutdown`: the drain when the daemon stops.
- `status`: the status document.
- `context`: `EvaluationContext`, the dependencies, so that this package knows nothing of git.
"""
