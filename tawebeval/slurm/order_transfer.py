"""The way of an order to a node without a shared directory: the stdin of srun.

The node's program says that it is there (`READY`). Then the daemon sends the order and the
submission, and the tree of the commit if the node wants it (`WANTED`). All of it comes before the
evaluator begins, and before any line of `frames`:

- the number of bytes of the order, in decimal, and a line feed; the order;
- a line of JSON: the key of the tree, and `runner.node_cache`;
- the submission, and, if it is wanted, the tree (`tree_stream`).

A thread reads a piece of the files while the one before it is in the pipe: one piece is in memory,
and a node that does not read stops the thread. After a restart of the daemon an evaluation that has
not begun is started anew, and with it the transfer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from twisted.internet.main import CONNECTION_LOST
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm.frames import FrameKind
from tawebeval.slurm.order import Order, decode_order
from tawebeval.slurm.pipe_writer import PipeClosed, PipeWriter
from tawebeval.slurm.tree_cache import TreeCache
from tawebeval.slurm.tree_stream import (
    MAX_LINE_BYTES,
    BrokenStream,
    StreamEnded,
    TreeSize,
    decode_tree,
    encode_tree,
    read_exactly,
    read_line,
)

_MAX_ORDER = 64 * 2**20  # bytes; the limits of the form are far lower

log = Logger()


def make_tree_key(checkout: Path) -> str:
    """Return the key of a tree on the nodes.

    The name of a checkout has the repository, and the digest of the tree and of what is in it.
    """
    return hashlib.sha256(os.fsencode(checkout.name)).hexdigest()


class OrderSender:
    """Sender of what one srun needs: an order, a submission and a tree.

    `order_file` is the file of the order in the evaluation's directory. `on_failure` is called if
    something cannot be read.
    """

    def __init__(
        self,
        reactor: Any,
        threads: WorkerThreads,
        order_file: Path,
        checkout: Path,
        cache_bytes: int,
        descriptor: int,
        on_failure: Callable[[EvaluationFailure], object],
    ) -> None:
        self._threads = threads
        self._order_file = order_file
        self._checkout = checkout
        self._cache_bytes = cache_bytes
        self._on_failure = on_failure
        own = os.dup(descriptor)
        self._writer = PipeWriter(reactor, own, partial(os.close, own))

    def on_frame(self, kind: FrameKind) -> None:
        """Send what a node that tells `READY` or `WANTED` waits for."""
        if kind is FrameKind.READY:
            pieces = encode_order(self._order_file, self._checkout, self._cache_bytes)
        else:
            pieces = encode_tree(self._checkout)
        run_in_background(self._send(pieces), log, "defect: sending to a node has failed")

    async def _send(self, pieces: Iterator[bytes]) -> None:
        try:
            while (piece := await self._threads.run_in_thread(next, pieces, None)) is not None:
                await self._writer.write_and_wait(piece)
        except PipeClosed:
            pass
        except OSError as error:
            if self._writer.connected:
                log.error("sending to a node has failed: {error}", error=error)  # noqa: TRY400
                self._fail(f"the daemon could not send the files: {error.strerror}")
        except Exception:
            self._fail("the daemon could not send the files; the log has the reason")
            raise

    def _fail(self, why: str) -> None:
        self._on_failure(EvaluationFailure("lost", why))

    def stop(self) -> None:
        """Send nothing more."""
        self._writer.connectionLost(Failure(CONNECTION_LOST))


def encode_order(order_file: Path, checkout: Path, cache_bytes: int) -> Iterator[bytes]:
    """Yield an order and the submission beside it, in pieces. Blocks. Raises: OSError."""
    encoded = order_file.read_bytes()
    about_tree = json.dumps([make_tree_key(checkout), cache_bytes]).encode()
    yield b"%d\n%b%b\n" % (len(encoded), encoded, about_tree)
    yield from encode_tree(Workspace(order_file.parent).submission_directory)


def receive_order(
    stream: IO[bytes],
    place: Path,
    opened: Callable[[TreeCache], TreeCache],
    send: Callable[[FrameKind], object],
) -> Order:
    """Return the order for the directories below `place`, with everything in them. Blocks.

    `opened` enters the cache of trees, which the node leaves in the end. Raises: BrokenStream,
    WrongVersion, OSError.
    """
    send(FrameKind.READY)
    order = decode_order(_read_order(stream))
    key, cache_bytes = read_line(stream, tuple[str, int])
    root = place / "evaluation"
    submission = order.move_to(root, place).workspace.submission_directory
    submission.mkdir(parents=True)
    decode_tree(stream, submission)

    def receive_tree(target: Path) -> TreeSize:
        send(FrameKind.WANTED)
        return decode_tree(stream, target)

    if cache_bytes:
        cache = opened(TreeCache.open(place.parent, cache_bytes, place))
        checkout = cache.provide_tree(key, receive_tree)
    else:
        checkout = place / "tree"
        checkout.mkdir()
        receive_tree(checkout)
    moved = order.move_to(root, checkout)
    for _, directory in moved.workspace.make_sandboxed_view(root).writable_paths:
        directory.mkdir()
    return moved


def _read_order(stream: IO[bytes]) -> bytes:
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        raise StreamEnded
    if not line.strip().isdigit() or int(line) > _MAX_ORDER:
        raise BrokenStream("the stream does not begin with an evaluation")
    return read_exactly(stream, int(line))
