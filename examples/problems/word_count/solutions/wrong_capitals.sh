# The and the are one word, not two.
tr -cs 'A-Za-z' '\n' | grep . | sort | uniq -c | sort -k1,1nr -k2,2
