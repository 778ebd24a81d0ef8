"""Bytes in, values out: the part of tawebeval that only computes.

No function here does input or output, reads a clock or draws random bytes: the caller passes the
time, random bytes and callbacks as arguments. So tests can check every rule of docs/api.md byte by
byte.

- Standard output: `segi` gives an evaluator its markers, and turns its bytes into events. The
  client library sums up those that are results (`tawebeval_client.results`).
- From the evaluator to clients: `events` encodes each event, once, as a line of JSON. An `EventLog`
  has the lines, in rings in front of the file of stdout, and makes pages of them; `EventMemory`
  bounds the memory of all. Lines are framed as server-sent events or WebSocket messages.
- Requests: `form` parses the form of POST /evaluate, `hosts` the hosts of its URLs and the client's
  address behind proxies. `tokens` finds the caller, and signs links that read one evaluation.
  `budgets` counts what callers use together and their parts, and tells refused ones when to return.
- Values that several packages share: `evaluations` (identifiers, states, commits, counters, cursors
  of lists).

All other packages import this one; of the daemon it imports `errors` alone.
"""
