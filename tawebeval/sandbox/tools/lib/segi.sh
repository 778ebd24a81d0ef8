# Library for evaluators in sh and bash: . "$EVALUATION_TOOLS/lib/segi.sh"
#
#     segi_require 1
#     segi_find_submission source
#     segi_run --time 2 --read "$segi_file" -- python3 "$segi_file" <input >output
#     [ "$segi_verdict" != accepted ] || segi_compare tokens output expected
#     segi_send_case small
#     [ "$segi_verdict" = accepted ] && reached=true || reached=false
#     segi_send_goal correct "$reached"
#
# A judgement is in these variables: segi_verdict, segi_message, segi_expected, segi_printed;
# segi_time (seconds) and segi_memory (bytes) of the last run.

SEGI_VERSION=1

# segi_run shows its errors on descriptor 9, as its stderr may be redirected for the submission.
exec 9>&2

# End the evaluator with an error if this library is older: segi_require VERSION
segi_require() {
    [ "$1" -le "$SEGI_VERSION" ] && return
    echo "the evaluator needs version $1 of segi; this server has $SEGI_VERSION" >&2
    exit 1
}

# --- Events ---

# Send each argument, a JSON value, as a data event.
segi_send() {
    printf '\n%s\n' "$EVALUATION_DATA_BEGIN"
    printf '%s\n' "$@"
    printf '%s\n' "$EVALUATION_DATA_END"
}

# Print a text as a JSON string, without control characters: segi_quote TEXT
segi_quote() {
    printf '%s\n' "$1" | LC_ALL=C tr -d '\000-\010\013-\037\177' | LC_ALL=C awk '
        BEGIN { printf "\"" }
        { gsub(/\\/, "&&"); gsub(/"/, "\\\\&"); gsub(/\t/, "\\t") }
        { printf "%s%s", (NR > 1 ? "\\n" : ""), $0 }
        END { printf "\"" }'
}

# Send whether the submission reached a goal: segi_send_goal GOAL true|false
segi_send_goal() {
    segi_send "{\"type\": \"goal_result\", \"goal\": $(segi_quote "$1"), \"result\": $2}"
}

# Send the judgement of a test case: segi_send_case NAME [POINTS]
segi_send_case() {
    if [ -z "${segi_verdict-}" ]; then
        echo 'segi_send_case: no verdict; segi_run and segi_compare lose it in $( ) and in a pipe' >&2
        exit 1
    fi
    set -- "{\"type\": \"case\", \"case\": $(segi_quote "$1")${2:+, \"points\": $2}"
    set -- "$1, \"verdict\": \"$segi_verdict\"${segi_time:+, \"time\": $segi_time}"
    set -- "$1${segi_memory:+, \"memory\": $segi_memory}"
    [ -z "$segi_message" ] || set -- "$1, \"message\": $(segi_quote "$segi_message")"
    [ -z "$segi_expected" ] || set -- "$1, \"expected\": $(segi_quote "$segi_expected")"
    [ -z "$segi_printed" ] || set -- "$1, \"printed\": $(segi_quote "$segi_printed")"
    segi_send "$1}"
}

# Send how much of the evaluation is done: segi_send_progress DONE TOTAL
segi_send_progress() {
    segi_send "{\"type\": \"progress\", \"done\": $1, \"total\": $2}"
}

# Send the score: segi_send_score SCORE MAXIMUM
segi_send_score() {
    segi_send "{\"type\": \"score\", \"score\": $1, \"maximum\": $2}"
}

# Send a file, which is read later, under an ASCII name: segi_send_file NAME PATH [TYPE]
segi_send_file() {
    printf '\n%s\nContent-Type: %s\n' "$EVALUATION_FILE_BEGIN" "${3:-application/octet-stream}"
    printf 'Content-Disposition: attachment; filename="%s"\n' "$1"
    printf 'X-SEGI-As: path\n\n%s\n%s\n' "$2" "$EVALUATION_FILE_END"
}

# --- The submission ---

# Send what the evaluator lacks, in place of goals, and exit: segi_cannot_judge MISSING MESSAGE
segi_cannot_judge() {
    printf '%s\n' "$2"
    set -- "$(segi_quote "$1")" "$(segi_quote "$2")"
    segi_send "{\"type\": \"cannot_judge\", \"missing\": $1, \"message\": $2}"
    exit 3
}

# Set segi_file to the path of a submitted file; exit if there is none: segi_find_submission FIELD
segi_find_submission() {
    segi_file=$(printenv "SUBMISSION_FILE_$(printf %s "$1" | tr a-z A-Z)") && [ "$segi_file" ] ||
        segi_cannot_judge "$1" "Nothing to judge: the field submission[$1] is missing."
}

# Run a program by tawebeval-run, with its options: segi_run [OPTION]... -- COMMAND...
# Sets the judgement, "accepted" for exit status 0, and segi_status. Exits if the run failed.
# The output has at most 16 MiB, unless an option says otherwise.
segi_run() {
    segi_expected='' segi_printed='' segi_status=0
    rm -f "$TEMPORARY_DIRECTORY/segi-report"
    tawebeval-run --report "$TEMPORARY_DIRECTORY/segi-report" --output 16M "$@" || segi_status=$?
    if [ -s "$TEMPORARY_DIRECTORY/segi-report" ]; then
        segi_error=$(sed -n 's/^{"error": "\(.*\)"}$/\1/p' "$TEMPORARY_DIRECTORY/segi-report")
    else
        segi_error='the program could not be run'
    fi
    if [ "$segi_error" ]; then
        echo "segi_run: $segi_error" >&9
        exit 1
    fi
    segi_time=$(segi_report cpu_seconds) segi_memory=$(segi_report peak_memory_bytes)
    segi_signal=$(segi_report signal)
    case $(sed -n 's/.*"reason": "\([a-z]*\)".*/\1/p' "$TEMPORARY_DIRECTORY/segi-report") in
        time)
            segi_verdict=time_limit
            segi_message=$(printf 'stopped after %.1f s of processor time' "$segi_time")
            ;;
        wall)
            segi_verdict=time_limit
            segi_message=$(printf 'stopped after %.1f s' "$(segi_report wall_seconds)")
            ;;
        memory)
            segi_verdict=memory_limit
            segi_message="stopped at its limit of $(((segi_memory + 524288) / 1048576)) MiB of memory"
            ;;
        output) segi_verdict=output_limit segi_message='printed too much' ;;
        processes) segi_verdict=runtime_error segi_message='too many processes' ;;
        *)
            if [ "$segi_status" = 0 ]; then
                segi_verdict=accepted segi_message=''
            elif [ "$segi_signal" ]; then
                segi_verdict=runtime_error segi_message="killed by signal $segi_signal"
            else
                segi_verdict=runtime_error segi_message="exit status $segi_status"
            fi
            ;;
    esac
}

