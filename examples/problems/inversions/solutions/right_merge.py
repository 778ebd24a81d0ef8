def sort(numbers):
    """Return the sorted numbers, and their inversions."""
    if len(numbers) < 2:
        return numbers, 0
    middle = len(numbers) // 2
    (left, one), (right, other) = sort(numbers[:middle]), sort(numbers[middle:])
    merged, inversions, place = [], one + other, 0
    for number in right:
        while place < len(left) and left[place] <= number:
            merged.append(left[place])
            place += 1
        inversions += len(left) - place
        merged.append(number)
    return merged + left[place:], inversions


input()
print(sort(list(map(int, input().split())))[1])
