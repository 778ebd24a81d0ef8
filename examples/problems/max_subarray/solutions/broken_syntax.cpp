#include <iostream>

int main() {
    int length
    std::cin >> length;
    std::cout << best << std::endl;
}
