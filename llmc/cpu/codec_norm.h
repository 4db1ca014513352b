// Decoding fused with the norm that follows, where a target has it: the CPU has not. False: nothing was done, the caller
// takes the two steps, which give the same bits.
#pragma once
#include "llmc/codec/codec.h"
#include "llmc/cpu/device.h"
#include "llmc/residual_norm.h"

namespace cpu {

inline bool codec_decode_reduce_layernorm(const Codec&, const uint8_t* const*, const float*, int, size_t,
                                          const ResidualNorm<float>&, const Codec&, uint8_t*, const RoundingKey&, uint64_t*,
                                          Stream) {
    return false;
}

inline bool codec_decode_layernorm(const Codec&, const uint8_t* const*, int, size_t, const ResidualNorm<float>&, Stream) {
    return false;
}

}  // namespace cpu
