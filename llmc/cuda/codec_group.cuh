// The codecs' arithmetic in a warp: encoding and decoding of a tile, 512 values, 16 a lane, in registers. codec/spec.h is the
// definition; the bytes and the floats are the same, bit for bit.
//
// A group of G values is held by G / 16 lanes, so a tile has 512 / G groups. Lane l of a group holds values 8 l .. 8 l + 7 and
// G / 2 more of these:
//
//   loads and stores of 16-bit values are 128 bits a lane, next to each other; those of 8-bit codes 64 bits
//   butterflies of strides 1, 2, 4 and G / 2 stay in registers; the others are shuffles: 3 of 7 for G = 128
//   codes of fewer than 8 bits: the values that share a byte are G / 2 apart, or in lanes a power of two apart
//
// G is not a template parameter: it only sets how many of the stages are shuffles. What differs in its instructions is a kind:
//
//   Plain<W>                     none, bf16: values of type W, no groups
//   Fp8Groups<format, hadamard>  fp8, taco
//   ByteGroups<hadamard>         int8, hadint8
//   SectionGroups                hadint4 .. hadint7
//
//   kind::Raw                                          what a lane reads of a wire
//   Raw kind::load(c, wire, place)                     only the loads, so that several can be under way
//   kind::decode(c, v, raw, place)
//   bool kind::encode(c, wire, v, place, stream)       false in the first lane of a group that is not finite
//   int kind::reduce_blocks                            blocks of 256 threads an SM whose registers a reduction fits in
#pragma once
#include "llmc/codec/spec.h"
#include "llmc/cuda/common.cuh"

namespace cuda {

constexpr int codec_tile = 512;  // values of a warp
constexpr int codec_half = 8;    // values of a lane that are next to each other

// Where a lane stands: its values are at, .. at + 7 and at + distance, .. at + distance + 7 of the stripe, as far as they are
// below `end`. The others are taken as zeros.
struct CodecPlace {
    int lanes, lane;       // of a group; this one's number in it
    size_t group, groups;  // this lane's group; groups of the stripe
    size_t at, end;
    int log_group, distance;  // log2(G), G / 2
};

// Of a tile whose first value is number `first`, the start of a group.
__device__ __forceinline__ CodecPlace codec_place(const Codec& c, size_t first, size_t end, size_t groups) {
    const int g = c.group > 0 ? c.group : codec_tile, lane = int(threadIdx.x % warp_size);
    CodecPlace p;
    p.lanes = g / (2 * codec_half);
    p.lane = lane & (p.lanes - 1);
    p.log_group = __popc(unsigned(g - 1));
    const int group = lane >> (p.log_group - 4);
    p.group = (first >> p.log_group) + size_t(group);
    p.groups = groups;
    p.at = first + size_t(group * g + p.lane * codec_half);
    p.end = end;
    p.distance = g / 2;
    return p;
}

// --- values

// Whether 128-bit accesses may be used for values whose index is a multiple of 8.
__device__ __forceinline__ bool is_packed(const void* values) { return reinterpret_cast<uintptr_t>(values) % 16 == 0; }

// x + at, a multiple of a pack: as the index of a pack, since nvcc cuts a store to a sum of several indices into 32 bits.
template <class E>
__device__ __forceinline__ E* pack_address(E* x, size_t at) {
    return reinterpret_cast<E*>(reinterpret_cast<uint4*>(x) + at / Pack<E>::size);
}

template <class E>
__device__ __forceinline__ void values_load(float (&v)[16], const E* x, const CodecPlace& p) {
    const bool packed = is_packed(x);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const size_t at = p.at + size_t(half * p.distance);
        float* to = v + half * codec_half;
        if (packed && at + codec_half <= p.end) {
#pragma unroll
            for (int i = 0; i < codec_half; i += Pack<E>::size) {
                const Pack<E> pack = pack_load(x + at + i);
#pragma unroll
                for (int k = 0; k < Pack<E>::size; k++) to[i + k] = to_float(pack[k]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < codec_half; i++) to[i] = at + i < p.end ? to_float(x[at + i]) : 0.0f;
        }
    }
}

template <class E>
__device__ __forceinline__ void values_store(E* x, const float (&v)[16], const CodecPlace& p) {
    const bool packed = is_packed(x);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const size_t at = p.at + size_t(half * p.distance);
        const float* from = v + half * codec_half;
        if (packed && at + codec_half <= p.end) {
#pragma unroll
            for (int i = 0; i < codec_half; i += Pack<E>::size) {
                Pack<E> pack;
#pragma unroll
                for (int k = 0; k < Pack<E>::size; k++) pack[k] = from_float<E>(from[i + k]);
                pack_store(pack_address(x, at + i), pack);
            }
        } else {
#pragma unroll
            for (int i = 0; i < codec_half; i++)
                if (at + i < p.end) x[at + i] = from_float<E>(from[i]);
        }
    }
}

