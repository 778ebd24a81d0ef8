"""Show the daemon at work: ``python examples/demo.py`` (or ``make demo``).

Makes a git repository of ``examples/problems``, starts the daemon under
``twistd``, sends it submissions over HTTP, prints the events as they arrive,
and stops. Everything is kept in a temporary directory, which is removed at the
end (``--keep`` leaves it there). The exit status is 0 only if every evaluation
came to what it should.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_folder(keep: bool) -> Iterator[Path]:
    """Make a folder, and remove it at the end unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix="tawebeval-demo-"))
    try:
        yield folder
    finally:
        if keep:
            print(f"Everything is left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Read the command line; the result is the exit status."""
    parser = argparse.ArgumentParser(description="Show the daemon at work.")
    parser.add_argument("--keep", action="store_true", help="leave the temporary directory")
    arguments = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        from demonstration.daemon import DemonstrationError
        from demonstration.run import demonstrate
    except ModuleNotFoundError as error:
        print(f"{sys.executable} has no {error.name}. Run `make demo`, which sees to all it needs.")
        return 1
    try:
        with temporary_folder(arguments.keep) as folder:
            well = demonstrate(folder)
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
