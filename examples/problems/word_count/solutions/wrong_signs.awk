# "stop," is taken for another word than "stop".
{ for (i = 1; i <= NF; i++) count[tolower($i)]++ }
END { for (word in count) print count[word], word | "sort -k1,1nr -k2,2" }
