{
    gsub(/[^A-Za-z]+/, " ")
    for (i = 1; i <= NF; i++) count[tolower($i)]++
}
END {
    # 10 comes before 9: this sorts the numbers as if they were words.
    for (word in count) print count[word], word | "sort -k1,1r -k2,2"
}
