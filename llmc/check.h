// Errors. One clear sentence that says what, where, expected, found and what to do, thrown as `Error`.
//
// Nothing below main() prints or exits: main catches, and `comm/agree.h` sees to it that all ranks end together.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline std::string format_text_list(const char* format, va_list args) {
    va_list again;
    va_copy(again, args);
    std::string text(std::vsnprintf(nullptr, 0, format, args), '\0');
    std::vsnprintf(text.data(), text.size() + 1, format, again);
    va_end(again);
    return text;
}

__attribute__((format(printf, 1, 2))) inline std::string format_text(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = format_text_list(format, args);
    va_end(args);
    return text;
}

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const std::string text = format_text_list(format, args);
    va_end(args);
    throw Error(text);
}

// A macro, so that the message's arguments are evaluated only when it fails.
#define check(condition, ...)                \
    do {                                     \
        if (!(condition)) fail(__VA_ARGS__); \
    } while (0)
