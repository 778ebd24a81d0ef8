"""`python -m tawebeval.slurm FILE`, which a job runs: `tawebeval.slurm.node`."""

import os
import sys

if __name__ == "__main__":
    os.environ.pop("SLURM_JWT", None)  # srun's authority, which no child may have
    # The node speaks no TLS, and the import would take a third of the time to start an evaluator.
    sys.modules["OpenSSL"] = None  # type: ignore[assignment]

    from tawebeval.slurm.node import run_job

    run_job()
