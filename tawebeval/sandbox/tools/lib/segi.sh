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
    [ $# = 0 ] || segi_write_block DATA "$(printf '%s\n' "$@")"
}

# Print a block, DATA or FILE, in one piece, as other processes may print at the same time.
segi_write_block() {
    eval "set -- \"\$EVALUATION_$1_BEGIN\" \"\$2\" \"\$EVALUATION_$1_END\""
    printf '\n%s\n%s\n%s\n' "$@" | dd obs=64k 2>/dev/null
}

# For awk in the locale C: print the first characters of a text, with U+FFFD for each byte that is
# not UTF-8; return how many of `most` are left.
segi_awk='
    function show(text, most,    at, one) {
        if (text !~ /[^\001-\177]/ && length(text) <= most) {
            printf "%s", text
            return most - length(text)
        }
        for (at = 1; at <= length(text) && most > 0; most--) {
            one = substr(text, at, 4)
            if (match(one, /^([\001-\177]|[\302-\337][\200-\277])/) || \
                match(one, /^(\340[\240-\277]|[\341-\354\356\357][\200-\277])[\200-\277]/) || \
                match(one, /^\355[\200-\237][\200-\277]/) || \
                match(one, /^(\360[\220-\277]|[\361-\363][\200-\277])[\200-\277][\200-\277]/) || \
                match(one, /^\364[\200-\217][\200-\277][\200-\277]/)) {
                printf "%s", substr(one, 1, RLENGTH)
                at += RLENGTH
            } else {
                printf "\357\277\275"
                at++
            }
        }
        return most
    }'

# Copy the first characters of stdin, as many as $1 says.
segi_shorten() {
    LC_ALL=C awk -v left="$1" "$segi_awk"'{ left = show((NR > 1 ? "\n" : "") $0, left) }'
}

# Print a text as a JSON string, without control characters: segi_quote TEXT
segi_quote() {
    printf '%s\n' "$1" | LC_ALL=C tr -d '\000-\010\013-\037\177' | LC_ALL=C awk "$segi_awk"'
        BEGIN { printf "\"" }
        { gsub(/\\/, "&&"); gsub(/"/, "\\\\&"); gsub(/\t/, "\\t") }
        { printf (NR > 1 ? "\\n" : ""); show($0, length($0)) }
        END { printf "\"" }'
}

# Send whether the submission reached a goal: segi_send_goal GOAL true|false
segi_send_goal() {
    segi_send "{\"type\": \"goal_result\", \"goal\": $(segi_quote "$1"), \"result\": $2}"
}

# Send the judgement of a test case: segi_send_case [--input FILE] [--show-expected] NAME [POINTS]
# Of the input an excerpt is sent, of the expected output only with --show-expected: who sees it can
# print it in the next submission.
segi_send_case() {
    segi_input='' segi_answer=''
    while :; do
        case $1 in
            --input) segi_input=$(head -c 400 "$2" | segi_shorten 100) && shift 2 ;;
            --show-expected) segi_answer=$segi_expected && shift ;;
            *) break ;;
        esac
    done
    if [ -z "${segi_verdict-}" ]; then
        echo 'segi_send_case: no verdict; segi_run and segi_compare lose it in $( ) and in a pipe' >&2
        exit 1
    fi
    set -- "{\"type\": \"case\", \"case\": $(segi_quote "$1")${2:+, \"points\": $2}"
    set -- "$1, \"verdict\": \"$segi_verdict\"${segi_time:+, \"time\": $segi_time}"
    set -- "$1${segi_memory:+, \"memory\": $segi_memory}"
    [ -z "$segi_message" ] || set -- "$1, \"message\": $(segi_quote "$segi_message")"
    [ -z "$segi_input" ] || set -- "$1, \"input\": $(segi_quote "$segi_input")"
    [ -z "$segi_answer" ] || set -- "$1, \"expected\": $(segi_quote "$segi_answer")"
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
    segi_write_block FILE "Content-Type: ${3:-application/octet-stream}
Content-Disposition: attachment; filename=\"$1\"
X-SEGI-As: path

$2"
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
    # Not by $(...), as a name may end in a newline.
    eval "segi_file=\${SUBMISSION_FILE_$(printf %s "$1" | tr a-z A-Z)-}"
    [ "$segi_file" ] ||
        segi_cannot_judge "$1" "Nothing to judge: the field submission[$1] is missing."
}

