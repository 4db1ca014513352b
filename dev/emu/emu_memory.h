// Device memory: one mapped region that only kernels, copies and library calls can touch.
//
// While host code runs the region is forbidden to it (mprotect), so a host that follows a device pointer dies at once, with a
// sentence that names the allocation. An allocation has its exact size, is 256-byte aligned, filled with 0xFF, and lies
// between guards: poisoned under ASan, else words that are looked at when it is freed and at each synchronisation. Freed
// memory is filled with 0xFF (poisoned under ASan) and given out again as late as possible.
#pragma once
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <map>
#include <set>
#include <string>

#include "emu_shared.h"

namespace emu {

// In the order of the stream that it is allocated and freed on: an address is known before its memory is there.
enum class State { coming, live, freed };

struct Allocation {
    size_t bytes;
    State state;
};

struct Memory {
    static constexpr size_t region_bytes = size_t(64) << 30;      // of addresses
    static constexpr size_t large_page = size_t(2) << 20;
    static constexpr size_t total = size_t(16) << 30;             // of memory, as the device says
    static constexpr size_t keep_freed = size_t(128) << 20;       // so much is freed before any of it is given out again

    char* base = nullptr;
    size_t used = 0;                                 // of the region, from its start
    size_t live = 0, freed = 0;                      // bytes
    std::map<uintptr_t, Allocation> allocations;     // by address
    std::deque<uintptr_t> freed_order;               // oldest first
    std::map<uintptr_t, size_t> pinned;              // host memory that kernels may touch
    int open = 0;                                    // DeviceAccess scopes
    struct sigaction handler_before;
};

inline Memory memory;

inline size_t slot_bytes(size_t bytes) { return (bytes + 255) / 256 * 256 + guard_bytes; }

// In whole large pages: with small ones a change of protection takes milliseconds for each 100 MB.
inline bool region_protect(int protection) {
    constexpr size_t page = Memory::large_page;
    return memory.used == 0 || mprotect(memory.base, (memory.used + page - 1) / page * page, protection) == 0;
}

// While one of these lives, device memory may be touched.
struct DeviceAccess {
    DeviceAccess() {
        if (memory.open++ == 0 && !region_protect(PROT_READ | PROT_WRITE))
            throw Error(text("emu: cannot open %zu bytes of device memory (errno %d)", memory.used, errno));
    }
    DeviceAccess(const DeviceAccess&) = delete;
    DeviceAccess& operator=(const DeviceAccess&) = delete;
    ~DeviceAccess() {
        if (--memory.open == 0) region_protect(PROT_NONE);
    }
};

// The allocation that `address` lies in, live or freed; allocations.end() if none.
inline std::map<uintptr_t, Allocation>::iterator allocation_find(const void* address) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    auto it = memory.allocations.upper_bound(at);
    if (it == memory.allocations.begin()) return memory.allocations.end();
    --it;
    return at < it->first + std::max<size_t>(it->second.bytes, 1) ? it : memory.allocations.end();
}

inline bool in_region(const void* address) {
    return memory.base && static_cast<const char*>(address) - memory.base >= 0 &&
           size_t(static_cast<const char*>(address) - memory.base) < Memory::region_bytes;
}

// Whether [address, address + bytes) is device memory; "" if it is, else what is wrong with it. `now`: for work that runs, not
// for work that is put on a stream.
inline std::string device_range_error(const void* address, size_t bytes, bool now) {
    const auto it = allocation_find(address);
    if (it == memory.allocations.end()) return text("%p is in no allocation of the device", address);
    const size_t offset = reinterpret_cast<uintptr_t>(address) - it->first;
    if (it->second.state == State::freed || (it->second.state == State::coming && now))
        return text("%p is %zu bytes into %zu bytes that %s", address, offset, it->second.bytes,
                    it->second.state == State::freed ? "were freed" : "another stream has yet to allocate");
    if (bytes > it->second.bytes - offset)
        return text("%zu bytes at %p, %zu bytes into an allocation of %zu, end behind it", bytes, address, offset,
                    it->second.bytes);
    return "";
}

inline bool is_pinned(const void* address) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    auto it = memory.pinned.upper_bound(at);
    return it != memory.pinned.begin() && at < (--it)->first + it->second;
}

