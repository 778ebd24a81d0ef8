"""`sandbox.bpf`: programs, held against the tables that they are assembled from."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hypothesis import example, given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox.bpf import (
    ALLOW,
    KILL_PROCESS,
    SyscallArgumentTest,
    SyscallPolicy,
    SyscallRule,
    assemble_program,
    return_errno,
)
from tests.cases.bpf_interpreter import MOST_INSTRUCTIONS, Filter

ARCHITECTURE = 0xC000003E
OTHERWISE = return_errno(38)

_words = st.integers(0, 7) | st.sampled_from([2**31, 2**32 - 1])
_answers = st.sampled_from([ALLOW, return_errno(0), return_errno(1), return_errno(38)])
_conditions = st.builds(
    SyscallArgumentTest,
    st.integers(0, 5),
    st.lists(_words, min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.just(2**32 - 1) | _words,
)
_cases = st.builds(SyscallRule, _answers, st.lists(_conditions, min_size=1, max_size=3).map(tuple))
_decisions = st.builds(SyscallPolicy, _answers, st.lists(_cases, max_size=3).map(tuple))
_numbers = st.integers(0, 40) | st.sampled_from([400, 2**30, 2**32 - 2])
_tables = st.dictionaries(_numbers, _decisions, max_size=40)
_arguments = st.lists(
    st.builds(lambda upper, lower: upper << 32 | lower, _words, _words), min_size=6, max_size=6
)

MANY = {2 * number: SyscallPolicy(ALLOW) for number in range(500)}
"""Too many spans for a jump from the first half to the second one."""


def expected(table: Mapping[int, SyscallPolicy], number: int, arguments: list[int]) -> int:
    """Return what the table says."""
    if number not in table:
        return OTHERWISE
    for rule in table[number].rules:
        if all(meets(each, arguments[each.argument_index] % 2**32) for each in rule.conditions):
            return rule.action
    return table[number].unmatched_action


def meets(condition: SyscallArgumentTest, word: int) -> bool:
    """Return whether the lower half of an argument meets a condition."""
    word &= condition.mask
    if condition.is_bit_test:
        return any(word & value for value in condition.values)
    return word in condition.values


def assembled(table: Mapping[int, SyscallPolicy]) -> Filter:
    """Return the program for a table."""
    return Filter.parse(assemble_program(table, OTHERWISE, ARCHITECTURE))


class AssembleTests(SynchronousTestCase):
    """What the programs answer."""

    @given(_tables, _arguments)
    @example(MANY, [0] * 6)
    def test_answers(self, table: dict[int, SyscallPolicy], arguments: list[int]) -> None:
        """Each number gets the answer of the table, and so do the numbers around it."""
        program = assembled(table)
        for known in (0, 2**32 - 1, *table):
            for number in {max(known - 1, 0), known, min(known + 1, 2**32 - 1)}:
                self.assertEqual(
                    program.answer(number, *arguments, architecture=ARCHITECTURE),
                    expected(table, number, arguments),
                    number,
                )

    @given(_tables, st.integers(0, 2**32 - 1).filter(lambda value: value != ARCHITECTURE))
    def test_other_architectures(self, table: dict[int, SyscallPolicy], architecture: int) -> None:
        """A call of another architecture kills the process, whatever its number."""
        program = assembled(table)
        for number in (0, 2**32 - 1, *table):
            answer = program.answer(number, architecture=architecture)
            self.assertEqual(answer, KILL_PROCESS)

    def test_size(self) -> None:
        """Numbers with the same answer share instructions: 500 spans fit, a run takes one."""
        self.assertLess(len(assembled(MANY).instructions), MOST_INSTRUCTIONS)
        run = dict.fromkeys(range(2**10), SyscallPolicy(ALLOW))
        self.assertLess(len(assembled(run).instructions), 10)

    def test_too_long(self) -> None:
        """A condition that no jump can skip is refused, not cut."""
        condition = SyscallArgumentTest(0, tuple(range(300)))
        with self.assertRaises(struct.error):
            assembled({0: SyscallPolicy(ALLOW, (SyscallRule(OTHERWISE, (condition,)),))})
