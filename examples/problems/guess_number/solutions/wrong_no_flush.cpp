#include <cstdio>
#include <cstring>

int main() {
    long low = 1, high;
    if (std::scanf("%ld", &high) != 1) return 1;
    char answer[10] = "";
    while (std::strcmp(answer, "equal") != 0) {
        const long guess = (low + high) / 2;
        std::printf("%ld\n", guess);  // stays in the buffer: fflush(stdout) is missing
        if (std::scanf("%9s", answer) != 1) return 1;
        if (std::strcmp(answer, "higher") == 0) low = guess + 1;
        if (std::strcmp(answer, "lower") == 0) high = guess - 1;
    }
}
