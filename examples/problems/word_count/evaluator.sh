#!/usr/bin/env bash
# Judge a program that counts words. Run it as: bash evaluator.sh
#
# Reads SUBMISSION_FILE_SOURCE and sends the goals counted, ordered and fast.

export LC_ALL=C
goals='counted ordered fast'
time_limit=5 # seconds, for each case

# --- output for the daemon -------------------------------------------------

# Send each argument, a JSON value, as one data event.
send() {
    printf '\n%s\n' "$EVALUATION_DATA_BEGIN"
    printf '%s\n' "$@"
    printf '%s\n' "$EVALUATION_DATA_END"
}

# Send whether the submission reached a goal: send_goal NAME true|false
send_goal() {
    send "{\"type\": \"goal_result\", \"goal\": \"$1\", \"result\": $2}"
}

miss_all_goals() {
    local goal
    for goal in $goals; do send_goal "$goal" false; done
    exit 0
}

# Send what this machine lacks, and exit: cannot_judge WHAT SENTENCE
cannot_judge() {
    printf '%s\n' "$2"
    send "{\"type\": \"cannot_judge\", \"missing\": \"$1\", \"message\": \"$2\"}"
    exit 3
}

# --- the texts ------------------------------------------------------------

# Print a text drawn from TURINGARENA_SEED: random_text WORDS VOCABULARY. The
# generator stays below 2^53, so every awk prints the same text.
random_text() {
    awk -v seed="$TURINGARENA_SEED" -v words="$1" -v vocabulary="$2" '
        function draw(below) {
            state = (state * 16807) % 2147483647
            return int(state / 2147483647 * below)
        }
        function made_word(number,    word) {
            word = ""
            do {
                word = word substr("bdfgklmnprstvz", number % 14 + 1, 1)
                number = int(number / 14)
                word = word substr("aeiou", number % 5 + 1, 1)
                number = int(number / 5)
            } while (number > 0)
            return word
        }
        BEGIN {
            state = seed % 2147483646 + 1
            for (i = 0; i < 10; i++) draw(1)
            for (i = 0; i < words; i++) {
                # The smaller of two draws: some words are much more frequent.
                one = draw(vocabulary); two = draw(vocabulary)
                word = made_word(one < two ? one : two)
                if (draw(5) == 0) word = toupper(substr(word, 1, 1)) substr(word, 2)
                printf "%s%s", word, (draw(6) == 0 ? "," : "") (draw(12) == 0 ? ".\n" : " ")
            }
        }'
}

# Count the words of stdin and print the expected answer.
expected_answer() {
    tr -cs 'A-Za-z' '\n' | tr 'A-Z' 'a-z' | sed '/^$/d' | sort | uniq -c |
        sort -k1,1nr -k2,2 | awk '{print $1, $2}'
}

# --- running the submission -----------------------------------------------

# Run the submission on the file $work/text; set $status and $seconds. All
# processes are in one process group, which is killed at the end.
run_submission() {
    local begin pid end
    rm -rf "$work/scratch" && mkdir "$work/scratch"
    begin=${EPOCHREALTIME/./}
    (
        cd "$work/scratch" || exit 1
        ulimit -f 16384 -c 0 # 16 MiB for a file, no core dumps
        exec env -i PATH="$PATH" HOME="$work/scratch" LANG=C.UTF-8 \
            timeout -s KILL "$time_limit" "${command[@]}" "$source" \
            <"$work/text" >"$work/answer" 2>"$work/words"
    ) &
    pid=$!
    { wait "$pid"; } 2>/dev/null
    status=$?
    kill -KILL -- "-$pid" 2>/dev/null
    end=${EPOCHREALTIME/./}
    printf -v seconds '%d.%02d' $(((end - begin) / 1000000)) $(((end - begin) / 10000 % 100))
}

