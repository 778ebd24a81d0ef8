"""The description of one job: what the node has to run, as JSON.

In a shared directory the file of the job description lies in the evaluation's directory, which the
sandbox does not show, and only the daemon's user can read it. Without a shared directory the daemon
sends that file by the stdin of srun (`job_transfer`). Nothing of the job description stands on a
command line, which other users could read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from tawebeval.config import LimitSettings, SandboxSettings
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.sandbox.environments import Environment
from tawebeval.sandbox.workspace import Workspace

JOB_DESCRIPTION_FILE_NAME = "order"
"""The name of the file of the job description in the evaluation's directory."""

NODE_PROTOCOL_VERSION = 4
"""The version of job descriptions and frames: daemon and nodes must have the same."""


@attrs.frozen
class JobDescription:
    """An evaluator to run: everything that a run of a sandbox needs."""

    command: str
    variables: Mapping[str, str]
    directory: Path
    root: Path
    checkout: Path
    commit_bytes: int
    commit_files: int
    limits: LimitSettings
    sandbox: SandboxSettings
    environment: Environment | None

    @property
    def workspace(self) -> Workspace:
        """The evaluation's directories."""
        return Workspace(self.root)

    def make_checkout(self) -> Checkout:
        """Return the checkout of the commit, which the daemon holds."""
        commit = Commit("", "", self.commit_files, self.commit_bytes)
        return Checkout(commit, self.checkout, lambda: None)

    def encode(self) -> bytes:
        """Return the job description as JSON."""
        environment = self.environment
        content: dict[str, Any] = {
            "version": NODE_PROTOCOL_VERSION,
            "command": self.command,
            "variables": dict(self.variables),
            "directory": str(self.directory),
            "root": str(self.root),
            "checkout": str(self.checkout),
            "commit_bytes": self.commit_bytes,
            "commit_files": self.commit_files,
            "limits": msgspec.to_builtins(self.limits),
            "sandbox": msgspec.to_builtins(self.sandbox),
            "environment": environment
            and [environment.name, str(environment.root), dict(environment.variables)],
        }
        return json.dumps(content).encode()

    def move_to(self, root: Path, checkout: Path) -> JobDescription:
        """Return the description for a node that has the directories elsewhere, below `root`."""
        there = Workspace(root)
        directory = self.directory.relative_to(self.workspace.tree_directory)
        return attrs.evolve(
            self,
            directory=there.tree_directory / directory,
            root=root,
            checkout=checkout,
        )

    def write_file(self) -> Path:
        """Write the description to the evaluation's directory; return its path. Blocks.

        The file has its name once it is whole. Raises: OSError.
        """
        path = self.root / JOB_DESCRIPTION_FILE_NAME
        new = path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(self.encode())
        new.replace(path)
        return path


class WrongVersion(Exception):
    """A job description of another version of tawebeval."""


def read_job_description(path: Path) -> JobDescription:
    """Return the job description in a file. Blocks. Raises: OSError, WrongVersion."""
    return decode_job_description(path.read_bytes())


def decode_job_description(encoded: bytes) -> JobDescription:
    """Return a job description. Raises: WrongVersion."""
    content = json.loads(encoded)
    version = content.pop("version")
    if version != NODE_PROTOCOL_VERSION:
        raise WrongVersion(
            f"the daemon's tawebeval sends job descriptions of version {version}, and this node's"
            f" takes version {NODE_PROTOCOL_VERSION}; install the same tawebeval on both"
        )
    environment = content["environment"]
    return JobDescription(
        **{
            **content,
            "directory": Path(content["directory"]),
            "root": Path(content["root"]),
            "checkout": Path(content["checkout"]),
            "limits": msgspec.convert(content["limits"], LimitSettings),
            "sandbox": msgspec.convert(content["sandbox"], SandboxSettings),
            "environment": environment
            and Environment(environment[0], Path(environment[1]), environment[2]),
        }
    )
