"""The form of `POST /evaluate`: its fields, their names and values (docs/api.md).

Every error names its field. A field `limits[NAME]` chooses a limit of the evaluation, in the range
that the operator has set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal, TypeAlias, TypeVar
from urllib.parse import unquote_to_bytes

import attrs
import msgspec
from msgspec import structs

from tawebeval.core.hosts import parse_server_address
from tawebeval.errors import InvalidField, format_size

MAX_FIELD_NAME_LENGTH = 251  # characters; NAME.txt is a file's name
FIELD_NAME_PATTERN = rf"[a-z][a-z0-9_]{{0,{MAX_FIELD_NAME_LENGTH - 1}}}"
"""Regular expression of the names of submission fields."""

MAX_FILENAME_BYTES = 255
"""The longest name that Linux file systems take, in bytes of UTF-8."""

_EXCERPT = 80  # characters of a wrong name, in its error
# RFC 8187, section 3.2.1. Python's codecs are not asked: they keep each unknown name for ever.
_EXTENDED = re.compile(r"([^']*)'[0-9A-Za-z-]*'((?:[!#$&+.^_`|~0-9A-Za-z-]|%[0-9A-Fa-f]{2})*)")
_CHARSETS = {"utf-8": "utf-8", "iso-8859-1": "iso-8859-1"}

S = TypeVar("S", bound=msgspec.Struct)

LimitUnit = Literal["seconds", "whole seconds", "bytes", "count"]

LIMIT_UNITS: Mapping[str, LimitUnit] = {
    "wall_clock": "seconds",
    "cpu": "whole seconds",
    "memory": "bytes",
    "processes": "count",
    "open_files": "count",
    "file_size": "bytes",
    "disk": "bytes",
    "disk_files": "count",
    "output": "bytes",
    "stderr": "bytes",
}
"""The unit of each limit that a request may choose, by its name in `[limits]`."""

ChosenLimits: TypeAlias = Mapping[str, int | float]
"""The limits that a request has chosen, by their names in `[limits]`."""

_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)([KMGT]?)(?:i?B)?", re.IGNORECASE)

_SYNTAX: Mapping[LimitUnit, tuple[re.Pattern[str], str]] = {
    "seconds": (
        re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?"),
        "a number of seconds, such as 10 or 2.5",
    ),
    "whole seconds": (re.compile("[0-9]{1,10}"), "a whole number of seconds, such as 10"),
    "bytes": (
        _SIZE,
        "a size: bytes, or a number with K, M, G or T (of 1024), such as 65536 or 256M",
    ),
    "count": (re.compile("[0-9]{1,10}"), "a whole number, such as 100"),
}


def get_base_name(name: str) -> str:
    r"""Return the last component of `name`; both `/` and `\` separate components.

    Raises ValueError for a component that cannot name a file: empty, `.`, `..`, with a NUL, over
    255 bytes, or not encodable as UTF-8 (docs/api.md).
    """
    base = name.replace("\\", "/").rpartition("/")[2]
    if base in ("", ".", ".."):
        raise ValueError(f"{name[-_EXCERPT:]!r} has no file name at its end")
    if "\0" in base:
        raise ValueError("a file name cannot contain NUL")
    try:
        length = len(base.encode())
    except UnicodeEncodeError:
        raise ValueError("a file name must be UTF-8") from None
    if length > MAX_FILENAME_BYTES:
        raise ValueError(f"the file name has {length} bytes; the limit is {MAX_FILENAME_BYTES}")
    return base


def decode_extended_filename(value: str) -> str:
    """Return the name in a parameter `filename*` (RFC 8187). Raises ValueError."""
    parts = _EXTENDED.fullmatch(value)
    charset = _CHARSETS.get(parts[1].lower()) if parts else None
    try:
        if parts and charset:
            return unquote_to_bytes(parts[2]).decode(charset)
    except UnicodeDecodeError:
        pass
    raise ValueError(
        f"malformed filename* {value[:_EXCERPT]!r}; write UTF-8''NAME or ISO-8859-1''NAME, with"
        " %XX for bytes other than letters and digits (RFC 8187)"
    )


@attrs.frozen
class LimitRange:
    """The allowed values of a limit: at least `minimum`, over 0, and at most `maximum`."""

    minimum: float
    maximum: float


def parse_limits(
    values: Mapping[str, str], limit_ranges: Mapping[str, LimitRange], over_maximum_hint: str = ""
) -> dict[str, int | float]:
    """Return the chosen limits of some values by name; an empty value chooses the default.

    `over_maximum_hint` ends the message about a value over its maximum.

    Raises: InvalidField, with the name of the form's field.
    """
    return {
        name: _parse_limit(name, value, limit_ranges[name], over_maximum_hint)
        for name, value in values.items()
        if value
    }


def _parse_limit(name: str, value: str, allowed: LimitRange, hint: str) -> int | float:
    unit = LIMIT_UNITS[name]
    pattern, words = _SYNTAX[unit]
    match = pattern.fullmatch(value)
    if match is None:
        raise InvalidField(f"limits[{name}]", f"{value!r} is not {words}")
    if unit == "bytes":
        number: int | float = _compute_size(match)
    else:
        number = float(value) if unit == "seconds" else int(value)
    if not 0 < number >= allowed.minimum:
        least = f"below the minimum, {describe_limit(name, allowed.minimum)}"
        why = least if allowed.minimum else "not above 0"
        raise InvalidField(f"limits[{name}]", f"{value!r} is {why}", limit=allowed.minimum)
    if number > allowed.maximum:
        raise InvalidField(
            f"limits[{name}]",
            f"{describe_limit(name, number)} is over the maximum,"
            f" {describe_limit(name, allowed.maximum)} (limits.maximum.{name}){hint}",
            limit=allowed.maximum,
        )
    return number


def choose_limits(defaults: S, chosen: ChosenLimits, ranges: Mapping[str, LimitRange]) -> S:
    """Return the limits of an evaluation: those that its request has chosen, else `defaults`.

    A restart may have lowered a maximum after the request: then the maximum holds.
    """
    if not chosen:
        return defaults
    changes = {name: min(value, ranges[name].maximum) for name, value in chosen.items()}
    return structs.replace(defaults, **changes)


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as "65536" or "256M"; None for another text."""
    match = _SIZE.fullmatch(text)
    return None if match is None else _compute_size(match)


def _compute_size(match: re.Match[str]) -> int:
    """Return the bytes of a match of `_SIZE`."""
    bits = 10 * (1 + "KMGT".index(match[2].upper())) if match[2] else 0
    return int(float(match[1]) * 2**bits)


def describe_limit(name: str, value: float) -> str:
    """Return the value of a limit with its unit."""
    match LIMIT_UNITS[name]:
        case "bytes":
            return format_size(value)
        case "count":
            return f"{value:.0f}"
        case _:
            return f"{value:g} s"


MAX_SEED = 2**31 - 1
MAX_CLONE_DEPTH = 2**31 - 2  # one more means "everything" to git
MAX_TRUNCATED_COMMAND_BYTES = 1024
"""Bytes of `evaluator_cmd` that are kept for the status after the evaluator's start."""

_SUBMISSION = re.compile(rf"submission\[({FIELD_NAME_PATTERN})\]")
_OID = re.compile(r"[0-9a-fA-F]{40}")
_SHA256_OID = re.compile(r"[0-9a-fA-F]{64}")
_DIGITS = re.compile(r"[0-9]{1,10}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# A URL of RFC 3986 without a fragment; `parse_server_address` checks the host.
_CALLBACK = re.compile(
    r"https?://[A-Za-z0-9._~:\[\]-]+([/?]([A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)?"
)
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)")
_SCP_LIKE = re.compile(r"(?:[A-Za-z0-9._][A-Za-z0-9._-]*@)?[A-Za-z0-9._][A-Za-z0-9._-]*:(?!:)\S+")
# Host and path of a URL, and of an scp-like address, without user name and port.
_URL_PLACE = re.compile(r"[A-Za-z]+://(?:[^/@]*@)?([A-Za-z0-9._-]+)(?::[0-9]+)?/+([^?#]+).*")
_SCP_PLACE = re.compile(r"(?:[^/@:]*@)?([A-Za-z0-9._-]+):/*([^/].*)")
# git-check-ref-format(1)
_BAD_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|^[-/.]|[/.]$|^@$")

MAX_FIELDS = 64
"""Fields of a form, including the files of the submission."""

TEXT_FIELD_SIZE_LIMITS: Mapping[str, int] = {
    "repository[url]": 2048,  # as most servers take
    "repository[branch]": 255,  # a file's name, as refs are
    "repository[depth]": 64,
    "commit_oid": 64,
    "directory": 4096,  # PATH_MAX
    "evaluator_cmd": 65536,
    "seed": 64,
    "environment": 64,
    "callback_url": 2048,
    **{f"limits[{name}]": 64 for name in LIMIT_UNITS},
}
"""The fields that are no files, with the largest size of each in bytes of UTF-8."""

DEFAULT_ENVIRONMENT_NAME = "default"
"""The name of the environment of requests that choose none: the machine's own programs."""

MAX_LABELS = 16
MAX_LABEL_BYTES = 256
LABEL_NAME_PATTERN = "[a-z0-9_.-]{1,64}"
LABEL_FIELD_PATTERN = re.compile(rf"metadata\[({LABEL_NAME_PATTERN})\]")
"""The names of the fields of labels."""

FIELD_ALIASES = {
    "oid": "commit_oid",
    "repositories[main][url]": "repository[url]",
    "repositories[main][branch]": "repository[branch]",
    "repositories[main][depth]": "repository[depth]",
}
"""Field names that clients of 2018 send (docs/api.md), and the present names."""


def draw_seed(random: Callable[[int], bytes]) -> int:
    """Return a seed for a request without one; `random(n)` returns n random bytes."""
    return int.from_bytes(random(4), "big") & MAX_SEED


@attrs.frozen
class Repository:
    """Repository of the evaluator.

    `branch` is fetched where the server does not serve single commits; `depth` is the number of
    commits of history to fetch.
    """

    url: str
    branch: str | None = None
    depth: int | None = None


@attrs.frozen
class SubmissionFile:
    """File of a submission: `field` is NAME of `submission[NAME]`, `filename` a base name.

    `size` is the number of bytes that were received, None if they are not known.
    """

    field: str
    filename: str
    size: int | None = attrs.field(default=None, eq=False)


@attrs.frozen
class EvaluationRequest:
    """A client's request for an evaluation.

    `commit_oid` is "" until the daemon has resolved the branch of the repository. `directory` is
    relative to the root of the repository; "" is the root. `callback_url` is the URL to notify when
    the evaluation ends, or None. `limits` replace the operator's defaults. `metadata` are the
    client's labels. `environment_name` is None for the default environment. `problem_name` is that
    of the operator's problem that the submission is for, None without one; `build_command` builds
    its tree, "" without one. `has_restricted_token` tells that the caller's token is restricted to
    problems. `submission_time` is when the files of a rerun were submitted first, in seconds since
    the epoch. `differs_from_problem` tells that a rerun has not what its problem sets, or that the
    submission has an own input.
    """

    repository: Repository
    commit_oid: str
    directory: str
    evaluator_cmd: str
    seed: int | None
    submission: tuple[SubmissionFile, ...]
    callback_url: str | None = None
    limits: ChosenLimits = attrs.field(factory=dict)
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    environment_name: str | None = None
    problem_name: str | None = None
    build_command: str = ""
    has_restricted_token: bool = False
    submission_time: float | None = None
    differs_from_problem: bool = False

    @property
    def truncated_command(self) -> str:
        """Beginning of the command, as the status document shows it."""
        command = self.evaluator_cmd.encode()[:MAX_TRUNCATED_COMMAND_BYTES]
        return command.decode("utf-8", "ignore")  # without a part of a character at the end

    def drop_start_only_fields(self) -> EvaluationRequest:
        """Return the request without the fields that only the evaluator's start needs."""
        return attrs.evolve(
            self,
            repository=attrs.evolve(self.repository, depth=None),
            evaluator_cmd=self.truncated_command,
            build_command="",
            submission=(),
            callback_url=None,
            limits={},
        )


def build_form_fields(request: EvaluationRequest) -> dict[str, str]:
    """Return the fields of a form that is parsed to this request; files and callback are left out.

    None is left out, and so is the empty commit of a branch that is not resolved.
    """
    repository = request.repository
    given: dict[str, str | int | None] = {
        "repository[url]": repository.url,
        "repository[branch]": repository.branch,
        "repository[depth]": repository.depth,
        "commit_oid": request.commit_oid or None,
        "directory": request.directory,
        "evaluator_cmd": request.evaluator_cmd,
        "seed": request.seed,
        "environment": request.environment_name,
        **{
            f"limits[{name}]": value if isinstance(value, int) else f"{value:.9f}"
            for name, value in request.limits.items()
        },
        **{f"metadata[{name}]": value for name, value in request.metadata.items()},
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def pack_request(request: EvaluationRequest) -> bytes:
    """Return the request as bytes, about as many as its texts have in UTF-8.

    A kept request is packed because a `str` may take four bytes for each character.
    """
    return msgspec.msgpack.encode(request)


@lru_cache(maxsize=32)  # an evaluation asks twenty times for its own; some are 100 KiB
def unpack_request(packed: bytes) -> EvaluationRequest:
    """Return the request that `pack_request` encoded."""
    return msgspec.msgpack.decode(packed, type=EvaluationRequest)


PERMITTED_PROBLEM_FORM_FIELDS = frozenset({"callback_url", "metadata"})
"""The fields that are no files, without a part in brackets, that a form for a problem may have.

Not the seed: who chooses it may know the test cases."""

ALTERING_FORM_FIELDS = frozenset({"seed", "limits", "commit_oid"})
"""Fields of the form of a rerun with which it tells nothing of what its problem sets."""

PERMITTED_RERUN_FORM_FIELDS = PERMITTED_PROBLEM_FORM_FIELDS | ALTERING_FORM_FIELDS
"""The same for the form of a rerun, unless the token is restricted to problems."""


OWN_INPUT_FIELD = "own_input"
"""The field of a file, in the form of a problem that permits it, which the submission shall read.

Its evaluation judges nothing, and counts for nothing."""


@attrs.frozen
class FormPreset:
    """What the daemon knows about a form before the form arrives.

    `preset_values` are the values of fields that are no files; the form replaces those that it has.
    `permitted_text_fields` are the fields that the form may have, as in
    `PERMITTED_PROBLEM_FORM_FIELDS`; None: any known field. `submission_field_names` are the names
    of the files that the form must have, empty for any, None for no files; besides, one for a
    problem that `permits_own_input` may have `OWN_INPUT_FIELD`. `preset_origin` names in messages
    what sets all other fields. A rerun that `uses_current_evaluator` takes what its
    problem sets now. The others are as in `EvaluationRequest`.
    """

    preset_origin: str = ""
    problem_name: str | None = None
    preset_values: Mapping[str, str] = attrs.field(factory=dict)
    permitted_text_fields: frozenset[str] | None = None
    submission_field_names: Sequence[str] | None = ()
    has_restricted_token: bool = False
    differs_from_problem: bool = False
    build_command: str = ""
    submission_time: float | None = None
    uses_current_evaluator: bool = False
    permits_own_input: bool = False

    def check_text_field(self, name: str) -> None:
        """Raise InvalidField if the form may not have this known field."""
        if name == "callback_url" and self.has_restricted_token:
            raise InvalidField(
                name, "not with a token restricted to problems; remove it from the form"
            )
        if (
            self.permitted_text_fields is not None
            and name.partition("[")[0] not in self.permitted_text_fields
        ):
            raise InvalidField(
                name, f"{self.preset_origin} sets this field; remove it from the form"
            )

    def check_submission_field(self, name: str) -> None:
        """Raise InvalidField if the form may not have the field submission[`name`]."""
        field = f"submission[{name}]"
        if self.submission_field_names is None:
            raise InvalidField(
                field, f"{self.preset_origin} has the files; remove it from the form"
            )
        if name == OWN_INPUT_FIELD and self.problem_name is not None:
            if not self.permits_own_input:
                raise InvalidField(field, f"{self.preset_origin} runs no own input; remove it")
        elif self.submission_field_names and name not in self.submission_field_names:
            raise InvalidField(
                field, f"unknown to {self.preset_origin}; {self._describe_submission()}"
            )

    def check_required_files(self, names: Collection[str]) -> None:
        """Raise InvalidField if the form lacks a file."""
        missing = [name for name in self.submission_field_names or () if name not in names]
        if missing:
            field = f"submission[{missing[0]}]"
            raise InvalidField(field, f"is required; {self._describe_submission()}")

    def _describe_submission(self) -> str:
        return "its fields: " + ", ".join(
            f"submission[{name}]" for name in self.submission_field_names or ()
        )


def parse_submission_file(name: str, filename: str | None) -> SubmissionFile | None:
    """Return the submission file for the form field `name`, or None for any other field.

    `filename` is the client's name of the file, None for a field that is no file. Raises
    InvalidField for a malformed submission field or file name.
    """
    if not name.startswith("submission"):
        return None
    match = _SUBMISSION.fullmatch(name)
    if match is None:
        raise InvalidField(
            name[:80],
            "bad field name; write submission[NAME], where NAME is a lower-case letter, then"
            f" lower-case letters, digits or _, at most {MAX_FIELD_NAME_LENGTH} characters",
        )
    if filename is None:
        return SubmissionFile(match[1], f"{match[1]}.txt")
    try:
        return SubmissionFile(match[1], get_base_name(filename))
    except ValueError as error:
        raise InvalidField(name, str(error)) from None


def parse_form(
    fields: Mapping[str, str],
    submission: Sequence[SubmissionFile],
    protocols: Sequence[str],
    limit_ranges: Mapping[str, LimitRange],
    environments: Collection[str] = (),
    problem_name: str | None = None,
    over_maximum_hint: str = "",
    unknown_names: Sequence[str] = (),
) -> EvaluationRequest:
    """Return the request of a form. Raises InvalidField.

    `fields` has the values of the fields that are no files, within `find_field_size_limit`.
    `protocols` are the protocols allowed for repositories, by git's names. `limit_ranges` are the
    allowed values of the limits, by their names in `[limits]`, `environments` the names of the
    configured environments. The form of a problem may have a branch in place of a commit.
    `over_maximum_hint` ends the message about a limit over its maximum. `unknown_names` are those
    of ignored fields: the message about a missing field has the nearest one.
    """
    if not submission:
        raise InvalidField(
            "submission",
            "no file was sent; send at least one field submission[NAME], such as"
            f" submission[source]{_find_near_name('submission[source]', unknown_names)}",
        )
    has_commit = (
        problem_name is None or "commit_oid" in fields or "repository[branch]" not in fields
    )
    for name in ("repository[url]", *(["commit_oid"] if has_commit else []), "evaluator_cmd"):
        _check_required(fields, name, unknown_names)
    commit_oid = _commit_oid(fields["commit_oid"]) if has_commit else ""
    evaluator_cmd = fields["evaluator_cmd"]
    if "\0" in evaluator_cmd:
        raise InvalidField("evaluator_cmd", "cannot contain NUL")
    return EvaluationRequest(
        repository=Repository(
            url=_url(fields, protocols),
            branch=_branch(fields.get("repository[branch]", "")),
            depth=_number(fields, "repository[depth]", 1, MAX_CLONE_DEPTH),
        ),
        commit_oid=commit_oid,
        directory=_directory(fields.get("directory", "")),
        evaluator_cmd=evaluator_cmd,
        seed=_number(fields, "seed", 0, MAX_SEED),
        submission=tuple(submission),
        callback_url=_callback_url(fields.get("callback_url", "")),
        metadata=_labels(fields),
        environment_name=parse_environment_name(fields.get("environment", ""), environments),
        limits=parse_limits(
            {name: fields.get(f"limits[{name}]", "") for name in LIMIT_UNITS},
            limit_ranges,
            over_maximum_hint,
        ),
        problem_name=problem_name,
    )


def _commit_oid(commit_oid: str) -> str:
    if _SHA256_OID.fullmatch(commit_oid):
        raise InvalidField(
            "commit_oid",
            f"{commit_oid!r} is of a repository with SHA-256 OIDs, which are not supported; use one"
            " with SHA-1 OIDs (`git init --object-format=sha1`)",
        )
    if not _OID.fullmatch(commit_oid):
        raise InvalidField(
            "commit_oid",
            f"{commit_oid!r} is not a whole commit OID (40 hexadecimal digits); print it by `git"
            " rev-parse COMMIT` in a clone, or by `git ls-remote URL BRANCH`",
        )
    return commit_oid.lower()