// Zeros beyond the end.
__device__ __forceinline__ void values_cut(float (&v)[16], const CodecPlace& p) {
    if (p.at + size_t(p.distance + codec_half) <= p.end) return;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (p.at + size_t(i / codec_half * p.distance + i % codec_half) >= p.end) v[i] = 0;
    }
}

__device__ __forceinline__ float power_of_two(int exponent) { return spec::float_of(uint32_t(127 + exponent) << 23); }

// --- bytes of a wire, which may stand anywhere: `aligned` says that T does here

template <class T>
__device__ __forceinline__ T wire_load(const uint8_t* from, bool aligned) {
    if (aligned) return *reinterpret_cast<const T*>(from);
    T value;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(&value);  // not memcpy: nvcc would make one load of both, byte by byte
#pragma unroll
    for (int i = 0; i < int(sizeof(T)); i++) bytes[i] = from[i];
    return value;
}

template <class T>
__device__ __forceinline__ void wire_store(uint8_t* to, const T& value, bool aligned) {
    if (aligned)
        *reinterpret_cast<T*>(to) = value;
    else
        memcpy(to, &value, sizeof(T));
}

// Whether all payloads of a wire start at multiples of 8 bytes, and so its scales at multiples of 4.
__device__ __forceinline__ bool wire_aligned(const Codec& c, const uint8_t* wire) {
    return (reinterpret_cast<uintptr_t>(wire) | codec_payload_bytes(c)) % 8 == 0;
}

// --- over the values of a group

__device__ __forceinline__ void group_hadamard(float (&y)[16], const CodecPlace& p) {
#pragma unroll
    for (int stride = 1; stride < codec_half; stride *= 2)
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (i & stride) continue;
            const float u = y[i], v = y[i + stride];
            y[i] = spec::add(u, v);
            y[i + stride] = spec::add(u, -v);
        }
    for (int lanes = 1; lanes < p.lanes; lanes *= 2) {
        const float sign = p.lane & lanes ? -1.0f : 1.0f;  // the product is exact, so that one rounding is left: the sum's
#pragma unroll
        for (int i = 0; i < 16; i++) y[i] = fmaf(sign, y[i], __shfl_xor_sync(full_warp, y[i], lanes));
    }
#pragma unroll
    for (int i = 0; i < codec_half; i++) {
        const float u = y[i], v = y[i + codec_half];
        y[i] = spec::add(u, v);
        y[i + codec_half] = spec::add(u, -v);
    }
}

__device__ __forceinline__ float group_sum_squares(const float (&x)[16], const CodecPlace& p) {
    float t[16];
#pragma unroll
    for (int i = 0; i < 16; i++) t[i] = spec::mul(x[i], x[i]);
#pragma unroll
    for (int stride = 1; stride < codec_half; stride *= 2)
#pragma unroll
        for (int i = 0; i < 16; i += 2 * stride) t[i] = spec::add(t[i], t[i + stride]);
    float low = t[0], high = t[codec_half];
    for (int lanes = 1; lanes < p.lanes; lanes *= 2) {
        low = spec::add(low, __shfl_xor_sync(full_warp, low, lanes));
        high = spec::add(high, __shfl_xor_sync(full_warp, high, lanes));
    }
    return spec::add(low, high);
}

