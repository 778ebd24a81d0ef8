"""Bytes in, values out: the part of tawebeval that only computes.

No function here does input or output, reads a clock or draws random bytes: the caller passes the
time, random bytes and callbacks as arguments. So tests can check every rule of docs/api.md byte by
byte.

- Standard output: `segi.SegiParser` turns an evaluator's bytes into events; `fileblock` parses the
  files among them, `text` cuts text between characters, and `events` encodes each event, once, as a
  line of JSON.
- From the evaluator to clients: `event_log.EventLog` has the encoded lines, in rings
  (`ring.EventRing`) in front of the file of stdout; `event_log.EventMemory` bounds the memory of
  all logs. `pages` has cursors and pages, and `framing` frames lines as server-sent events or
  WebSocket messages.
- Lists: `evaluation_lists` has their cursors, and joins the lists of several daemons.
- Requests: `form` parses the form of POST /evaluate, `hosts` the hosts of its URLs. `tokens` finds
  the caller, `signed_links` signs links that read one evaluation, `forwarded_headers` finds the
  client's address behind proxies. `shares` counts what callers use together, and their parts.
- Values that several packages share: `identifiers`, `states`, `evaluator_environment` (the
  evaluator's environment), `checkout`, `backoff` (retries of HTTP requests), `counters` (counters
  for metrics), `retry_schedule` (`Retry-After` of a full queue).

All other packages import this one; it imports `errors` alone.
"""
