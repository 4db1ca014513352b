// The definition of every codec: scalar, one group at a time, plain enough to check by eye. Fast code (cpu/codec.h, and
// kernels) must give the same bytes and the same decoded floats, bit for bit.
//
//   taco    alpha = clamp(FP8MAX / sqrt(mean(x^2) + 1e-6), 1e-3, 1e3), the mean over the values present
//           y = H(alpha x) / sqrt(G)
//           s = clamp(max(max|y|, 1e-12) / target, 1e-12, 1e6)
//           code = fp8(y / s)                                   decode: x = (H(code) / sqrt(G)) * (s / alpha)
//   hadint  y = H(x) / sqrt(G), s = max|y| / (2^(bits-1) - 1)
//           level = round(y / s)                                decode: x = (H(level) / sqrt(G)) * s
//   fp8     s = max|x| / target, code = fp8(x / s)              decode: x = code * s
//   int8    s = max|x| / 127, level = round(x / s)              decode: x = level * s
//
// H is the Walsh-Hadamard transform in Sylvester order. The wire of a stripe of n values, m = ceil(n / G) groups, the last
// padded with zeros and sent whole, little endian, no alignment:
//
//   payload of group 0 .. m-1 | float32 s of group 0 .. m-1 | taco: float32 alpha of group 0 .. m-1
//
// Payload: 8-bit codes are bytes in order. Integers of fewer bits are two's complement, cut in sections: the low 4 bits of
// all values, then (6, 7 bits) the next 2 bits of all values, then (5, 7 bits) the next bit of all values. A section of
// width w has B = G w / 8 bytes; byte j holds values j, j + B, j + 2B .. from its low bits up. So whole vectors, and the
// lanes of a warp, are packed by shift and or, without moving bytes.
//
// Arithmetic: float32, each operation rounded to nearest even on its own (never contracted, never flushed to zero), in the
// order written here. Sums and H go by adjacent pairs: strides 1, 2, 4 .. G/2.
//
// A group of zeros decodes to zeros. A group with a NaN or an infinity, or whose transform overflows, has payload 0 and the
// quiet NaN 0x7fc00000 as scales, and decodes to NaN everywhere.
//
// Stochastic rounding (Codec::stochastic): value i of the stripe takes word i % 4 of Philox counter i / 4.
#pragma once
#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

#include <cstdint>
#include <cstring>

#include "../dtype.h"
#include "../rng.h"
#include "codec.h"

#ifdef __CUDACC__
#define CODEC_FN __host__ __device__ inline
#else
#define CODEC_FN inline
#endif

namespace spec {

#ifdef __CUDA_ARCH__
CODEC_FN float mul(float a, float b) { return __fmul_rn(a, b); }
CODEC_FN float add(float a, float b) { return __fadd_rn(a, b); }
CODEC_FN float div(float a, float b) { return __fdiv_rn(a, b); }
CODEC_FN float root(float a) { return __fsqrt_rn(a); }
#else
CODEC_FN float mul(float a, float b) { return a * b; }
CODEC_FN float add(float a, float b) { return a + b; }
CODEC_FN float div(float a, float b) { return a / b; }
CODEC_FN float root(float a) { return __builtin_sqrtf(a); }
#endif

CODEC_FN uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

CODEC_FN float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

CODEC_FN float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }  // NaN stays NaN

constexpr uint32_t quiet_nan = 0x7fc00000, infinity = 0x7f800000;
constexpr int max_group = 512;

// The nearest float32 to 1 / sqrt(G).
CODEC_FN constexpr float inverse_sqrt(int g) {
    return g == 32 ? 0x1.6a09e6p-3f : g == 64 ? 0x1p-3f : g == 128 ? 0x1.6a09e6p-4f : g == 256 ? 0x1p-4f : 0x1.6a09e6p-5f;
}

CODEC_FN void hadamard(float* y, int g) {
    for (int stride = 1; stride < g; stride *= 2)
        for (int i = 0; i < g; i++) {
            if (i & stride) continue;
            const float u = y[i], v = y[i + stride];
            y[i] = add(u, v);
            y[i + stride] = add(u, -v);
        }
}

CODEC_FN float tree_sum(float* t, int g) {
    for (int stride = 1; stride < g; stride *= 2)
        for (int i = 0; i < g; i += 2 * stride) t[i] = add(t[i], t[i + stride]);
    return t[0];
}

