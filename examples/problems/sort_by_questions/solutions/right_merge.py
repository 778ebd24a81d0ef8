def lighter(one, other):
    print("?", one, other, flush=True)
    return input() == "yes"


def merge_sort(items):
    if len(items) < 2:
        return items
    middle = len(items) // 2
    left, right = merge_sort(items[:middle]), merge_sort(items[middle:])
    merged = []
    while left and right:
        merged.append((left if lighter(left[0], right[0]) else right).pop(0))
    return merged + left + right


print("!", *merge_sort(list(range(1, int(input()) + 1))))
