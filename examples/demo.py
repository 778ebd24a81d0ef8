"""Show the daemon at work: ``python examples/demo.py`` (or ``make demo``).

Makes a git repository of ``examples/problems``, starts the daemon under
``twistd``, submits solutions over HTTP and prints the events as they arrive. On
a terminal, or with ``--keep`` (``make demo KEEP=1``), the page with these
evaluations then stays open until Ctrl-C. At the end the daemon is stopped and
its temporary directory removed. The exit status is 0 only if every evaluation
had the expected result.
"""

from __future__ import annotations

import argparse
import io
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Run the demo, and return the exit status."""
    parser = argparse.ArgumentParser(description="Show the daemon at work.")
    parser.add_argument("--keep", action="store_true", help="keep the page open until Ctrl-C")
    arguments = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        from demonstration.daemon import DemonstrationError
        from demonstration.run import demonstrate
    except ModuleNotFoundError as error:
        print(f"{sys.executable} has no {error.name}. Run `make demo`, which installs it in .venv.")
        return 1
    try:
        with tempfile.TemporaryDirectory(
            prefix="tawebeval-demo-", ignore_cleanup_errors=True
        ) as folder:
            well = demonstrate(Path(folder), arguments.keep)
    except KeyboardInterrupt:
        return 130
    except DemonstrationError as error:
        print(error)
        return 1
    except FileNotFoundError as error:
        print(f"This machine has no {error.filename}.")
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{shlex.join(error.cmd)} failed: {error.stderr}")
        return 1
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
