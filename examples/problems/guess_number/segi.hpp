// Output for the daemon: text by say(), data by send().
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

const int JUDGED = 0;
const int CANNOT_JUDGE = 3;

// Return the value of an environment variable, "" if it is not set.
inline std::string environment(const char *name) {
    const char *value = std::getenv(name);
    return value ? value : "";
}

// Print text, or a part of a line, and flush it.
[[gnu::format(printf, 1, 2)]] inline void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vprintf(format, arguments);
    va_end(arguments);
    std::fflush(stdout);
}

// Send one JSON value as a data event. The newline before the begin marker
// belongs to the block, so this works in the middle of a line, too.
inline void send(const std::string &json) {
    say("\n%s\n%s\n%s\n", environment("EVALUATION_DATA_BEGIN").c_str(), json.c_str(),
        environment("EVALUATION_DATA_END").c_str());
}

inline void send_goal(const std::string &goal, bool reached) {
    send("{\"type\": \"goal_result\", \"goal\": \"" + goal +
         "\", \"result\": " + (reached ? "true}" : "false}"));
}

// Send what this machine lacks; return the exit status. The sentence must not
// need escaping in JSON.
inline int cannot_judge(const std::string &missing, const std::string &sentence) {
    say("%s\n", sentence.c_str());
    send("{\"type\": \"cannot_judge\", \"missing\": \"" + missing + "\", \"message\": \"" +
         sentence + "\"}");
    return CANNOT_JUDGE;
}
