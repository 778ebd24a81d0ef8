"""What benchmarks run in processes of their own: writers, loads, baselines, and our own parts."""
