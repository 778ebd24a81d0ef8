"""One job of an evaluation: its directory, which daemon and node see.

Each job has a directory of its own below that of the evaluation. So a job of an earlier attempt,
which may still run on a node that does not answer, writes into no file of a later one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any

import attrs
import msgspec
from twisted.internet.interfaces import IDelayedCall

from tawebeval.deferreds import OneShotEvent
from tawebeval.linux import kernel_files, starter
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.starter_client import ProgramState, collect_program
from tawebeval.sandbox import broker
from tawebeval.sandbox.workspace import Workspace, WorkspaceView
from tawebeval.slurm import node
from tawebeval.slurm.jobs import QueuedJob

NODE_PYTHON = "/usr/bin/python3"
"""The Python of the program on the nodes, which is also that of evaluators."""

_PREFIX = "job-"
_PROGRAMS = "node-"  # begins the names of the programs on the nodes
_NAME_LENGTH = 16  # of an evaluation's name in the log, which begins its directory's name
_STDERR_TAIL = 8 * 1024  # bytes of srun's stderr that are read
_PROGRAM = collect_program(node, broker, kernel_files, starter)
_DIGEST = hashlib.sha256(b"\0".join(_PROGRAM.values())).hexdigest()[:16]

_writing = Lock()  # several threads may start jobs at once


def write_node_program(parent: Path) -> Path:
    """Write the program of the nodes below a shared directory; return its path. Blocks.

    Raises: OSError.
    """
    target = parent / f"{_PROGRAMS}{_DIGEST}"
    with _writing:
        if not target.exists():
            new = parent / f"{_PROGRAMS}new"
            for name, content in _PROGRAM.items():  # no archive: each job would compile it
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(content)
            new.rename(target)
    return target


def remove_other_node_programs(parent: Path) -> None:
    """Remove the programs of nodes of other versions of tawebeval. Blocks. Raises: OSError."""
    for program in parent.glob(f"{_PROGRAMS}*"):
        if program.name != f"{_PROGRAMS}{_DIGEST}":
            remove_tree(program)


class NodeState(ProgramState, frozen=True):
    """The content of the file `state` of a job (`node.NodeJob`)."""

    node: str | None = None
    job: str | None = None
    exceeded: str | None = None
    unlinked_bytes: int = 0
    error: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether nothing more comes from the node."""
        return self.error is not None or self.is_output_complete


@attrs.frozen
class JobWorkspace(Workspace):
    """The directories of one job; only the submission is that of the evaluation."""

    @property
    def submission_directory(self) -> Path:
        """The directory of the submitted files."""
        return Workspace(self.root.parent).submission_directory

    def make_sandboxed_view(self, root: Path) -> WorkspaceView:
        """Return the view of an evaluator that sees its own workspace only, at `root`."""
        return attrs.evolve(super().make_sandboxed_view(root), ours=[self.root, self.root.parent])


