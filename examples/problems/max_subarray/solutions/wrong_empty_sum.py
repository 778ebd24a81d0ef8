length = int(input())
best = ending_here = 0  # as if no numbers at all were a choice
for number in map(int, input().split()):
    ending_here = max(0, ending_here + number)
    best = max(best, ending_here)
print(best)
