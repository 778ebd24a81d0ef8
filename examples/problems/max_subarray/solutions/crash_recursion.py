length = int(input())
numbers = [int(word) for word in input().split()]


def best_ending_at(i):
    """Give the best sum that ends at i, and the best sum up to there."""
    if i == 0:
        return numbers[0], numbers[0]
    ending, best = best_ending_at(i - 1)
    ending = max(numbers[i], ending + numbers[i])
    return ending, max(best, ending)


print(best_ending_at(length - 1)[1])
