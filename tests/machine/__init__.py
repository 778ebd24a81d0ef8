"""The Debian package on machines of Debian 12 and 13, with Debian's own kernels, in QEMU.

`python -m tests.machine` makes a root file system of each suite (`roots`), builds the package in
one of them (`package`), boots the other (`qemu`), and runs the checks of `guest/checks.py` there as
root. All that is slow to make and the same the next time is kept in the user's cache directory
(`cache`). The programs in `guest` run in the machine and use nothing but Python's standard library.

`python -m tests.machine.bare` needs no machine: it runs the commands of README.md in a root file
system.

Each check prints one line. The exit status is 0 only if all checks of all suites have passed.
"""
