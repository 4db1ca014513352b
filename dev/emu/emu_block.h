// The threads of one block: each is a fiber that runs until it waits, then the next ready one goes on.
//
// A thread that does not wait needs no switch: the next one starts on the same stack. Where a thread waits is written down,
// so that a barrier that can never complete is reported with who waits where, instead of hanging.
//
// Orders: forward and reverse take the ready threads in turn. Random takes the ready thread of the highest priority:
// drawn anew each time (seed % 3 = 0), once for a warp (1) or once for a thread (2, with sudden changes). The fixed ones
// starve some threads as long as the barriers allow, which finds a missing barrier far more often.
#pragma once
#include <cstring>
#include <exception>
#include <source_location>
#include <string>
#include <utility>

#include "emu_options.h"
#include "emu_switch.h"
#include "emu_vector.h"

// CUDA's own variables, of the thread that runs.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emu {

using Location = std::source_location;

enum class Wait : uint8_t { none, barrier, warp_barrier, shuffle, vote, reduction, mma, ldmatrix, returned };

inline const char* wait_name(Wait wait) {
    static const char* const names[] = {"nothing",          "__syncthreads", "__syncwarp", "a shuffle", "a vote",
                                        "a __reduce_*_sync", "an mma",       "an ldmatrix", "nothing: returned"};
    return names[int(wait)];
}

struct alignas(64) Thread {
    void* stack_pointer;   // null: not started
    const void* in;        // what it gives to a warp collective, and where it takes the result
    void* out;
    Location location;     // of the call that it waits in
    uint32_t mask;         // of the warp collective that it waits in
    uint32_t linear, priority;
    int8_t source;         // shuffles: the lane whose value it takes; votes: its predicate
    uint8_t lane;
    Wait wait;
    uint3 index;
    char* stack;           // from here on: not looked at when threads change (a cache line of its own)
    void* asan_stack;
    void* tsan_fiber;
    struct AsyncCopy* copies;  // cp.async that have not landed (emu_ptx.h), and the groups made of them
    uint32_t copy_count, copy_group;
};

struct Warp {
    uint32_t exist, live, waiting;    // sets of lanes
    uint32_t generation[32];          // TSan: barriers passed by the lanes whose lowest is this one
    char order[2][32];                // TSan: what those barriers release and acquire
};

struct Block {
    static constexpr uint32_t max_threads = 1024;
    // TSan: fibers and stacks of their own for so many blocks in a row, so that neighbours are not ordered
    static constexpr uint32_t pools = with_tsan ? 4 : 1;

    Thread threads[max_threads];
    Warp warps[max_threads / 32];
    uint32_t count = 0, live = 0;
    void (*body)(void*) = nullptr;    // runs the kernel with its arguments
    void* arguments = nullptr;
    dim3 shape;

    // ready threads: a ring, or (random order) a heap by key
    uint32_t ring[max_threads];
    uint64_t heap[max_threads];       // priority, chance, the thread in the lowest 10 bits
    uint32_t ready = 0, first = 0;
    Order order = Order::forward;
    uint32_t strategy = 0;
    Random random;

    // __syncthreads
    uint32_t arrived = 0, arrived_true = 0, released_true = 0, barrier_generation = 0;
    Location barrier_location;
    char barrier_order[2], start_order, end_order;

    Stacks stacks;
    void* main_stack_pointer = nullptr;
    void* main_fiber = nullptr;
    void* main_asan_stack = nullptr;
    const void* main_bottom = nullptr;
    size_t main_size = 0;
    void* fibers[pools * (with_tsan ? max_threads : 1)] = {};
    uint32_t pool = 0;
    bool failed = false;
    std::exception_ptr error;
};

inline Block block;
inline Thread* running = nullptr;   // null: host code

// --- ready threads

EMU_NO_TSAN inline void heap_push(uint32_t linear) {
    Thread& thread = block.threads[linear];
    if (block.strategy == 0 || (block.strategy == 2 && block.random.below(64) == 0)) thread.priority = block.random.next();
    const uint64_t key = uint64_t(thread.priority) << 32 | (block.random.next() & ~1023u) | linear;
    uint32_t at = block.ready++;
    for (; at && block.heap[(at - 1) / 2] < key; at = (at - 1) / 2) block.heap[at] = block.heap[(at - 1) / 2];
    block.heap[at] = key;
}

