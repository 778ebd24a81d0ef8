"""One evaluation from the queue to its end, and the registry of all.

`registry` is what the web calls: it accepts, finds, reads, cancels and forgets evaluations, with
`acceptance` (who may begin one), `records` (which there are) and `following` (who reads events, and
what each reader still needs).

`evaluation` is one of them: it waits for its place, fetches its tree, and starts a `run`, which
holds the limits and watches the child. `intake` takes the child's stdout into the ring, and pauses
it while the ring is full. `context` has what all evaluations use: clock, threads, sandbox, the
source of trees. Where these trees come from is not known here.
"""
