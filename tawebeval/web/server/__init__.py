"""HTTP without the API: connections, requests, and their bounds.

`channel` is a connection of Twisted's with deadlines (`timeouts`), bounds for what is malformed,
and WebSockets; `request` is a request and the site. `limits`, `clients` and `presence` count
connections and say whose they are. `interface` has the Protocols of what they need of the
API, for no module here imports the rest of `web`. `problems` is the one table from exceptions to
answers; `headers` are those of every answer.
"""
