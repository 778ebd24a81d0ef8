"""Benchmarks: what the daemon reaches, beside small baselines measured in the same run."""
