"""The forms that begin evaluations, parsed while they arrive and written to disk.

twisted.web would hold the whole form in memory, twice, and drop file names. `FormReceiver` holds
only text fields, each within its limit, and the chunks that `UploadWriter` collects.

A small form is written by one call of a thread, when the form is complete. Of a large form, one
call writes a batch while the next batch is gathered; when that is full, too, the connection is not
read until the call has returned. So a slow disk slows down the client that uploads, and no other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    content_disposition_unquote,
    parse_options_header,
)
from twisted.logger import Logger

from tawebeval.archive.files import WorkspaceSubmission
from tawebeval.config import Configuration
from tawebeval.core.form import (
    ALTERING_FORM_FIELDS,
    FIELD_ALIASES,
    MAX_FIELDS,
    OWN_INPUT_FIELD,
    PERMITTED_PROBLEM_FORM_FIELDS,
    PERMITTED_RERUN_FORM_FIELDS,
    FormPreset,
    SubmissionFile,
    build_form_fields,
    decode_extended_filename,
    find_field_size_limit,
    parse_form,
    parse_submission_file,
)
from tawebeval.deferreds import Condition, WorkerThreads, run_in_background
from tawebeval.errors import (
    AccessDenied,
    EvaluationExpired,
    InvalidField,
    MalformedRequest,
    ProblemClosed,
    ProblemNotFound,
    RequestError,
    RequestTooLarge,
    SubmissionDiscarded,
    UnsupportedMediaType,
    format_size,
)
from tawebeval.evaluations.service import EvaluationRegistry, ReceivedForm, SubmissionStore
from tawebeval.linux.filetree import add_path_to_errors
from tawebeval.web.auth import check_problem_open
from tawebeval.web.server.channel import ApiRequest
from tawebeval.web.server.messages import (
    get_header,
    get_header_elements,
    get_query_argument,
    report_storage_error,
)

WRITE_BATCH_BYTES = 512 * 1024
"""Bytes of a form that are gathered before a thread writes them; fewer at its end."""

_FILE_MEMORY = 1024  # bytes of memory that a file takes besides its content
_MEMORY = 32 * 2**20  # bytes of all forms that may wait for the disk

_MAX_PART_HEADER_BYTES = 2048  # of one part
_MAX_PARAMETERS = 32  # and folded lines, of the headers of one part
_MAX_UNKNOWN_NAMES = 16  # of ignored fields, for a message
_MAX_KEY = 255  # characters of an Idempotency-Key
_PER_FILE = 8192  # bytes of disk that a file and its directory take, of whatever size
# A parameter whose value is in quotes, or is written without quotes that it needs.
_PARAMETER = re.compile(r'; *([A-Za-z0-9*-]+) *= *("[^"\\]*"|"(?:[^"\\]|\\.)*+"|[^";]*)')
_BROWSERS_DISPOSITION = re.compile(r'form-data; name="[^"]*"(?:; filename="[^"]*")?')
_QUOTED = re.compile(rb'"[^"]*"')  # as browsers quote: names may have semicolons
_IDENTITY_CODINGS = ("7bit", "8bit", "binary", "identity")
_NOT_UTF8 = "the headers of a part must be UTF-8, with the names in them"

log = Logger()


@attrs.define
class UnwrittenUploads:
    """Counter of the bytes of all forms that are gathered or being written."""

    size_bytes: int = 0

    @property
    def is_memory_full(self) -> bool:
        """Whether forms must wait for the disk before they receive more."""
        return self.size_bytes >= _MEMORY


@attrs.define
class _Piece:
    """A part of a file; `begins` is whether it is the first part.

    `target` is an existing file of which the whole file is to be a hard link.
    """

    path: Path
    begins: bool
    target: Path | None = None
    content: bytearray = attrs.field(factory=bytearray)


@attrs.define(eq=False)
class UploadWriter:
    """Writer of the files of one form below `directory`, which the first write creates.

    `has_begun_writing` is whether `directory` may exist.
    """

    directory: Path
    _source: ApiRequest
    _unwritten: UnwrittenUploads
    _threads: WorkerThreads
    has_begun_writing: bool = False
    _gathered: list[_Piece] = attrs.field(factory=list)
    _size: int = 0  # bytes of memory of the gathered pieces
    _file: Path = Path()  # the file that is arriving
    _complete: bool = False
    _writing: bool = False
    _error: Exception | None = None
    _batch_written: Condition = attrs.field(factory=Condition)
    _on_idle: Callable[[], object] | None = None

    def begin_file(self, path: Path) -> None:
        """Begin a file at a path relative to the directory."""
        self._file = path
        self._gather(_Piece(path, begins=True), _FILE_MEMORY)

    def hardlink_file(self, path: Path, target: Path) -> None:
        """Make the file at `path` a hard link to `target`."""
        self._gather(_Piece(path, begins=True, target=target), _FILE_MEMORY)

    def add_content(self, content: bytes | bytearray) -> None:
        """Add content to the file that was begun last."""
        if not self._gathered:
            self._gather(_Piece(self._file, begins=False), _FILE_MEMORY)
        self._gathered[-1].content += content
        self._count(len(content))
        if self._writing:
            if self._is_due:
                self._source.pause_body()
        else:
            self._write_if_due()

    def _gather(self, piece: _Piece, size: int) -> None:
        self._gathered.append(piece)
        self._count(size)

    def _count(self, size: int) -> None:
        self._size += size
        self._unwritten.size_bytes += size

    async def finish(self) -> None:
        """Return when all files are written. May be cancelled. Raises: OSError."""
        self._complete = True
        if not self._writing:
            self._write_if_due()
        while self._writing:
            await self._batch_written.wait()
        if self._error is not None:
            raise self._error

    def stop_writing(self, on_idle: Callable[[], object]) -> None:
        """Write nothing more; call `on_idle()` when no thread writes any more."""
        self._take_gathered()
        if self._writing:
            self._on_idle = on_idle
        else:
            on_idle()

    def _take_gathered(self) -> list[_Piece]:
        gathered, self._gathered = self._gathered, []
        self._count(-self._size)
        return gathered

    @property
    def _is_due(self) -> bool:
        """Whether the gathered pieces are to be written once no thread writes."""
        if self._error is not None or not self._gathered:
            return False
        return self._complete or self._size >= WRITE_BATCH_BYTES or self._unwritten.is_memory_full

    def _write_if_due(self) -> None:
        if self._is_due:
            self._writing = self.has_begun_writing = True
            run_in_background(self._write(), log, "defect: an upload could not be written")

    async def _write(self) -> None:
        try:
            while self._is_due:
                size = self._size
                pieces = self._take_gathered()
                self._unwritten.size_bytes += size
                try:
                    await self._threads.run_in_thread(_write, self.directory, pieces)
                finally:
                    self._unwritten.size_bytes -= size
                self._source.resume_body()
        except Exception as error:  # noqa: BLE001  (the client is told of any error)
            self._error = error
        self._writing = False
        self._batch_written.notify()
        if self._on_idle is not None:
            self._on_idle()
        elif self._error is not None and not self._complete:
            self._source.refuse_request(self._error)


def _write(directory: Path, pieces: list[_Piece]) -> None:
    """Write pieces of files in order. Blocks. Raises: OSError."""
    # Not its parents: those are made with a mode that keeps other users out.
    directory.mkdir(mode=0o755, exist_ok=True)
    for piece in pieces:
        path = directory / piece.path
        if piece.begins:
            path.parent.mkdir(mode=0o755, parents=True)
        if piece.target is not None:
            path.hardlink_to(piece.target)
            continue
        # Unbuffered: bytes that the disk has refused must not be written again by close().
        with (
            add_path_to_errors(path),
            open(path, "xb" if piece.begins else "ab", buffering=0) as file,
        ):
            rest = memoryview(piece.content)
            while rest:
                rest = rest[file.write(rest) :]


class _FormParser(PushMultipartParser):  # type: ignore[misc]  # it has no types
    """Parser that limits the headers of each part.

    It copies a header for each of its folded lines, and takes 2 µs for each parameter.
    """

    _header_bytes = 0  # of the arriving part, like the next
    _parameters = 0  # and folded lines

    def _on_segment_start(self) -> None:
        self._header_bytes = self._parameters = 0
        super()._on_segment_start()

    def _on_segment_headerline(self, line: bytes) -> None:
        self._header_bytes += len(line)
        if self._header_bytes > _MAX_PART_HEADER_BYTES:
            raise ParserLimitReached(f"a part has over {format_size(_MAX_PART_HEADER_BYTES)}")
        self._parameters += _QUOTED.sub(b"", line).count(b";") + (line[:1] in (b" ", b"\t"))
        if self._parameters > _MAX_PARAMETERS:
            raise ParserLimitReached(
                f"a part has over {_MAX_PARAMETERS} parameters and folded lines"
            )
        super()._on_segment_headerline(line)


@attrs.define(eq=False)
class FormReceiver:
    """Parses one form; `files` writes its files below the subdirectory `submission`.

    `idempotency_key` is the header `Idempotency-Key`. `received_bytes` is the number of bytes
    received; the budget of `submissions` counts them for the `caller`, and what each file takes
    besides, until the directory is removed. `target` is what the form is for: the same form for
    another target is another form. `preset` is what is known about the form. `use_kept` returns the
    submission that is to run again; such a form needs no body, and its bytes do not count.
    `refusal` is why the form can begin no evaluation, although its key may name one; then `preset`
    is unknown. All methods raise RequestError. The first byte of the body creates the directory.
    """

    _files: UploadWriter
    idempotency_key: str | None
    _configuration: Configuration
    _submissions: SubmissionStore
    _caller: str
    _target: str = ""
    _preset: FormPreset = attrs.field(factory=FormPreset)
    _check_open: Callable[[str | None], object] = lambda problem: None
    _use_kept: Callable[[], AbstractAsyncContextManager[WorkspaceSubmission]] | None = None
    _refusal: RequestError | None = None
    received_bytes: int = 0
    _stored_bytes: int = 0  # that count for the caller
    _parser: _FormParser | None = None
    _expected_start: bytes = b""
    _begun: bytes = b""  # the first bytes, at least as many as these
    _fields: dict[str, bytes] = attrs.field(factory=dict)  # in UTF-8
    _unknown_names: list[str] = attrs.field(factory=list)
    _submission: list[SubmissionFile] = attrs.field(factory=list)
    _digests: dict[str, bytes] = attrs.field(factory=dict)
    # The arriving part: its text or file; neither if the field is unknown.
    _name: str = ""
    _text: bytearray | None = None
    _max_text: int = 0  # bytes that the text may have
    _in_file: bool = False
    _file_bytes: int = 0
    _must_be_empty: bool = False  # a file without a name
    _hash: Any = attrs.field(factory=hashlib.sha256)

    def check_headers(self, content_type: str, length: int | None) -> None:
        """Check the headers, which make the parser. `length` is None if unknown."""
        if self._use_kept is not None and not length and not content_type:
            return
        media_type, options = parse_options_header(content_type)
        if media_type != "multipart/form-data":
            raise UnsupportedMediaType(
                f"the body is {media_type or 'of no declared media type'}; send"
                " multipart/form-data, as `curl -F` or a browser's FormData does"
            )
        if length is not None and length > self._configuration.limits.request_body:
            raise self._make_length_error(f"is {format_size(length)}; the limit is")
        boundary = options.get("boundary", "")
        if not boundary:
            raise MalformedRequest(
                "the Content-Type has no boundary; leave the header to the library that makes the"
                " form, such as `curl -F` or FormData"
            )
        try:
            self._parser = parser = _FormParser(
                boundary,
                content_length=-1 if length is None else length,
                max_segment_count=MAX_FIELDS,
            )
        except MultipartError as error:
            raise _make_form_error(error) from None
        self._expected_start = b"\r\n--" + parser.boundary
        if self._use_kept is None:
            self._submissions.budget.check_amount(length or 0, self._caller)

    def _make_length_error(self, words: str) -> RequestTooLarge:
        most = self._configuration.limits.request_body
        limit = f"{format_size(most)} (limits.request_body)"
        return RequestTooLarge(f"request body {words} {limit}", limit=most)

    def feed(self, chunk: bytes) -> None:
        """Parse a part of the body."""
        if self._parser is None:
            raise UnsupportedMediaType("the body has no declared media type")
        self.received_bytes += len(chunk)
        if self.received_bytes > self._configuration.limits.request_body:
            raise self._make_length_error("is over")
        if self._use_kept is None:
            self._count_stored(len(chunk))
        if len(self._begun) < len(self._expected_start):
            self._check_beginning(chunk)
        try:
            for event in self._parser.parse(chunk):
                if isinstance(event, MultipartSegment):
                    self._begin(event)
                elif event is None:
                    self._end()
                else:
                    self._take(event)
        except MultipartError as error:
            raise _make_form_error(error) from None

    def _count_stored(self, size: int) -> None:
        self._submissions.budget.take_within_quota(size, self._caller)
        self._stored_bytes += size

    def _check_beginning(self, chunk: bytes) -> None:
        """Refuse a preamble before the first boundary, which RFC 2046 would allow.

        The parser overlooks a first boundary that arrives in pieces.
        """
        begin = self._expected_start
        self._begun += chunk[: len(begin)]
        begun = self._begun if self._begun[:1] == begin[:1] else begin[:2] + self._begun
        if not begin.startswith(begun[: len(begin)]):
            raise MalformedRequest("the form does not begin with the boundary of its Content-Type")

    def finish_parsing(self) -> None:
        """Parse the end of the body."""
        try:
            if self._parser is not None:
                self._parser.close()
        except MultipartError as error:
            raise _make_form_error(error) from None

    def compute_digest(self) -> bytes:
        """Return what identifies the content of the parsed form."""
        digests = sorted(self._digests.items())
        return hashlib.sha256(repr((self._target, digests)).encode()).digest()

    async def wait_until_stored(self) -> ReceivedForm:
        """Return the parsed form once its files are on disk."""
        if self._refusal is not None:
            raise self._refusal
        if self._use_kept is None:
            return await self._finish(self._preset)
        async with self._use_kept() as kept:
            return await self._finish(self._take_kept(kept))

    async def _finish(self, preset: FormPreset) -> ReceivedForm:
        self._check_open(preset.problem_name)  # the form may have taken hours
        fields = {name: text.decode() for name, text in self._fields.items()}
        preset.check_required_files([file.field for file in self._submission])
        configuration = self._configuration
        request = parse_form(
            {**preset.preset_values, **fields},
            self._submission,
            configuration.repositories.protocols,
            configuration.limits.requestable_ranges,
            configuration.environments,
            preset.problem_name,
            "; the operator can raise it",
            self._unknown_names,
        )
        try:
            await self._files.finish()
        except FileNotFoundError as error:
            if self._use_kept is None:
                raise report_storage_error(error) from None
            raise SubmissionDiscarded from None  # meanwhile
        except OSError as error:
            raise report_storage_error(error) from None
        return ReceivedForm(
            attrs.evolve(
                request,
                build_command=preset.build_command,
                has_restricted_token=preset.has_restricted_token,
                differs_from_problem=preset.differs_from_problem
                or (
                    preset.problem_name is not None
                    and any(name.partition("[")[0] in ALTERING_FORM_FIELDS for name in fields)
                )
                or any(file.field == OWN_INPUT_FIELD for file in self._submission),
                submission_time=preset.submission_time,
            ),
            self._files.directory,
            self.idempotency_key,
            self.compute_digest(),
            self._stored_bytes,
        )

    def _take_kept(self, kept: WorkspaceSubmission) -> FormPreset:
        """Link the files of a kept submission; return the preset with its fields."""
        request, preset = kept.request, self._preset
        self._count_stored(kept.size_bytes)
        self._submission += request.submission
        for file in request.submission:
            path = Path("submission", file.field, file.filename)
            self._files.hardlink_file(path, kept.workspace.locate_submitted_file(file))
        values, build = build_form_fields(request), request.build_command
        if preset.uses_current_evaluator:
            if request.problem_name is None:
                raise MalformedRequest("evaluator: the evaluation is for no problem")
            problem = self._configuration.problems.get(request.problem_name)
            if problem is None:
                raise ProblemNotFound(request.problem_name)
            kept_values = {
                name: value
                for name, value in values.items()
                if (name == "seed" and not request.differs_from_problem)
                or name.startswith("metadata[")
            }
            values, build = {**problem.form_fields, **kept_values}, problem.build
        return attrs.evolve(
            preset,
            preset_values=values,
            problem_name=request.problem_name,
            build_command=build,
            # Also if a supervisor runs it again, for its caller reads it.
            has_restricted_token=preset.has_restricted_token or request.has_restricted_token,
            # It may repeat an old commit, and must not undo what a mended evaluator has found.
            differs_from_problem=not preset.uses_current_evaluator,
            submission_time=request.submission_time,
        )

    def abandon(self) -> None:
        """Write nothing more, then remove what is written."""
        self._files.stop_writing(self._discard)

    def _discard(self) -> None:
        if self._files.has_begun_writing:
            self._submissions.discard_upload(
                self._files.directory, self._stored_bytes, self._caller
            )
        else:
            self._submissions.budget.give_back(self._stored_bytes, self._caller)

    def _begin(self, part: MultipartSegment) -> None:
        # The parser refuses it only where the line arrives in pieces.
        if any("\n" in value for _, value in part.headerlist):
            raise MalformedRequest("a header in the form has a line feed without a carriage return")
        name, filename = _read_disposition(part)
        name = self._name = FIELD_ALIASES.get(name, name)
        self._hash = hashlib.sha256(repr((name, filename)).encode("utf-8", "replace"))
        file = parse_submission_file(name, filename or None)
        limit = find_field_size_limit(name) if file is None else None
        # Browsers send an empty name and no content for an input without a file.
        self._must_be_empty = file is not None and filename == ""
        if self._must_be_empty:
            return
        if file is None and limit is None:
            if len(self._unknown_names) < _MAX_UNKNOWN_NAMES:
                self._unknown_names.append(name[:80])
            return
        for header in ("Content-Transfer-Encoding", "Content-Encoding"):
            coding = part.header(header, "").strip(" \t")
            if coding and coding.lower() not in _IDENTITY_CODINGS:
                raise InvalidField(
                    name,
                    f"the {header} {coding[:80]!r} is not supported; send the bytes themselves"
                    " (RFC 7578, sections 4.7 and 4.8)",
                )
        if name in self._digests:
            raise InvalidField(name, "the field is repeated; send it once")
        self._digests[name] = b""
        if file is None:
            self._preset.check_text_field(name)
            self._text = bytearray()
            self._max_text = limit or 0
        else:
            self._preset.check_submission_field(file.field)
            self._count_stored(_PER_FILE)
            self._submission.append(file)
            self._in_file, self._file_bytes = True, 0
            self._files.begin_file(Path("submission", file.field, file.filename))

    def _take(self, chunk: bytes | bytearray) -> None:
        if self.idempotency_key is not None:
            self._hash.update(chunk)
        if self._must_be_empty:
            raise InvalidField(self._name, "the file has content and no name; send a file name")
        if self._in_file:
            self._file_bytes += len(chunk)
            self._files.add_content(chunk)
        elif self._text is not None:
            self._take_text(self._text, chunk)

    def _take_text(self, text: bytearray, chunk: bytes | bytearray) -> None:
        size, most = len(text) + len(chunk), self._max_text
        if size > most:
            raise RequestTooLarge(
                f"{self._name}: the field is over {format_size(most)}",
                field=self._name,
                size=size,
                limit=most,
            )
        text += chunk

    def _end(self) -> None:
        if self._in_file:
            self._in_file = False
            self._submission[-1] = attrs.evolve(self._submission[-1], size=self._file_bytes)
        elif self._text is not None:
            try:
                self._text.decode()
            except UnicodeDecodeError:
                raise InvalidField(self._name, "is not UTF-8") from None
            # Browsers' FormData writes each line feed as two characters.
            self._fields[self._name] = bytes(self._text).replace(b"\r\n", b"\n")
            self._text = None
        else:
            return
        self._digests[self._name] = self._hash.digest()


@attrs.frozen
class FormReceiverFactory:
    """Factory of receivers, whose forms arrive in `directory`, written by `threads`.

    `random_bytes(n)` returns n random bytes; `unwritten_uploads` counts the bytes of all forms.
    """

    _registry: EvaluationRegistry
    _directory: Path
    _threads: WorkerThreads
    _random_bytes: Callable[[int], bytes]
    unwritten_uploads: UnwrittenUploads = attrs.field(factory=UnwrittenUploads)

    def make_receiver(
        self, request: ApiRequest, length: int | None, problem: str | None, rerun_of: str | None
    ) -> FormReceiver:
        """Return the receiver of the form of `request`. Raises: RequestError.

        `length` is that of the body in bytes, None if unknown. The form is for the `problem` of
        this name, for a rerun of the evaluation with this identifier, or has all fields.
        """
        registry, submissions = self._registry, self._registry.submissions
        headers, caller = request.requestHeaders, request.caller
        codings = get_header_elements(headers, "Content-Encoding")
        if any(coding.lower() != "identity" for coding in codings):
            raise UnsupportedMediaType(
                f"Content-Encoding: {', '.join(codings)[:80]!r} is not supported; send the body"
                " without compression"
            )
        key = get_header(headers, "Idempotency-Key")
        if key is not None and not 0 < len(key) <= _MAX_KEY:
            raise MalformedRequest(
                f"Idempotency-Key: {len(key)} characters; allowed: 1 to {_MAX_KEY}"
            )
        preset, use_kept, target, refusal = FormPreset(), None, "", None
        try:
            if problem is not None:
                target = f"problem {problem}"
                preset = self._make_problem_preset(request, problem)
            elif rerun_of is not None:
                target = f"rerun {rerun_of} {request.query.get(b'evaluator', '')}"
                use_kept = partial(self._use_submission, request, rerun_of)
                preset = self._make_rerun_preset(request, rerun_of)
        except (ProblemNotFound, ProblemClosed, EvaluationExpired) as error:
            if registry.records.find_by_idempotency_key(key, caller) is None:
                raise
            refusal = error
        if key is None:
            # Refused before the body is sent. (A key may name an accepted evaluation.)
            registry.check_admission(caller)
        directory = self._directory / self._random_bytes(16).hex()
        receiver = FormReceiver(
            UploadWriter(directory, request, self.unwritten_uploads, self._threads),
            key,
            registry.context.configuration,
            submissions,
            caller,
            target,
            attrs.evolve(preset, has_restricted_token=request.token.permitted_problems is not None),
            partial(check_problem_open, registry.context, request.token),
            use_kept,
            refusal,
        )
        receiver.check_headers(get_header(headers, "Content-Type") or "", length)
        return receiver

    def _make_problem_preset(self, request: ApiRequest, name: str) -> FormPreset:
        problem = self._registry.context.configuration.problems.get(name)
        if problem is None:
            raise ProblemNotFound(name)
        check_problem_open(self._registry.context, request.token, name)
        return FormPreset(
            f"the problem {name!r}",
            name,
            problem.form_fields,
            PERMITTED_PROBLEM_FORM_FIELDS,
            problem.fields,
            build_command=problem.build,
            permits_own_input=problem.own_input,
        )

    def _make_rerun_preset(self, request: ApiRequest, identifier: str) -> FormPreset:
        """Return what is known of the form before the request of the evaluation is read."""
        permitted = request.token.permitted_problems
        is_current = _parse_evaluator_choice(request)
        fields = PERMITTED_RERUN_FORM_FIELDS if permitted is None else PERMITTED_PROBLEM_FORM_FIELDS
        try:
            evaluation = self._registry.find_ended_evaluation(identifier, request.caller)
        except EvaluationExpired:
            if not self._registry.archive_reader.is_enabled:
                raise
            # The archive is read later.
            return FormPreset(
                "the evaluation", None, {}, fields, None, uses_current_evaluator=is_current
            )
        problem = evaluation.details.request.problem_name
        owner = "the evaluation" if problem is None else f"the problem {problem!r}"
        _check_rerun_access(problem, permitted)
        check_problem_open(self._registry.context, request.token, problem)
        return FormPreset(owner, problem, {}, fields, None, uses_current_evaluator=is_current)

    @asynccontextmanager
    async def _use_submission(
        self, request: ApiRequest, identifier: str
    ) -> AsyncIterator[WorkspaceSubmission]:
        try:
            async with self._registry.open_kept_submission(identifier, request.caller) as kept:
                _check_rerun_access(kept.request.problem_name, request.token.permitted_problems)
                yield kept
        except OSError as error:  # from a disk without room for archived files
            raise report_storage_error(error) from None


def _parse_evaluator_choice(request: ApiRequest) -> bool:
    """Return whether `?evaluator=current` is in the query. Raises: MalformedRequest."""
    choice = get_query_argument(request.query, "evaluator")
    if choice not in (None, "current"):
        raise MalformedRequest(f"evaluator: {choice[:80]!r} is not allowed; allowed: current")
    return choice is not None


def _check_rerun_access(problem: str | None, permitted: Collection[str] | None) -> None:
    if permitted is not None and problem not in permitted:
        raise AccessDenied("the token does not permit the problem of this evaluation")


def _read_disposition(part: MultipartSegment) -> tuple[str, str | None]:
    """Return the name of a part's field, and its file name; None for a field that is no file.

    Raises: InvalidField.
    """
    disposition = dict(part.headerlist)["Content-Disposition"]
    if _BROWSERS_DISPOSITION.fullmatch(disposition):
        return part.name or "", part.filename
    parameters = {key.lower(): value.strip() for key, value in _PARAMETER.findall(disposition)}
    name = content_disposition_unquote(parameters.get("name", ""))
    if "filename*" in parameters:  # which counts before `filename` (RFC 6266, section 4.3)
        try:
            return name, decode_extended_filename(parameters["filename*"])
        except ValueError as error:
            raise InvalidField(name[:80], str(error)) from None
    if any(key.startswith("filename*") for key in parameters):
        why = "the file name comes in pieces (RFC 2231); send the name whole, as filename*"
        raise InvalidField(name[:80], why)
    filename = parameters.get("filename")
    return name, None if filename is None else content_disposition_unquote(filename, filename=True)


def _make_form_error(error: MultipartError) -> RequestError:
    """Return the refusal of a malformed form, with the name of the field if it is known."""
    if isinstance(error, ParserLimitReached):
        most = f"the form has over {MAX_FIELDS} fields, or too long headers"
        return RequestTooLarge(f"{most}: {error}")
    wrong = error.__context__
    if not isinstance(wrong, UnicodeDecodeError):
        return MalformedRequest(f"malformed form: {error}")
    header = wrong.object.decode("utf-8", "replace")
    name = parse_options_header(header.partition(":")[2])[1].get("name", "")
    if not name or "\ufffd" in name:
        return MalformedRequest(f"malformed form: {_NOT_UTF8}")
    return InvalidField(FIELD_ALIASES.get(name, name)[:80], _NOT_UTF8)