// Host code touched device memory, or a CUDA thread ran out of stack: say so, then die where it happened.
inline void fault_report(int signal, siginfo_t* info, void*) {
    char line[512];
    int length = 0;
    if (block.stacks.is_guard(info->si_addr)) {
        length = snprintf(line, sizeof line, "emu: a CUDA thread needs more than its %zu KB of stack\n",
                          (Stacks::bytes - Stacks::guard) >> 10);
    } else if (in_region(info->si_addr)) {
        const auto it = allocation_find(info->si_addr);
        if (it == memory.allocations.end())
            length = snprintf(line, sizeof line, "emu: %s code touched %p, device memory that was never allocated\n",
                              running ? "device" : "host", info->si_addr);
        else
            length = snprintf(line, sizeof line,
                              "emu: host code touched device memory, %zu bytes into %s of %zu bytes: copy it with cudaMemcpy\n",
                              size_t(reinterpret_cast<uintptr_t>(info->si_addr) - it->first),
                              it->second.state == State::freed ? "a freed allocation" : "an allocation", it->second.bytes);
    }
    if (length && write(2, line, size_t(length)) < 0) _exit(134);
    sigaction(signal, &memory.handler_before, nullptr);  // the instruction runs again, and dies as it would have
}

inline void region_make() {
    constexpr size_t page = Memory::large_page;
    void* at = mmap(nullptr, Memory::region_bytes + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw Error("emu: no address space for device memory");
    memory.base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(at) + page - 1) / page * page);
    madvise(memory.base, Memory::region_bytes, MADV_HUGEPAGE);
    static char stack[64 << 10];  // the thread's own may be what overflowed
    stack_t alternative = {};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = fault_report;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &memory.handler_before);
}

// Null if there is not so much memory. The memory is there once allocation_begin ran.
inline char* allocation_take(size_t bytes) {
    if (!memory.base) region_make();
    if (bytes > Memory::total - std::min(memory.live, Memory::total)) return nullptr;
    char* at = nullptr;
    if (memory.freed > Memory::keep_freed) {
        const auto oldest = std::find_if(memory.freed_order.begin(), memory.freed_order.end(), [&](uintptr_t address) {
            return slot_bytes(memory.allocations[address].bytes) == slot_bytes(bytes);
        });
        if (oldest != memory.freed_order.end()) {
            at = reinterpret_cast<char*>(*oldest);
            memory.freed -= memory.allocations[*oldest].bytes;
            memory.freed_order.erase(oldest);
        }
    }
    if (!at) {
        if (memory.used == 0) memory.used = guard_bytes;
        if (memory.used + slot_bytes(bytes) > Memory::region_bytes) return nullptr;
        at = memory.base + memory.used;
        memory.used += slot_bytes(bytes);
        if (memory.open) region_protect(PROT_READ | PROT_WRITE);
        memory_poison(at - guard_bytes, slot_bytes(bytes) + guard_bytes);
    }
    memory.allocations[reinterpret_cast<uintptr_t>(at)] = {bytes, State::coming};
    memory.live += bytes;
    return at;
}

inline void allocation_fill(char* at, size_t bytes) {
    if (with_tsan) fill_unseen(at, 0xff, bytes);
    else std::memset(at, 0xff, bytes);
}

// Before and behind, leaving the contents as they are.
inline void guards_write(char* at, size_t bytes) {
    guard_write(at - guard_bytes, guard_bytes);
    guard_write(at + bytes, slot_bytes(bytes) - bytes);
}

// Fresh contents, and guards around them.
inline void allocation_begin(char* at) {
    const DeviceAccess access;
    Allocation& allocation = memory.allocations[reinterpret_cast<uintptr_t>(at)];
    allocation.state = State::live;
    memory_unpoison(at, allocation.bytes);
    if (!with_asan) guards_write(at, allocation.bytes);
    allocation_fill(at, allocation.bytes);
}

// Throws if somebody wrote around the allocation, once.
inline void guards_check(uintptr_t address, const Allocation& allocation) {
    if (with_asan || allocation.state != State::live) return;
    char *at = reinterpret_cast<char*>(address), *end = at + allocation.bytes;
    const size_t behind = slot_bytes(allocation.bytes) - allocation.bytes;
    const bool before_holds = guard_holds(at - guard_bytes, guard_bytes);
    if (before_holds && guard_holds(end, behind)) return;
    guards_write(at, allocation.bytes);
    throw Error(text("device code wrote %s an allocation of %zu bytes", before_holds ? "behind" : "before", allocation.bytes));
}

inline void guards_check_all() {
    if (with_asan) return;
    const DeviceAccess access;
    for (const auto& [address, allocation] : memory.allocations) guards_check(address, allocation);
}

// False if there is nothing to free at this address.
inline bool allocation_end(void* address) {
    const auto it = memory.allocations.find(reinterpret_cast<uintptr_t>(address));
    if (it == memory.allocations.end() || it->second.state != State::live) return false;
    const DeviceAccess access;
    guards_check(it->first, it->second);
    allocation_fill(static_cast<char*>(address), it->second.bytes);
    memory_poison(address, it->second.bytes);
    it->second.state = State::freed;
    memory.live -= it->second.bytes;
    memory.freed += it->second.bytes;
    memory.freed_order.push_back(it->first);
    return true;
}

}  // namespace emu
