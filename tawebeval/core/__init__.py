"""Bytes in, values out: the part of tawebeval that only computes.

Nothing here does input or output, and nothing knows the time or draws random bytes: what a function
needs of these is an argument. So every rule of the contract can be tested byte by byte.

- Of stdout: `segi` makes events of an evaluator's bytes, with `markers`, `values` and `fileblock`;
  `events` encodes them, once, as lines of JSON.
- Between evaluator and clients: `ring` keeps the encoded lines, `retention` says which of them are
  still needed, `budget` bounds all rings together, `pages` and `framing` cut them for clients.
- Of requests: `form`, `tokens`, `forwarded`, `hosts`, `identifiers`.
- Values that several packages share: `checkout`, `states`, `tally`, `backoff`, `variables`.

All other packages import this one; it imports `errors` alone.
"""
