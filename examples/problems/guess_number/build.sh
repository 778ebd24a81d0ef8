# Build the evaluator; report cannot_judge if the machine has no compiler.
if ! command -v g++ >/dev/null; then
    sentence='This machine has no C++ compiler (g++), and this evaluator is written in C++.'
    printf '%s\n' "$sentence"
    printf '\n%s\n' "$EVALUATION_DATA_BEGIN"
    printf '{"type": "cannot_judge", "missing": "g++", "message": "%s"}\n' "$sentence"
    printf '%s\n' "$EVALUATION_DATA_END"
    exit 3
fi
printf 'building the evaluator ... '
TMPDIR=$TEMPORARY_DIRECTORY g++ -std=c++17 -O1 -Wall -Wextra -o evaluator evaluator.cpp || exit 3
echo ok
