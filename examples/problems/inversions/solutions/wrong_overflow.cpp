#include <iostream>
#include <vector>

int main() {
    int length;
    std::cin >> length;
    std::vector<int> numbers(length);
    for (int &number : numbers) std::cin >> number;
    short inversions = 0;  // 16 bits: enough for 100 numbers
    for (int one = 0; one < length; one++)
        for (int other = one + 1; other < length; other++) inversions += numbers[one] > numbers[other];
    std::cout << inversions << std::endl;
}