// --- fp8: sign, exponent, mantissa. The codes for NaN and infinity are never written, so not treated apart when read.

struct Fp8 {
    int mantissa, bias;
    uint32_t max_code;
    float min_normal, spacing;  // of the subnormals
};

CODEC_FN constexpr Fp8 fp8_constants(Fp8Format format) {
    return format == Fp8Format::e4m3 ? Fp8{3, 7, 0x7e, 0x1p-6f, 0x1p-9f} : Fp8{2, 15, 0x7b, 0x1p-14f, 0x1p-16f};
}

// Round to nearest even, saturating. A sum with 2^23 spacings is rounded to a whole number of spacings by the adder.
CODEC_FN uint8_t fp8_encode(Fp8Format format, float v) {
    const Fp8 f = fp8_constants(format);
    const int shift = 23 - f.mantissa;
    const uint32_t sign = bits_of(v) >> 24 & 0x80, a = bits_of(v) & 0x7fffffff;
    uint32_t code;
    if (float_of(a) < f.min_normal) {
        const float magic = f.spacing * 0x1p23f;
        code = bits_of(add(float_of(a), magic)) - bits_of(magic);
    } else {
        const uint32_t half = (1u << (shift - 1)) - 1 + (a >> shift & 1);
        code = ((a + half) >> shift) - (uint32_t(127 - f.bias) << f.mantissa);
    }
    return uint8_t(sign | (code < f.max_code ? code : f.max_code));
}

// Two of them, the first in the low byte. GPUs that have FP8 convert by the same rule.
CODEC_FN uint16_t fp8_encode_pair(Fp8Format format, float low, float high) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
    return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, format == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2);
#else
    return uint16_t(fp8_encode(format, low) | fp8_encode(format, high) << 8);
#endif
}

// Up with a probability equal to the fraction: random bits are added below the mantissa. Subnormals are lifted by the
// least normal number, onto the same grid.
CODEC_FN uint8_t fp8_encode_stochastic(Fp8Format format, float v, uint32_t random) {
    const Fp8 f = fp8_constants(format);
    const int shift = 23 - f.mantissa;
    const uint32_t sign = bits_of(v) >> 24 & 0x80;
    const float a = float_of(bits_of(v) & 0x7fffffff);
    const bool subnormal = a < f.min_normal;
    const uint32_t lifted = bits_of(subnormal ? add(a, f.min_normal) : a);
    const uint32_t zero = (uint32_t(127 - f.bias) << f.mantissa) + (subnormal ? 1u << f.mantissa : 0);
    const uint32_t code = ((lifted + (random >> (32 - shift))) >> shift) - zero;
    return uint8_t(sign | (code < f.max_code ? code : f.max_code));
}

CODEC_FN float fp8_decode(Fp8Format format, uint8_t code) {
    const Fp8 f = fp8_constants(format);
    const uint32_t c = code & 0x7f;
    const float magnitude = c < 1u << f.mantissa ? mul(float(int(c)), f.spacing)
                                                 : float_of((c << (23 - f.mantissa)) + (uint32_t(127 - f.bias) << 23));
    return code & 0x80 ? -magnitude : magnitude;
}

// --- integers. |v| is below 192: at most 1.5 (2^(bits-1) - 1), when a subnormal scale was rounded down.

CODEC_FN int level_clamp(int level, int max) { return level < -max ? -max : level > max ? max : level; }

CODEC_FN int level_encode(float v, int max) {
    const float magic = 0x1.8p23f;  // spacing 1
    return level_clamp(int(bits_of(add(v, magic))) - int(bits_of(magic)), max);
}

CODEC_FN int level_encode_stochastic(float v, int max, uint32_t random) {
    const float magic = 768.0f;  // spacing 2^-14: fixed point with 14 fraction bits; random bits are added to these
    return level_clamp(int((bits_of(add(v, magic)) + (random >> 18)) >> 14) - int(bits_of(magic) >> 14), max);
}

// --- packing

CODEC_FN uint8_t* pack_section(uint8_t* payload, const uint8_t* q, int g, int low, int width) {
    const int bytes = g * width / 8, mask = (1 << width) - 1;
    for (int j = 0; j < bytes; j++) {
        int byte = 0;
        for (int k = 0; k < 8 / width; k++) byte |= (q[j + k * bytes] >> low & mask) << (k * width);
        payload[j] = uint8_t(byte);
    }
    return payload + bytes;
}

