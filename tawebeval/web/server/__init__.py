"""HTTP connections and requests, their deadlines and limits, without the API.

Twisted's `HTTPChannel`, `Request` and `Site` are subclassed where they keep a body in memory,
answer malformed input in HTML, or have no deadline for a slow client:

- `channel`: `ApiChannel`, malformed input, WebSockets, and draining. `deadlines` has the phases and
  deadlines of a connection, `websocket_input` the limit for what a WebSocket receives.
- `request`: `ApiRequest`, which is refused as early as possible; `site`: `ApiSite`.
- `targets`: paths, queries, hosts, and the path prefix behind a proxy.
- `request_headers`: headers of a request, each within 1 KiB.
- `limits`: the client's address, connection limits, and the connections to drain.
- `headers`, `error_responses`: headers of every response, and the one table from exceptions to
  responses.

No module here imports the rest of `web`. `interface` has the Protocols for it: `web.routes`
implements `Application`, `web.upload` `BodyReceiver`.

`web.routes.make_site` makes the site; `daemon.assembly` listens with it and drains it at the end.
"""
