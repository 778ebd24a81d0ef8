"""The HTTP API (docs/api.md) on top of `web.server`.

The package turns requests into calls of `evaluations.service`, and its results into responses. It
decides nothing about an evaluation: the registry takes values and returns values.

`routes` has the Klein app, also its routes for the operator (health and metrics), the page and the
API description; and `KleinApplication`, the application of the site, which answers requests for
events before Klein. `WebContext` there has what the routes share.
A request goes to one of these modules:

- `upload`: `FormReceiver` parses the form of POST /evaluate while it arrives.
- `events`: pages of events (`prepare_event_page`), and the choice between a page and a stream or
  WebSocket (`streams`).
- `lists`: the evaluations of this daemon or of all at its address; the problems.

`auth` has `Authenticator`, the origin checks, and `EvaluationLinks`, the links that only read one
evaluation.

`daemon.assembly` builds the context and the site.
"""
