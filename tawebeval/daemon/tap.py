"""`twistd tawebeval`: its options and `makeService`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.application.service import IService
from twisted.logger import Logger
from twisted.python import usage

from tawebeval import __version__
from tawebeval.daemon.configuration import check_sandbox_paths, read_configuration
from tawebeval.daemon.process import (
    exempt_objects_from_gc,
    ignore_sighup_and_sigusr1,
    install_poll_reactor_if_needed,
    keep_freed_memory,
    reset_inherited_signals,
    use_monotonic_clock,
)
from tawebeval.daemon.reload import ConfigurationFile
from tawebeval.daemon.startup import open_directories
from tawebeval.errors import ConfigurationError
from tawebeval.linux import daemon_limits
from tawebeval.linux.cgroups import CgroupManager, open_cgroups
from tawebeval.linux.privileges import check_user_and_locale

log = Logger()


class Options(usage.Options):
    """Options of `twistd tawebeval`. They override the configuration file.

    `get_exit_status()` returns the exit status of the daemon that was made with them.
    """

    synopsis = "[--config FILE] [--listen ENDPOINT]..."
    longdesc = "Run evaluators over the web and stream their output as events."
    optParameters = [  # noqa: RUF012  (Twisted's convention)
        ["config", "c", None, "Read settings from this TOML file; without one, use the defaults."],
    ]

    def __init__(self) -> None:
        super().__init__()
        self["listen"] = ()
        self.get_exit_status: Callable[[], int] = int

    def opt_listen(self, endpoint: str) -> None:
        """Listen on this endpoint, such as tcp:8080:interface=127.0.0.1. May be repeated."""
        self["listen"] += (endpoint,)

    opt_l = opt_listen

    def opt_version(self) -> None:
        """Print the version and exit."""
        print(f"tawebeval {__version__}")
        raise SystemExit(0)


def makeService(
    options: Options,
    reactor: Any = None,
    find_cgroups: Callable[..., CgroupManager] = open_cgroups,
) -> IService:
    """Build the daemon for twistd.

    `reactor` None means the global reactor. `find_cgroups` may move the process to another cgroup.
    Raises: SystemExit, with a message, as root and for an invalid configuration.
    """
    if reactor is None:
        install_poll_reactor_if_needed()
        from twisted.internet import reactor

        use_monotonic_clock(reactor)
        reset_inherited_signals()
        ignore_sighup_and_sigusr1()

    # Imported late: they import the reactor.
    from tawebeval.daemon.assembly import build_daemon
    from tawebeval.daemon.logging import open_log

    try:
        check_user_and_locale()
        path, listen = options["config"] and Path(options["config"]), options["listen"]
        written = configuration = read_configuration(path, listen)
        check_sandbox_paths(configuration, options["config"], os.environ)
        directories = open_directories(os.environ, os.urandom)
        cgroups = find_cgroups(directories.daemon_label)
        keep_freed_memory()
        daemon_limits.check_hard_limits(configuration.limits)
        daemon_limits.raise_descriptor_limit()
        configuration = daemon_limits.cap_configured_connections(configuration)
        for problem in daemon_limits.assess_process_limit(configuration).problems:
            log.warn("processes: {problem}", problem=str(problem))
        atexit.register(cgroups.remove_all_cgroups)  # after a failed start no service is stopped
        # Absolute: twistd may change the working directory.
        file = ConfigurationFile(path and path.absolute(), listen, written)
        log_writer = open_log(configuration.log, options.parent, os.environ)
        daemon = build_daemon(configuration, directories, reactor, cgroups, file, log_writer)
    except ConfigurationError as error:
        # For a UsageError twistd would show a traceback at this point.
        raise SystemExit(f"tawebeval: {error}") from None
    options.get_exit_status = daemon.get_exit_status
    exempt_objects_from_gc()
    return daemon
