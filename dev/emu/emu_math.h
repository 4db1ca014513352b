// Intrinsics: arithmetic with a named rounding, approximations, bits, loads and stores with cache hints.
//
// What is only fast and approximate on a GPU (__expf, rsqrtf, tanhf ..) is the host's function here, so results agree to
// rounding, not to the bit. What names its rounding (_rn), and all work on bits, agrees to the bit. Built without contraction.
#pragma once
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emu_block.h"

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __tanhf(float x) { return std::tanh(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }

// Out of range saturates; NaN is 0.
namespace emu {
template <class I>
I integer_from(double rounded) {
    constexpr I low = std::is_signed_v<I> ? I(I(1) << (sizeof(I) * 8 - 1)) : I(0), high = I(~low);
    if (rounded != rounded) return 0;
    if (rounded <= double(low)) return low;
    return rounded >= double(high) ? high : I(rounded);
}
}  // namespace emu
inline int __float2int_rn(float x) { return emu::integer_from<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return emu::integer_from<int>(std::trunc(x)); }
inline int __float2int_rd(float x) { return emu::integer_from<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return emu::integer_from<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return emu::integer_from<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return emu::integer_from<unsigned>(std::trunc(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
    x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
    x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
    return __builtin_bswap32(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// Byte i of the result is byte (selector's digit i) & 7 of b:a, or, where the digit's bit 3 is set, eight times its sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned digit = selector >> 4 * i & 15;
        unsigned byte = both >> 8 * (digit & 7) & 0xff;
        if (digit & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}

constexpr int min(int a, int b) { return b < a ? b : a; }
constexpr int max(int a, int b) { return a < b ? b : a; }
constexpr unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
constexpr unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
constexpr long min(long a, long b) { return b < a ? b : a; }
constexpr long max(long a, long b) { return a < b ? b : a; }
constexpr unsigned long min(unsigned long a, unsigned long b) { return b < a ? b : a; }
constexpr unsigned long max(unsigned long a, unsigned long b) { return a < b ? b : a; }
constexpr long long min(long long a, long long b) { return b < a ? b : a; }
constexpr long long max(long long a, long long b) { return a < b ? b : a; }
constexpr unsigned long long min(unsigned long long a, unsigned long long b) { return b < a ? b : a; }
constexpr unsigned long long max(unsigned long long a, unsigned long long b) { return a < b ? b : a; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

template <class T>
T __ldg(const T* from) { return *from; }
template <class T>
T __ldcs(const T* from) { return *from; }
template <class T>
T __ldcg(const T* from) { return *from; }
template <class T>
T __ldca(const T* from) { return *from; }
template <class T>
T __ldlu(const T* from) { return *from; }
template <class T>
void __stcs(T* to, const std::type_identity_t<T>& value) { *to = value; }
template <class T>
void __stcg(T* to, const std::type_identity_t<T>& value) { *to = value; }
template <class T>
void __stwb(T* to, const std::type_identity_t<T>& value) { *to = value; }

[[noreturn]] inline void __trap() { throw emu::Error("__trap() by " + emu::thread_name(*emu::running)); }
