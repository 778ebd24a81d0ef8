// Judge a program that guesses a number; play against it through pipes.
//
// Reads SUBMISSION_FILE_SOURCE and sends the goals found and logarithmic.

#include "segi.hpp"

const double GAME_TIME = 5; // seconds

struct Solution {
    segi::Words command;
    std::vector<segi::Path> files; // what it may read
};

// The number to find: drawn at the start, or undecided. While it is undecided,
// each answer leaves the larger part of the numbers.
class Secret {
  public:
    Secret(long low, long high) : low_(low), high_(high) {}

    std::string answer(long guess) {
        if (low_ == high_ && guess == low_) return "equal";
        if (guess < low_) return "higher";
        if (guess > high_) return "lower";
        if (high_ - guess >= guess - low_) {
            low_ = guess + 1;
            return "higher";
        }
        high_ = guess - 1;
        return "lower";
    }

  private:
    long low_, high_; // it is one of these
};

struct Game {
    std::string about;
    long count; // the numbers are 1 ... count
    Secret secret;
    long guesses; // so many are allowed
};

// Parse the guess in a line; nothing if it is not a number.
std::optional<long> parse_guess(const std::string &line) {
    const std::size_t begin = line.find_first_not_of(" \t\r");
    if (begin == line.npos) return std::nullopt;
    const std::string word = line.substr(begin, line.find_last_not_of(" \t\r") - begin + 1);
    const std::size_t digits = word[0] == '-' ? 1 : 0;
    if (word.size() == digits || word.size() > 18) return std::nullopt;
    if (word.find_first_not_of("0123456789", digits) != word.npos) return std::nullopt;
    return std::stol(word);
}

// Play one game and report on it.
bool play(Game game, const Solution &solution) {
    std::cout << game.about << ", 1 to " << game.count << " ... " << std::flush;
    segi::Limits limits;
    limits.time = limits.wall = GAME_TIME;
    segi::Program program(solution.command, limits, {solution.files});
    program.write(std::to_string(game.count) + "\n");
    for (long number = 1; number <= game.guesses; number++) {
        const auto line = program.read_line();
        if (!line) {
            const segi::Result result = program.finish();
            if (result.reason == "wall")
                std::cout << "no guess came (limit " << GAME_TIME << " s; is the output flushed?)\n";
            else
                std::cout << "ended without finding it (" << result.judge().message << ")\n"
                          << result.err.substr(0, 1000);
            return false;
        }
        const auto guess = parse_guess(*line);
        if (!guess) {
            std::cout << "not a guess: " << line->substr(0, 40) << std::endl;
            return false;
        }
        const std::string answer = game.secret.answer(*guess);
        program.write(answer + "\n");
        if (answer == "equal") {
            std::cout << "found by guess " << number << "; " << game.guesses << " are allowed\n";
            return true;
        }
    }
    std::cout << "not found by " << game.guesses << " guesses\n";
    return false;
}

// Prepare a submission; nothing if it is broken.
std::optional<Solution> prepare(const segi::Path &source) {
    const std::string ending = source.extension();
    if (ending == ".py") return Solution{{"python3", "-I", "-B", source}, {source}};
    if (ending == ".sh") return Solution{{"sh", source}, {source}};
    const std::string name = source.filename();
    if (ending != ".cpp") {
        std::cout << name << ": a solution is a file that ends in .cpp, .py or .sh" << std::endl;
        return std::nullopt;
    }
    std::cout << "compiling " << name << " ... " << std::flush;
    const segi::Path build = segi::environment("TEMPORARY_DIRECTORY") + "/build";
    const auto judgement =
        segi::compile({"g++", "-std=c++17", "-O2", "-o", build / "solution", source}, source, build);
    std::cout << (judgement.is_accepted() ? "ok" : "failed\n" + judgement.message) << std::endl;
    if (!judgement.is_accepted()) return std::nullopt;
    return Solution{{build / "solution"}, {build}};
}

long logarithm(long count) { // of count + 1, to the base of 2, rounded up
    long guesses = 0;
    while ((1L << guesses) < count + 1) guesses++;
    return guesses;
}

int main() {
    segi::require(1);
    const auto solution = prepare(segi::find_submission("source"));
    bool reached = solution.has_value();

    std::mt19937 draw = segi::make_random();
    std::vector<Game> games;
    for (long count : {1, 2, 10, 1000}) {
        const long drawn = draw() % count + 1;
        games.push_back({"the first number", count, Secret(1, 1), count});
        if (count == 1) continue;
        games.push_back({"the last number", count, Secret(count, count), count});
        games.push_back({"some number", count, Secret(drawn, drawn), count});
    }
    for (const Game &game : games) reached = reached && play(game, *solution);
    segi::send_goal("found", reached);

    games.clear();
    for (long count : {1'000'000L, 2'000'000'000L})
        games.push_back({"a number that may change after each guess", count, Secret(1, count), logarithm(count)});
    for (const Game &game : games) reached = reached && play(game, *solution);
    segi::send_goal("logarithmic", reached);
}
