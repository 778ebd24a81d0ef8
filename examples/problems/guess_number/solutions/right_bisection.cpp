#include <iostream>
#include <string>

int main() {
    long long low = 1, high;
    std::cin >> high;
    std::string answer;
    while (answer != "equal") {
        const long long guess = low + (high - low) / 2;
        std::cout << guess << std::endl;
        if (!(std::cin >> answer)) return 1;
        if (answer == "higher") low = guess + 1;
        if (answer == "lower") high = guess - 1;
    }
}