CODEC_FN const uint8_t* unpack_section(uint8_t* q, const uint8_t* payload, int g, int low, int width) {
    const int bytes = g * width / 8, mask = (1 << width) - 1;
    for (int j = 0; j < bytes; j++)
        for (int k = 0; k < 8 / width; k++) q[j + k * bytes] |= uint8_t((payload[j] >> (k * width) & mask) << low);
    return payload + bytes;
}

CODEC_FN void pack(uint8_t* payload, const uint8_t* q, int g, int bits) {
    if (bits == 8) {
        memcpy(payload, q, size_t(g));
        return;
    }
    payload = pack_section(payload, q, g, 0, 4);
    if (bits >= 6) payload = pack_section(payload, q, g, 4, 2);
    if (bits & 1) pack_section(payload, q, g, bits - 1, 1);
}

CODEC_FN void unpack(uint8_t* q, const uint8_t* payload, int g, int bits) {
    if (bits == 8) {
        memcpy(q, payload, size_t(g));
        return;
    }
    memset(q, 0, size_t(g));
    payload = unpack_section(q, payload, g, 0, 4);
    if (bits >= 6) payload = unpack_section(q, payload, g, 4, 2);
    if (bits & 1) unpack_section(q, payload, g, bits - 1, 1);
    const int sign = 1 << (bits - 1);
    for (int i = 0; i < g; i++) q[i] = uint8_t((q[i] ^ sign) - sign);
}

// --- one group

struct Scales {
    float s, alpha;
};

CODEC_FN float taco_alpha(const Codec& c, float mean_square) {
    return clamp(div(fp8_max(c.format), root(add(mean_square, 1e-6f))), 1e-3f, 1e3f);
}

// From max|y| as bits, where NaN and infinity are the largest.
CODEC_FN float group_scale(const Codec& c, uint32_t max_bits) {
    const float max = float_of(max_bits);
    if (max_bits >= infinity) return float_of(quiet_nan);
    if (c.kind == Codec::taco) return clamp(div(max < 1e-12f ? 1e-12f : max, c.target), 1e-12f, 1e6f);
    return div(max, codec_has_fp8(c) ? c.target : float((1 << (c.bits - 1)) - 1));
}

CODEC_FN uint64_t rounding_stream(const RoundingKey& key) {
    const Philox a = philox(key.seed, key.step | uint64_t(key.micro_batch) << 32, key.layer | uint64_t(key.rank) << 32);
    const Philox b = philox(a[0] | uint64_t(a[1]) << 32, key.boundary | uint64_t(key.stripe) << 32, hash_name("codec"));
    return b[0] | uint64_t(b[1]) << 32;
}

