#!/usr/bin/env bash
# Judge a program that counts words. Run it as: bash evaluator.sh
#
# Reads SUBMISSION_FILE_SOURCE and sends the goals counted, ordered and fast.

. "$EVALUATION_TOOLS/lib/segi.sh"
export LC_ALL=C
work=$TEMPORARY_DIRECTORY
time_limit=5 # seconds, for each case

miss_all_goals() {
    local goal
    for goal in counted ordered fast; do segi_send_goal "$goal" false; done
    exit 0
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

# --- judging the submission ----------------------------------------------

# Judge the submission on the text $work/text: judge ABOUT. Set $counted,
# $ordered and $stop to true or false; $stop ends the evaluation.
judge() {
    number=$((number + 1))
    counted=false ordered=false stop=true
    printf 'case %d: %s ... ' "$number" "$1"
    expected_answer <"$work/text" >"$work/expected"
    segi_run --time "$time_limit" --wall 15 --output 1M --read "$source" -- \
        "${command[@]}" "$source" <"$work/text" >"$work/answer" 2>"$work/words"
    if [[ $segi_verdict != accepted ]]; then
        printf '%s\n' "$segi_message"
        show_words
        return
    fi
    stop=false
    # Ignore spaces at the ends of a line, and repeated spaces between words.
    awk '{$1 = $1; print}' "$work/answer" >"$work/lines"
    segi_compare exact "$work/lines" "$work/expected"
    if [[ $segi_verdict == accepted ]]; then
        counted=true ordered=true
        printf 'ok (%.2f s)\n' "$segi_time"
        return
    fi
    if cmp -s <(sort "$work/lines") <(sort "$work/expected"); then
        counted=true
        printf 'counted right, but in the wrong order\n'
    else
        printf 'wrong\n'
    fi
    printf '  %s: expected: %s\n' "${segi_message% *}" "${segi_expected:-(the end)}"
    printf '  %s: printed:  %s\n' "${segi_message% *}" "${segi_printed:-(the end)}"
}

# Show the first lines of stderr, without the names of directories.
show_words() {
    local line count=0
    while IFS= read -r line && ((count++ < 5)); do
        printf '  %s\n' "${line//"${source%/*}/"/}"
    done <"$work/words"
}

# --- the evaluation -------------------------------------------------------

segi_require 1
segi_find_submission source
source=$segi_file
number=0
case $source in
    *.sh)
        command=(sh)
        printf 'preparing %s ... ' "${source##*/}"
        segi_compile --read "$source" -- sh -n "$source"
        if [[ $segi_verdict != accepted ]]; then
            printf 'failed\n  %s\n' "$segi_message"
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
segi_send_goal counted "$all_counted"
segi_send_goal ordered "$all_ordered"

fast=false
if [[ $stop == false && $all_counted == true ]]; then
    random_text 300000 20000 >"$work/text"
    judge '300000 random words'
    fast=$counted
fi
segi_send_goal fast "$fast"
