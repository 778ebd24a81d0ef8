"""The daemon's tree of services: `Daemon`, its evaluations, its listeners and its timer."""

from __future__ import annotations

import atexit
import errno
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from socket import AF_INET, AF_INET6, IPPROTO_TCP, TCP_USER_TIMEOUT
from typing import Any

import attrs
from twisted.application.internet import StreamServerEndpointService, TimerService
from twisted.application.service import MultiService, Service
from twisted.application.strports import service
from twisted.internet.address import UNIXAddress
from twisted.internet.defer import Deferred, gatherResults, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint
from twisted.internet.task import deferLater
from twisted.logger import ILogObserver, Logger
from zope.interface import implementer

from tawebeval import __version__
from tawebeval.config import Configuration, HttpSettings
from tawebeval.daemon.logging import LineWriter, LogWriter
from tawebeval.daemon.process_setup import ShutdownSignals
from tawebeval.daemon.startup import StartupChecks
from tawebeval.errors import ConfigurationError
from tawebeval.evaluations.database import EvaluationRow
from tawebeval.evaluations.lifecycle import STARTER_LOST
from tawebeval.evaluations.registry import EvaluationRegistry
from tawebeval.git.cache import RepositoryCache
from tawebeval.linux.child import become_subreaper
from tawebeval.linux.privileges import drop_privileges, get_user_name
from tawebeval.linux.rlimits import PROCESS_LIMIT_REMEDY
from tawebeval.sandbox.workspace import WritableTrees
from tawebeval.web.server.channel import ApiSite
from tawebeval.web.server.limits import DRAIN_TIMEOUT
from tawebeval.webhooks.deliveries import CallbackQueue

_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  (compared only)
_TIMER_PERIOD = 1.0  # seconds
_MIN_USER_TIMEOUT = 120.0  # seconds for which a client may be unreachable
_LARGE_RESPONSE = 256 * 1024  # bytes, which a client may read slowly
_LOG_TIMEOUT = 2.0  # seconds for which the shutdown waits for the log
_LASTING_PATIENCE = 0.5  # seconds for responses, if evaluations go on: streams do not end
_STARTER_END = 0.5  # seconds from the end of the starter's connection to that of its process
_LAST_POLLS = 0.5  # seconds in which clients can fetch the end events of cancelled evaluations

_OTHER_ENDPOINT = "choose another endpoint by --listen or the setting listen"
_OTHER_PORT = (
    "choose another port, as in --listen tcp:8081:interface=127.0.0.1, or by the setting listen"
)

log = Logger()


class EvaluationService(Service):
    """Service of the evaluations, their archive, the repository cache and the webhooks.

    Its stop drains them, and no process of an evaluation outlives it; if they are lasting, they go
    on. `rows` are those of an earlier process, whose files are in the directory `uploads` until
    they begin. `trees` has the connection to the starter.
    """

    name = "evaluations"

    def __init__(
        self,
        registry: EvaluationRegistry,
        repositories: RepositoryCache,
        callbacks: CallbackQueue,
        rows: Sequence[EvaluationRow],
        uploads: Path,
        trees: WritableTrees,
        *,
        is_lasting: bool,
    ) -> None:
        self.registry = registry
        self.repositories = repositories
        self.callbacks = callbacks
        self.context = registry.context
        self._rows = rows
        self._uploads = uploads
        self._trees = trees
        self._is_lasting = is_lasting
        self.exit_status = 0  # of the process

    def startService(self) -> None:
        """Load the repository cache and become the reaper of all descendant processes.

        Go on with the evaluations of an earlier process.
        """
        become_subreaper()
        self.repositories.load_existing(self._restore_evaluations)
        super().startService()

    def _restore_evaluations(self) -> None:
        context, registry = self.context, self.registry
        threads = context.worker_threads
        self._trees.attach(context.clock, threads.run_in_thread, self._on_starter_lost)
        assert context.store is not None, "the daemon has one"
        # Also above the numbers of evaluations that are gone.
        now = int(context.read_wall_clock() * 1000)
        registry.records.last_sequence_number = max(context.store.find_last_sequence_number(), now)
        registry.restore_evaluations(
            self._rows,
            context.store.load_callbacks(),
            self._uploads,
            self.repositories.resume_checkout,
        )
        self._rows = ()
        if context.archive is not None:
            context.archive.start()

    @property
    def evaluations_outlast_daemon(self) -> bool:
        """Whether evaluations go on when the daemon ends."""
        is_on_cluster = self.context.configuration.runner.kind == "slurm"
        return self._is_lasting and (is_on_cluster or self._trees.starter.is_alive)

    def _on_starter_lost(self) -> None:
        self.registry.refuse_evaluations()
        # A process that ends closes its connections first.
        self.context.clock.callLater(_STARTER_END, self._stop_without_starter)

    def _stop_without_starter(self) -> None:
        """Stop, after clients have read what is left: systemd starts the starter and the daemon."""
        if self.evaluations_outlast_daemon:
            self.registry.hand_over_evaluations()
            log.error("stopping: the connection to the starter of evaluators is lost")
        else:
            what = "the starter of evaluators has ended, and with the starter all evaluators"
            log.error("stopping: {what}", what=what)
            self.registry.end_lost_runs(STARTER_LOST)
        self.exit_status = 1
        self.context.clock.stop()

    def stopService(self) -> Deferred[bool]:
        """Drain for `service.drain` seconds; return whether evaluations were running or queued."""
        super().stopService()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> bool:
        self._trees.starter.ignore_connection_loss()
        if self.evaluations_outlast_daemon:
            self.registry.hand_over_evaluations()
            await self.repositories.close()
            await self._close_store()
            return False
        had_any = await self.registry.drain_and_close(self.context.configuration.service.drain)
        await self.repositories.close()
        await self._close_store()
        return had_any

    async def _close_store(self) -> None:
        if self.context.store is not None:
            await self.context.store.close()

    def kill_all_evaluations(self) -> None:
        """Kill all evaluations."""
        self.registry.end_drain_early()