def find_field_size_limit(name: str) -> int | None:
    """Return the largest size of a field that is no file, in bytes; None for an unknown field.

    Raises InvalidField for an unknown limit, which would silently be the default, and for a
    malformed label.
    """
    if name in TEXT_FIELD_SIZE_LIMITS:
        return TEXT_FIELD_SIZE_LIMITS[name]
    if name.startswith("limits["):
        known = ", ".join(LIMIT_UNITS)
        raise InvalidField(name[:80], f"no such limit; write limits[NAME], where NAME is {known}")
    if name.startswith("metadata["):
        if not LABEL_FIELD_PATTERN.fullmatch(name):
            raise InvalidField(name[:80], format_label_name_error())
        return MAX_LABEL_BYTES
    return None


def format_label_name_error() -> str:
    """Return the message about a malformed name of a label."""
    return "bad label; write metadata[NAME], where NAME is 1 to 64 of the characters a-z 0-9 _ . -"


def _labels(fields: Mapping[str, str]) -> Mapping[str, str]:
    labels = {}
    for name, value in fields.items():
        match = LABEL_FIELD_PATTERN.fullmatch(name)
        if match is not None and value:
            if _CONTROL.search(value):
                raise InvalidField(name, "cannot contain control characters")
            labels[match[1]] = value
    if len(labels) > MAX_LABELS:
        raise InvalidField("metadata", f"{len(labels)} labels were sent; the limit is {MAX_LABELS}")
    return labels


