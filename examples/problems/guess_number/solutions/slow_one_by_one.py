count = int(input())
for guess in range(1, count + 1):
    print(guess, flush=True)
    if input() == "equal":
        break
