"""Tests of `tawebeval.slurm`, without a cluster."""
