length = int(input())
numbers = [int(word) for word in input().split()]
best = numbers[0]
for begin in range(length):
    total = 0
    for number in numbers[begin:]:
        total += number
        best = max(best, total)
print(best)
