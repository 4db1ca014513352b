// The codecs on the CPU: SIMD over the values of a group (codec/simd.h), threads over groups. codec/spec.h is the
// definition; these give the same bytes and the same floats, bit for bit, at any number of threads.
//
// wire is codec_bytes(c, n) long and need not be aligned. Nothing the size of the tensor is allocated.
#pragma once
#include <vector>

#include "../codec/simd.h"
#include "../device.h"

namespace cpu {

constexpr size_t codec_parallel_threshold = 1 << 15;  // values; below this, waking threads costs more than the work

// A stripe in blocks of 1024 values: whole groups, what a core keeps in its first cache.
constexpr size_t codec_block = simd::tile_values;

struct CodecStripe {
    Codec codec;
    size_t n, blocks, groups;
    simd::GroupCodec group;
    uint64_t stream;  // of random numbers
};

inline CodecStripe codec_stripe(const Codec& c, size_t n, const RoundingKey& key) {
    CodecStripe stripe = {c, n, (n + codec_block - 1) / codec_block, 0, {}, 0};
    if (codec_has_groups(c)) {
        stripe.groups = codec_groups(c, n);
        stripe.group = simd::group_codec(c);
        stripe.stream = spec::rounding_stream(key);
    }
    return stripe;
}

inline size_t block_values(const CodecStripe& stripe, size_t block) {
    return std::min(codec_block, stripe.n - block * codec_block);
}

// x: the values of the block. Returns the number of groups that are not finite.
inline size_t block_encode(const CodecStripe& stripe, uint8_t* wire, size_t block, const float* x) {
    const Codec& c = stripe.codec;
    const size_t values = block_values(stripe, block), first = block * codec_block;
    uint8_t* payload = wire + first * size_t(c.bits) / 8;
    if (c.kind == Codec::none) {
        memcpy(payload, x, 4 * values);
        return 0;
    }
    if (c.kind == Codec::bf16) {
        for (size_t i = 0; i < values; i++) {
            const uint16_t half = bf16_from_float(x[i]);
            memcpy(payload + 2 * i, &half, 2);
        }
        return 0;
    }
    const size_t g = size_t(c.group), whole = values / g, rest = values % g, first_group = first / g;
    spec::Scales scales[simd::tile_values / 32];
    size_t not_finite = 0;
    if (whole > 0) not_finite += size_t(stripe.group.encode(c, payload, scales, x, int(whole), c.group, stripe.stream, first));
    if (rest > 0) {
        alignas(64) float padded[spec::max_group] = {};
        memcpy(padded, x + whole * g, 4 * rest);
        not_finite += size_t(stripe.group.encode(c, payload + whole * codec_payload_bytes(c), scales + whole, padded, 1,
                                                 int(rest), stripe.stream, first + whole * g));
    }
    for (size_t k = 0; k < whole + (rest > 0); k++) spec::scales_store(c, wire, stripe.groups, first_group + k, scales[k]);
    return not_finite;
}

// x: the values of the block, written, or added to.
inline void block_decode(const CodecStripe& stripe, float* x, const uint8_t* wire, size_t block, bool add) {
    const Codec& c = stripe.codec;
    const size_t values = block_values(stripe, block), first = block * codec_block;
    const uint8_t* payload = wire + first * size_t(c.bits) / 8;
    const auto put = [&](auto value) {
        if (add)
            for (size_t i = 0; i < values; i++) x[i] += value(i);
        else
            for (size_t i = 0; i < values; i++) x[i] = value(i);
    };
    if (c.kind == Codec::none) return put([&](size_t i) { return simd::load<float>(payload + 4 * i); });
    if (c.kind == Codec::bf16) return put([&](size_t i) { return float_from_bf16(simd::load<uint16_t>(payload + 2 * i)); });
    const size_t g = size_t(c.group);
    for (size_t i = 0; i < values; i += g, payload += codec_payload_bytes(c)) {
        const spec::Scales scales = spec::scales_load(c, wire, stripe.groups, (first + i) / g);
        if (values - i >= g) {
            stripe.group.decode(c, x + i, payload, scales, add);
        } else {
            alignas(64) float padded[spec::max_group] = {};
            memcpy(padded, x + i, 4 * (values - i));
            stripe.group.decode(c, padded, payload, scales, add);
            memcpy(x + i, padded, 4 * (values - i));
        }
    }
}

// Several streams are read a block at a time, too short for the hardware to run ahead in each: ask for the next block.
inline void prefetch(const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// The sum over peers, in rank order, of a block. One of them may be the own contribution, which is not encoded.
inline void block_decode_reduce(const CodecStripe& stripe, float* sum, const uint8_t* const* wires, const float* own, int peers,
                                size_t block) {
    const size_t values = block_values(stripe, block);
    const size_t bytes = codec_block * size_t(stripe.codec.bits) / 8;
    for (int peer = 0; peer < peers; peer++) {
        if (wires[peer]) {
            prefetch(wires[peer] + (block + 1) * bytes, bytes);
            block_decode(stripe, sum, wires[peer], block, peer > 0);
            continue;
        }
        const float* x = own + block * codec_block;
        prefetch(x + codec_block, 4 * codec_block);
        for (size_t i = 0; i < values; i++) sum[i] = peer > 0 ? sum[i] + x[i] : x[i];
    }
}

// Adds to *nonfinite the number of groups that hold a NaN or an infinity, or overflow; null: not wanted.
inline void codec_encode(const Codec& c, uint8_t* wire, const float* x, size_t n, const RoundingKey& key, uint64_t* nonfinite,
                         Stream) {
    const CodecStripe stripe = codec_stripe(c, n, key);
    size_t not_finite = 0;
#pragma omp parallel for schedule(static) reduction(+ : not_finite) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < stripe.blocks; block++)
        not_finite += block_encode(stripe, wire, block, x + block * codec_block);
    if (nonfinite) *nonfinite += not_finite;
}

inline void codec_decode(const Codec& c, float* x, const uint8_t* wire, size_t n, Stream) {
    const CodecStripe stripe = codec_stripe(c, n, {});
#pragma omp parallel for schedule(static) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < stripe.blocks; block++) block_decode(stripe, x + block * codec_block, wire, block, false);
}

// out: [n] = the sum over peers; wires: [peers], null where own (float32) takes the place. out may be own.
inline void codec_decode_reduce(const Codec& c, float* out, const uint8_t* const* wires, const float* own, int peers, size_t n,
                                Stream) {
    const CodecStripe stripe = codec_stripe(c, n, {});
#pragma omp parallel for schedule(static) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < stripe.blocks; block++) {
        alignas(64) float sum[codec_block];
        block_decode_reduce(stripe, sum, wires, own, peers, block);
        memcpy(out + block * codec_block, sum, 4 * block_values(stripe, block));
    }
}

// The same sum, encoded: wire and *nonfinite as codec_encode would leave them.
inline void codec_decode_reduce_encode(const Codec& c, uint8_t* wire, const uint8_t* const* wires, const float* own, int peers,
                                       size_t n, const RoundingKey& key, uint64_t* nonfinite, Stream) {
    const CodecStripe stripe = codec_stripe(c, n, key);
    size_t not_finite = 0;
#pragma omp parallel for schedule(static) reduction(+ : not_finite) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < stripe.blocks; block++) {
        alignas(64) float sum[codec_block];
        block_decode_reduce(stripe, sum, wires, own, peers, block);
        not_finite += block_encode(stripe, wire, block, sum);
    }
    if (nonfinite) *nonfinite += not_finite;
}

// signal_noise: [2], to which the sums of x^2 and of (x - decoded)^2 are added, the same bits at any number of threads.
inline void codec_error_add(const Codec& c, double* signal_noise, const float* x, const uint8_t* wire, size_t n, Stream) {
    const CodecStripe stripe = codec_stripe(c, n, {});
    std::vector<double> signal(stripe.blocks), noise(stripe.blocks);
#pragma omp parallel for schedule(static) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < stripe.blocks; block++) {
        alignas(64) float decoded[codec_block];
        block_decode(stripe, decoded, wire, block, false);
        const float* values = x + block * codec_block;
        for (size_t i = 0; i < block_values(stripe, block); i++) {
            const double value = values[i], error = value - decoded[i];
            signal[block] += value * value;
            noise[block] += error * error;
        }
    }
    for (size_t block = 0; block < stripe.blocks; block++) signal_noise[0] += signal[block], signal_noise[1] += noise[block];
}

}  // namespace cpu
