"""Judge programs that sort hidden weights by questions, in C++ or Python.

Reads ``SUBMISSION_FILE_SOURCE`` and sends the goals ``sorted`` and ``few_questions``.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi

LANGUAGES = {ending: segi.LANGUAGES[ending] for ending in (".cpp", ".py")}
SIZES = (1, 2, 5, 50)
GAME_SECONDS = 10


def few_questions(count: int) -> int:
    """Return the most questions that binary insertion needs for `count` weights."""
    return sum(number.bit_length() for number in range(1, count))


def answer(question: list[str], weights: list[int]) -> str | None:
    """Return the answer to a question such as ``? 1 2``; None if it is not a question."""
    try:
        mark, one, other = question[0], int(question[1]), int(question[2])
    except (IndexError, ValueError):
        return None
    if mark != "?" or len(question) != 3 or not {one, other} <= {*range(1, len(weights) + 1)}:
        return None
    return "yes" if weights[one - 1] < weights[other - 1] else "no"


def play(solution: segi.Solution, weights: list[int]) -> tuple[segi.Judgement, int]:
    """Answer questions until the program prints the order; return the number of questions."""
    count = len(weights)
    numbers = sorted(range(1, count + 1), key=lambda number: weights[number - 1])
    order = " ".join(map(str, numbers))
    with solution.start(time=GAME_SECONDS, wall=GAME_SECONDS) as program:
        program.write(f"{count}\n")
        for questions in range(count * count + 1):
            line = program.read_line()
            if line is None:
                fault = program.finish().fault
                return fault or segi.Judgement("wrong_answer", "it printed no order"), questions
            words = line.split()
            if words[:1] == ["!"]:
                return segi.compare_tokens(line[line.index("!") + 1 :], order), questions
            reply = answer(words, weights)
            if reply is None:
                return segi.Judgement("wrong_answer", "not a question", "", line[:40]), questions
            program.write(f"{reply}\n")
    return segi.Judgement("wrong_answer", "too many questions"), questions


def main() -> None:
    """Judge the submission."""
    solution = segi.prepare(segi.find_submission("source"), LANGUAGES)
    if solution.fault:
        print(solution.fault.message)
    is_sorted = is_fast = not solution.fault
    draw = segi.make_random()
    for count in SIZES:
        if not is_sorted:
            break
        print(f"{count} weights ... ", end="", flush=True)
        judgement, questions = play(solution, draw.sample(range(10 * count), count))
        print(f"sorted by {questions} questions" if judgement.is_accepted else judgement.message)
        segi.send_case(f"{count} weights", judgement)
        is_sorted = judgement.is_accepted
        is_fast = is_fast and is_sorted and questions <= few_questions(count)
    segi.send_goal("sorted", is_sorted)
    segi.send_goal("few_questions", is_fast)


if __name__ == "__main__":
    main()