EMU_NO_TSAN inline uint32_t heap_pop() {
    const uint32_t top = block.heap[0] & 1023, n = --block.ready;
    const uint64_t key = block.heap[n];
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && block.heap[child + 1] > block.heap[child]) child++;
        if (block.heap[child] < key) break;
        block.heap[at] = block.heap[child];
    }
    block.heap[at] = key;
    return top;
}

EMU_NO_TSAN inline void ready_push(uint32_t linear) {
    if (block.order == Order::random) return heap_push(linear);
    block.ring[(block.first + block.ready++) % Block::max_threads] = linear;
}

EMU_NO_TSAN inline Thread* ready_pop() {
    if (block.order == Order::random) return &block.threads[heap_pop()];
    const uint32_t linear = block.ring[block.first];
    block.first = (block.first + 1) % Block::max_threads;
    block.ready--;
    return &block.threads[linear];
}

// --- switching

inline void thread_main();

EMU_NO_TSAN inline void stack_enter(Thread* to) {
    if (to->stack_pointer) return;
    if (with_tsan) to->stack = block.stacks.all[to->linear * Block::pools + block.pool];
    else to->stack = block.stacks.unused[--block.stacks.unused_count];
    to->stack_pointer = stack_prepare(Stacks::top(to->stack), thread_main);
}

// Goes on with `to`. `asan_stack`: where ASan keeps what it knows of the stack that is left; null if that one is done.
EMU_NO_TSAN inline void thread_switch(void** save, void** asan_stack, Thread* to) {
    stack_enter(to);
    running = to;
    threadIdx = to->index;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(asan_stack, to->stack + Stacks::guard, Stacks::bytes - Stacks::guard);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to->tsan_fiber, 1);  // 1: without ordering the two
#endif
    stack_switch(save, to->stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(*asan_stack, nullptr, nullptr);
#endif
    (void)asan_stack;
}

// Back to the host's stack, for good: the block is done, or given up.
[[noreturn]] EMU_NO_TSAN inline void block_leave() {
    void* ignored;
    running = nullptr;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(nullptr, block.main_bottom, block.main_size);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(block.main_fiber, 1);
#endif
    stack_switch(&ignored, block.main_stack_pointer);
    __builtin_unreachable();
}

inline std::string thread_name(const Thread& thread) {
    return text("thread (%u,%u,%u) of block (%u,%u,%u)", thread.index.x, thread.index.y, thread.index.z, blockIdx.x, blockIdx.y,
                blockIdx.z);
}

EMU_NO_TSAN inline bool location_same(const Location& a, const Location& b) {
    if (__builtin_memcmp(&a, &b, sizeof a) == 0) return true;  // mostly the same call
    return a.line() == b.line() && strcmp(a.file_name(), b.file_name()) == 0;
}

// Who waits where, the threads in one place counted together.
inline std::string waiting_text() {
    std::string all;
    for (uint32_t i = 0; i < block.count; i++) {
        const Thread& thread = block.threads[i];
        auto same = [&](const Thread& other) {
            return thread.wait == other.wait &&
                   (thread.wait == Wait::returned || thread.wait == Wait::none ||
                    (thread.mask == other.mask && location_same(thread.location, other.location)));
        };
        bool seen = false;
        for (uint32_t j = 0; j < i && !seen; j++) seen = same(block.threads[j]);
        if (seen) continue;
        uint32_t n = 0;
        for (uint32_t j = i; j < block.count; j++) n += same(block.threads[j]);
        all += text("\n  %u thread%s, first (%u,%u,%u): ", n, n == 1 ? "" : "s", thread.index.x, thread.index.y, thread.index.z);
        if (thread.wait == Wait::returned) all += "returned";
        else if (thread.wait == Wait::none) all += "running or ready to run";
        else {
            all += text("in %s at %s:%u", wait_name(thread.wait), thread.location.file_name(), unsigned(thread.location.line()));
            if (thread.wait != Wait::barrier) all += text(" with mask %08x", thread.mask);
        }
    }
    return all;
}

[[noreturn]] inline void waiting_error(const char* what) {
    throw Error(text("%s, block (%u,%u,%u):", what, blockIdx.x, blockIdx.y, blockIdx.z) + waiting_text());
}

// The running thread waits; returns when another made it ready.
EMU_NO_TSAN inline void thread_wait() {
    Thread* me = running;
    if (block.ready == 0) waiting_error("threads wait for each other in different places");
    Thread* to = ready_pop();
    if (to != me) thread_switch(&me->stack_pointer, &me->asan_stack, to);
}

