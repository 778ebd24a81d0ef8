if tr 'A-Z' 'a-z'; then
    sort | uniq -c
