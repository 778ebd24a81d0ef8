"""The documents of the API. `scripts/document_types` writes this module from openapi.json.

docs/api.md describes their members. Later versions of the server may send further members.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias, TypedDict


class ProblemDocument(TypedDict):
    """A problem of the operator with its statement."""

    name: str
    title: str
    description: str
    fields: list[str]
    extensions: list[str]
    own_input: bool
    environment: str
    limits: Limits
    opens: str | None
    closes: str | None
    late: bool
    statement: str
    pictures: dict[str, str]


class JudgedProblem(TypedDict):
    """A problem of the operator. (`Problem` is the document of an error.)"""

    name: str
    title: str
    description: str
    fields: list[str]
    extensions: list[str]
    own_input: bool
    environment: str
    limits: Limits
    opens: str | None
    closes: str | None
    late: bool


class SubmittedFile(TypedDict):
    """A submitted file, with `text` or `base64`, or neither if its content is over what is left
    of 256 KiB for all files."""

    field: str
    filename: str
    size: int
    text: NotRequired[str]
    base64: NotRequired[str]


class Link(TypedDict):
    link: str
    expires: str


State: TypeAlias = Literal["queued", "fetching", "running", "finished", "failed", "cancelled"]


class Status(TypedDict):
    evaluation_id: str
    log_name: str
    state: State
    queue_place: int | None
    caller: str | None
    problem: str | None
    counts: bool
    repository: str
    commit_oid: str | None
    tree_oid: str | None
    directory: str
    evaluator_cmd: str
    seed: int
    build: Literal["running", "waiting", None]
    environment: ChosenEnvironment | None
    limits: Limits
    metadata: dict[str, str]
    submitted: str
    created: str
    fetching: str | None
    running: str | None
    ended: str | None
    exit: Exit | None
    usage: Usage | None
    error: Failure | None
    results: Results | None
    runner: Runner | None
    callback: Callback | None
    stderr: str
    events: EventCounts
    buffered_bytes: int
    archived: NotRequired[bool]


class EventCounts(TypedDict):
    buffered: int
    discarded: int


class Runner(TypedDict):
    kind: Literal["slurm"]
    job: str | None
    node: str | None
    queue_reason: str | None
    retries: int


class Limits(TypedDict):
    """The limits of the evaluation: the request's, or the operator's defaults. Until it runs, a
    change of the configuration may change them."""

    wall_clock: float
    cpu: int
    memory: int
    processes: int
    open_files: int
    file_size: int
    disk: int
    disk_files: int
    output: int
    stderr: int


class Exit(TypedDict):
    """How the evaluator's own process ended; one member is `null`. In the sandbox, status 128 +
    N is reported as signal N."""

    status: int | None
    signal: int | None


class Usage(TypedDict):
    """Resource use of all processes of the evaluation together; `null` if unknown. Without
    cgroups `cpu_seconds` misses processes that the evaluator did not wait for."""

    cpu_seconds: float | None
    peak_memory_bytes: int | None
    wall_seconds: float | None


class Failure(TypedDict):
    """Members of the final error event."""

    reason: str
    message: str


class Results(TypedDict):
    """Summary of the results that the evaluator has sent as data."""

    goals: dict[str, bool]
    goals_omitted: int
    cases: dict[str, int]
    progress: Progress | None
    score: Score | None


class Progress(TypedDict):
    done: int
    total: int


class Score(TypedDict):
    score: float
    maximum: float | None


class Callback(TypedDict):
    """State of the callback."""

    url: str
    state: Literal["waiting", "pending", "delivered", "refused", "given_up"]
    attempts: int
    last_error: str | None


class Summary(TypedDict):
    evaluation_id: str
    state: State
    caller: str | None
    problem: str | None
    counts: bool
    directory: str
    evaluator_cmd: str
    metadata: dict[str, str]
    submitted: str
    created: str
    ended: str | None
    error: Failure | None
    results: Results | None


class Standing(TypedDict):
    """What a caller has reached in a problem. A rerun takes the place of the evaluation that it
    repeats."""

    caller: str | None
    problem: str
    submissions: int
    evaluated: int
    last_submitted: str
    best: Summary


class TokenPermissions(TypedDict):
    """A caller, and what its token permits."""

    caller: str | None
    read_only: bool
    shared: bool
    problems: list[str] | None
    group: str | None
    supervises: dict[str, list[str]]


class Environment(TypedDict):
    name: str
    description: str
    digest: str | None


class ChosenEnvironment(TypedDict):
    """The environment of an evaluation."""

    name: str
    digest: str | None