// --- the barrier of the block

EMU_NO_TSAN inline void barrier_release(Thread* me) {
    block.arrived = 0;
    block.released_true = block.arrived_true;
    block.arrived_true = 0;
    block.barrier_generation++;
    for (uint32_t k = 0; k < block.count; k++) {
        Thread& thread = block.threads[block.order == Order::reverse ? block.count - 1 - k : k];
        thread.wait = Wait::none;
        if (&thread != me || block.order == Order::random) ready_push(thread.linear);
    }
}

// Returns how many threads came with a true predicate.
EMU_NO_TSAN inline uint32_t barrier_wait(bool predicate, const Location& location) {
    Thread* me = running;
    if (!me) throw Error("__syncthreads outside a kernel");
    me->wait = Wait::barrier;
    me->location = location;
    if (block.live != block.count) waiting_error("__syncthreads that threads which returned never reach");
    if (block.arrived == 0) block.barrier_location = location;
    else if (!location_same(block.barrier_location, location))
        waiting_error("divergent __syncthreads: threads of one block reach different ones");
    char* order = &block.barrier_order[block.barrier_generation & 1];
    order_release(order);
    block.arrived_true += predicate;
    if (++block.arrived == block.count) barrier_release(me);
    if (me->wait != Wait::none || block.order == Order::random) thread_wait();
    order_acquire(order);
    return block.released_true;
}

// --- warp collectives

// The lanes of `mask` meet. The last one computes for all, from every lane's `in` to every lane's `out`: compute(lanes, mask).
// Lanes are indexed by their number in the warp. `ordered`: memory too (a shuffle does not order memory).
template <class Compute>
EMU_NO_TSAN void warp_meet(Wait kind, uint32_t mask, bool ordered, const Location& location, Compute compute) {
    Thread* me = running;
    if (!me) throw Error(text("%s outside a kernel", wait_name(kind)));
    Thread* lanes = me - me->lane;
    Warp& warp = block.warps[me->linear / 32];
    me->wait = kind;
    me->mask = mask;
    me->location = location;
    if (!(mask >> me->lane & 1) || (mask & warp.exist & ~warp.live)) {
        waiting_error(mask >> me->lane & 1 ? "a warp collective whose mask has lanes that returned"
                                           : "a warp collective called by a lane that is not in its mask");
    }
    mask &= warp.exist;
    warp.waiting |= 1u << me->lane;
    uint32_t* generation = &warp.generation[__builtin_ctz(mask)];
    char* order = &warp.order[*generation & 1][__builtin_ctz(mask)];
    if (ordered) order_release(order);
    bool complete = (warp.waiting & mask) == mask;
    for (uint32_t rest = complete ? mask : 0; rest; rest &= rest - 1) {
        const Thread& lane = lanes[__builtin_ctz(rest)];
        if (lane.mask != me->mask) complete = false;
        else if (lane.wait != kind) waiting_error("lanes of one mask meet in different warp collectives");
    }
    if (complete) {
        compute(lanes, mask);
        warp.waiting &= ~mask;
        ++*generation;
        for (uint32_t rest = mask; rest;) {
            const int lane = block.order == Order::reverse ? 31 - __builtin_clz(rest) : __builtin_ctz(rest);
            rest &= ~(1u << lane);
            lanes[lane].wait = Wait::none;
            if (&lanes[lane] != me || block.order == Order::random) ready_push(lanes[lane].linear);
        }
    }
    if (!complete || block.order == Order::random) thread_wait();
    if (ordered) order_acquire(order);
}

// --- threads from start to end

EMU_NO_TSAN inline void thread_return(Thread* me) {
    Warp& warp = block.warps[me->linear / 32];
    me->wait = Wait::returned;
    block.live--;
    warp.live &= ~(1u << me->lane);
    if (block.arrived) waiting_error("a thread returned while others wait for it in __syncthreads");
    for (uint32_t rest = warp.waiting; rest; rest &= rest - 1) {
        if ((me - me->lane)[__builtin_ctz(rest)].mask >> me->lane & 1)
            waiting_error("a lane returned while others wait for it in a warp collective");
    }
}

