low=1
read -r high
answer=
while [ "$answer" != equal ]; do
    guess=$(((low + high) / 2))
    echo "$guess"
    read -r answer || exit 1
    case $answer in
        higher) low=$((guess + 1)) ;;
        lower) high=$((guess - 1)) ;;
    esac
done
