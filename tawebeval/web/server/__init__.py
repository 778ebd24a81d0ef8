"""HTTP connections and requests, their deadlines and limits, without the API.

Twisted's `HTTPChannel`, `Request` and `Site` are subclassed where they keep a body in memory,
answer malformed input in HTML, or have no deadline for a slow client:

- `timeouts`: `TimeoutChannel`, the phases of a connection and their deadlines.
- `channel`: `ApiChannel`, malformed input, WebSockets, the fast path's hook, and draining.
- `request`: `ApiRequest`, which is refused as early as possible, and `ApiSite`.
- `request_headers`: the headers of a request, each within 1 KiB.
- `limits`: the client's address, connection limits, and the connections to drain.
- `transport`: write-through TCP transports, and how far a client has read.
- `headers`, `base_path`, `error_responses`: headers of every response, the path prefix behind a
  proxy, and the one table from exceptions to responses.

No module here imports the rest of `web`. `interface` has the Protocols for it: `Application`,
`BodyReceiver` and `FastPath` are implemented by `web.routes`, `web.upload` and `web.fastpath`.

`web.routes.make_site` makes the site; `daemon.assembly` listens with it and drains it at the end.
"""