class Daemon(MultiService):
    """Parent service of all parts. The start fails if an endpoint cannot be opened.

    `log_writer` is the log observer for twistd, None to keep the observer of twistd.
    """

    def __init__(
        self,
        startup: StartupChecks,
        evaluations: EvaluationService,
        site: ApiSite,
        reactor: Any,
        log_writer: LogWriter | None = None,
    ) -> None:
        super().__init__()
        self.log_writer = log_writer
        self._site = site
        self._evaluations = evaluations
        self._reactor = reactor
        for part in (
            startup,
            evaluations,
            ShutdownSignals(evaluations.kill_all_evaluations, reactor),
        ):
            part.setServiceParent(self)

    def get_exit_status(self) -> int:
        """Return the exit status of the process, unless a signal ends it."""
        return self._evaluations.exit_status

    def setServiceParent(self, parent: Any) -> None:
        """Attach to the application and install the log observer."""
        super().setServiceParent(parent)
        if self.log_writer is not None:
            parent.setComponent(ILogObserver, self.log_writer)

    def apply_log_level(self, configuration: Configuration) -> None:
        """Set the lowest level that is logged (`log.level`)."""
        if self.log_writer is not None:
            self.log_writer.level = configuration.log.level

    def privilegedStartService(self) -> None:
        """Open the endpoints and drop all privileges.

        Raises: SystemExit, with a message, if an endpoint cannot be opened.
        """
        log.info(
            "starting tawebeval {version} on Python {python}",
            version=__version__,
            python=platform.python_version(),
        )
        for part in self:
            try:
                part.privilegedStartService()
            except (CannotListenError, OSError, OverflowError, ValueError) as error:
                why = explain_listen_error(part.name or "", error)
                raise SystemExit(f"tawebeval: listen: {part.name}: {why}") from None
        drop_privileges()

    def startService(self) -> None:
        """Start all parts. Raises: SystemExit, with a message."""
        if self.log_writer is not None:
            self._start_log_thread(self.log_writer.line_writer)
        super().startService()
        for part in self._list_listeners():
            if part.endpoint.port is not None:
                page = build_url(
                    part.name or "", part.endpoint.port.getHost(), self._site.base_path.prefix
                )
                log.info("ready: {page} (page), API at {page}evaluate", page=page)

    def _start_log_thread(self, lines: LineWriter) -> None:
        """Write the log in a thread, and wait for the thread at shutdown only.

        Raises: SystemExit, with a message, if no thread can be started.
        """
        try:
            lines.start()
        except RuntimeError as error:
            raise SystemExit(f"tawebeval: threads: {error}; {PROCESS_LIMIT_REMEDY}") from None
        # Both: after the reactor has stopped, a signal may end the process before atexit runs.
        self._reactor.addSystemEventTrigger("after", "shutdown", lines.flush, _LOG_TIMEOUT)
        atexit.register(lines.flush, _LOG_TIMEOUT)

    def stopService(self) -> Deferred[None]:
        """Drain the evaluations, close the listeners and connections, then stop all other parts."""
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        stop = super().stopService
        self._site.open_connections.close_idle_connections()
        # Disowned, because stopping all parts would stop the service a second time.
        if await maybeDeferred(self._evaluations.disownServiceParent):
            await deferLater(self._reactor, _LAST_POLLS)
        await self._stop_listening()
        lasting = self._evaluations.evaluations_outlast_daemon
        await self._site.open_connections.drain_connections(
            _LASTING_PATIENCE if lasting else DRAIN_TIMEOUT
        )
        await maybeDeferred(stop)

    async def _stop_listening(self) -> None:
        """Close the listening ports; open connections stay."""
        listening = self._list_listeners()
        await gatherResults([maybeDeferred(part.disownServiceParent) for part in listening])

    def _list_listeners(self) -> list[StreamServerEndpointService]:
        return [part for part in self if isinstance(part, StreamServerEndpointService)]


