// In which order the emulator runs what CUDA leaves open, and how it says that something is wrong.
//
//   EMU_ORDER=forward|reverse|random:SEED         threads of a block, and blocks of a grid
//   EMU_STREAMS=lazy|eager|random:SEED            queued work of different streams
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "emu_sanitizer.h"

namespace emu {

// A kernel, or the use of the device, is wrong. What kernels do wrong is thrown by the call that makes them run.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
    char buffer[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return buffer;
}

enum class Order { forward, reverse, random };
enum class StreamPolicy { lazy, eager, random };

struct Options {
    Order order = Order::forward;
    uint64_t order_seed = 1;
    StreamPolicy streams = StreamPolicy::lazy;
    uint64_t streams_seed = 1;

    Options();
};

inline Options& options() {
    static Options all;
    return all;
}

// "random" or "random:SEED"
inline bool random_parse(const std::string& word, uint64_t* seed) {
    if (word.rfind("random", 0) != 0) return false;
    *seed = word.size() > 7 ? strtoull(word.c_str() + 7, nullptr, 10) : 1;
    return word.size() == 6 || word[6] == ':';
}

inline void order_parse(Options& to, const std::string& word) {
    if (word == "forward") to.order = Order::forward;
    else if (word == "reverse") to.order = Order::reverse;
    else if (random_parse(word, &to.order_seed)) to.order = Order::random;
    else throw Error("emu: order of threads is '" + word + "', expected forward, reverse or random:SEED");
}

inline void streams_parse(Options& to, const std::string& word) {
    if (word == "lazy") to.streams = StreamPolicy::lazy;
    else if (word == "eager") to.streams = StreamPolicy::eager;
    else if (random_parse(word, &to.streams_seed)) to.streams = StreamPolicy::random;
    else throw Error("emu: order of streams is '" + word + "', expected lazy, eager or random:SEED");
}

inline Options::Options() {
    if (const char* word = getenv("EMU_ORDER")) order_parse(*this, word);
    if (const char* word = getenv("EMU_STREAMS")) streams_parse(*this, word);
}

inline void order_set(const std::string& word) { order_parse(options(), word); }
inline void streams_set(const std::string& word) { streams_parse(options(), word); }

// xorshift64*: quick, and the same everywhere.
struct Random {
    uint64_t state = 1;

    explicit Random(uint64_t seed = 1) : state((seed + 1) * 0x9e3779b97f4a7c15ull | 1) {}
    EMU_NO_TSAN uint32_t next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return uint32_t(state * 0x2545f4914f6cdd1dull >> 32);
    }
    EMU_NO_TSAN uint32_t below(uint32_t n) { return uint32_t(uint64_t(next()) * n >> 32); }
};

}  // namespace emu
