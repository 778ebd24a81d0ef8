// A child process that reads and writes lines until a deadline. The destructor
// kills its whole process group.
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "segi.hpp"

class Program {
  public:
    using Clock = std::chrono::steady_clock;

    // Start argv in the directory scratch; its stderr goes to a file beside it.
    Program(const std::vector<std::string> &argv, const std::string &scratch,
            std::chrono::seconds time)
        : words_path_(scratch + ".err"), deadline_(Clock::now() + time) {
        int in[2], out[2];
        if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC)) std::abort();
        // An environment without the evaluator's markers.
        std::vector<std::string> variables = {"PATH=" + environment("PATH"), "HOME=" + scratch,
                                              "TMPDIR=" + scratch, "LANG=C.UTF-8"};
        const auto arguments = pointers(argv), environ = pointers(variables);
        pid_ = fork();
        if (pid_ < 0) std::abort();
        if (pid_ == 0) {
            setsid();
            const int words = open(words_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
            dup2(in[0], 0);
            dup2(out[1], 1);
            dup2(words, 2);
            limit(RLIMIT_CPU, time.count() + 1);
            limit(RLIMIT_FSIZE, 64 << 20);
            limit(RLIMIT_CORE, 0);
            signal(SIGPIPE, SIG_DFL);
            if (chdir(scratch.c_str()) == 0) execvpe(arguments[0], arguments.data(), environ.data());
            _exit(127);
        }
        close(in[0]);
        close(out[1]);
        stdin_ = in[1];
        stdout_ = out[0];
    }

    Program(const Program &) = delete;
    Program &operator=(const Program &) = delete;

    ~Program() {
        close(stdin_);
        close(stdout_);
        // Not reaped yet: the number is still its own. It may not have come
        // as far as setsid(), so both are sent.
        kill(-pid_, SIGKILL);
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
    }

    // Write a line. Only a few short ones ever wait in the pipe: this does not block.
    void write_line(const std::string &line) {
        const std::string bytes = line + "\n";
        // A program that has ended is noticed when it is read from.
        if (write(stdin_, bytes.data(), bytes.size()) < 0) return;
    }

    // Read a line, or the beginning of one that does not end; nothing at the
    // end of the output or after the deadline.
    std::optional<std::string> read_line() {
        std::size_t end;
        while ((end = unread_.find('\n')) == std::string::npos) {
            char bytes[4096];
            if (unread_.size() > sizeof bytes) return unread_;
            if (!ready()) return std::nullopt;
            const ssize_t size = read(stdout_, bytes, sizeof bytes);
            if (size <= 0) return std::nullopt;
            unread_.append(bytes, size);
        }
        std::string line = unread_.substr(0, end);
        unread_.erase(0, end + 1);
        return line;
    }

    // Wait for the end: the exit status, minus the signal, nothing after the deadline.
    std::optional<int> wait() {
        siginfo_t information{};
        // Leave it to be reaped at the very end.
        while (waitid(P_PID, pid_, &information, WEXITED | WNOHANG | WNOWAIT) == 0 &&
               information.si_pid == 0) {
            if (Clock::now() >= deadline_) return std::nullopt;
            usleep(2000);
        }
        return information.si_code == CLD_EXITED ? information.si_status : -information.si_status;
    }

    // The first lines that the program has written to stderr.
    std::vector<std::string> words(std::size_t count) const {
        std::vector<std::string> lines;
        std::ifstream file(words_path_);
        for (std::string line; lines.size() < count && std::getline(file, line);)
            lines.push_back(line);
        return lines;
    }

  private:
    static std::vector<char *> pointers(const std::vector<std::string> &strings) {
        std::vector<char *> result;
        for (const auto &string : strings) result.push_back(const_cast<char *>(string.c_str()));
        result.push_back(nullptr);
        return result;
    }

    static void limit(int resource, rlim_t value) {
        const rlimit both = {value, value};
        setrlimit(resource, &both);
    }

    // Wait until there is something to read; false after the deadline.
    bool ready() const {
        using std::chrono::milliseconds;
        const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
        pollfd entry = {stdout_, POLLIN, 0};
        return poll(&entry, 1, std::max<long>(0, left.count() + 1)) > 0;
    }

    std::string words_path_;
    Clock::time_point deadline_;
    pid_t pid_ = -1;
    int stdin_ = -1;
    int stdout_ = -1;
    std::string unread_;
};
