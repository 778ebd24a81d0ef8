#include <algorithm>
#include <iostream>

int main() {
    int length;
    std::cin >> length;
    int ending_here = 0, best = 0;  // 32 bits: too few
    for (int i = 0; i < length; i++) {
        int number;
        std::cin >> number;
        ending_here = i == 0 ? number : std::max(number, ending_here + number);
        best = i == 0 ? number : std::max(best, ending_here);
    }
    std::cout << best << std::endl;
}
