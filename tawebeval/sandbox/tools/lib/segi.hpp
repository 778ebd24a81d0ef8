// Library for evaluators in C++17: g++ -std=c++17 -I"$EVALUATION_TOOLS/lib" evaluator.cpp
//
//     segi::require(1);
//     const auto source = segi::find_submission("source");
//     segi::Limits limits;
//     limits.time = 2;
//     const auto result = segi::run({"python3", source}, "3 4\n", limits, {{source}});
//     auto judgement = result.judge();
//     if (judgement.is_accepted()) judgement = segi::compare_tokens(result.out, "7");
//     segi::send_goal("correct", judgement.is_accepted());
//
// Programs of the submission run in a sandbox of their own, by tawebeval-run. Times are in seconds,
// sizes in bytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace segi {

using Path = std::filesystem::path;
using Words = std::vector<std::string>;

const int VERSION = 1;
const long MIB = 1 << 20;
const int CANNOT_JUDGE = 3; // an exit status

// End the evaluator with an error if this library is older.
inline void require(int version) {
    if (version <= VERSION) return;
    std::cerr << "the evaluator needs version " << version << " of segi; this server has "
              << VERSION << std::endl;
    std::exit(1);
}

// Return the value of an environment variable, "" if it is not set.
inline std::string environment(const std::string &name) {
    const char *value = std::getenv(name.c_str());
    return value ? value : "";
}

// --- Events ---

// Return the first characters of a text; bytes that are not UTF-8 become U+FFFD.
inline std::string shorten(std::string_view text, std::size_t most = 100) {
    std::string result;
    for (; !text.empty() && most > 0; most--) {
        const auto byte = [&](std::size_t at) -> unsigned { // 0 at the end
            return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
        };
        const unsigned lead = byte(0), next = byte(1); // and the range of next, as in RFC 3629
        const std::size_t size = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
        const unsigned least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        const unsigned largest = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        bool is_valid = size == 1 || (lead >= 0xc2 && lead <= 0xf4 && next >= least && next <= largest);
        for (std::size_t at = 2; at < size; at++) is_valid = is_valid && (byte(at) & 0xc0) == 0x80;
        if (is_valid) result += text.substr(0, size);
        else result += "\xef\xbf\xbd";
        text.remove_prefix(is_valid ? size : 1);
    }
    return result;
}

// Return a text as a JSON string.
inline std::string quote(const std::string &text) {
    std::string result = "\"";
    for (const unsigned char byte : shorten(text, text.size())) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
        if (byte == '"' || byte == '\\') result += '\\';
        if (byte < 0x20) result += escaped;
        else result += static_cast<char>(byte);
    }
    return result + '"';
}

// Print a block in one piece, as other threads and processes may print, too.
inline void write_block(const std::string &kind, const std::string &body) {
    std::fflush(stdout);
    const std::string begin = environment("EVALUATION_" + kind + "_BEGIN");
    std::cout << "\n" + begin + "\n" + body + "\n" + environment("EVALUATION_" + kind + "_END") + "\n"
              << std::flush;
}

// Send a JSON value as a data event, also in the middle of a line.
inline void send(const std::string &json) { write_block("DATA", json); }

// Send whether the submission reached a goal.
inline void send_goal(const std::string &goal, bool reached) {
    send("{\"type\": \"goal_result\", \"goal\": " + quote(goal) +
         ", \"result\": " + (reached ? "true}" : "false}"));
}

// Send how much of the evaluation is done.
inline void send_progress(long done, long total) {
    send("{\"type\": \"progress\", \"done\": " + std::to_string(done) +
         ", \"total\": " + std::to_string(total) + "}");
}

// Send the submission's score, and the highest that it could have reached.
inline void send_score(double score, double maximum) {
    send("{\"type\": \"score\", \"score\": " + std::to_string(score) +
         ", \"maximum\": " + std::to_string(maximum) + "}");
}

// Send a file, which is read later, under an ASCII name.
inline void send_file(const std::string &name, const Path &path,
                      const std::string &type = "application/octet-stream") {
    write_block("FILE", "Content-Type: " + type + "\nContent-Disposition: attachment; filename=\"" + name +
                            "\"\nX-SEGI-As: path\n\n" + std::filesystem::absolute(path).string());
}

// --- The submission ---