// max|y| as bits; as integers, NaN and infinity are the largest.
__device__ __forceinline__ uint32_t group_max_bits(const float (&y)[16], const CodecPlace& p) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) largest = max(largest, spec::bits_of(y[i]) & 0x7fffffffu);
    for (int lanes = 1; lanes < p.lanes; lanes *= 2) largest = max(largest, __shfl_xor_sync(full_warp, largest, lanes));
    return largest;
}

// y / s, correctly rounded. With the reciprocal r of s, one step from y r is, as a quotient of floats is never so near the
// middle of two floats that the step's error matters; test_codec.cpp goes through all that come near. Inside the bounds of s
// the remainder is exact wherever the quotient is not rounded to a code of zero anyway. Its sign is turned, so that zeros keep
// theirs.
template <bool clamped>
__device__ __forceinline__ void group_divide(float (&y)[16], float s, float max) {
    const float r = spec::div(1.0f, s);
    if (__all_sync(full_warp, s >= 0x1p-60f && s <= 0x1p60f)) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float q = spec::mul(y[i], r);
            y[i] = fmaf(fmaf(q, s, -y[i]), -r, q);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        y[i] = spec::div(y[i], s);
        if (clamped)
            y[i] = spec::clamp(y[i], -max, max);  // an integer, so rounding may come after; inside the bounds it cannot
                                                  // be exceeded
    }
}

// --- codes, four in a word

__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

template <Fp8Format format>
struct Fp8Code {
    static constexpr bool is_fp8 = true;

    static __device__ __forceinline__ uint32_t encode(const float* v) {
        return spec::fp8_encode_pair(format, v[0], v[1]) | uint32_t(spec::fp8_encode_pair(format, v[2], v[3])) << 16;
    }
    static __device__ __forceinline__ uint32_t encode_stochastic(const float* v, const Philox& random) {
        return low_bytes(
            spec::fp8_encode_stochastic(format, v[0], random[0]), spec::fp8_encode_stochastic(format, v[1], random[1]),
            spec::fp8_encode_stochastic(format, v[2], random[2]), spec::fp8_encode_stochastic(format, v[3], random[3]));
    }
    // Exponent and mantissa moved to a float32's places; what is missing to the value is a power of two, for the subnormals
    // too, and is left to the caller.
    static constexpr int shift = format == Fp8Format::e4m3 ? 4 : 3;
    static constexpr float unit = format == Fp8Format::e4m3 ? 0x1p120f : 0x1p112f;
    static __device__ __forceinline__ float decode(uint32_t word, int byte) {
        constexpr uint32_t places = 0x80000000u | 0x7fu << (24 - shift);
        return spec::float_of(uint32_t(int32_t(word << (24 - 8 * byte)) >> shift) & places);
    }
};

struct LevelCode {
    static constexpr bool is_fp8 = false;

    // The level is the low byte of a sum with a number of the spacing wanted.
    static __device__ __forceinline__ uint32_t encode(const float* v) {
        const auto level = [&](int i) { return spec::bits_of(spec::add(v[i], 0x1.8p23f)); };
        return low_bytes(level(0), level(1), level(2), level(3));
    }
    static __device__ __forceinline__ uint32_t encode_stochastic(const float* v, const Philox& random) {
        const auto level = [&](int i) { return (spec::bits_of(spec::add(v[i], 768.0f)) + (random[i] >> 18)) >> 14; };
        return low_bytes(level(0), level(1), level(2), level(3));
    }
};

// Sections of codes of 4 to 7 bits. q: words of 4 codes: 0, 1 of the lane's first 8 values, 2, 3 of the others.

constexpr uint32_t bytes_of_bits(int width) { return 0x01010101u * ((1u << width) - 1); }

// The words of both halves, of the values 4 h .. and G / 2 beyond, as section bytes with `apart` bits between the halves.
__device__ __forceinline__ uint32_t halves_merge(const uint32_t (&q)[4], int h, int low, int width, int apart) {
    const uint32_t mask = bytes_of_bits(width);
    return (q[h] >> low & mask) | (q[2 + h] >> low & mask) << apart;
}

