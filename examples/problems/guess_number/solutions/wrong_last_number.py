low, high = 1, int(input())
while True:
    guess = (low + high) // 2  # high itself is never guessed
    print(guess, flush=True)
    answer = input()
    if answer == "equal":
        break
    if answer == "higher":
        low = guess
    else:
        high = guess
