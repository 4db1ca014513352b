// The device seam: streams, events and memory. Whatever differs between a GPU and a CPU, bar collectives (`comm/`) and the
// ops, is behind it: llmc/cpu/device.h, llmc/cuda/device.cuh.
//
//   device_upload, device_download   between host and device; return when the host's memory may be touched
//   device_copy, device_zero         on the device, in the order of the stream
//   event_record, stream_wait        order streams among each other
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#ifdef LLMC_CUDA
#include "llmc/cuda/device.cuh"
#else
#include "llmc/cpu/device.h"
#endif

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
