// The codecs of spec.h on vectors of 16 floats, the transform in registers (G up to 256 on AVX-512).
// GCC's vector extensions, so it is right on any CPU; each operation is rounded as in spec.h, so the bits are the same.
//
// A butterfly inside a vector is one shuffle and one multiply-add by +1 or -1, which is exact. On AVX-512, y / s is not divided
// but multiplied by 1/s and corrected twice (Markstein): the result is the correctly rounded quotient, at a quarter of the cost.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "spec.h"

// Without AVX-512 GCC warns, at the end of the file that includes this, of how vectors are passed; none is: all is inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace simd {

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint64_t u64 __attribute__((vector_size(64)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t levels16 __attribute__((vector_size(16)));

#define SIMD_FN __attribute__((always_inline)) inline

template <class V>
SIMD_FN V load(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
SIMD_FN void store(void* to, V v) {
    memcpy(to, &v, sizeof v);
}

SIMD_FN v16 splat(float x) { return x - v16{}; }  // x - 0, not x + 0, which would lose the sign of -0

// a * b + c, where a * b is exact.
SIMD_FN v16 multiply_add_exact(v16 a, v16 b, v16 c) {
#ifdef __AVX512F__
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// GCC 12 takes conversions, comparisons and most ?: of vectors wider than the machine's apart into scalars; loops over
// arrays, shifts, masks and minima it does not. (maskz: without it, it warns of an undefined operand.)

SIMD_FN i16 widen(levels16 q) {
#ifdef __AVX512F__
    return (i16)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)q);
#else
    int8_t from[16];
    int32_t to[16];
    store(from, q);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    return load<i16>(to);
#endif
}

SIMD_FN bytes16 narrow(u16 code) {
#ifdef __AVX512F__
    return (bytes16)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)code);
#else
    uint32_t from[16];
    uint8_t to[16];
    store(from, code);
    for (int i = 0; i < 16; i++) to[i] = uint8_t(from[i]);
    return load<bytes16>(to);
#endif
}

// All ones where a < b; their difference must not overflow.
SIMD_FN u16 less(i16 a, i16 b) { return (u16)((a - b) >> 31); }

SIMD_FN u16 select(u16 mask, u16 a, u16 b) { return (mask & a) | (~mask & b); }

SIMD_FN i16 smaller(i16 a, i16 b) { return a < b ? a : b; }
SIMD_FN i16 larger(i16 a, i16 b) { return a > b ? a : b; }

constexpr i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <int stride>
SIMD_FN v16 butterfly(v16 a) {
    constexpr v16 sign = (lanes & stride) != 0 ? v16{} - 1.0f : v16{} + 1.0f;
    return multiply_add_exact(a, sign, __builtin_shuffle(a, lanes ^ stride));
}

template <int V>
SIMD_FN void hadamard(v16* y) {
#pragma GCC unroll 32
    for (int k = 0; k < V; k++) y[k] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(y[k]))));
#pragma GCC unroll 8
    for (int stride = 1; stride < V; stride *= 2)
#pragma GCC unroll 32
        for (int k = 0; k < V; k++) {
            if (k & stride) continue;
            const v16 u = y[k], v = y[k + stride];
            y[k] = u + v;
            y[k + stride] = u - v;
        }
}

// Adjacent pairs: two vectors become one of 16 pair sums, in order, until 16 numbers are left.
template <int V>
SIMD_FN float tree_sum_squares(const float* x) {
    constexpr i16 even = lanes * 2, odd = lanes * 2 + 1;
    v16 t[V];
#pragma GCC unroll 32
    for (int k = 0; k < V; k++) {
        const v16 value = load<v16>(x + 16 * k);
        t[k] = value * value;
    }
#pragma GCC unroll 8
    for (int width = V / 2; width > 0; width /= 2)
#pragma GCC unroll 16
        for (int k = 0; k < width; k++)
            t[k] = __builtin_shuffle(t[2 * k], t[2 * k + 1], even) + __builtin_shuffle(t[2 * k], t[2 * k + 1], odd);
    v16 sum = t[0];
    sum += __builtin_shuffle(sum, lanes ^ 1);
    sum += __builtin_shuffle(sum, lanes ^ 2);
    sum += __builtin_shuffle(sum, lanes ^ 4);
    sum += __builtin_shuffle(sum, lanes ^ 8);
    return sum[0];
}