// Send what the evaluator lacks, in place of goals, and exit.
[[noreturn]] inline void cannot_judge(const std::string &missing, const std::string &message) {
    std::cout << message << std::endl;
    send("{\"type\": \"cannot_judge\", \"missing\": " + quote(missing) +
         ", \"message\": " + quote(message) + "}");
    std::exit(CANNOT_JUDGE);
}

// Return the path of the file that was submitted in a field; exit if there is none.
inline Path find_submission(const std::string &field) {
    std::string name = "SUBMISSION_FILE_";
    for (const unsigned char letter : field) name += static_cast<char>(std::toupper(letter));
    const std::string path = environment(name);
    if (path.empty())
        cannot_judge(field, "Nothing to judge: the field submission[" + field + "] is missing.");
    return path;
}

// Return a generator of random numbers that the evaluation's seed determines.
inline std::mt19937 make_random() { return std::mt19937(std::stoul(environment("TURINGARENA_SEED"))); }

// The verdict on a test case, with excerpts of what was expected and printed.
struct Judgement {
    std::string verdict = "accepted";
    std::string message = "", expected = "", printed = "";

    bool is_accepted() const { return verdict == "accepted"; }
};

// --- Runs ---

// Limits of a run; without one, that of the evaluation holds, or three quarters of its memory and
// processes. `wall` is 5 times `time` and 5 s.
// The evaluator holds the output in memory.
struct Limits {
    double time = 0, wall = 0;
    long memory = 0, processes = 0, output = 16 * MIB, file_size = 0;
};

// What a program sees: paths to read, or also to write, and the directory in which it starts.
struct Files {
    std::vector<Path> read = {}, write = {};
    Path directory = "/tmp";
};

// How a program ended: by an exit status, a signal (or 0), or a limit ("time", "wall", "memory",
// "processes", "output", or "").
struct Result {
    int exit_status = 0, signal = 0;
    std::string reason;
    double cpu_seconds = 0, wall_seconds = 0;
    long peak_memory_bytes = 0;
    std::string out, err;

    // The judgement of a program that failed, "accepted" after exit status 0.
    Judgement judge() const {
        if (reason == "output") return {"output_limit", "printed too much"};
        if (reason == "memory") {
            const auto mebibytes = std::to_string((peak_memory_bytes + MIB / 2) / MIB);
            return {"memory_limit", "stopped at its limit of " + mebibytes + " MiB of memory"};
        }
        if (reason == "processes") return {"runtime_error", "too many processes"};
        if (!reason.empty()) {
            char seconds[32];
            std::snprintf(seconds, sizeof seconds, "%.1f s",
                          reason == "time" ? cpu_seconds : wall_seconds);
            const std::string kind = reason == "time" ? " of processor time" : "";
            return {"time_limit", std::string("stopped after ") + seconds + kind};
        }
        if (signal) return {"runtime_error", "killed by signal " + std::to_string(signal)};
        if (exit_status) return {"runtime_error", "exit status " + std::to_string(exit_status)};
        return {};
    }
};

// What a case shows: the expected output only if asked, as who sees it can print it in the next
// submission; and an excerpt of the input.
struct Shown {
    bool expected = false;
    std::string input = "";
};

// Send the judgement of a test case, with the time and memory of a result.
inline void send_case(const std::string &name, const Judgement &judgement,
                      const Result *result = nullptr, std::optional<double> points = {},
                      const Shown &shown = {}) {
    std::string json = "{\"type\": \"case\", \"case\": " + quote(name) +
                       ", \"verdict\": " + quote(judgement.verdict);
    if (points) json += ", \"points\": " + std::to_string(*points);
    if (result)
        json += ", \"time\": " + std::to_string(result->cpu_seconds) +
                ", \"memory\": " + std::to_string(result->peak_memory_bytes);
    if (!judgement.message.empty()) json += ", \"message\": " + quote(judgement.message);
    if (!shown.input.empty()) json += ", \"input\": " + quote(shorten(shown.input));
    if (shown.expected && !judgement.expected.empty())
        json += ", \"expected\": " + quote(judgement.expected);
    if (!judgement.printed.empty()) json += ", \"printed\": " + quote(judgement.printed);
    send(json + "}");
}