// One word a lane from two: the lanes of a group's upper half keep the second, and give the first.
__device__ __forceinline__ uint32_t lanes_merge(uint32_t first, uint32_t second, int apart, bool upper, int lanes) {
    const uint32_t received = __shfl_xor_sync(full_warp, upper ? first : second, lanes);
    return upper ? received | second << apart : first | received << apart;
}

__device__ __forceinline__ void sections_store(const Codec& c, uint8_t* payload, const uint32_t (&q)[4], const CodecPlace& p,
                                               bool present, bool aligned) {
    const uint2 low = {halves_merge(q, 0, 0, 4, 4), halves_merge(q, 1, 0, 4, 4)};
    if (present) wire_store(payload + 8 * p.lane, low, aligned);
    const int half = p.lanes / 2;
    const bool upper = p.lane >= half;
    const int pair = p.lane & (half - 1);
    payload += p.distance;
    if (c.bits >= 6) {
        const uint32_t word = lanes_merge(halves_merge(q, 0, 4, 2, 4), halves_merge(q, 1, 4, 2, 4), 2, upper, half);
        if (present) wire_store(payload + 8 * pair + 4 * upper, word, aligned);
        payload += p.distance / 2;
    }
    if (c.bits & 1) {
        const uint32_t first = halves_merge(q, 0, c.bits - 1, 1, 4), second = halves_merge(q, 1, c.bits - 1, 1, 4);
        if (p.lanes == 2) {  // all of a group's bits are one word
            const uint32_t own = first | second << 1, received = __shfl_xor_sync(full_warp, own, 1);
            if (present && !upper) wire_store(payload, own | received << 2, aligned);
        } else {
            const uint32_t own = lanes_merge(first, second, 2, upper, half);
            const uint32_t received = __shfl_xor_sync(full_warp, own, half / 2);
            if (present && pair < half / 2) wire_store(payload + 8 * pair + 4 * upper, own | received << 1, aligned);
        }
    }
}

struct Sections {
    uint2 low, middle, high;
};

// Value i of a group of G is in byte i % B of a section, from bit width * (i / B); B is a power of two.
__device__ __forceinline__ Sections sections_load(const Codec& c, const uint8_t* payload, const CodecPlace& p, bool aligned) {
    Sections s = {};
    s.low = wire_load<uint2>(payload + 8 * p.lane, aligned);
    const auto two_words = [&](int bytes) {
        return uint2{wire_load<uint32_t>(payload + (8 * p.lane & (bytes - 1)), aligned),
                     wire_load<uint32_t>(payload + ((8 * p.lane + 4) & (bytes - 1)), aligned)};
    };
    payload += p.distance;
    if (c.bits >= 6) {
        s.middle = two_words(p.distance / 2);
        payload += p.distance / 2;
    }
    if (c.bits & 1) s.high = two_words(p.distance / 4);
    return s;
}

// As 2^(bits - 1) + level.
__device__ __forceinline__ void sections_unpack(const Codec& c, uint32_t (&q)[4], const Sections& s, const CodecPlace& p) {
    const uint32_t sign = 0x01010101u << (c.bits - 1);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const int h = w % 2, upper = w / 2;
        const int index = upper * p.distance + 8 * p.lane + 4 * h;
        q[w] = (h ? s.low.y : s.low.x) >> (4 * upper) & bytes_of_bits(4);
        if (c.bits >= 6) q[w] |= ((h ? s.middle.y : s.middle.x) >> (2 * (index >> (p.log_group - 2))) & bytes_of_bits(2)) << 4;
        if (c.bits & 1) q[w] |= ((h ? s.high.y : s.high.x) >> (index >> (p.log_group - 3)) & bytes_of_bits(1)) << (c.bits - 1);
        q[w] ^= sign;
    }
}

// --- kinds

