low, high = 1, int(input()
print((low + high) // 2)