// What a stack runs: threads, one after the other, until one of them has waited and the next in turn has a stack already.
EMU_NO_TSAN inline void thread_main() {
#ifdef __SANITIZE_ADDRESS__
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!block.main_bottom) block.main_bottom = bottom, block.main_size = size;
#endif
    for (;;) {
        Thread* next = nullptr;
        try {
            Thread* me = running;
            order_acquire(&block.start_order);
            block.body(block.arguments);
            order_release(&block.end_order);
            thread_return(me);
            if (block.ready == 0 && block.live) waiting_error("threads wait for each other in different places");
            if (block.ready) {
                next = ready_pop();
                if (!next->stack_pointer && !with_tsan) {
                    next->stack = me->stack;
                    next->stack_pointer = me;  // started: filled in when it first waits
                    running = next;
                    threadIdx = next->index;
                    continue;
                }
            }
            if (!with_tsan) block.stacks.unused[block.stacks.unused_count++] = me->stack;
        } catch (...) {
            block.error = std::current_exception();
            block.failed = true;
            order_release(&block.end_order);
        }
        if (!next) block_leave();
        void* ignored;
        stack_enter(next);
        running = next;
        threadIdx = next->index;
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(nullptr, next->stack + Stacks::guard, Stacks::bytes - Stacks::guard);
#endif
#ifdef __SANITIZE_THREAD__
        __tsan_switch_to_fiber(next->tsan_fiber, 1);
#endif
        stack_switch(&ignored, next->stack_pointer);
    }
}

// Once before the blocks of a launch.
inline void block_prepare(dim3 shape, void (*body)(void*), void* arguments) {
    block.count = shape.x * shape.y * shape.z;
    block.shape = shape;
    block.body = body;
    block.arguments = arguments;
    block.order = options().order;
    block.random = Random(options().order_seed);
    block.strategy = options().order_seed % 3;
    block.stacks.reserve(block.count * Block::pools);
    uint3 index = {0, 0, 0};
    for (uint32_t i = 0; i < block.count; i++) {
        Thread& thread = block.threads[i];
        thread.index = index;
        thread.linear = i;
        thread.lane = i % 32;
        if (++index.x == shape.x) {
            index.x = 0;
            if (++index.y == shape.y) index.y = 0, index.z++;
        }
    }
}

// After an error: the threads stop where they are, and the host goes on after all that they did.
EMU_NO_TSAN inline void block_abandon() {
#ifdef __SANITIZE_THREAD__
    for (uint32_t i = 0; i < block.count; i++) {
        void*& fiber = block.fibers[i * Block::pools + block.pool];
        __tsan_switch_to_fiber(fiber, 1);
        order_release(&block.end_order);
        __tsan_switch_to_fiber(block.main_fiber, 1);
        __tsan_destroy_fiber(fiber);
        fiber = nullptr;
    }
#endif
    order_acquire(&block.end_order);
    block.stacks.clean_all();
}

// All threads of one block, to their end.
EMU_NO_TSAN inline void block_run(uint3 index) {
    blockIdx = index;
    block.live = block.count;
    block.arrived = block.arrived_true = block.ready = block.first = 0;
    block.pool = (block.pool + 1) % Block::pools;
    for (uint32_t w = 0; w * 32 < block.count; w++) {
        const uint32_t lanes = block.count - w * 32;
        block.warps[w].exist = block.warps[w].live = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        block.warps[w].waiting = 0;
    }
    for (uint32_t k = 0; k < block.count; k++) {
        Thread& thread = block.threads[block.order == Order::reverse ? block.count - 1 - k : k];
        thread.wait = Wait::none;
        thread.mask = 0;
        thread.stack_pointer = nullptr;
        thread.asan_stack = nullptr;
        thread.copy_count = 0;
        if (block.order == Order::random)
            thread.priority = block.strategy == 1 && thread.lane ? block.threads[k - 1].priority : block.random.next();
#ifdef __SANITIZE_THREAD__
        void*& fiber = block.fibers[thread.linear * Block::pools + block.pool];
        if (!fiber) fiber = __tsan_create_fiber(0);
        thread.tsan_fiber = fiber;
#endif
        ready_push(thread.linear);
    }
#ifdef __SANITIZE_THREAD__
    block.main_fiber = __tsan_get_current_fiber();
#endif
    block.main_bottom = nullptr;
    order_release(&block.start_order);
    thread_switch(&block.main_stack_pointer, &block.main_asan_stack, ready_pop());
    if (block.failed) {
        block.failed = false;
        block_abandon();
        std::rethrow_exception(std::exchange(block.error, nullptr));
    }
}

}  // namespace emu
