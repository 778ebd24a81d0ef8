"""The way of a job description to a node without a shared directory: the stdin of srun.

The node's program says that it is there (`READY_FOR_JOB`). Then the daemon sends the job
description and the submission, and the tree of the commit if the node wants it (`TREE_WANTED`). All
of it comes before the evaluator begins, and before any line of `frames`:

- the number of bytes of the job description, in decimal, and a line feed; the job description;
- a line of JSON: the key of the tree, `runner.node_cache` and `limits.free_disk`;
- the submission, and, if it is wanted, the tree (`tree_stream`).

A thread reads a piece of the files while the one before it is in the pipe: one piece is in memory,
and a node that does not read stops the thread. After a restart of the daemon an evaluation that has
not begun is started anew, and with it the transfer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import attrs
from twisted.internet.main import CONNECTION_LOST
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm.frames import FrameKind
from tawebeval.slurm.job_description import JobDescription, decode_job_description
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

_MAX_JOB_DESCRIPTION = 64 * 2**20  # bytes; the limits of the form are far lower

log = Logger()


def make_tree_key(checkout: Path) -> str:
    """Return the key of a tree on the nodes.

    The name of a checkout has the repository, and the digest of the tree and of what is in it.
    """
    return hashlib.sha256(os.fsencode(checkout.name)).hexdigest()


@attrs.define(eq=False)
class JobSender:
    """Sender of what one srun needs: a job description, a submission and a tree.

    `description_file` is the file of the job description in the evaluation's directory.
    `on_failure` is called if something cannot be read.
    """

    _reactor: Any
    _threads: WorkerThreads
    _description_file: Path
    _checkout: Path
    _cache_bytes: int
    _min_free_bytes: int
    _stdin: int
    _on_failure: Callable[[EvaluationFailure], object]
    _writer: PipeWriter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        own = os.dup(self._stdin)
        self._writer = PipeWriter(self._reactor, own, partial(os.close, own))

    def on_frame(self, kind: FrameKind) -> None:
        """Send what a node that tells `READY_FOR_JOB` or `TREE_WANTED` waits for."""
        if kind is FrameKind.READY_FOR_JOB:
            pieces = encode_job(
                self._description_file, self._checkout, self._cache_bytes, self._min_free_bytes
            )
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


def encode_job(
    description_file: Path, checkout: Path, cache_bytes: int, min_free_bytes: int
) -> Iterator[bytes]:
    """Yield a job description and the submission beside it, in pieces. Blocks. Raises: OSError."""
    encoded = description_file.read_bytes()
    about_tree = json.dumps([make_tree_key(checkout), cache_bytes, min_free_bytes]).encode()
    yield b"%d\n%b%b\n" % (len(encoded), encoded, about_tree)
    yield from encode_tree(Workspace(description_file.parent).submission_directory)


def receive_job(
    stream: IO[bytes],
    place: Path,
    opened: Callable[[TreeCache], TreeCache],
    send: Callable[[FrameKind], object],
) -> JobDescription:
    """Return the job description for the directories below `place`, and fill them. Blocks.

    `opened` enters the cache of trees, which the node leaves in the end. Raises: BrokenStream,
    WrongVersion, OSError.
    """
    send(FrameKind.READY_FOR_JOB)
    job = decode_job_description(_read_job_description(stream))
    key, cache_bytes, min_free_bytes = read_line(stream, tuple[str, int, int])
    check_free_disk(place, min_free_bytes, job.commit_bytes)
    root = place / "evaluation"
    submission = job.move_to(root, place).workspace.submission_directory
    submission.mkdir(parents=True)
    decode_tree(stream, submission)

    def receive_tree(target: Path) -> TreeSize:
        # The evaluator gets a copy of what is received.
        check_free_disk(place, min_free_bytes, 2 * job.commit_bytes)
        send(FrameKind.TREE_WANTED)
        return decode_tree(stream, target)

    if cache_bytes:
        cache = opened(TreeCache.open(place.parent, cache_bytes, place))
        checkout = cache.provide_tree(key, receive_tree)
    else:
        checkout = place / "tree"
        checkout.mkdir()
        receive_tree(checkout)
    moved = job.move_to(root, checkout)
    for _, directory in moved.workspace.make_sandboxed_view(root).writable_paths:
        directory.mkdir()
    return moved


def check_free_disk(place: Path, min_free_bytes: int, tree_bytes: int = 0) -> None:
    """Check that a disk has room for a tree, and that enough is left then. Raises: OSError."""
    free = shutil.disk_usage(place).free
    if free < min_free_bytes + tree_bytes:
        beside = f" beside a tree of {format_size(tree_bytes)}" if tree_bytes else ""
        what = (
            f"only {format_size(free)} are free; {format_size(min_free_bytes)} (limits.free_disk)"
            f" must remain{beside}"
        )
        raise OSError(errno.ENOSPC, what, str(place.parent))


def _read_job_description(stream: IO[bytes]) -> bytes:
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        raise StreamEnded
    if not line.strip().isdigit() or int(line) > _MAX_JOB_DESCRIPTION:
        raise BrokenStream("the stream does not begin with an evaluation")
    return read_exactly(stream, int(line))