# Judge the submission on the text $work/text: judge ABOUT. Set $counted,
# $ordered and $stop to true or false; $stop ends the evaluation.
judge() {
    number=$((number + 1))
    counted=false ordered=false stop=true
    printf 'case %d: %s ... ' "$number" "$1"
    expected_answer <"$work/text" >"$work/expected"
    run_submission
    if ((status == 137 && ${seconds%.*} >= time_limit)); then
        printf 'out of time (limit %d s)\n' "$time_limit"
        return
    fi
    if ((status != 0)); then
        printf 'exit status %d\n' "$status"
        show_words
        return
    fi
    stop=false
    # Ignore spaces at the ends of a line, and repeated spaces between words.
    awk '{$1 = $1; print}' "$work/answer" >"$work/lines"
    if cmp -s "$work/lines" "$work/expected"; then
        counted=true ordered=true
        printf 'ok (%s s)\n' "$seconds"
    elif cmp -s <(sort "$work/lines") <(sort "$work/expected"); then
        counted=true
        printf 'counted right, but not in order\n'
        show_first_difference
    else
        printf 'wrong\n'
        show_first_difference
    fi
}

show_first_difference() {
    local line=0 wanted got
    while true; do
        line=$((line + 1)) wanted='(the end)' got='(the end)'
        IFS= read -r wanted <&3 || wanted='(the end)'
        IFS= read -r got <&4 || got='(the end)'
        [[ $wanted == "$got" ]] && continue
        printf '  line %d: expected: %s\n' "$line" "$wanted"
        printf '  line %d: printed:  %s\n' "$line" "${got:0:60}"
        return
    done 3<"$work/expected" 4<"$work/lines"
}

# Show the first lines of stderr, without the names of directories.
show_words() {
    local line count=0
    while IFS= read -r line && ((count++ < 5)); do
        printf '  %s\n' "${line//"${source%/*}/"/}"
    done <"$work/words"
}

# --- the evaluation -------------------------------------------------------

((BASH_VERSINFO[0] >= 5)) ||
    cannot_judge bash 'This machine has an old bash, and the evaluator needs bash 5.'
for tool in awk cmp sed sort timeout tr uniq; do
    command -v "$tool" >/dev/null ||
        cannot_judge "$tool" "This machine has no program called $tool."
done
source=${SUBMISSION_FILE_SOURCE-}
[[ -n $source ]] ||
    cannot_judge source 'Nothing to judge: the field submission[source] is missing.'

work=$TEMPORARY_DIRECTORY
number=0
case $source in
    *.sh)
        command=(sh)
        printf 'reading %s ... ' "${source##*/}"
        if ! sh -n "$source" 2>"$work/words"; then
            printf 'failed\n'
            show_words
            miss_all_goals
        fi
        printf 'ok\n'
        ;;
    *.awk) command=(awk -f) ;;
    *)
        printf '%s: a solution is a file that ends in .sh or .awk\n' "${source##*/}"
        miss_all_goals
        ;;
esac

all_counted=true all_ordered=true
while IFS='|' read -r about text && [[ $about ]]; do
    if [[ $about == *'random words' ]]; then
        random_text "${about%% *}" 60 >"$work/text"
    else
        printf "$text" >"$work/text"
    fi
    judge "$about"
    [[ $counted == true ]] || all_counted=false
    [[ $ordered == true ]] || all_ordered=false
    [[ $stop == true ]] && break
done <<'CASES'
three words|one two two\n
no words at all|
capital letters|The cat and the hat and THE mat\n
signs between words|"Stop!" (he said) - stop, stop; or...don't\n
words of equal number|pear apple fig\npear fig apple\n
several lines, some empty|a b\n\n\nb c\n   c c\n\n
no line terminator at the end|one two\ntwo
numbers of two digits|nine nine nine nine nine nine nine nine nine ten ten ten ten ten ten ten ten ten ten\n
2000 random words|
CASES
send_goal counted "$all_counted"
send_goal ordered "$all_ordered"

fast=false
if [[ $stop == false && $all_counted == true ]]; then
    random_text 300000 20000 >"$work/text"
    judge '300000 random words'
    fast=$counted
fi
send_goal fast "$fast"
