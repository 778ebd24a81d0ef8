low, high = 1, int(input())
answer = ""
while answer != "equal":
    guess = (low + high) // 2
    print(guess, flush=True)
    answer = input()
    if answer == "higher":
        low = guess + 1
    elif answer == "lower":
        high = guess - 1