def parse_environment_name(name: str, known_names: Collection[str]) -> str | None:
    """Return the name of an environment; None for the default. Raises InvalidField."""
    if name in ("", DEFAULT_ENVIRONMENT_NAME):
        return None
    if name not in known_names:
        allowed = ", ".join((DEFAULT_ENVIRONMENT_NAME, *known_names))
        raise InvalidField("environment", f"no environment {name!r} here; allowed: {allowed}")
    return name


def _check_required(fields: Mapping[str, str], name: str, unknown_names: Sequence[str]) -> None:
    value = fields.get(name)
    if value is None:
        raise InvalidField(name, f"is required{_find_near_name(name, unknown_names)}")
    if not value.strip():
        raise InvalidField(name, "is empty")


def _find_near_name(name: str, unknown_names: Sequence[str]) -> str:
    near = get_close_matches(name, unknown_names, 1, 0.5)
    return f"; {near[0]!r} is no known field: rename it to {name}" if near else ""


def _number(fields: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    value = fields.get(name, "")
    if not value:
        return None
    if not _DIGITS.fullmatch(value) or not least <= int(value) <= most:
        raise InvalidField(name, f"{value!r} is not a whole number from {least} to {most}")
    return int(value)


def _url(fields: Mapping[str, str], protocols: Sequence[str]) -> str:
    url = fields["repository[url]"]
    try:
        check_repository_url(url, protocols)
    except ValueError as error:
        raise InvalidField("repository[url]", str(error)) from None
    return url


def check_repository_url(url: str, protocols: Sequence[str]) -> None:
    """Raise ValueError, with a message for people, unless this is the URL of a repository.

    `protocols` are those allowed, by git's names. The host is not checked against any rule.
    """
    if _CONTROL.search(url) or url != url.strip():
        raise ValueError("cannot contain control characters or surrounding space")
    match = _SCHEME.fullmatch(url)
    if match is not None:
        protocol, rest = match.groups()
        userinfo, _, host = re.split(r"[/?#]", rest)[0].rpartition("@")
        if userinfo and (protocol != "ssh" or ":" in userinfo):
            raise ValueError(
                "cannot contain credentials (a user name or password); the operator sets them"
                " (repositories.credentials)"
            )
        if userinfo.startswith("-") or host.startswith("-"):
            raise ValueError("has a host that begins with '-'")
    elif url.startswith("/"):
        protocol = "file"
    elif _SCP_LIKE.fullmatch(url):
        protocol = "ssh"
    else:
        raise ValueError("is not the URL of a repository, such as https://example.org/problems.git")
    if protocol not in protocols:
        raise ValueError(_explain_protocol(url, protocol, protocols))
    parse_server_address(url)


def _explain_protocol(url: str, protocol: str, protocols: Sequence[str]) -> str:
    """Return the message about a protocol that is not allowed, with the https URL if there is one.

    The https URL is what GitHub, GitLab and others serve a repository by.
    """
    allowed = ", ".join(protocols) or "none (repositories.protocols)"
    message = f"this server does not fetch over {protocol} (allowed: {allowed})"
    place = (_URL_PLACE if "://" in url else _SCP_PLACE).fullmatch(url)
    if "https" in protocols and protocol != "file" and place is not None:
        return f"{message}; try https://{place[1]}/{place[2]}"
    return f"{message}; use another URL, or ask the operator (repositories.protocols)"


def _branch(branch: str) -> str | None:
    name = branch.removeprefix("refs/heads/")
    if _BAD_BRANCH.search(branch) or _BAD_BRANCH.search(name):
        raise InvalidField("repository[branch]", f"{branch!r} is not a branch name, such as main")
    return name or None


def _directory(directory: str) -> str:
    if "\0" in directory:
        raise InvalidField("directory", "cannot contain NUL")
    if directory.startswith("/"):
        raise InvalidField(
            "directory", f"{directory!r} is absolute; write it relative to the repository's root"
        )
    parts = [part for part in directory.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidField(
            "directory",
            f"{directory[:80]!r} contains '..'; write it relative to the repository's root",
        )
    return "/".join(parts)


def _callback_url(url: str) -> str | None:
    name = "callback_url"
    if not url:
        return None
    if "@" in re.split(r"[/?#]", url.partition("://")[2])[0]:
        raise InvalidField(
            name,
            "cannot contain credentials (a user name or password); callbacks are signed instead",
        )
    if not _CALLBACK.fullmatch(url):
        raise InvalidField(
            name, "is not an http or https URL of ASCII characters without a fragment"
        )
    try:
        parse_server_address(url)
    except ValueError as error:
        raise InvalidField(name, str(error)) from None
    return url
