// The codecs on the CPU. See codec/spec.h for the definition; these give the same bits.
#pragma once
#include <vector>

#include "../codec/spec.h"
#include "../device.h"

namespace cpu {

inline size_t codec_encode(const Codec& c, uint8_t* wire, const floatX* x, size_t n, const RoundingKey& key, Stream) {
    return spec::codec_encode(c, wire, x, n, key);
}

inline void codec_decode(const Codec& c, floatX* x, const uint8_t* wire, size_t n, Stream) { spec::codec_decode(c, x, wire, n); }

inline void codec_decode_reduce(const Codec& c, floatX* out, const uint8_t* const* wires, const floatX* own, int peers, size_t n,
                                Stream stream) {
    std::vector<float> sum(n), one(n);
    for (int peer = 0; peer < peers; peer++) {
        if (wires[peer]) codec_decode(c, one.data(), wires[peer], n, stream);
        const float* from = wires[peer] ? one.data() : own;
        for (size_t i = 0; i < n; i++) sum[i] = peer ? sum[i] + from[i] : from[i];
    }
    memcpy(out, sum.data(), 4 * n);
}

inline size_t codec_decode_reduce_encode(const Codec& c, uint8_t* wire, const uint8_t* const* wires, const floatX* own, int peers,
                                         size_t n, const RoundingKey& key, Stream stream) {
    std::vector<float> sum(n);
    codec_decode_reduce(c, sum.data(), wires, own, peers, n, stream);
    return codec_encode(c, wire, sum.data(), n, key, stream);
}

}  // namespace cpu
