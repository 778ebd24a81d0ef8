"""HTTP: the API (contract, sections 1 to 3 and 6) on top of `web.server`.

`routes` is the Klein app: it hands each request to `upload` (a form that arrives), `events` (pages
and streams), `operations` (health and metrics) or `static_files` (the page, the description).
`fastpath` answers plain polls from bytes, before a request object is made; it has to answer as the
routes do. `auth` says whose a request is, and how many each caller may send.

`context` has what all of them use. Nothing of an evaluation is decided here: that is
`evaluations.registry`, which is called with values and returns values.
"""
