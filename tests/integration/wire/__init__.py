"""Cases of the wire that hold wherever evaluators run: on this machine and on a cluster."""