// Read a file of the evaluator; for one that a program of the submission wrote, see read_output.
inline std::string read_file(const Path &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// An open file, closed by the destructor.
class File {
  public:
    explicit File(int descriptor) : descriptor_(descriptor) {}
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File() { close(); }

    // Make an empty file without a name, or return its path: no other run has the same one.
    static int make(Path *path = nullptr) {
        std::string name = environment("TEMPORARY_DIRECTORY") + "/segi-XXXXXX";
        const int descriptor = mkostemp(name.data(), O_CLOEXEC);
        if (descriptor < 0) throw std::runtime_error("cannot make the file " + name);
        if (path) *path = name;
        else std::remove(name.c_str());
        return descriptor;
    }

    int descriptor() const { return descriptor_; }

    void close() {
        if (descriptor_ >= 0) ::close(descriptor_);
        descriptor_ = -1;
    }

    // Read the first bytes of the file.
    std::string read(std::size_t most = SIZE_MAX) const {
        std::string text;
        char bytes[65536];
        for (ssize_t size; text.size() < most; text.append(bytes, size)) {
            const std::size_t left = std::min(most - text.size(), sizeof bytes);
            if ((size = pread(descriptor_, bytes, left, text.size())) <= 0) break;
        }
        return text;
    }

  private:
    int descriptor_;
};

// What a program wrote into a file; without text if `fault` is not accepted.
struct Output {
    std::string text;
    Judgement fault = {};
};

// Read a file of at most `most` bytes that a program of the submission has written. A symbolic link,
// also in place of a directory, and a hard link could lead to files that the program must not read,
// such as the expected output. They are faults, as is all but a regular file. Links above the
// evaluator's own directories are followed.
inline Output read_output(const Path &path, std::size_t most = 16 * MIB) {
    const Path full = std::filesystem::absolute(path).lexically_normal();
    const std::string parent = full.parent_path(), name = full.filename();
    std::string base = "/";
    for (const std::string &own : {std::filesystem::current_path().string(),
                                   environment("TEMPORARY_DIRECTORY"), environment("HOME")})
        if (own.size() > base.size() && (parent + "/").compare(0, own.size() + 1, own + "/") == 0)
            base = own;
    int directory = open(base.c_str(), O_PATH | O_CLOEXEC);
    for (const Path &each : Path(parent.substr(base.size())).relative_path()) {
        const File above(directory);
        directory = openat(directory, each.c_str(), O_PATH | O_NOFOLLOW | O_DIRECTORY | O_CLOEXEC);
        if (directory < 0) break;
    }
    const int missing = errno;
    const File folder(directory);
    // Without waiting for the writer of a FIFO.
    const File file(directory < 0 ? -1 : openat(directory, name.c_str(),
                                                O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.descriptor() < 0) {
        const bool is_missing = (directory < 0 ? missing : errno) == ENOENT;
        return {"", {"wrong_answer", name + (is_missing ? " is missing" : " is a link or no readable file")}};
    }
    struct stat status;
    if (fstat(file.descriptor(), &status) || !S_ISREG(status.st_mode) || status.st_nlink != 1)
        return {"", {"wrong_answer", name + " is a link or no readable file"}};
    std::string text = file.read(most + 1);
    if (text.size() > most)
        return {"", {"output_limit", name + " has over " + std::to_string(most) + " bytes"}};
    return {std::move(text)};
}

// A running program of the submission, behind pipes; its stderr goes to a file. The destructor
// kills it. Several threads may write and read.
class Program {
  public:
    Program(const Words &command, const Limits &limits, const Files &files,
            const std::string *input = nullptr)
        : report_(File::make(&report_path_)), errors_(File::make()), output_(input ? File::make() : -1) {
        std::signal(SIGPIPE, SIG_IGN);
        int in[2] = {-1, -1}, out[2] = {-1, -1};
        if (input) { // files: neither side can block the other
            in[0] = File::make();
            write_all(in[0], *input);
            lseek(in[0], 0, SEEK_SET);
            out[1] = dup(output_.descriptor());
        } else if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC)) {
            throw std::runtime_error("no pipe");
        }
        Words words = arguments(limits, files);
        words.insert(words.end(), command.begin(), command.end());
        std::vector<char *> argv;
        for (auto &word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        pid_ = fork();
        if (pid_ == 0) {
            dup2(in[0], 0);
            dup2(out[1], 1);
            dup2(errors_.descriptor(), 2);
            execvp(argv[0], argv.data());
            _exit(125);
        }
        for (const int descriptor : {in[0], out[1]}) close(descriptor);
        stdin_ = in[1];
        stdout_ = out[0];
        for (const int descriptor : {stdin_, stdout_})
            if (descriptor >= 0) fcntl(descriptor, F_SETFL, O_NONBLOCK);
        if (pid_ < 0) throw std::runtime_error("no process");
    }

    Program(const Program &) = delete;
    Program &operator=(const Program &) = delete;

    ~Program() {
        close_pipes();
        if (pid_ > 0) {
            kill(pid_, SIGKILL); // and the daemon's side kills the program
            waitpid(pid_, nullptr, 0);
        }
        std::remove(report_path_.c_str());
    }

    // Write to the program's input; meanwhile keep what it prints. That it has ended shows when it
    // is read from.
    void write(const std::string &text) {
        for (std::size_t done = 0; done < text.size();) {
            const ssize_t size = ::write(stdin_, text.data() + done, text.size() - done);
            if (size >= 0) done += size;
            else if (errno == EAGAIN) wait_for_more(stdin_);
            else if (errno != EINTR) return;
        }
    }

    // Read a line, or the first 64 KiB of one; nothing at the end of the output.
    std::optional<std::string> read_line() {
        const std::size_t most = 64 * 1024;
        while (true) {
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                const std::string_view unread = std::string_view(unread_).substr(taken_);
                const std::size_t end = unread.find('\n');
                if (end <= most || unread.size() > most || has_closed_) {
                    if (unread.empty()) return std::nullopt;
                    const std::string line(unread.substr(0, std::min(end, most)));
                    taken_ += line.size() + (end == line.size() ? 1 : 0);
                    if (taken_ > unread_.size() / 2) { // not each time, as it moves the rest
                        unread_.erase(0, taken_);
                        taken_ = 0;
                    }
                    return line;
                }
            }
            wait_for_more();
        }
    }

    // Close the program's input, and return the result after its end, with unread output. Throws
    // std::runtime_error if it was not run.
    Result finish() {
        if (stdin_ >= 0) close(stdin_);
        stdin_ = -1;
        while (stdout_ >= 0 && !has_closed_) wait_for_more();
        close_pipes();
        waitpid(pid_, nullptr, 0);
        pid_ = -1;
        Result result;
        result.out = output_.descriptor() >= 0 ? output_.read() : unread_.substr(taken_);
        result.err = errors_.read();
        const std::string report = report_.read();
        if (report.empty() || field(report, "error") != "null")
            throw std::runtime_error(result.err);
        const auto number = [&](const std::string &name) {
            return std::strtod(field(report, name).c_str(), nullptr); // null is 0
        };
        result.exit_status = static_cast<int>(number("exit_status"));
        result.signal = static_cast<int>(number("signal"));
        result.cpu_seconds = number("cpu_seconds");
        result.wall_seconds = number("wall_seconds");
        result.peak_memory_bytes = static_cast<long>(number("peak_memory_bytes"));
        const std::string reason = field(report, "reason");
        if (reason[0] == '"') result.reason = reason.substr(1, reason.find('"', 1) - 1);
        return result;
    }

  private:
    static void write_all(int descriptor, const std::string &text) {
        for (std::size_t done = 0; done < text.size();) {
            const ssize_t size = ::write(descriptor, text.data() + done, text.size() - done);
            if (size < 0) throw std::runtime_error("cannot write the input of a program");
            done += size;
        }
    }

    // Wait for output and keep it, or until a descriptor can be written to.
    void wait_for_more(int writing = -1) {
        const bool has_closed = has_closed_; // maybe by another thread since the caller's look
        if (has_closed && writing < 0) return;
        pollfd both[] = {{has_closed ? -1 : stdout_, POLLIN, 0}, {writing, POLLOUT, 0}};
        if (poll(both, 2, -1) < 0 || !both[0].revents) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        char bytes[65536];
        const ssize_t size = ::read(stdout_, bytes, sizeof bytes);
        if (size > 0) unread_.append(bytes, size);
        else if (size == 0 || (errno != EAGAIN && errno != EINTR)) has_closed_ = true;
    }

    // Return what stands behind a name in the report.
    static std::string field(const std::string &report, const std::string &name) {
        const std::string key = "\"" + name + "\": ";
        const std::size_t at = report.find(key);
        return at == std::string::npos ? "null" : report.substr(at + key.size());
    }

    Words arguments(const Limits &limits, const Files &files) const {
        Words words = {"tawebeval-run", "--report", report_path_, "--dir", files.directory};
        const auto add = [&](const char *option, auto limit) {
            if (limit > 0) words.insert(words.end(), {option, std::to_string(limit)});
        };
        add("--time", limits.time);
        add("--wall", limits.wall);
        add("--memory", limits.memory);
        add("--processes", limits.processes);
        add("--output", limits.output);
        add("--file-size", limits.file_size);
        for (const Path &path : files.read) words.insert(words.end(), {"--read", path});
        for (const Path &path : files.write) words.insert(words.end(), {"--write", path});
        words.push_back("--");
        return words;
    }

    void close_pipes() {
        if (stdin_ >= 0) close(stdin_);
        if (stdout_ >= 0) close(stdout_);
        stdin_ = stdout_ = -1;
    }

    Path report_path_;
    File report_, errors_, output_; // read by descriptor: a name could lead to another file
    pid_t pid_ = -1;
    int stdin_ = -1, stdout_ = -1;
    std::mutex mutex_; // of the members below
    std::string unread_; // behind taken_ bytes
    std::size_t taken_ = 0;
    std::atomic<bool> has_closed_ = false; // whether the output has ended
};

