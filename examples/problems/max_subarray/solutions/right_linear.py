import sys

length, *numbers = map(int, sys.stdin.read().split())
best = ending_here = numbers[0]
for number in numbers[1:]:
    ending_here = number if ending_here < 0 else ending_here + number
    if ending_here > best:
        best = ending_here
print(best)
