#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

int main() {
    int count;
    std::cin >> count;
    std::vector<int> order;
    for (int one = 1; one <= count; one++) {
        const auto place = std::lower_bound(order.begin(), order.end(), one, [](int a, int b) {
            std::cout << "? " << a << " " << b << std::endl;
            std::string answer;
            std::cin >> answer;
            return answer == "yes";
        });
        order.insert(place, one);
    }
    std::cout << "!";
    for (const int one : order) std::cout << " " << one;
    std::cout << std::endl;
}
