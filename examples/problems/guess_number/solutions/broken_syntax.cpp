#include <iostream>

int main() {
    long low = 1, high;
    std::cin >> high
    std::cout << (low + high) / 2 << std::endl;
}
