// Element types. `floatX` is the storage type of weights and activations: float on the cpu target.
#pragma once
#include <bit>
#include <cstdint>

using floatX = float;

// bfloat16 is the upper half of a float32; round to nearest even, NaN stays NaN (quiet, sign kept).
inline uint16_t bf16_from_float(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float_from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