# Print a number of the report.
segi_report() {
    sed -n "s/.*\"$1\": \([0-9][0-9.e-]*\).*/\1/p" "$TEMPORARY_DIRECTORY/segi-report"
}

# Compile, with the options of tawebeval-run: segi_compile [OPTION]... -- COMMAND...
# A failure is the verdict compile_error, with what the compiler prints, names of files only.
segi_compile() {
    set -- --time 30 --wall 60 --output 1M --file-size 64M "$@"
    segi_run "$@" </dev/null >"$TEMPORARY_DIRECTORY/segi-compiler" 2>&1
    [ "$segi_verdict" = accepted ] && return
    segi_verdict=compile_error
    segi_compiler=$(head -c 4000 "$TEMPORARY_DIRECTORY/segi-compiler" |
        sed 's|/evaluation/[^ :]*/||g')
    segi_message=${segi_compiler:-$segi_message}
}

# --- Comparison ---

# Set the judgement of what was printed: segi_compare exact|tokens|floats PRINTED EXPECTED
# exact compares each byte; tokens the words; floats allows numbers SEGI_TOLERANCE (1e-9) of
# difference, absolute or relative. Exits if it cannot compare.
segi_compare() {
    case $1 in
        exact) segi_copy=segi_bytes ;;
        tokens | floats) segi_copy=segi_words ;;
        *) segi_fail_compare "$1: not exact, tokens or floats" ;;
    esac
    for segi_each in "$2" "$3"; do
        [ -r "$segi_each" ] && ! [ -d "$segi_each" ] ||
            segi_fail_compare "$segi_each: cannot read the file"
    done
    segi_verdict=accepted segi_message='' segi_expected='' segi_printed=''
    # Copies, as a pipe can be read only once.
    $segi_copy "$2" >"$TEMPORARY_DIRECTORY/segi-printed" &&
        $segi_copy "$3" >"$TEMPORARY_DIRECTORY/segi-expected" || segi_fail_compare 'reading failed'
    set -- "$1" "$TEMPORARY_DIRECTORY/segi-printed" "$TEMPORARY_DIRECTORY/segi-expected"
    cmp -s "$2" "$3" && return
    LC_ALL=C awk -v kind="$1" -v printed="$2" -v expected="$3" -v tolerance="${SEGI_TOLERANCE:-1e-9}" '
        function size(number) { return number < 0 ? -number : number }
        function is_number(word) {
            # Unambiguous, so that no long word takes quadratic time; and not infinite.
            return word ~ /^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$/ && \
                size(word + 0) <= 1e308
        }
        function is_same(one, other,    most) {
            if (kind != "floats" || !is_number(one) || !is_number(other)) return one "" == other ""
            one += 0; other += 0
            most = size(one) > size(other) ? size(one) : size(other)
            return size(one - other) <= tolerance * (most > 1 ? most : 1)
        }
        function tell(message) {
            printf "%s %d %s\n%s\n%s\n", (kind == "exact" ? "line" : "word"), number, message, \
                substr(other, 1, 100), substr(one, 1, 100)
            exit
        }
        BEGIN {
            while (++number) {
                one = other = ""
                has_one = (getline one < printed) > 0
                has_other = (getline other < expected) > 0
                if (!has_one && !has_other) {
                    if (kind != "floats") { number--; tell("differs") }
                    exit
                }
                if (!has_one) tell("missing")
                if (!has_other) tell("unexpected")
                if (!is_same(one, other)) tell("differs")
            }
        }' >"$TEMPORARY_DIRECTORY/segi-difference" || segi_fail_compare 'awk failed'
    [ -s "$TEMPORARY_DIRECTORY/segi-difference" ] || return 0
    segi_verdict=wrong_answer
    {
        IFS= read -r segi_message
        IFS= read -r segi_expected
        IFS= read -r segi_printed
    } <"$TEMPORARY_DIRECTORY/segi-difference"
}

# End the evaluator, as every output would be the same: segi_fail_compare REASON
segi_fail_compare() {
    echo "segi_compare: $1" >&2
    exit 1
}

segi_bytes() {
    cat <"$1"
}

# Print each word of a file on a line.
segi_words() {
    LC_ALL=C tr -s ' \t\r\v\f\n' '\n' <"$1" | LC_ALL=C awk NF
}
