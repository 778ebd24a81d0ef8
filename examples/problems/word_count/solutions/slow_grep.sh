# Reads the whole text again for each different word.
tr 'A-Z' 'a-z' | tr -cs 'a-z' '\n' >text
sort -u text | grep . | while read -r word; do
    echo "$(grep -cx "$word" text) $word"
done | sort -k1,1nr -k2,2
