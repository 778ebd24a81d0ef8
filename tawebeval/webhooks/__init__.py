"""Tells the end of an evaluation to a URL that the caller has named.

`callbacks` keeps what is to be delivered, in memory, and tries again with growing pauses;
`deliveries` bounds that for each caller. `sender` makes one attempt, to an address that was looked
up and checked before. `signing` and `signatures` sign by Standard Webhooks.

`evaluations.registry` hands over what has ended. Nothing here knows git or a sandbox.
"""
