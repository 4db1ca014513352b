// Atomics. Threads do not run at the same time, so these are atomic for TSan's eyes only; relaxed, as in CUDA.
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

namespace emu {

// old = *at; *at = change(old); returns old.
template <class T, class Change>
T atomic_change(T* at, Change change) {
    using Bits = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned>;
    Bits* bits = reinterpret_cast<Bits*>(at);
    Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &old, std::bit_cast<Bits>(T(change(std::bit_cast<T>(old)))), true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return std::bit_cast<T>(old);
}

}  // namespace emu

#define EMU_ATOMIC(name, T, expression) \
    inline T name(T* at, T value) {     \
        return emu::atomic_change(at, [value](T old) -> T { return expression; }); \
    }
EMU_ATOMIC(atomicAdd, int, int(unsigned(old) + unsigned(value)))
EMU_ATOMIC(atomicAdd, unsigned, old + value)
EMU_ATOMIC(atomicAdd, unsigned long long, old + value)
EMU_ATOMIC(atomicAdd, float, old + value)
EMU_ATOMIC(atomicAdd, double, old + value)
EMU_ATOMIC(atomicSub, int, int(unsigned(old) - unsigned(value)))
EMU_ATOMIC(atomicSub, unsigned, old - value)
#define EMU_ATOMIC_INTEGERS(name, expression) \
    EMU_ATOMIC(name, int, expression)         \
    EMU_ATOMIC(name, unsigned, expression)    \
    EMU_ATOMIC(name, long long, expression)   \
    EMU_ATOMIC(name, unsigned long long, expression)
EMU_ATOMIC_INTEGERS(atomicMax, old > value ? old : value)
EMU_ATOMIC_INTEGERS(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicAnd, unsigned, old & value)
EMU_ATOMIC(atomicOr, unsigned, old | value)
EMU_ATOMIC(atomicXor, unsigned, old ^ value)
EMU_ATOMIC(atomicExch, int, (void(old), value))
EMU_ATOMIC(atomicExch, unsigned, (void(old), value))
EMU_ATOMIC(atomicExch, unsigned long long, (void(old), value))
EMU_ATOMIC(atomicExch, float, (void(old), value))
#undef EMU_ATOMIC_INTEGERS
#undef EMU_ATOMIC

#define EMU_ATOMIC_CAS(T)                                                                             \
    inline T atomicCAS(T* at, T expected, T value) {                                                  \
        return emu::atomic_change(at, [=](T old) -> T { return old == expected ? value : old; });     \
    }
EMU_ATOMIC_CAS(int)
EMU_ATOMIC_CAS(unsigned)
EMU_ATOMIC_CAS(unsigned long long)
#undef EMU_ATOMIC_CAS
