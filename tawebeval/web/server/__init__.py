"""HTTP connections and requests, their deadlines and limits, without the API.

Twisted's `HTTPChannel`, `Request` and `Site` are subclassed where they keep a body in memory,
answer malformed input in HTML, or have no deadline for a slow client:

- `channel`: `ApiChannel` with the phases and deadlines of a connection, malformed input, WebSockets
  and draining; `ApiRequest`, which is refused as early as possible; `ApiSite` with the limits of
  connections; and the Protocol of the API, `Application`, which `web.routes` implements.
- `messages`: headers of requests, each within 1 KiB; paths, queries and hosts; headers of
  responses, and the one table from exceptions to responses.

No module here imports the rest of `web`. `daemon.assembly` makes the site, listens with it and
drains it at the end.
"""
