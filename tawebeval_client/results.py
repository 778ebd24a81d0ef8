"""Summary of an evaluator's results, taken from its data values as they enter the ring.

Four kinds of values are results (docs/evaluators.md):

    {"type": "goal_result", "goal": "fast", "result": true}
    {"type": "case", "case": "sample 1", "verdict": "accepted"}
    {"type": "progress", "done": 3, "total": 10}
    {"type": "score", "score": 30, "maximum": 100}

Other members, and any other value, are ignored. Every value becomes an event, whether it counts or
not. The summary describes the first value that has the type of a result and does not count.

The evaluator chooses every byte. So the parser skips most other values by their length and one
search, and a summary keeps at most `MAX_GOALS` goals, `MAX_GOAL_NAMES_BYTES` of their names, a
number for each verdict, and the last progress and score: less than 20 KiB. The JSON of a summary is
bounded likewise.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

import msgspec

from tawebeval_client.documents import Results

MAX_GOALS = 100
"""Goals that a summary has at most; later ones are only counted."""

MAX_GOAL_NAMES_BYTES = 4096
"""Bytes of JSON that all names of goals in a summary have at most."""

MIN_RESULT_BYTES = len(b'{"type":"score","score":1}')
"""Size of the shortest result."""

MAX_RESULT_BYTES = 16 * 1024
"""Size up to which a value may be a result."""

TYPE_KEY_JSON = b'"type"'
"""Bytes that each result contains; their escapes are not recognised."""

Verdict = Literal[
    "accepted",
    "wrong_answer",
    "time_limit",
    "memory_limit",
    "output_limit",
    "runtime_error",
    "compile_error",
    "partial",
    "skipped",
    "judge_error",
]

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Verdicts of a case."""

_LARGEST = 2**53  # up to which each integer is a float
_TYPE = re.compile(rb'"type"[ \t\r]*:[ \t\r]*"(goal_result|case|progress|score)"')
_WRONG_MEMBER = re.compile(
    r"(?:Expected `(bool|str|int|float)`|Invalid enum value).* - at `\$\.(\w+)`"
    r"|Object missing required field `((?!type`)\w+)`",
    re.DOTALL,
)
_FORMS = {
    "bool": "write true or false",
    "str": "write a string",
    "int": f"write a whole number from 0 to {_LARGEST}",
    "float": f"write a number from -{_LARGEST} to {_LARGEST}",
    None: f"write one of {', '.join(VERDICTS)}",
}
_SHOWN_BYTES = 40

_Count = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
_Points = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]


class _Result(msgspec.Struct, tag_field="type", gc=False):
    pass


class _Goal(_Result, tag="goal_result"):
    goal: str
    result: bool


class _Case(_Result, tag="case"):
    case: str
    verdict: Verdict


class _Progress(_Result, tag="progress"):
    done: _Count
    total: _Count


class _Score(_Result, tag="score"):
    score: _Points
    maximum: _Points | None = None
    # A score with a name is that of a part.
    goal: None = None
    name: None = None


_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# Builds the members above and skips all others.
_decode = msgspec.json.Decoder(_Goal | _Case | _Progress | _Score).decode


