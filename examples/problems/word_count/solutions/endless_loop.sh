count=0
while [ "$count" -ge 0 ]; do
    count=$((count + 1))
done
