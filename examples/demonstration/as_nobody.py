"""Run a program of tawebeval as nobody, for root: ``python as_nobody.py PROGRAM [ARGUMENT...]``.

The program is one that refuses to run as root. ``tawebeval serve --user nobody`` is the usual way,
but nobody cannot read a checkout in /root, or a Python there. So all modules are imported before
this process becomes nobody.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import pwd
import runpy
import sys
from types import ModuleType

USER = "nobody"

# Modules that functions import: for lock files and /proc, for host names, for errors in options.
LATE_IMPORTS = ("encodings.ascii", "encodings.idna", "click._textwrap", "click.shell_completion")


def become_nobody(*_: object) -> None:
    """Import all modules of tawebeval, and become nobody for good, unless that is done."""
    if os.geteuid():
        return
    import_all(importlib.import_module("tawebeval"))
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    user = pwd.getpwnam(USER)
    os.setgroups([user.pw_gid])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    os.environ.update(HOME=user.pw_dir, USER=USER, LOGNAME=USER)


def import_all(package: ModuleType) -> None:
    """Import all modules of a package."""
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        if found.ispkg:
            import_all(module)


def main() -> None:
    """Run the program, with its refusal of root replaced."""
    from tawebeval.linux import privileges

    privileges.refuse_root = privileges.become_user = become_nobody
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
