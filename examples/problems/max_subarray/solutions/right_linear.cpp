#include <algorithm>
#include <cstdio>

int main() {
    int length;
    if (std::scanf("%d", &length) != 1) return 1;
    long long ending_here = 0, best = 0;
    for (int i = 0; i < length; i++) {
        long long number;
        if (std::scanf("%lld", &number) != 1) return 1;
        ending_here = i == 0 ? number : std::max(number, ending_here + number);
        best = i == 0 ? number : std::max(best, ending_here);
    }
    std::printf("%lld\n", best);
}