@attrs.define(eq=False)
class Attempt:
    """One job, and its srun.

    - `job_name`: its name in Slurm; `workspace`: its directories, `evaluation` that of the events.
    - `job_identifier`, `node`: None until known. `state`: what the node has told; None before.
    - `job`: what squeue said last, since the end of srun. `deadline`: of the wait for more.
    - `is_over`: whether its end was taken: nothing more counts.
    - `has_srun`: whether the starter runs an srun for it. `srun_ended`: happens at its end.
    """

    job_name: str
    workspace: JobWorkspace
    evaluation: Workspace
    job_identifier: str | None = None
    node: str | None = None
    state: NodeState | None = None
    is_over: bool = False
    has_srun: bool = True
    job: QueuedJob | None = None
    deadline: IDelayedCall | None = None
    srun_ended: OneShotEvent[None] = attrs.field(factory=OneShotEvent)

    @classmethod
    def create(cls, job_prefix: str, session: str, evaluation: Workspace) -> Attempt:
        """Return a new job, of which nothing is on the disk yet; its name ends in `session`."""
        token = token_hex(4) + session
        name = f"{job_prefix}{evaluation.root.name[:_NAME_LENGTH]}-{token}"
        return cls(name, JobWorkspace(evaluation.root / f"{_PREFIX}{token}"), evaluation)

    @classmethod
    def load(cls, described: Mapping[str, Any], evaluation: Workspace) -> Attempt:
        """Return the job that `describe` has described."""
        name = described["job_name"]
        workspace = JobWorkspace(evaluation.root / f"{_PREFIX}{name.rpartition('-')[2]}")
        return cls(name, workspace, evaluation, described["job"], described["node"])

    def describe(self) -> dict[str, Any]:
        """Return what `load` needs, as JSON."""
        return {"job_name": self.job_name, "job": self.job_identifier, "node": self.node}

    @property
    def directory(self) -> Path:
        """The job's directory, which is also the name of srun for the starter."""
        return self.workspace.root

    @property
    def state_file(self) -> Path:
        """The file that the node writes."""
        return self.directory / "state"

    @property
    def has_begun(self) -> bool:
        """Whether the node has started the evaluator."""
        return self.state is not None and self.state.error is None

    # On the disk; these block

    def make_directories(self) -> None:
        """Make the directories and files that the node finds. Raises: OSError."""
        for _, directory in self.workspace.make_sandboxed_view(self.directory).writable_paths:
            directory.mkdir(parents=True, exist_ok=True)
        self.workspace.output_directory.mkdir(mode=0o700)
        (self.directory / "signal").touch(0o600)

    def write_start(self, specification: Mapping[str, Any]) -> None:
        """Write what the node has to start. Raises: OSError."""
        path = self.workspace.output_directory / "start"
        path.touch(0o600)
        path.write_text(json.dumps(specification))

    def read_start(self, other: Attempt) -> dict[str, Any]:
        """Return what another job has to start, for the directories of this job.

        The names of these directories are random, and nothing else contains them. Raises: OSError;
        ValueError, if the description is damaged.
        """
        text = (other.workspace.output_directory / "start").read_text()
        found: dict[str, Any] = json.loads(text.replace(other.directory.name, self.directory.name))
        return found

    def read_state(self) -> NodeState | None:
        """Return what the node has told; None before. Raises: OSError.

        Once the evaluator runs, its output is where events are made of it.
        """
        try:
            state = msgspec.json.decode(self.state_file.read_bytes(), type=NodeState)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        if state.error is None:
            own, target = self.workspace.output_directory, self.evaluation.output_directory
            target.mkdir(exist_ok=True)
            for name in ("stdout", "stderr"):
                with suppress(FileNotFoundError):
                    (own / name).rename(target / name)
                with suppress(FileNotFoundError):  # NFS asks its server for the size
                    os.close(os.open(target / name, os.O_RDONLY | os.O_CLOEXEC))
        return state

    def has_printed(self) -> bool:
        """Tell whether the evaluator has printed anything."""
        return any(
            (directory / name).exists() and (directory / name).stat().st_size
            for directory in (self.workspace.output_directory, self.evaluation.output_directory)
            for name in ("stdout", "stderr")
        )

    def write_signal(self, number: int) -> None:
        """Let the node send a signal to the evaluator. Raises: OSError."""
        with (self.directory / "signal").open("a") as file:
            file.write(f"{number}\n")

    def read_srun_stderr(self) -> str:
        """Return the end of what srun has printed on stderr."""
        with suppress(OSError):
            return (self.directory / "stderr").read_bytes()[-_STDERR_TAIL:].decode(errors="replace")
        return ""

    def remove(self) -> None:
        """Remove the directory. Raises: OSError."""
        remove_tree(self.directory)


def build_node_command(program: Path, arguments: Sequence[str]) -> Sequence[str]:
    """Return what a job runs."""
    return [NODE_PYTHON, "-I", "-S", str(program), *arguments]
