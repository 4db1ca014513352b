// The codecs on the CPU: SIMD over the values of a group (codec/simd.h), threads over groups. codec/spec.h is the
// definition; these give the same bytes and the same floats, bit for bit, at any number of threads.
//
// wire is codec_bytes(c, n) long and need not be aligned. Nothing the size of the tensor is allocated.
#pragma once
#include "../codec/simd.h"
#include "../device.h"

namespace cpu {

constexpr size_t codec_parallel_threshold = 1 << 15;  // values; below this, waking threads costs more than the work

// A stripe in blocks: groups, or, for the codecs without groups, 512 values.
struct CodecBlocks {
    Codec codec;
    size_t n, block, count, payload_bytes;
    simd::GroupCodec group = {};
    uint64_t stream = 0;  // of random numbers
};

inline CodecBlocks codec_blocks(const Codec& c, size_t n) {
    const size_t block = codec_has_groups(c) ? size_t(c.group) : 512;
    CodecBlocks blocks = {c, n, block, (n + block - 1) / block, block * size_t(c.bits) / 8};
    if (codec_has_groups(c)) blocks.group = simd::group_codec(c);
    return blocks;
}

inline size_t block_present(const CodecBlocks& b, size_t block) { return std::min(b.block, b.n - block * b.block); }

// x: the block's values, as many as are present. False if they are not all finite.
inline bool block_encode(const CodecBlocks& b, uint8_t* wire, size_t block, const float* x) {
    const size_t present = block_present(b, block);
    uint8_t* payload = wire + block * b.payload_bytes;
    if (b.codec.kind == Codec::none) {
        memcpy(payload, x, 4 * present);
        return true;
    }
    if (b.codec.kind == Codec::bf16) {
#pragma omp simd
        for (size_t i = 0; i < present; i++) {
            const uint16_t half = bf16_from_float(x[i]);
            memcpy(payload + 2 * i, &half, 2);
        }
        return true;
    }
    alignas(64) float padded[spec::max_group];
    if (present < b.block) {
        memcpy(padded, x, 4 * present);
        memset(padded + present, 0, 4 * (b.block - present));
        x = padded;
    }
    spec::Scales scales;
    const bool finite = b.group.encode(b.codec, payload, scales, x, int(present), b.stream, block * b.block);
    spec::scales_store(b.codec, wire, b.count, block, scales);
    return finite;
}

inline void block_decode(const CodecBlocks& b, float* x, const uint8_t* wire, size_t block) {
    const size_t present = block_present(b, block);
    const uint8_t* payload = wire + block * b.payload_bytes;
    if (b.codec.kind == Codec::none) {
        memcpy(x, payload, 4 * present);
    } else if (b.codec.kind == Codec::bf16) {
#pragma omp simd
        for (size_t i = 0; i < present; i++) {
            uint16_t half;
            memcpy(&half, payload + 2 * i, 2);
            x[i] = float_from_bf16(half);
        }
    } else if (present == b.block) {
        b.group.decode(b.codec, x, payload, spec::scales_load(b.codec, wire, b.count, block));
    } else {
        alignas(64) float padded[spec::max_group];
        b.group.decode(b.codec, padded, payload, spec::scales_load(b.codec, wire, b.count, block));
        memcpy(x, padded, 4 * present);
    }
}

// The sum over peers, in rank order, of a block. One of them may be the own contribution, which is not encoded.
inline void block_decode_reduce(const CodecBlocks& b, float* sum, const uint8_t* const* wires, const float* own, int peers,
                                size_t block) {
    const size_t present = block_present(b, block);
    alignas(64) float decoded[512];
    for (int peer = 0; peer < peers; peer++) {
        const float* x = wires[peer] ? decoded : own + block * b.block;
        if (wires[peer]) block_decode(b, decoded, wires[peer], block);
        if (peer == 0)
            memcpy(sum, x, 4 * present);
        else
#pragma omp simd
            for (size_t i = 0; i < present; i++) sum[i] += x[i];
    }
}

// Returns the number of groups that hold a NaN or an infinity, or overflow.
inline size_t codec_encode(const Codec& c, uint8_t* wire, const floatX* x, size_t n, const RoundingKey& key, Stream) {
    CodecBlocks b = codec_blocks(c, n);
    b.stream = spec::rounding_stream(key);
    size_t not_finite = 0;
#pragma omp parallel for schedule(static) reduction(+ : not_finite) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < b.count; block++) not_finite += !block_encode(b, wire, block, x + block * b.block);
    return not_finite;
}

inline void codec_decode(const Codec& c, floatX* x, const uint8_t* wire, size_t n, Stream) {
    const CodecBlocks b = codec_blocks(c, n);
#pragma omp parallel for schedule(static) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < b.count; block++) block_decode(b, x + block * b.block, wire, block);
}

// out: [n] = the sum over peers; wires: [peers], null where own (float32) takes the place. out may be own.
inline void codec_decode_reduce(const Codec& c, floatX* out, const uint8_t* const* wires, const floatX* own, int peers, size_t n,
                                Stream) {
    const CodecBlocks b = codec_blocks(c, n);
#pragma omp parallel for schedule(static) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < b.count; block++) {
        alignas(64) float sum[512];
        block_decode_reduce(b, sum, wires, own, peers, block);
        memcpy(out + block * b.block, sum, 4 * block_present(b, block));
    }
}

// The same sum, encoded: wire as codec_encode would write it. Returns what codec_encode does.
inline size_t codec_decode_reduce_encode(const Codec& c, uint8_t* wire, const uint8_t* const* wires, const floatX* own, int peers,
                                         size_t n, const RoundingKey& key, Stream) {
    CodecBlocks b = codec_blocks(c, n);
    b.stream = spec::rounding_stream(key);
    size_t not_finite = 0;
#pragma omp parallel for schedule(static) reduction(+ : not_finite) if (n > codec_parallel_threshold)
    for (size_t block = 0; block < b.count; block++) {
        alignas(64) float sum[512];
        block_decode_reduce(b, sum, wires, own, peers, block);
        not_finite += !block_encode(b, wire, block, sum);
    }
    return not_finite;
}

}  // namespace cpu
