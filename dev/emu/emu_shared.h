// Shared memory. Every variable is new in each block, filled with 0xFF (a NaN in every float format), of its exact size,
// 128-byte aligned, between guards: ASan forbids them; without it writes into them are found at the end of the block.
//
//   EMU_SHARED_ARRAY(float, tile, [32][33]);     EMU_SHARED_DYNAMIC(float, buffer);
#pragma once
#include <sys/mman.h>

#include "emu_block.h"

#define EMU_SHARED_ARRAY(T, name, ...)               \
    typedef T name##_emu_type __VA_ARGS__;           \
    static ::emu::SharedVariable name##_emu_variable; \
    name##_emu_type& name = *static_cast<name##_emu_type*>(name##_emu_variable.in_block(sizeof(name##_emu_type), #name))
#define EMU_SHARED_DYNAMIC(T, name) T* name = static_cast<T*>(::emu::shared_dynamic())

namespace emu {

constexpr uint32_t guard_word = 0xffc5ffc5;  // a NaN too, but not what fresh memory holds
constexpr size_t guard_bytes = 256;

constexpr uint8_t guard_byte(uintptr_t address) { return uint8_t(guard_word >> 8 * (address % 4)); }

// Any address, whole words where they fit. Neither sanitizer sees it.
EMU_NO_TSAN __attribute__((no_sanitize("address"))) inline void guard_write(char* at, size_t bytes) {
    volatile char *to = at, *end = at + bytes;
    for (; to < end && reinterpret_cast<uintptr_t>(to) % 4; to++) *to = char(guard_byte(reinterpret_cast<uintptr_t>(to)));
    for (; end - to >= 4; to += 4) *reinterpret_cast<volatile uint32_t*>(to) = guard_word;
    for (; to < end; to++) *to = char(guard_byte(reinterpret_cast<uintptr_t>(to)));
}

EMU_NO_TSAN __attribute__((no_sanitize("address"))) inline bool guard_holds(const char* at, size_t bytes) {
    const volatile char *from = at, *end = at + bytes;
    for (; from < end && reinterpret_cast<uintptr_t>(from) % 4; from++) {
        if (uint8_t(*from) != guard_byte(reinterpret_cast<uintptr_t>(from))) return false;
    }
    for (; end - from >= 4; from += 4) {
        if (*reinterpret_cast<const volatile uint32_t*>(from) != guard_word) return false;
    }
    return true;
}

struct Shared {
    static constexpr size_t default_limit = 48 << 10, highest_limit = 227 << 10;
    static constexpr size_t room = size_t(4) << 20;  // of one block, guards included
    // TSan: blocks in a row have places of their own, as they are not ordered
    static constexpr size_t places = with_tsan ? 256 : 1;
    static constexpr int max_variables = 128;

    struct Variable {
        char* at;
        size_t bytes;
        const char* name;
    };
    char* memory = nullptr;
    char* next = nullptr;         // from where on this block's room is unused
    Variable variables[max_variables];
    int count = 0;
    size_t bytes = 0, limit = default_limit;
    uint64_t serial = 0;          // of the block
    uint64_t place = 0;
    char* dynamic = nullptr;
};

inline Shared shared;

EMU_NO_TSAN inline char* shared_take(size_t bytes, const char* name) {
    shared.bytes += (bytes + 15) / 16 * 16;
    if (shared.bytes > shared.limit || shared.count == Shared::max_variables)
        throw Error(text("shared memory: '%s' makes %zu bytes in %d variables, allowed are %zu bytes (with "
                         "cudaFuncSetAttribute at most %zu) in %d",
                         name, shared.bytes, shared.count + 1, shared.limit, Shared::highest_limit, Shared::max_variables));
    char* at = shared.next + guard_bytes;
    const size_t end = (bytes + 127) / 128 * 128;
    if (!with_asan) {
        guard_write(at - guard_bytes, guard_bytes);
        guard_write(at + bytes, end - bytes + guard_bytes);
    }
    memory_unpoison(at, bytes);
    if (with_tsan) fill_unseen(at, 0xff, bytes);
    else memset(at, 0xff, bytes);
    // ASan: the gap is as large as the variable, so that most indices out of range stay in it
    shared.next = at + end + (with_asan ? std::max(bytes, guard_bytes) / 128 * 128 : 0);
    shared.variables[shared.count++] = {at, bytes, name};
    return at;
}

EMU_NO_TSAN inline void shared_begin(size_t dynamic_bytes) {
    if (!shared.memory) {
        void* memory = mmap(nullptr, Shared::room * Shared::places, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw Error("emu: no memory for the shared memory of blocks");
        shared.memory = static_cast<char*>(memory);
    }
    if (++shared.place % Shared::places == 0) order_acquire(&block.end_order);
    shared.serial++;
    shared.next = shared.memory + shared.place % Shared::places * Shared::room;
    memory_poison(shared.next, Shared::room / 2);
    shared.count = 0;
    shared.bytes = 0;
    shared.dynamic = dynamic_bytes ? shared_take(dynamic_bytes, "dynamic shared memory") : nullptr;
}

inline void shared_end() {
    if (with_asan) return;
    for (int i = 0; i < shared.count; i++) {
        const Shared::Variable& v = shared.variables[i];
        if (!guard_holds(v.at - guard_bytes, guard_bytes))
            throw Error(text("block (%u,%u,%u) wrote before shared '%s' of %zu bytes", blockIdx.x, blockIdx.y, blockIdx.z, v.name,
                             v.bytes));
        if (!guard_holds(v.at + v.bytes, guard_bytes))
            throw Error(text("block (%u,%u,%u) wrote behind shared '%s' of %zu bytes", blockIdx.x, blockIdx.y, blockIdx.z, v.name,
                             v.bytes));
    }
}

EMU_NO_TSAN inline void* shared_dynamic() { return shared.dynamic; }

// A variable of a kernel: where it lies in the block that runs.
struct SharedVariable {
    uint64_t serial = 0;
    char* at = nullptr;

    EMU_NO_TSAN void* in_block(size_t bytes, const char* name) {
        if (serial != shared.serial) {
            at = shared_take(bytes, name);
            serial = shared.serial;
        }
        return at;
    }
};

}  // namespace emu
