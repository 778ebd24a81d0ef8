"""Assembler of classic BPF programs for seccomp(2), from a table of actions for system calls.

libseccomp cannot write them: where a call is allowed, it has no way to refuse two values of one
argument. A search in halves over the numbers also keeps the program short, and each evaluation
loads it: the kernel runs it once for every call when it does (seccomp_cache_prepare).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import attrs

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

# Instructions (linux/bpf_common.h): loading a word, masks, jumps, and the action.
_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x45, 0x06
_WORD = 0xFFFFFFFF  # all bits of what a program can look at
_FARTHEST = 255  # instructions that a conditional jump can skip

# Where struct seccomp_data has the call's number, its architecture and the lower half of its first
# argument, which is the later half where the most significant byte comes first.
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENT = 16 + (4 if struct.pack("=H", 1)[0] == 0 else 0)

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if the test holds and if not, and value."""


def return_errno(number: int) -> int:
    """Return the action that fails a call with an errno; with 0 the call seems to succeed."""
    return _ERRNO | number


@attrs.frozen
class SyscallArgumentTest:
    """The condition that the lower 32 bits of an argument are one of `values`.

    - `argument_index`: its index, from 0 to 5.
    - `is_bit_test`: the condition is instead that a bit of one of `values` is set.
    - `mask`: other bits of the argument count as 0.

    The kernel ignores the upper half of arguments other than addresses and sizes; so does this.
    """

    argument_index: int
    values: tuple[int, ...]
    is_bit_test: bool = False
    mask: int = _WORD


@attrs.frozen
class SyscallRule:
    """The action for calls that meet all of the conditions."""

    action: int
    conditions: tuple[SyscallArgumentTest, ...]


@attrs.frozen
class SyscallPolicy:
    """The actions for one call: that of the first rule that applies, or else `unmatched_action`."""

    unmatched_action: int
    rules: tuple[SyscallRule, ...] = ()


def assemble_program(
    decisions: Mapping[int, SyscallPolicy], default_action: int, architecture: int
) -> bytes:
    """Return the program that gives the actions in `decisions`, by the number of the call.

    `default_action` is the action for all other numbers. A call of another architecture, where the
    numbers mean other calls, kills its process. Raises: struct.error, if the conditions of a rule
    are too long for a jump over them.
    """
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        *_search(_spans(decisions, SyscallPolicy(default_action))),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _spans(
    decisions: Mapping[int, SyscallPolicy], default_action: SyscallPolicy
) -> Sequence[tuple[int, SyscallPolicy]]:
    """Return each decision with the first call number to which it applies, in order."""
    spans: list[tuple[int, SyscallPolicy]] = []
    for start in sorted({0, *decisions, *(number + 1 for number in decisions)}):
        decision = decisions.get(start, default_action)
        if not spans or spans[-1][1] != decision:
            spans.append((start, decision))
    return spans


def _search(spans: Sequence[tuple[int, SyscallPolicy]]) -> Sequence[Instruction]:
    if len(spans) == 1:
        return _decide(spans[0][1])
    middle = len(spans) // 2
    below, above = _search(spans[:middle]), _search(spans[middle:])
    number = spans[middle][0]
    if len(below) <= _FARTHEST:
        return [(_AT_LEAST, len(below), 0, number), *below, *above]
    return [(_AT_LEAST, 0, 1, number), (_JUMP, 0, 0, len(below)), *below, *above]


def _decide(decision: SyscallPolicy) -> Sequence[Instruction]:
    code: list[Instruction] = []
    for rule in decision.rules:
        code += _try_rule(rule)
    return [*code, (_RETURN, 0, 0, decision.unmatched_action)]


def _try_rule(rule: SyscallRule) -> Sequence[Instruction]:
    code: list[Instruction] = [(_RETURN, 0, 0, rule.action)]
    for condition in reversed(rule.conditions):
        jump = _ANY_BIT if condition.is_bit_test else _EQUAL
        *others, last = condition.values
        code = [
            (_LOAD, 0, 0, _ARGUMENT + 8 * condition.argument_index),
            *([(_AND, 0, 0, condition.mask)] if condition.mask != _WORD else []),
            *((jump, len(others) - index, 0, value) for index, value in enumerate(others)),
            (jump, 0, len(code), last),
            *code,
        ]
    return code
