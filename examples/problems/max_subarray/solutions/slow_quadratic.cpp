#include <algorithm>
#include <iostream>
#include <vector>

int main() {
    int length;
    std::cin >> length;
    std::vector<long long> numbers(length);
    for (auto &number : numbers) std::cin >> number;
    long long best = numbers[0];
    for (int begin = 0; begin < length; begin++) {
        long long sum = 0;
        for (int end = begin; end < length; end++) {
            sum += numbers[end];
            best = std::max(best, sum);
        }
    }
    std::cout << best << std::endl;
}
