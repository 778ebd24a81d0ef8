"""Programs of classic BPF, run as the kernel runs them for seccomp (net/core/filter.c)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import attrs

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000
MOST_INSTRUCTIONS = 4096
"""How many instructions the kernel accepts."""

TESTS: dict[int, Callable[[int, int], int]] = {
    0x15: lambda a, b: a == b,
    0x25: lambda a, b: a > b,
    0x35: lambda a, b: a >= b,
    0x45: lambda a, b: a & b,
}


@attrs.frozen
class FilterStack:
    """Filters of one process: the strictest answer counts, of equal ones the last filter's."""

    filters: tuple[Filter, ...]

    @classmethod
    def parse(cls, programs: Iterable[bytes]) -> FilterStack:
        return cls(tuple(map(Filter.parse, programs)))

    def answer(self, number: int, *arguments: int, architecture: int) -> int:
        answers = [
            one.answer(number, *arguments, architecture=architecture)
            for one in reversed(self.filters)
        ]
        # By the action without its errno, as a signed number.
        return min(answers, key=lambda answer: ((answer >> 16) ^ 0x8000) - 0x8000)


@attrs.frozen
class Filter:
    """A program, as far as seccomp has its instructions."""

    instructions: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def parse(cls, program: bytes) -> Filter:
        return cls(tuple(struct.iter_unpack("=HBBI", program)))

    def answer(self, number: int, *arguments: int, architecture: int) -> int:
        given = [*arguments, *[0] * (6 - len(arguments))]
        data = struct.pack("=IIQ6Q", number, architecture, 0, *given)
        accumulator = place = 0
        while True:
            code, if_true, if_false, value = self.instructions[place]
            place += 1
            if code == 0x20:  # load a word
                (accumulator,) = struct.unpack_from("=I", data, value)
            elif code == 0x54:  # and
                accumulator &= value
            elif code == 0x05:  # jump
                place += value
            elif code in TESTS:
                place += if_true if TESTS[code](accumulator, value) else if_false
            elif code == 0x06:  # return
                return value
            else:
                raise NotImplementedError(f"an instruction of code {code:#x}")