// max|y| as bits; as integers, NaN and infinity are the largest.
template <int V>
SIMD_FN uint32_t max_magnitude_bits(const v16* y) {
    i16 max = (i16)y[0] & 0x7fffffff;
#pragma GCC unroll 32
    for (int k = 1; k < V; k++) max = larger(max, (i16)y[k] & 0x7fffffff);
    max = larger(max, __builtin_shuffle(max, lanes ^ 8));
    max = larger(max, __builtin_shuffle(max, lanes ^ 4));
    max = larger(max, __builtin_shuffle(max, lanes ^ 2));
    max = larger(max, __builtin_shuffle(max, lanes ^ 1));
    return uint32_t(max[0]);
}

// Correctly rounded y / s.
struct Divider {
    v16 s, reciprocal;
    bool quick;
};

SIMD_FN Divider divider(float s) {
#ifdef __AVX512F__
    // Inside these bounds the remainders below are exact wherever the quotient is not rounded to zero anyway.
    const bool quick = s >= 0x1p-60f && s <= 0x1p60f;
#else
    const bool quick = false;
#endif
    return {splat(s), splat(1.0f / s), quick};
}

template <bool quick>
SIMD_FN v16 divide(v16 y, const Divider& by) {
#ifdef __AVX512F__
    if constexpr (quick) {
        const __m512 s = (__m512)by.s, r = (__m512)by.reciprocal, a = (__m512)y;
        const __m512 q = _mm512_mul_ps(a, r);
        return (v16)_mm512_fmadd_ps(_mm512_fnmadd_ps(q, s, a), r, q);
    }
#endif
    return y / by.s;
}

// --- rounding to codes: quantisers, with the constants of one number format

struct Level {
    static constexpr bool fp8 = false;
    SIMD_FN static u16 encode(v16 v, v16, i16 max) {
        const i16 zero = (i16)splat(0x1.8p23f), level = (i16)(v + splat(0x1.8p23f)) - zero;
        return clamp(level, max);
    }
    SIMD_FN static u16 encode_stochastic(v16 v, v16, i16 max, u16 random) {
        const i16 zero = (i16)((u16)splat(768.0f) >> 14);
        return clamp((i16)(((u16)(v + splat(768.0f)) + (random >> 18)) >> 14) - zero, max);
    }
    SIMD_FN static u16 clamp(i16 level, i16 max) { return (u16)smaller(larger(level, -max), max); }
    SIMD_FN static v16 decode(const uint8_t* q) { return __builtin_convertvector(widen(load<levels16>(q)), v16); }
};

template <Fp8Format format>
struct Float8 {
    static constexpr bool fp8 = true;
    static constexpr spec::Fp8 f = spec::fp8_constants(format);
    static constexpr int shift = 23 - f.mantissa;
    static constexpr uint32_t zero = uint32_t(127 - f.bias) << f.mantissa;

    // The sign is y's: the quotient may have lost that of a zero.
    SIMD_FN static u16 encode(v16 v, v16 y, i16) {
        const u16 a = (u16)v & 0x7fffffff, magic = (u16)splat(f.spacing * 0x1p23f);
        const u16 normal = ((a + ((1u << (shift - 1)) - 1) + (a >> shift & 1)) >> shift) - zero;
        const u16 subnormal = (u16)((v16)a + (v16)magic) - magic;
        return finish(select(is_subnormal(a), subnormal, normal), y);
    }
    SIMD_FN static u16 encode_stochastic(v16 v, v16 y, i16, u16 random) {
        const u16 a = (u16)v & 0x7fffffff, subnormal = is_subnormal(a);
        const u16 lifted = select(subnormal, (u16)((v16)a + f.min_normal), a);
        const u16 offset = zero + (subnormal & (1u << f.mantissa));
        return finish(((lifted + (random >> (32 - shift))) >> shift) - offset, y);
    }
    SIMD_FN static u16 is_subnormal(u16 magnitude) { return less((i16)magnitude, (i16)splat(f.min_normal)); }
    SIMD_FN static u16 finish(u16 code, v16 y) {
        return ((u16)y >> 24 & 0x80) | (u16)smaller((i16)code, i16{} + int32_t(f.max_code));
    }
    // A subnormal m is read as the normal 1.m of the least exponent, less that exponent's 1: no denormal float is touched.
    SIMD_FN static v16 decode(const uint8_t* q) {
        const u16 code = (u16)widen(load<levels16>(q)), c = code & 0x7f;
        const u16 subnormal = less((i16)c, i16{} + (1 << f.mantissa));
        const v16 value = (v16)(((c + (subnormal & (1u << f.mantissa))) << shift) + (uint32_t(127 - f.bias) << 23));
        return (v16)((u16)(value - (v16)(subnormal & (u16)splat(f.min_normal))) | (code & 0x80) << 24);
    }
};