// Run a program of the submission in a sandbox of its own, and wait for its end. Throws
// std::runtime_error if it was not run.
inline Result run(const Words &command, const std::string &input, const Limits &limits = {},
                  const Files &files = {}) {
    return Program(command, limits, files, &input).finish();
}

// Compile a source file into the directory build, in a sandbox that has only these. Returns the
// compiler's output, with names of files only, as a judgement "compile_error".
inline Judgement compile(const Words &command, const Path &source, const Path &build,
                         const Limits &limits = {30, 60, 0, 0, MIB, 64 * MIB}) {
    std::filesystem::create_directories(build);
    const Result result = run(command, "", limits, {{source}, {build}, build});
    if (result.judge().is_accepted()) return {};
    std::string text = result.out + result.err;
    for (const std::string &directory : {source.parent_path().string() + "/", build.string() + "/"})
        for (std::size_t at = 0; (at = text.find(directory, at)) != text.npos;)
            text.erase(at, directory.size());
    return {"compile_error", text.empty() ? result.judge().message : shorten(text, 2000)};
}

// --- Comparison ---

using Text = std::string_view;

// Take the next word from a text; nothing at its end.
inline std::optional<Text> take_word(Text &text) {
    const char *const spaces = " \t\r\v\f\n";
    text.remove_prefix(std::min(text.find_first_not_of(spaces), text.size()));
    if (text.empty()) return std::nullopt;
    const Text word = text.substr(0, text.find_first_of(spaces));
    text.remove_prefix(word.size());
    return word;
}

