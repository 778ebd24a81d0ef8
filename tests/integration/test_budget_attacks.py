"""Evaluators that take what the kernel counts for the whole machine, or for the daemon's user.

Programs that wait print how much they got, and then `ready`. Those that could harm others on the
machine of the tests have a ceiling.
"""

from __future__ import annotations

from pathlib import Path

from tests.integration.attacks.case import HONEST, HONEST_OUTPUT, MEMORY, AttackCase
from tests.integration.cgroups import needs_cgroups
from tests.integration.client import failure, joined, python, text

PIPE_PAGES = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())

# Has children do `take(number)` until they are told to end, which is never.
_TAKE = r"""
import os, resource, socket, time
def take_by(children, take):
    told, tell = os.pipe()
    for number in range(children):
        if os.fork() == 0:
            got = take(number)
            os.write(tell, b"%d\n" % len(got))
            time.sleep(600)
            os._exit(0)
    os.close(tell)
    with os.fdopen(told) as file:
        print("took", sum(int(file.readline()) for _ in range(children)), flush=True)
    print("ready", flush=True)
    time.sleep(600)
def all_of(make):
    got = []
    try:
        while len(got) < 5000:
            got.append(make())
    except OSError:
        pass
    return got
"""

# Takes pages for pipes until the user may have no more, when a pipe gets fewer (pipe(7)).
PIPES = (
    _TAKE
    + r"""
import fcntl
page = os.sysconf("SC_PAGE_SIZE")
def take(number):
    got = all_of(os.pipe)
    sizes = [fcntl.fcntl(reading, fcntl.F_GETPIPE_SZ) for reading, _ in got]
    return [None] * (sum(sizes) // page)
take_by(20, take)
"""
)

# Puts descriptors into sockets that nobody reads, until their user may have no more in flight. How
# many these are depends on what other processes of the user have in flight.
IN_FLIGHT = (
    _TAKE
    + r"""
import errno
pairs = [socket.socketpair() for _ in range(100)]
def take(number):
    try:
        for sending, _ in pairs * 50:
            socket.send_fds(sending, [b"x"], [0])
    except OSError as error:
        return [None] * (error.errno == errno.ETOOMANYREFS)
    return []
take_by(3, take)
"""
)

# Takes a pending signal for each of many timers.
TIMERS = (
    _TAKE
    + r"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def timer():
    if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())):
        raise OSError
take_by(3, lambda number: all_of(timer))
"""
)

# Has epoll watch each of many files in each of many instances.
WATCHES = r"""
import os, select
for _ in range(30):
    if os.fork() == 0:
        files = [os.eventfd(0) for _ in range(120)]
        instances = [select.epoll() for _ in range(120)]
        for instance in instances:
            for file in files:
                instance.register(file)
        os.write(1, b"watching\n")
        __import__("time").sleep(600)
for _ in range(30):
    os.wait()
print("unlimited")
"""

# Moves from a silent socket into stdout, which keeps the pipe locked, behind many blank lines.
HOLD_STDOUT = """
import errno, os, socket, sys
silent, _other = socket.socketpair()
os.write(1, b"\\n" * 347_680)
try:
    if sys.argv[1] == "splice":
        os.splice(silent.fileno(), 1, 1)
    else:
        os.sendfile(1, silent.fileno(), None, 1)
    print("moved")
except OSError as error:
    print(errno.errorcode[error.errno])
"""

# Watches stdout many times. Each read of a full pipe wakes all watches, in the reader's time.
WATCHED_STDOUT = """
import os, select
told, tell = os.pipe()
for _ in range(10):
    if os.fork() == 0:
        instances = [select.epoll() for _ in range(110)]
        copies = [os.dup(1) for _ in range(130)]
        for instance in instances:
            for copy in copies:
                instance.register(copy, select.EPOLLOUT | select.EPOLLET)
        os.write(tell, b".")
        __import__("time").sleep(600)
for _ in range(10):
    os.read(told, 1)
for _ in range(60):
    os.write(1, (b"x" * 8191 + b"\\n") * 8)
print("unlimited")
"""


class RefusedAttacks(AttackCase):
    async def test_splice_and_sendfile_to_stdout_are_refused(self) -> None:
        for call in ("splice", "sendfile"):
            identifier = await self.begin(python(HOLD_STDOUT, call))
            self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
            printed = text(await self.client.follow(identifier))
            self.assertEqual(printed.strip(), "EINVAL")


class SharedAttacks(AttackCase):
    """What evaluations of one user share, taken as far as it goes, and kept."""

    async def taken(self, program: str) -> int:
        """Return how much a program has taken beside honest evaluations."""
        identifier = await self.begin_and_wait(python(program))
        for _ in range(2):
            self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
        self.assertEqual((await self.client.get("/health")).code, 200)
        printed = text((await self.client.first_page(identifier))["data"])
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        await self.client.cancel(identifier)
        return int(printed.split()[1])

    async def test_evaluations_run_while_another_exceeds_the_soft_limit_of_pipe_pages(
        self,
    ) -> None:
        self.assertGreater(await self.taken(PIPES), PIPE_PAGES)

    async def test_descriptors_in_flight_do_not_prevent_evaluations_from_starting(self) -> None:
        self.assertEqual(await self.taken(IN_FLIGHT), 3)  # processes that were refused

    async def test_tawebeval_run_starts_programs_while_descriptors_are_in_flight(self) -> None:
        identifier = await self.begin_and_wait(python(IN_FLIGHT))
        printed = await self.run_command("echo given | tawebeval-run -- cat; echo $?")
        self.assertEqual(text(printed), "given\n0\n")
        await self.client.cancel(identifier)

    async def test_pending_timers_are_limited_for_each_evaluation(self) -> None:
        self.assertLessEqual(await self.taken(TIMERS), 1024)

    @needs_cgroups
    async def test_epoll_watches_count_as_memory_of_the_evaluation(self) -> None:
        self.stopped(await self.attack(WATCHES), "memory", "memory", MEMORY)

    async def test_evaluator_that_slows_reads_of_its_stdout_is_stopped(self) -> None:
        attacked = await self.attack(WATCHED_STDOUT)
        self.assertEqual(failure(attacked.events, "output")["value"], 0.25)
        self.assertNotIn("unlimited", attacked.text)