class ResultSummary(msgspec.Struct, array_like=True):
    """Summary of the results of one evaluation.

    Of several results for one goal, several progresses or several scores, the last one counts. Each
    case counts, also under the same name. `uncounted_value` describes the first value that does not
    count because of a member; "" without one.
    """

    goals: dict[bytes, bool] = {}  # names as JSON: a `str` may take four times as much
    omitted_count: int = 0
    cases: dict[str, int] = {}
    progress: _Progress | None = None
    score: _Score | None = None
    uncounted_value: str = ""

    def add_if_result(self, json_value: bytes) -> None:
        """Count a data value, valid JSON of at most `MAX_RESULT_BYTES`, if it is a result."""
        kind = _TYPE.search(json_value)
        if kind is None:
            return
        try:
            result = _decode(json_value)
        except (msgspec.DecodeError, RecursionError) as error:
            if not self.uncounted_value:
                self.uncounted_value = _describe_uncounted(json_value, kind[1].decode(), str(error))
            return
        if isinstance(result, _Goal):
            # Not by orjson, whose results keep 4 KiB each.
            self._add_goal(msgspec.json.encode(result.goal), result.result)
        elif isinstance(result, _Case):
            self.cases[result.verdict] = self.cases.get(result.verdict, 0) + 1
        elif isinstance(result, _Progress):
            self.progress = result
        else:
            self.score = result

    def _add_goal(self, name: bytes, reached: bool) -> None:
        if name not in self.goals and (
            len(self.goals) == MAX_GOALS
            or sum(map(len, self.goals)) + len(name) > MAX_GOAL_NAMES_BYTES
        ):
            self.omitted_count += 1
            return
        self.goals[name] = reached

    def compute_share(self) -> float:
        """Return the part of the points, or of the cases and goals, that was reached: 0 to 1.

        A score without a maximum is returned as it is. 0 without results.
        """
        if self.score is not None:
            score, maximum = self.score.score, self.score.maximum
            return score if not maximum or maximum < 0 else min(1.0, max(0.0, score / maximum))
        shares = []
        if self.cases:
            shares.append(self.cases.get("accepted", 0) / sum(self.cases.values()))
        if self.goals:
            shares.append(sum(self.goals.values()) / (len(self.goals) + self.omitted_count))
        return sum(shares) / len(shares) if shares else 0.0

    def pack(self) -> bytes:
        """Return the summary as bytes, less than 8 KiB, for `unpack`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes) -> ResultSummary:
        """Return the summary that was packed. Raises msgspec.DecodeError."""
        return msgspec.msgpack.decode(packed, type=cls)

    def build_json_object(self) -> Results | None:
        """Return the summary as a JSON object; None if there was no result."""
        progress, score = self.progress, self.score
        if not (self.goals or self.omitted_count or self.cases or progress or score):
            return None
        return {
            "goals": {msgspec.json.decode(name, type=str): self.goals[name] for name in self.goals},
            "goals_omitted": self.omitted_count,
            "cases": dict(self.cases),
            "progress": None
            if progress is None
            else {"done": progress.done, "total": progress.total},
            "score": None
            if score is None
            else {
                "score": _shorten(score.score),
                "maximum": None if score.maximum is None else _shorten(score.maximum),
            },
        }


_FIRST = ("judge_error", "compile_error")  # which say more than any other verdict


def judge_evaluation(reason: str | None, results: Results | None) -> str:
    """Return the verdict of an ended evaluation in words, the same as on the page.

    `reason` is that of its failure, `results` the summary of its status. The verdict is "finished"
    if the results tell none.
    """
    if reason is not None:
        return "cancelled" if reason == "cancelled" else "evaluation failed"
    if results is None:
        return "finished"
    cases, score, reached = results["cases"], results["score"], {*results["goals"].values()}
    maximum = score and score["maximum"]
    share = score["score"] / maximum if score and maximum and maximum > 0 else None
    is_part = share is not None and 0 < share < 1
    failing: list[str] = [each for each in cases if each not in ("accepted", "partial", "skipped")]
    worst = next((each for each in (*_FIRST, *failing) if each in failing), None)
    if worst is not None and (worst in _FIRST or not is_part):
        return worst.replace("_", " ")
    if is_part or len(reached) > 1 or "partial" in cases:
        return "partly correct"
    if False in reached or (share is not None and share <= 0):
        return "not accepted"
    if results["goals_omitted"] or "skipped" in cases:
        return "incomplete"
    return "accepted" if cases or reached or share is not None else "finished"


def _describe_uncounted(json_value: bytes, kind: str, message: str) -> str:
    """Return why a value is no result, by the `message` of msgspec; "" if it need not be one."""
    wrong = _WRONG_MEMBER.fullmatch(message)
    if wrong is None:
        return ""
    expected, name, missing = wrong.groups()
    if missing:
        return f'a value of the type "{kind}" does not count as a result: "{missing}" is missing'
    try:
        raw = bytes(_decode_members(json_value)[name])
    except (msgspec.DecodeError, RecursionError):  # what follows the member is not decodable
        return ""
    shown = raw[:_SHOWN_BYTES].decode(errors="ignore") + ("..." if len(raw) > _SHOWN_BYTES else "")
    return (
        f'a value of the type "{kind}" does not count as a result: "{name}" is {shown};'
        f" {_FORMS[expected]}"
    )


def _shorten(number: float) -> float:
    """Return an integer for a whole number, as the evaluator most likely wrote it."""
    return int(number) if number.is_integer() else number