// Take the next line with its newline; nothing at the end.
inline std::optional<Text> take_line(Text &text) {
    if (text.empty()) return std::nullopt;
    const Text line = text.substr(0, std::min(text.find('\n'), text.size() - 1) + 1);
    text.remove_prefix(line.size());
    return line;
}

template <typename Take, typename IsSame>
Judgement find_difference(const std::string &kind, Text printed, Text expected, Take take,
                          IsSame is_same) {
    for (long number = 1;; number++) {
        const auto one = take(printed), other = take(expected);
        if (!one && !other) return {};
        if (one && other && is_same(*one, *other)) continue;
        const char *what = !one ? " missing" : !other ? " unexpected" : " differs";
        return {"wrong_answer", kind + " " + std::to_string(number) + what,
                shorten(other.value_or("")), shorten(one.value_or(""))};
    }
}

// Compare each byte.
inline Judgement compare_exact(Text printed, Text expected) {
    return find_difference("line", printed, expected, take_line, std::equal_to<Text>());
}

// Compare words; spaces and newlines only separate them.
inline Judgement compare_tokens(Text printed, Text expected) {
    return find_difference("word", printed, expected, take_word, std::equal_to<Text>());
}

// Compare words, of which numbers may differ: by `absolute`, or `relative` to the larger.
inline Judgement compare_floats(Text printed, Text expected, double absolute = 1e-9,
                                double relative = 1e-9) {
    const auto parse = [](Text word) -> std::optional<double> {
        if (word.find_first_not_of("0123456789+-.eE") != word.npos) return std::nullopt;
        const std::string copy(word);
        char *end;
        const double number = std::strtod(copy.c_str(), &end);
        return *end || !std::isfinite(number) ? std::nullopt : std::optional(number);
    };
    const auto is_same = [&](Text one, Text other) {
        const auto number = parse(one), wanted = parse(other);
        if (!number || !wanted) return one == other;
        const double larger = std::max(std::abs(*number), std::abs(*wanted));
        return std::abs(*number - *wanted) <= std::max(absolute, relative * larger);
    };
    return find_difference("word", printed, expected, take_word, is_same);
}

} // namespace segi
