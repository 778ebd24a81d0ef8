print(0