# Run a program by tawebeval-run, with its options: segi_run [OPTION]... -- COMMAND...
# Sets the judgement, "accepted" for exit status 0, and segi_status. Exits if the run failed.
# The output has at most 16 MiB, unless an option says otherwise.
segi_run() {
    segi_expected='' segi_printed='' segi_status=0
    segi_path=$(mktemp "$TEMPORARY_DIRECTORY/segi-XXXXXX") || exit 1
    {
        tawebeval-run --report "$segi_path" --output 16M "$@" || segi_status=$?
        segi_json=$(cat <&8) # by descriptor: the name could lead to another file
    } 8<"$segi_path"
    rm -f "$segi_path"
    case $segi_json in
        '' | '{"error": '*)
            segi_json=${segi_json#'{"error": "'} segi_json=${segi_json%'"}'}
            echo "segi_run: ${segi_json:-the program could not be run}" >&9
            exit 1
            ;;
    esac
    segi_time=$(segi_report cpu_seconds) segi_memory=$(segi_report peak_memory_bytes)
    segi_signal=$(segi_report signal)
    case $(segi_report reason) in
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

# Print a member of the report, a number or a word; nothing for null.
segi_report() {
    set -- "${segi_json#*\"$1\": }"
    set -- "${1%%[,\}]*}"
    set -- "${1#\"}"
    [ "$1" = null ] || printf '%s\n' "${1%\"}"
}

# Compile, with the options of tawebeval-run: segi_compile [OPTION]... -- COMMAND...
# A failure is the verdict compile_error, with what the compiler prints, names of files only.
segi_compile() {
    set -- --time 30 --wall 60 --output 1M --file-size 64M "$@"
    segi_printed_path=$(mktemp "$TEMPORARY_DIRECTORY/segi-XXXXXX") || exit 1
    segi_run "$@" </dev/null >"$segi_printed_path" 2>&1
    if [ "$segi_verdict" != accepted ]; then
        segi_verdict=compile_error
        segi_compiler=$(head -c 8000 "$segi_printed_path" | sed 's|/evaluation/[^ :]*/||g' |
            segi_shorten 2000)
        segi_message=${segi_compiler:-$segi_message}
    fi
    rm -f "$segi_printed_path"
}

# --- Files that a program of the submission wrote ---

# Copy such a file after the end of the program: segi_read_output PATH COPY [BYTES]
# Sets the judgement, "accepted" for a regular file of at most BYTES (16 MiB). A link could lead to
# files that the program must not read, such as the expected output: it is a fault.
segi_read_output() {
    : >"$2"
    if segi_check_output "$1"; then
        if [ "$(wc -c <"$1")" -le "${3:-16777216}" ]; then
            cat <"$1" >"$2"
        else
            segi_verdict=output_limit segi_message="${1##*/} has over ${3:-16777216} bytes"
        fi
    fi
}

# Set the judgement of such a file; return whether it may be read.
segi_check_output() {
    segi_verdict=accepted segi_message='' segi_expected='' segi_printed=''
    if ! [ -e "$1" ] && ! [ -L "$1" ]; then
        segi_message="${1##*/} is missing"
    elif segi_has_link "$1" || ! [ -f "$1" ] || ! [ -r "$1" ] ||
        [ "$(stat -c %h -- "$1")" != 1 ]; then
        segi_message="${1##*/} is a link or no readable file"
    else
        return 0
    fi
    segi_verdict=wrong_answer
    return 1
}

# Return whether a path leads through a symbolic link, below the evaluator's own directories.
segi_has_link() {
    set -- "${1%"${1##*[!/]}"}"
    until [ -z "$1" ] || [ "$1" = "$PWD" ] || [ "$1" = "$TEMPORARY_DIRECTORY" ]; do
        [ ! -L "$1" ] || return 0
        case $1 in
            */*) set -- "${1%/*}" ;;
            *) break ;;
        esac
    done
    return 1
}

# --- Comparison ---

# Set the judgement of what was printed: segi_compare exact|tokens|floats PRINTED EXPECTED
# exact compares each byte; tokens the words; floats allows numbers SEGI_TOLERANCE (1e-9) of
# difference, absolute or relative. Exits if it cannot compare, also if PRINTED is a link or a
# pipe: copy it by segi_read_output, or name a descriptor such as /dev/stdin.
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
    case $2 in
        /dev/stdin | /dev/fd/* | /proc/self/fd/*) ;;
        *) segi_check_output "$2" || segi_fail_compare "$segi_message" ;;
    esac
    segi_path=$(mktemp -d "$TEMPORARY_DIRECTORY/segi-XXXXXX") || segi_fail_compare 'mktemp failed'
    # Copies, as a pipe can be read only once.
    $segi_copy "$2" >"$segi_path/printed" && $segi_copy "$3" >"$segi_path/expected" ||
        segi_fail_compare 'reading failed'
    cmp -s "$segi_path/printed" "$segi_path/expected" || segi_find_difference "$1"
    rm -rf "$segi_path"
}

# Set the judgement of the different files in the directory segi_path.
segi_find_difference() {
    set -- "$1" "$segi_path/printed" "$segi_path/expected"
    LC_ALL=C awk -v kind="$1" -v printed="$2" -v expected="$3" \
        -v tolerance="${SEGI_TOLERANCE:-1e-9}" "$segi_awk"'
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
            printf "%s %d %s\n", (kind == "exact" ? "line" : "word"), number, message
            show(other, 100); printf "\n"
            show(one, 100); printf "\n"
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
        }' >"$segi_path/difference" || segi_fail_compare 'awk failed'
    [ -s "$segi_path/difference" ] || return 0
    segi_verdict=wrong_answer
    {
        IFS= read -r segi_message
        IFS= read -r segi_expected
        IFS= read -r segi_printed
    } <"$segi_path/difference"
}

# End the evaluator, as every output would be the same: segi_fail_compare REASON
segi_fail_compare() {
    echo "segi_compare: $1" >&2
    exit 1
}

segi_bytes() {
    cat <"$1"
}

# Print each word of a file on a line. Some awk take NUL for the end of a line.
segi_words() {
    LC_ALL=C tr ' \t\r\v\f\000' '\n\n\n\n\n\001' <"$1" | LC_ALL=C tr -s '\n' | LC_ALL=C awk NF
}
