// Judge a program that guesses a number; play against it through pipes.
//
// Reads SUBMISSION_FILE_SOURCE and sends the goals found and logarithmic.

#include <filesystem>
#include <random>

#include "program.hpp"
#include "segi.hpp"

namespace fs = std::filesystem;
using std::chrono::seconds;

const seconds GAME_TIME(5);
const seconds COMPILER_TIME(60);

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

bool has_command(const std::string &name) {
    const std::string path = environment("PATH") + ":";
    for (std::size_t begin = 0, end; (end = path.find(':', begin)) != path.npos; begin = end + 1)
        if (access((path.substr(begin, end - begin) + "/" + name).c_str(), X_OK) == 0) return true;
    return false;
}

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

// Show the first lines of a program's stderr, without the names of directories.
void show_words(const Program &program, const fs::path &source) {
    const std::string folder = source.parent_path().string() + "/";
    for (std::string line : program.words(20)) {
        for (std::size_t at; (at = line.find(folder)) != line.npos;) line.erase(at, folder.size());
        say("  %.200s\n", line.c_str());
    }
}

// Play one game and report on it.
bool play(Game game, const std::vector<std::string> &command, const fs::path &source,
          const std::string &scratch) {
    say("%s, 1 to %ld ... ", game.about.c_str(), game.count);
    Program program(command, scratch, GAME_TIME);
    program.write_line(std::to_string(game.count));
    for (long number = 1; number <= game.guesses; number++) {
        const auto line = program.read_line();
        if (!line) {
            if (const auto status = program.wait())
                say("ended without finding it (%s %d)\n", *status < 0 ? "signal" : "exit status",
                    std::abs(*status));
            else
                say("no guess came (limit %ld s; is the output flushed?)\n",
                    (long)GAME_TIME.count());
            show_words(program, source);
            return false;
        }
        const auto guess = parse_guess(*line);
        if (!guess) {
            say("not a guess: %.40s\n", line->c_str());
            return false;
        }
        const std::string answer = game.secret.answer(*guess);
        program.write_line(answer);
        if (answer == "equal") {
            say("found with %ld of %ld guesses\n", number, game.guesses);
            return true;
        }
    }
    say("not found with %ld guesses\n", game.guesses);
    return false;
}

// Return the command that runs a submission; empty if it is broken.
std::vector<std::string> prepare(const fs::path &source, const std::string &scratch) {
    if (source.extension() == ".py") return {"python3", "-I", "-B", source};
    if (source.extension() == ".sh") return {"sh", source};
    const std::string target = scratch + "-solution";
    say("compiling %s ... ", source.filename().c_str());
    Program compiler({"g++", "-std=c++17", "-O2", "-Wall", "-o", target, source}, scratch,
                     COMPILER_TIME);
    const auto status = compiler.wait();
    say(status == 0 ? "ok\n" : "failed\n");
    if (status == 0) return {target};
    show_words(compiler, source);
    return {};
}

long logarithm(long count) { // of count + 1, to the base of 2, rounded up
    long guesses = 0;
    while ((1L << guesses) < count + 1) guesses++;
    return guesses;
}

int main() {
    signal(SIGPIPE, SIG_IGN);
    if (environment("SUBMISSION_FILE_SOURCE").empty())
        return cannot_judge("source", "Nothing to judge: the field submission[source] is missing.");
    const fs::path source = environment("SUBMISSION_FILE_SOURCE");
    const std::string ending = source.extension();
    if (ending != ".cpp" && ending != ".py" && ending != ".sh") {
        say("%s: a solution is a file that ends in .cpp, .py or .sh\n", source.filename().c_str());
        send_goal("found", false);
        send_goal("logarithmic", false);
        return JUDGED;
    }
    if (ending == ".py" && !has_command("python3"))
        return cannot_judge("python3", "This machine has no Python (python3): try a .cpp file.");

    const std::string scratch = environment("TEMPORARY_DIRECTORY") + "/scratch";
    fs::create_directory(scratch);
    const auto command = prepare(source, scratch);
    bool reached = !command.empty();

    std::mt19937 draw(std::stoul(environment("TURINGARENA_SEED")));
    std::vector<Game> games;
    for (long count : {1, 2, 10, 1000}) {
        const long drawn = draw() % count + 1;
        games.push_back({"the first number", count, Secret(1, 1), count});
        if (count == 1) continue;
        games.push_back({"the last number", count, Secret(count, count), count});
        games.push_back({"some number", count, Secret(drawn, drawn), count});
    }
    for (const Game &game : games) reached = reached && play(game, command, source, scratch);
    send_goal("found", reached);

    games.clear();
    for (long count : {1'000'000L, 2'000'000'000L})
        games.push_back({"a number that dodges", count, Secret(1, count), logarithm(count)});
    for (const Game &game : games) reached = reached && play(game, command, source, scratch);
    send_goal("logarithmic", reached);
    return JUDGED;
}
