"""Webhooks: signed POST requests that report the end of an evaluation to a URL of the caller.

A form may name a `callback_url` (docs/api.md, "Callbacks"). `evaluations.service` asks
`CallbackQueue.create_callback` for a `CallbackRecord` when the evaluation is accepted, and hands it
to `CallbackQueue.start_delivery` with the status document when the evaluation has ended. The
evaluation does not wait for the delivery. The status document shows the `CallbackState`, the
metrics count final states.

- `deliveries`: `CallbackQueue`, the queue. One coroutine for each delivery waits for a slot, makes
  an attempt and pauses. Memory is bounded in bytes, slots are shared fairly between callers.
  `WebhookSender` makes one attempt, by the `PinnedAgent` of `tawebeval.pinned_agent`.
- `records`: `CallbackRecord`, the callback of an evaluation, and its state.
- `signing`: Standard Webhooks 1.0, and the callers' secrets in a file, which a reload reads again.

`daemon.assembly` builds these parts by `make_callback_queue`. docs/design/webhooks.md gives the
reasons.
"""
