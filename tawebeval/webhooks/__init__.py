"""Webhooks: signed POST requests that report the end of an evaluation to a URL of the caller.

A form may name a `callback_url` (docs/api.md, "Callbacks"). `evaluations.Registry` asks
`Callbacks.expect` for a `Callback` when the evaluation is accepted, and hands it to
`Callbacks.send` with the status document when the evaluation has ended. The evaluation does not
wait for the delivery. The status document shows the `CallbackState`, the metrics count final
states.

- `callback`: `Callback` and `CallbackState`, plain values.
- `deliveries`: `Callbacks`, the queue. One coroutine for each delivery waits for a slot, makes
  an attempt and pauses. Memory is bounded in bytes, slots are shared fairly between callers.
- `sender`: `Sender` makes one attempt. `PinnedAgent` connects to the address that was looked up
  and checked, and limits the response in bytes and seconds.
- `signatures`: Standard Webhooks 1.0; pure functions.
- `signing`: `SecretsFile`, the callers' secrets, which a reload reads again.

`daemon.assembly` builds these parts by `open_callbacks`. docs/design/webhooks.md gives the reasons.
"""
