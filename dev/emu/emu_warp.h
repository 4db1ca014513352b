// Barriers, shuffles, votes and fences under CUDA's names. Each notes where it was called from, for reports.
#pragma once
#include <type_traits>

#include "emu_block.h"

#define EMU_HERE ::emu::Location location = ::emu::Location::current()

EMU_NO_TSAN inline void __syncthreads(EMU_HERE) { emu::barrier_wait(false, location); }
EMU_NO_TSAN inline int __syncthreads_count(int predicate, EMU_HERE) { return int(emu::barrier_wait(predicate, location)); }
EMU_NO_TSAN inline int __syncthreads_or(int predicate, EMU_HERE) { return emu::barrier_wait(predicate, location) != 0; }
EMU_NO_TSAN inline int __syncthreads_and(int predicate, EMU_HERE) {
    return emu::barrier_wait(predicate, location) == emu::block.count;
}

EMU_NO_TSAN inline void __syncwarp(uint32_t mask = ~0u, EMU_HERE) {
    emu::warp_meet(emu::Wait::warp_barrier, mask, true, location, [](emu::Thread*, uint32_t) EMU_NO_TSAN {});
}

// Memory order within a thread is the program's, and between threads barriers make it: a fence has nothing left to do, but
// for TSan, where it orders with every earlier fence (more than CUDA promises).
namespace emu {
inline char fence_order;
EMU_NO_TSAN inline void fence() {
    order_release(&fence_order);
    order_acquire(&fence_order);
}
}  // namespace emu
EMU_NO_TSAN inline void __threadfence() { emu::fence(); }
EMU_NO_TSAN inline void __threadfence_block() { emu::fence(); }
EMU_NO_TSAN inline void __threadfence_system() { emu::fence(); }

namespace emu {

// Every lane gives a value and takes that of lane `source`. A source outside the mask is an error; CUDA leaves it undefined.
template <class T>
EMU_NO_TSAN T shuffle(uint32_t mask, T value, int source, const Location& location) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "shuffles move at most 8 bytes");
    T result = value;
    if (running) {
        running->in = &value;
        running->out = &result;
        running->source = int8_t(source);
    }
    warp_meet(Wait::shuffle, mask, false, location, [](Thread* lanes, uint32_t members) EMU_NO_TSAN {
        for (uint32_t rest = members; rest; rest &= rest - 1) {
            const Thread& lane = lanes[__builtin_ctz(rest)];
            if (!(members >> lane.source & 1)) waiting_error("a shuffle takes from a lane that does not take part");
            *static_cast<T*>(lane.out) = *static_cast<const T*>(lanes[lane.source].in);
        }
    });
    return result;
}

// The lane's number, its segment's first lane and its segment's mask: shuffles stay within segments of `width` lanes.
EMU_NO_TSAN inline int lane_number() { return running ? int(running->lane) : 0; }
EMU_NO_TSAN inline int segment_first(int width) { return lane_number() & ~(width - 1); }

struct Vote {
    uint32_t ballot, members;
};
EMU_NO_TSAN inline Vote vote(uint32_t mask, bool predicate, const Location& location) {
    Vote result = {};
    if (running) {
        running->out = &result;
        running->source = predicate;
    }
    warp_meet(Wait::vote, mask, false, location, [](Thread* lanes, uint32_t members) EMU_NO_TSAN {
        uint32_t ballot = 0;
        for (uint32_t rest = members; rest; rest &= rest - 1) {
            const int lane = __builtin_ctz(rest);
            ballot |= uint32_t(lanes[lane].source) << lane;
        }
        for (uint32_t rest = members; rest; rest &= rest - 1)
            *static_cast<Vote*>(lanes[__builtin_ctz(rest)].out) = {ballot, members};
    });
    return result;
}

template <class T, class Combine>
EMU_NO_TSAN T reduction(uint32_t mask, T value, const Location& location, Combine combine) {
    T result = value;
    if (running) {
        running->in = &value;
        running->out = &result;
    }
    warp_meet(Wait::reduction, mask, false, location, [combine](Thread* lanes, uint32_t members) EMU_NO_TSAN {
        T all = *static_cast<const T*>(lanes[__builtin_ctz(members)].in);
        for (uint32_t rest = members & (members - 1); rest; rest &= rest - 1)
            all = combine(all, *static_cast<const T*>(lanes[__builtin_ctz(rest)].in));
        for (uint32_t rest = members; rest; rest &= rest - 1) *static_cast<T*>(lanes[__builtin_ctz(rest)].out) = all;
    });
    return result;
}

}  // namespace emu

template <class T>
EMU_NO_TSAN T __shfl_sync(uint32_t mask, T value, int source, int width = 32, EMU_HERE) {
    return emu::shuffle(mask, value, emu::segment_first(width) + (source & (width - 1)), location);
}
template <class T>
EMU_NO_TSAN T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32, EMU_HERE) {
    // into a later segment: the lane keeps its own value; into an earlier one it may look
    const int source = emu::lane_number() ^ lane_mask;
    return emu::shuffle(mask, value, source < emu::segment_first(width) + width ? source : emu::lane_number(), location);
}
template <class T>
EMU_NO_TSAN T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    const int source = emu::lane_number() - int(delta);
    return emu::shuffle(mask, value, source >= emu::segment_first(width) ? source : emu::lane_number(), location);
}
template <class T>
EMU_NO_TSAN T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, EMU_HERE) {
    const int source = emu::lane_number() + int(delta);
    return emu::shuffle(mask, value, source < emu::segment_first(width) + width ? source : emu::lane_number(), location);
}

EMU_NO_TSAN inline uint32_t __ballot_sync(uint32_t mask, int predicate, EMU_HERE) {
    return emu::vote(mask, predicate, location).ballot;
}
EMU_NO_TSAN inline int __any_sync(uint32_t mask, int predicate, EMU_HERE) {
    return emu::vote(mask, predicate, location).ballot != 0;
}
EMU_NO_TSAN inline int __all_sync(uint32_t mask, int predicate, EMU_HERE) {
    const emu::Vote all = emu::vote(mask, predicate, location);
    return all.ballot == all.members;
}

#define EMU_REDUCE(name, T, expression)                                                                              \
    EMU_NO_TSAN inline T name(uint32_t mask, T value, EMU_HERE) {                                                    \
        return emu::reduction(mask, value, location, [](T a, T b) EMU_NO_TSAN -> T { return expression; });          \
    }
EMU_REDUCE(__reduce_add_sync, unsigned, a + b)
EMU_REDUCE(__reduce_add_sync, int, int(unsigned(a) + unsigned(b)))
EMU_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMU_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMU_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMU_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMU_REDUCE(__reduce_and_sync, unsigned, a & b)
EMU_REDUCE(__reduce_or_sync, unsigned, a | b)
EMU_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef EMU_REDUCE
