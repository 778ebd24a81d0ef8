#include <iostream>

int main() {
    int length, sum = 0;
    std::cin >> length;
    volatile unsigned i = 0;
    while (i >= 0) {  // an unsigned number always is
        i = i + 1;
    }
    std::cout << sum << std::endl;
}
