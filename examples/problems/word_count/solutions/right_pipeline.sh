tr 'A-Z' 'a-z' | tr -cs 'a-z' '\n' | grep . | sort | uniq -c | sort -k1,1nr -k2,2
