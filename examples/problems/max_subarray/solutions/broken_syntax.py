length = int(input())
for number in map(int, input().split())
    print(number)
