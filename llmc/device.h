// The device seam: streams and memory. Whatever differs between a GPU and a CPU, bar collectives (`comm/`), is behind it.
//
// On the cpu target work is done when a call returns, so a Stream carries nothing.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/check.h"

struct Stream {};

// Zeroed memory of the device, `bytes` long. Large pages where the system has them: the optimizer's sweep over all
// parameters is bound by memory, and small pages cost it a TLB miss every 4 KB.
inline void* device_allocate(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "cannot allocate %.1f MiB of memory: use a smaller model, --micro-batch or --seq, or more ranks",
          double(bytes) / (1 << 20));
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

inline void device_free(void* memory, size_t bytes) { munmap(memory, bytes); }
inline void device_copy(void* to, const void* from, size_t bytes, Stream) { std::memcpy(to, from, bytes); }
inline void device_zero(void* memory, size_t bytes, Stream) { std::memset(memory, 0, bytes); }

// One block of memory for everything, planned up front. The function that lays it out runs twice: first on an arena
// without memory, which only counts, then, after `arena_allocate`, on the real one. Both passes take the same pieces.
struct Arena {
    char* base = nullptr;
    size_t used = 0, size = 0;
    std::vector<std::pair<std::string, size_t>> plan;  // label and bytes, in the order first taken; for the printed plan

    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        if (base) device_free(base, size);
    }
};

// `count` elements of T, 64-byte aligned; null in the counting pass. The plan sums pieces of one label.
template <class T>
T* arena_take(Arena& arena, size_t count, const char* label) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    T* taken = arena.base ? reinterpret_cast<T*>(arena.base + arena.used) : nullptr;
    arena.used += bytes;
    if (arena.base) {
        check(arena.used <= arena.size, "arena: '%s' was not planned: %zu bytes taken, %zu planned", label, arena.used,
              arena.size);
    } else {
        auto row = std::find_if(arena.plan.begin(), arena.plan.end(), [&](auto& r) { return r.first == label; });
        if (row == arena.plan.end()) row = arena.plan.insert(row, {label, 0});
        row->second += bytes;
    }
    return taken;
}

inline void arena_allocate(Arena& arena) {
    arena.size = arena.used;
    arena.used = 0;
    arena.base = static_cast<char*>(device_allocate(arena.size));
}
