def lighter(one, other):
    print("?", one, other, flush=True)
    return input() == "yes"


count = int(input())
numbers = range(1, count + 1)
rank = {one: sum(lighter(other, one) for other in numbers if other != one) for one in numbers}
print("!", *sorted(numbers, key=rank.get))
