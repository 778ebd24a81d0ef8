#include <iostream>
#include <string>

int main() {
    int low = 1, high;
    std::cin >> high;
    std::string answer;
    while (answer != "equal") {
        const int guess = (int)((unsigned)low + (unsigned)high) / 2;  // the sum may need 33 bits
        std::cout << guess << std::endl;
        if (!(std::cin >> answer)) return 1;
        if (answer == "higher") low = guess + 1;
        if (answer == "lower") high = guess - 1;
    }
}