template <class W>
struct Plain {
    static constexpr bool has_scales = false;
    static constexpr int reduce_blocks = 3;
    struct Raw {
        Pack<W> packs[16 / Pack<W>::size];
    };
    static __device__ __forceinline__ Raw load(const Codec&, const uint8_t* wire, const CodecPlace& p) {
        Raw raw;
        const bool aligned = is_packed(wire);
#pragma unroll
        for (int i = 0; i < 16; i += Pack<W>::size) {
            const size_t at = p.at + size_t(i / codec_half * p.distance + i % codec_half);
            Pack<W>& pack = raw.packs[i / Pack<W>::size];
            if (aligned && at + Pack<W>::size <= p.end) {
                pack = pack_load(reinterpret_cast<const W*>(wire) + at);
            } else {
#pragma unroll
                for (int k = 0; k < Pack<W>::size; k++)
                    pack[k] = at + k < p.end ? wire_load<W>(wire + sizeof(W) * (at + k), false) : from_float<W>(0.0f);
            }
        }
        return raw;
    }
    static __device__ __forceinline__ void decode(const Codec&, float (&v)[16], const Raw& raw, const CodecPlace&) {
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = to_float(raw.packs[i / Pack<W>::size][i % Pack<W>::size]);
    }
    static __device__ __forceinline__ bool encode(const Codec&, uint8_t* wire, float (&v)[16], const CodecPlace& p, uint64_t) {
        const bool aligned = is_packed(wire);
#pragma unroll
        for (int i = 0; i < 16; i += Pack<W>::size) {
            const size_t at = p.at + size_t(i / codec_half * p.distance + i % codec_half);
            Pack<W> pack;
#pragma unroll
            for (int k = 0; k < Pack<W>::size; k++) pack[k] = wire_value(v[i + k]);
            if (aligned && at + Pack<W>::size <= p.end) {
                pack_store(pack_address(reinterpret_cast<W*>(wire), at), pack);
            } else {
#pragma unroll
                for (int k = 0; k < Pack<W>::size; k++)
                    if (at + k < p.end) wire_store(wire + sizeof(W) * (at + k), pack[k], false);
            }
        }
        return true;
    }
    // bf16 by the definition, which keeps the sign and the upper bits of a NaN; the hardware's does not.
    static __device__ __forceinline__ W wire_value(float x) {
        if constexpr (std::is_same_v<W, bf16>) {
            const uint16_t bits = bf16_from_float(x);
            W value;
            memcpy(&value, &bits, 2);
            return value;
        } else {
            return from_float<W>(x);
        }
    }
};

template <class Code, bool has_hadamard, bool sectioned>
struct Groups {
    static constexpr bool has_scales = true, has_alpha = has_hadamard && Code::is_fp8;
    static constexpr int reduce_blocks = Code::is_fp8 ? 4 : sectioned ? 2 : 3;

    struct Raw {
        uint2 low, high;  // codes of 8 bits: of the lane's first 8 values, and of the others
        Sections sections;
        spec::Scales scales;
    };

    // A wire is not written by a group that is not there.
    static __device__ __forceinline__ bool is_present(const CodecPlace& p) { return p.at - size_t(p.lane * codec_half) < p.end; }

    static __device__ __forceinline__ Raw load(const Codec& c, const uint8_t* wire, const CodecPlace& p) {
        Raw raw = {};
        if (!is_present(p)) return raw;
        const bool aligned = wire_aligned(c, wire);
        const uint8_t* payload = wire + p.group * codec_payload_bytes(c);
        if constexpr (sectioned) {
            raw.sections = sections_load(c, payload, p, aligned);
        } else {
            raw.low = wire_load<uint2>(payload + 8 * p.lane, aligned);
            raw.high = wire_load<uint2>(payload + 8 * p.lane + p.distance, aligned);
        }
        const uint8_t* s = wire + p.groups * codec_payload_bytes(c) + 4 * p.group;
        raw.scales.s = wire_load<float>(s, aligned);
        if constexpr (has_alpha) raw.scales.alpha = wire_load<float>(s + 4 * p.groups, aligned);
        return raw;
    }