// --- random words of `count` values (a multiple of 32) from index `first` (a multiple of 4)

// The product of the low halves; what the high halves hold does not matter.
SIMD_FN u64 multiply_low(u64 a, uint32_t b) {
#ifdef __AVX512F__
    return (u64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#else
    return (a & 0xffffffff) * b;
#endif
}

SIMD_FN void random_words(uint32_t* out, int count, uint64_t key, uint64_t first) {
    for (int i = 0; i < count; i += 32) {
        const u64 counter = u64{0, 1, 2, 3, 4, 5, 6, 7} + (first + uint64_t(i)) / 4;
        u64 c0 = counter, c1 = counter >> 32, c2 = {}, c3 = {};
        uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            const u64 p0 = multiply_low(c0, 0xD2511F53u), p1 = multiply_low(c2, 0xCD9E8D57u);
            c0 = (p1 >> 32) ^ c1 ^ k0, c1 = p1;
            c2 = (p0 >> 32) ^ c3 ^ k1, c3 = p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        const u64 low = (c0 & 0xffffffff) | c1 << 32, high = (c2 & 0xffffffff) | c3 << 32;
        store(out + i, __builtin_shuffle(low, high, u64{0, 8, 1, 9, 2, 10, 3, 11}));
        store(out + i + 16, __builtin_shuffle(low, high, u64{4, 12, 5, 13, 6, 14, 7, 15}));
    }
}

// --- packing: spec.h's sections, four bytes at a time in a word; a mask keeps each byte's bits apart, so the loops are vectors

template <int G, int width>
SIMD_FN uint8_t* pack_section(uint8_t* payload, const uint8_t* q, int low) {
    constexpr int bytes = G * width / 8;
    constexpr uint32_t mask = 0x01010101u * ((1u << width) - 1);
    for (int j = 0; j < bytes; j += 4) {
        uint32_t word = 0;
#pragma GCC unroll 8
        for (int k = 0; k < 8 / width; k++) word |= (load<uint32_t>(q + j + k * bytes) >> low & mask) << (k * width);
        store(payload + j, word);
    }
    return payload + bytes;
}

template <int G>
SIMD_FN void pack(uint8_t* payload, const uint8_t* q, int bits) {
    payload = pack_section<G, 4>(payload, q, 0);
    if (bits >= 6) payload = pack_section<G, 2>(payload, q, 4);
    if (bits & 1) pack_section<G, 1>(payload, q, bits - 1);
}

// The first section starts q, the others add to it.
template <int G, int width, bool starts>
SIMD_FN const uint8_t* unpack_section(uint8_t* q, const uint8_t* payload, int low) {
    constexpr int bytes = G * width / 8;
    constexpr uint32_t mask = 0x01010101u * ((1u << width) - 1);
#pragma GCC unroll 8
    for (int k = 0; k < 8 / width; k++)
        for (int j = 0; j < bytes; j += 4) {
            uint8_t* to = q + j + k * bytes;
            const uint32_t part = (load<uint32_t>(payload + j) >> (k * width) & mask) << low;
            store(to, starts ? part : load<uint32_t>(to) | part);
        }
    return payload + bytes;
}

template <int G>
SIMD_FN void unpack(uint8_t* __restrict q, const uint8_t* __restrict payload, int bits) {
    payload = unpack_section<G, 4, true>(q, payload, 0);
    if (bits >= 6) payload = unpack_section<G, 2, false>(q, payload, 4);
    if (bits & 1) unpack_section<G, 1, false>(q, payload, bits - 1);
    const uint8_t sign = uint8_t(1 << (bits - 1));
    for (int i = 0; i < G; i++) q[i] = uint8_t((q[i] ^ sign) - sign);
}

// --- groups

// Groups are encoded several at a time, a step for all before the next, so that the long chains of a group (sums, maximum,
// divisions) overlap with those of its neighbours.
constexpr int tile_values = 1024;
constexpr int tile_groups(int g) { return tile_values / g; }

template <class Quantiser, bool quick, bool stochastic>
inline void quantise(uint8_t* q, const float* y, Divider by, int g, int max_level, const uint32_t* random) {
    const i16 max = i16{} + max_level;
    for (int i = 0; i < g; i += 16) {
        const v16 value = load<v16>(y + i), v = divide<quick>(value, by);
        u16 code;
        if constexpr (stochastic)
            code = Quantiser::encode_stochastic(v, value, max, load<u16>(random + i));
        else
            code = Quantiser::encode(v, value, max);
        store(q + i, narrow(code));
    }
}

template <class Quantiser>
SIMD_FN void quantise(const Codec& c, uint8_t* q, const float* y, float s, uint64_t stream, uint64_t first) {
    const Divider by = divider(s);
    const int g = c.group, max = (1 << (c.bits - 1)) - 1;
    if (!c.stochastic) {
        if (by.quick) return quantise<Quantiser, true, false>(q, y, by, g, max, nullptr);
        return quantise<Quantiser, false, false>(q, y, by, g, max, nullptr);
    }
    alignas(64) uint32_t random[spec::max_group];
    random_words(random, g, stream, first);
    if (by.quick) return quantise<Quantiser, true, true>(q, y, by, g, max, random);
    quantise<Quantiser, false, true>(q, y, by, g, max, random);
}

// spec::group_encode of up to tile_groups(G) whole groups. present: values in each, less than G only in a padded last one.
// Returns the number of groups that are not finite.
template <int G, class Quantiser, bool has_hadamard>
inline int groups_encode(const Codec& c, uint8_t* payload, spec::Scales* scales, const float* x, int groups, int present,
                         uint64_t stream, uint64_t first) {
    constexpr int V = G / 16;
    constexpr bool has_alpha = has_hadamard && Quantiser::fp8;
    alignas(64) float transformed[tile_values];
    uint32_t max_bits[tile_groups(G)];
    if constexpr (has_alpha) {
        for (int k = 0; k < groups; k++) scales[k].s = tree_sum_squares<V>(x + k * G);
        for (int k = 0; k < groups; k++) scales[k].alpha = spec::taco_alpha(c, scales[k].s / float(present));
    }
    for (int k = 0; k < groups; k++) {
        alignas(64) v16 y[V];
#pragma GCC unroll 32
        for (int i = 0; i < V; i++) y[i] = load<v16>(x + k * G + 16 * i);
        if constexpr (has_hadamard) {
            if constexpr (has_alpha) {
#pragma GCC unroll 32
                for (int i = 0; i < V; i++) y[i] *= scales[k].alpha;
            }
            hadamard<V>(y);
#pragma GCC unroll 32
            for (int i = 0; i < V; i++) y[i] *= spec::inverse_sqrt(G);
#pragma GCC unroll 32
            for (int i = 0; i < V; i++) store(transformed + k * G + 16 * i, y[i]);
        }
        max_bits[k] = max_magnitude_bits<V>(y);
    }
    int not_finite = 0;
    const float* y = has_hadamard ? transformed : x;
    for (int k = 0; k < groups; k++) scales[k].s = spec::group_scale(c, max_bits[k]);
    for (int k = 0; k < groups; k++, payload += codec_payload_bytes(c)) {
        const float s = scales[k].s;
        if (s != s || s == 0) {
            if (s != s) scales[k].alpha = s, not_finite++;
            memset(payload, 0, codec_payload_bytes(c));
        } else if (c.bits == 8) {
            quantise<Quantiser>(c, payload, y + k * G, s, stream, first + uint64_t(k * G));
        } else {
            alignas(64) uint8_t q[G];
            quantise<Quantiser>(c, q, y + k * G, s, stream, first + uint64_t(k * G));
            pack<G>(payload, q, c.bits);
        }
    }
    return not_finite;
}

// spec::group_decode; with `add` the values are added to x.
template <int G, class Quantiser, bool has_hadamard>
inline void group_decode(const Codec& c, float* x, const uint8_t* payload, spec::Scales scales, bool add) {
    constexpr int V = G / 16;
    alignas(64) v16 y[V];
    alignas(64) uint8_t q[G];
    if (scales.s != scales.s) {
        for (int i = 0; i < G; i++) x[i] = spec::float_of(spec::quiet_nan);
        return;
    }
    if (c.bits < 8) unpack<G>(q, payload, c.bits);
    const uint8_t* codes = c.bits == 8 ? payload : q;
#pragma GCC unroll 32
    for (int i = 0; i < V; i++) y[i] = Quantiser::decode(codes + 16 * i);
    float scale = scales.s;
    if constexpr (has_hadamard) {
        if (Quantiser::fp8) scale = scales.s / scales.alpha;
        hadamard<V>(y);
#pragma GCC unroll 32
        for (int i = 0; i < V; i++) y[i] *= spec::inverse_sqrt(G);
    }
    if (add) {
#pragma GCC unroll 32
        for (int i = 0; i < V; i++) store(x + 16 * i, load<v16>(x + 16 * i) + y[i] * scale);
    } else {
#pragma GCC unroll 32
        for (int i = 0; i < V; i++) store(x + 16 * i, y[i] * scale);
    }
}

struct GroupCodec {
    int (*encode)(const Codec&, uint8_t* payload, spec::Scales*, const float* x, int groups, int present, uint64_t stream,
                  uint64_t first);
    void (*decode)(const Codec&, float* x, const uint8_t* payload, spec::Scales, bool add);
};

#ifdef __CUDACC__
// nvcc 13's own compiler dies of vectors in templates. Only tests need the CPU's codecs there: the definition, for the same bits.
inline int groups_encode(const Codec& c, uint8_t* payload, spec::Scales* scales, const float* x, int groups, int present,
                         uint64_t stream, uint64_t first) {
    int not_finite = 0;
    for (int k = 0, at = 0; k < groups; k++, at += c.group, payload += codec_payload_bytes(c))
        not_finite += !spec::group_encode(c, payload, scales[k], x + at, present, stream, first + uint64_t(at));
    return not_finite;
}
inline void group_decode(const Codec& c, float* x, const uint8_t* payload, spec::Scales scales, bool add) {
    float values[spec::max_group];
    spec::group_decode(c, values, payload, scales);
    for (int i = 0; i < c.group; i++) x[i] = add ? x[i] + values[i] : values[i];
}
inline GroupCodec group_codec(const Codec&) { return {&groups_encode, &group_decode}; }
#else
template <class Quantiser, bool has_hadamard>
inline GroupCodec group_codec(int g) {
    switch (g) {
        case 32:
            return {groups_encode<32, Quantiser, has_hadamard>, group_decode<32, Quantiser, has_hadamard>};
        case 64:
            return {groups_encode<64, Quantiser, has_hadamard>, group_decode<64, Quantiser, has_hadamard>};
        case 128:
            return {groups_encode<128, Quantiser, has_hadamard>, group_decode<128, Quantiser, has_hadamard>};
        case 256:
            return {groups_encode<256, Quantiser, has_hadamard>, group_decode<256, Quantiser, has_hadamard>};
        default:
            return {groups_encode<512, Quantiser, has_hadamard>, group_decode<512, Quantiser, has_hadamard>};
    }
}

inline GroupCodec group_codec(const Codec& c) {
    using E4M3 = Float8<Fp8Format::e4m3>;
    using E5M2 = Float8<Fp8Format::e5m2>;
    const bool e4m3 = c.format == Fp8Format::e4m3;
    if (c.kind == Codec::taco) return e4m3 ? group_codec<E4M3, true>(c.group) : group_codec<E5M2, true>(c.group);
    if (c.kind == Codec::fp8) return e4m3 ? group_codec<E4M3, false>(c.group) : group_codec<E5M2, false>(c.group);
    return c.kind == Codec::hadint ? group_codec<Level, true>(c.group) : group_codec<Level, false>(c.group);
}
#endif

}  // namespace simd
