# Build the evaluator; report cannot_judge if the machine has no compiler.
. "$EVALUATION_TOOLS/lib/segi.sh"
command -v g++ >/dev/null || segi_cannot_judge g++ \
    'This machine has no C++ compiler (g++), and this evaluator is written in C++.'
printf 'building the evaluator ... '
TMPDIR=$TEMPORARY_DIRECTORY g++ -std=c++17 -O1 -Wall -Wextra -I"$EVALUATION_TOOLS/lib" \
    -o evaluator evaluator.cpp || exit 3
echo ok