    static __device__ __forceinline__ void decode(const Codec& c, float (&v)[16], const Raw& raw, const CodecPlace& p) {
        uint32_t q[4] = {raw.low.x, raw.low.y, raw.high.x, raw.high.y};
        float scale = raw.scales.s, before = 1;
        if constexpr (Code::is_fp8) {
#pragma unroll
            for (int i = 0; i < 16; i++) v[i] = Code::decode(q[i / 4], i % 4);
            before = Code::unit;
        } else {
            int bits = 8;
            if constexpr (sectioned) {
                bits = c.bits;
                sections_unpack(c, q, raw.sections, p);
            } else {
#pragma unroll
                for (int w = 0; w < 4; w++) q[w] ^= 0x80808080u;
            }
            const float zero = 0x1p23f + float(1 << (bits - 1));
#pragma unroll
            for (int i = 0; i < 16; i++)
                v[i] = spec::add(spec::float_of(__byte_perm(q[i / 4], 0x4b000000u, 0x7540u + unsigned(i % 4))), -zero);
        }
        if constexpr (has_alpha) scale = spec::div(raw.scales.s, raw.scales.alpha);
        if constexpr (has_hadamard) {
            group_hadamard(v, p);
            before *= spec::inverse_sqrt(c.group);
        }
        if (has_hadamard || Code::is_fp8) {
#pragma unroll
            for (int i = 0; i < 16; i++) v[i] = spec::mul(v[i], before);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = spec::mul(v[i], scale);
    }

    static __device__ __forceinline__ bool encode(const Codec& c, uint8_t* wire, float (&v)[16], const CodecPlace& p,
                                                  uint64_t stream) {
        spec::Scales scales = {0, 1};
        if constexpr (has_alpha) {
            const float sum = group_sum_squares(v, p);
            const size_t left = p.end - (p.at - size_t(p.lane * codec_half));  // beyond the end of all groups: any number does
            const bool whole = left >= size_t(c.group);
            scales.alpha =
                spec::taco_alpha(c, whole ? spec::mul(sum, power_of_two(-p.log_group)) : spec::div(sum, float(int(left))));
#pragma unroll
            for (int i = 0; i < 16; i++) v[i] = spec::mul(scales.alpha, v[i]);
        }
        if constexpr (has_hadamard) {
            group_hadamard(v, p);
#pragma unroll
            for (int i = 0; i < 16; i++) v[i] = spec::mul(v[i], spec::inverse_sqrt(c.group));
        }
        scales.s = spec::group_scale(c, group_max_bits(v, p));
        const bool finite = scales.s == scales.s, coded = finite && scales.s != 0;
        if (!finite) scales.alpha = scales.s;

        group_divide<!Code::is_fp8>(v, coded ? scales.s : 1.0f, float((1 << (c.bits - 1)) - 1));
        uint32_t q[4];
        if (c.stochastic) {
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const uint64_t index = p.at + size_t(w / 2 * p.distance + w % 2 * 4);
                q[w] = Code::encode_stochastic(v + 4 * w, philox(stream, index / 4, 0));
            }
        } else {
#pragma unroll
            for (int w = 0; w < 4; w++) q[w] = Code::encode(v + 4 * w);
        }
#pragma unroll
        for (int w = 0; w < 4; w++) q[w] = coded ? q[w] : 0;

        const bool present = is_present(p), aligned = wire_aligned(c, wire);
        uint8_t* payload = wire + p.group * codec_payload_bytes(c);
        if constexpr (sectioned) {
            sections_store(c, payload, q, p, present, aligned);
        } else if (present) {
            wire_store(payload + 8 * p.lane, uint2{q[0], q[1]}, aligned);
            wire_store(payload + 8 * p.lane + p.distance, uint2{q[2], q[3]}, aligned);
        }
        if (present && p.lane == 0) {
            uint8_t* s = wire + p.groups * codec_payload_bytes(c) + 4 * p.group;
            wire_store(s, scales.s, aligned);
            if constexpr (has_alpha) wire_store(s + 4 * p.groups, scales.alpha, aligned);
        }
        return finite || !present || p.lane != 0;
    }
};

template <Fp8Format format, bool has_hadamard>
using Fp8Groups = Groups<Fp8Code<format>, has_hadamard, false>;
template <bool has_hadamard>
using ByteGroups = Groups<LevelCode, has_hadamard, false>;
using SectionGroups = Groups<LevelCode, true, true>;

}  // namespace cuda
