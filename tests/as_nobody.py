"""Run a program of tawebeval as nobody, for root: ``python as_nobody.py PROGRAM [ARGUMENT...]``.

The program is one that refuses to run as root. This process becomes nobody at that point, as by
``--user nobody`` below a directory that only root can read, and keeps descriptors and environment.
"""

from __future__ import annotations

import os
import pwd
import runpy
import sys

from tawebeval.linux import privileges

USER = "nobody"


def become_nobody(*_: object) -> None:
    """Become nobody for good, unless that is done."""
    if os.geteuid() == 0:
        user = pwd.getpwnam(USER)
        privileges.set_process_user(user)
        os.environ.update(HOME=user.pw_dir, USER=USER, LOGNAME=USER)


def main() -> None:
    """Run the program, with its refusal of root replaced."""
    privileges.check_user_and_locale = privileges.become_user = become_nobody
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