def build_url(endpoint: str, address: Any, base_path: str) -> str:
    """Return the URL of the page at an open endpoint, as a program of this machine reaches it.

    `address` is the port's own address. A UNIX socket stands in the URL as in those of nginx.
    """
    if isinstance(address, UNIXAddress):
        path = (address.name or b"").decode(errors="replace")
        return f"http://unix:{path}:{base_path}/"
    scheme = "https" if endpoint.startswith(("ssl:", "tls:")) else "http"
    host = "localhost" if address.host in _ALL_ADDRESSES else address.host
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{address.port}{base_path}/"


@implementer(IStreamServerEndpoint)
@attrs.define
class ApiEndpoint:
    """An endpoint whose TCP connections end when the client is unreachable.

    The kernel drops a connection of which the client's kernel has not acknowledged sent data for
    `timeout` seconds; its own default is about 15 minutes. `port` is the open port, None before
    `listen`.
    """

    _endpoint: IStreamServerEndpoint
    _timeout: float
    port: IListeningPort | None = attrs.field(default=None, init=False)

    def listen(self, factory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Listen on the endpoint."""
        return self._endpoint.listen(factory).addCallback(self._prepare)

    def _prepare(self, port: Any) -> Any:
        if getattr(port, "addressFamily", None) in (AF_INET, AF_INET6):
            # Accepted sockets inherit the option: no connection costs a system call (tcp(7)).
            port.socket.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, round(self._timeout * 1000))
        self.port = port
        return port


def make_listener(
    endpoint: str, factory: IProtocolFactory, reactor: Any, settings: HttpSettings
) -> StreamServerEndpointService:
    """Return a service that listens at an endpoint.

    Raises: ConfigurationError, for an invalid endpoint. The start of the service raises the
    errors of the endpoint, such as CannotListenError.
    """
    try:
        listening = service(endpoint, factory, reactor=reactor)
    except LookupError:  # raised for `systemd:` endpoints only
        raise ConfigurationError(
            f"listen: systemd passes no socket for {endpoint!r} (LISTEN_FDS); open it in a unit"
            ' such as tawebeval.socket, or set listen = ["tcp:8080:interface=127.0.0.1"]'
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigurationError(f"listen: {explain_wrong_endpoint(endpoint, error)}") from None
    # TCP_USER_TIMEOUT cannot tell a client that reads nothing from an unreachable one.
    timeout = max(
        _MIN_USER_TIMEOUT,
        settings.rate_window_seconds + _LARGE_RESPONSE / settings.min_bytes_per_second,
    )
    listening.endpoint = ApiEndpoint(listening.endpoint, timeout)
    listening.setName(endpoint)
    return listening


def explain_wrong_endpoint(endpoint: str, error: Exception) -> str:
    """Return the message about what is no endpoint, from the error of its parser."""
    if isinstance(error, OSError):  # of a certificate or its key
        return f"{endpoint}: cannot read {error.filename}: {error.strerror}"
    why = str(error).partition("invalid literal for int() with base 10: ")[2]
    why = f"{why} is not a port" if why else str(error)
    return (
        f"{endpoint!r} is not an endpoint such as tcp:8080:interface=127.0.0.1 or"
        f" unix:/run/tawebeval/socket:mode=660: {why}"
    )


def explain_listen_error(endpoint: str, error: Exception) -> str:
    """Return why an endpoint cannot be opened, with the remedy."""
    cause = error.socketError if isinstance(error, CannotListenError) else error
    if not isinstance(cause, OSError):
        return f"{error}; {_OTHER_ENDPOINT}"
    if endpoint.startswith("systemd:"):
        return (
            f"the socket that systemd passes (LISTEN_FDS) cannot be used: {cause.strerror}; for"
            " domain=INET set ListenStream= in the socket unit to a TCP address such as"
            ' 127.0.0.1:8080; for a UNIX socket listen at "unix:/run/tawebeval/socket:mode=660"'
        )
    if endpoint.startswith("unix:"):
        user = get_user_name(os.geteuid())
        return (
            f"cannot create the socket as the user {user}: {cause.strerror}; create its directory"
            f" for this user, or {_OTHER_ENDPOINT}"
        )
    match cause.errno:
        case errno.EADDRINUSE:
            return (
                f"another program, or another tawebeval, listens there; stop it, or {_OTHER_PORT}"
            )
        case errno.EACCES:
            what = "a socket unit, or CAP_NET_BIND_SERVICE (AmbientCapabilities=)"
            return f"ports below 1024 need {what}; {_OTHER_PORT}"
        case errno.EADDRNOTAVAIL:
            return f"not an address of this machine, as `ip address` shows; {_OTHER_ENDPOINT}"
    return f"{cause.strerror or cause}; {_OTHER_ENDPOINT}"


def make_periodic_timer(
    calls: Iterable[Callable[[], object]], reactor: Any, period: float = _TIMER_PERIOD
) -> TimerService:
    """Return a service that makes all `calls` every `period` seconds, also after one that fails.

    No call may block.
    """
    calls = tuple(calls)

    def make_calls() -> None:
        for call in calls:
            try:
                call()
            except Exception:  # noqa: BLE001  (a timer that fails once stops for good)
                log.failure("defect: {chore} failed", chore=call.__name__)

    timer = TimerService(period, make_calls)
    timer.clock = reactor
    return timer