// x: [present] values, 1 .. G of them; `first` the index of x[0] in the stripe. False if the group is not finite.
CODEC_FN bool group_encode(const Codec& c, uint8_t* payload, Scales& scales, const float* x, int present, uint64_t stream,
                           uint64_t first) {
    const int g = c.group;
    float y[max_group], squares[max_group];
    for (int i = 0; i < g; i++) y[i] = i < present ? x[i] : 0.0f;
    scales.alpha = 1;
    if (c.kind == Codec::taco) {
        for (int i = 0; i < g; i++) squares[i] = mul(y[i], y[i]);
        scales.alpha = taco_alpha(c, div(tree_sum(squares, g), float(present)));
        for (int i = 0; i < g; i++) y[i] = mul(scales.alpha, y[i]);
    }
    if (codec_has_hadamard(c)) {
        hadamard(y, g);
        for (int i = 0; i < g; i++) y[i] = mul(y[i], inverse_sqrt(g));
    }
    uint32_t max_bits = 0;
    for (int i = 0; i < g; i++) {
        const uint32_t bits = bits_of(y[i]) & 0x7fffffff;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    scales.s = group_scale(c, max_bits);
    const bool finite = scales.s == scales.s;
    if (!finite) scales.alpha = scales.s;
    if (!finite || scales.s == 0) {  // 0: all are zero, or too small for a scale
        memset(payload, 0, codec_payload_bytes(c));
        return finite;
    }
    uint8_t q[max_group];
    const int max = (1 << (c.bits - 1)) - 1;
    for (int i = 0; i < g; i++) {
        const float v = div(y[i], scales.s);
        const uint64_t index = first + uint64_t(i);
        const uint32_t random = c.stochastic ? philox(stream, index / 4, 0)[index % 4] : 0;
        if (codec_has_fp8(c))
            q[i] = c.stochastic ? fp8_encode_stochastic(c.format, v, random) : fp8_encode(c.format, v);
        else
            q[i] = uint8_t(c.stochastic ? level_encode_stochastic(v, max, random) : level_encode(v, max));
    }
    pack(payload, q, g, c.bits);
    return true;
}

// x: [G] values.
CODEC_FN void group_decode(const Codec& c, float* x, const uint8_t* payload, Scales scales) {
    const int g = c.group;
    if (scales.s != scales.s) {
        for (int i = 0; i < g; i++) x[i] = float_of(quiet_nan);
        return;
    }
    uint8_t q[max_group];
    unpack(q, payload, g, c.bits);
    for (int i = 0; i < g; i++) x[i] = codec_has_fp8(c) ? fp8_decode(c.format, q[i]) : float(int8_t(q[i]));
    if (codec_has_hadamard(c)) {
        hadamard(x, g);
        for (int i = 0; i < g; i++) x[i] = mul(x[i], inverse_sqrt(g));
    }
    const float scale = c.kind == Codec::taco ? div(scales.s, scales.alpha) : scales.s;
    for (int i = 0; i < g; i++) x[i] = mul(x[i], scale);
}

// --- the wire

CODEC_FN void scales_store(const Codec& c, uint8_t* wire, size_t groups, size_t group, Scales scales) {
    uint8_t* s = wire + groups * codec_payload_bytes(c) + 4 * group;
    memcpy(s, &scales.s, 4);
    if (c.kind == Codec::taco) memcpy(s + 4 * groups, &scales.alpha, 4);
}

CODEC_FN Scales scales_load(const Codec& c, const uint8_t* wire, size_t groups, size_t group) {
    const uint8_t* s = wire + groups * codec_payload_bytes(c) + 4 * group;
    Scales scales = {0, 1};
    memcpy(&scales.s, s, 4);
    if (c.kind == Codec::taco) memcpy(&scales.alpha, s + 4 * groups, 4);
    return scales;
}

// A whole stripe. Returns the number of groups that are not finite; none and bf16 have no groups and count nothing.
inline size_t codec_encode(const Codec& c, uint8_t* wire, const float* x, size_t n, const RoundingKey& key) {
    if (n == 0) return 0;  // an empty stripe may have no address
    if (c.kind == Codec::none) memcpy(wire, x, 4 * n);
    if (c.kind == Codec::bf16)
        for (size_t i = 0; i < n; i++) {
            const uint16_t half = bf16_from_float(x[i]);
            memcpy(wire + 2 * i, &half, 2);
        }
    if (!codec_has_groups(c)) return 0;
    const size_t groups = codec_groups(c, n), g = size_t(c.group);
    const uint64_t stream = rounding_stream(key);
    size_t not_finite = 0;
    for (size_t group = 0; group < groups; group++) {
        Scales scales;
        const size_t first = group * g, present = n - first < g ? n - first : g;
        not_finite += !group_encode(c, wire + group * codec_payload_bytes(c), scales, x + first, int(present), stream, first);
        scales_store(c, wire, groups, group, scales);
    }
    return not_finite;
}

inline void codec_decode(const Codec& c, float* x, const uint8_t* wire, size_t n) {
    if (n == 0) return;
    if (c.kind == Codec::none) memcpy(x, wire, 4 * n);
    if (c.kind == Codec::bf16)
        for (size_t i = 0; i < n; i++) {
            uint16_t half;
            memcpy(&half, wire + 2 * i, 2);
            x[i] = float_from_bf16(half);
        }
    if (!codec_has_groups(c)) return;
    const size_t groups = codec_groups(c, n), g = size_t(c.group);
    for (size_t group = 0; group < groups; group++) {
        float values[max_group];
        group_decode(c, values, wire + group * codec_payload_bytes(c), scales_load(c, wire, groups, group));
        const size_t first = group * g, present = n - first < g ? n - first : g;
        memcpy(x + first, values, 4 * present);
    }
}

}  // namespace spec
