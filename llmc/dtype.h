// Element types. `floatX` is the storage type of weights and activations: float on the cpu target; on GPUs bfloat16, or
// what the build chose (FLOATX_FP32, FLOATX_FP16). Sums, statistics and gradients of parameters are float everywhere.
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

#ifdef LLMC_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using bf16 = __nv_bfloat16;
using fp16 = __half;
#if defined FLOATX_FP32
using floatX = float;
#elif defined FLOATX_FP16
using floatX = fp16;
#else
using floatX = bf16;
#endif
constexpr bool floatX_is_fp16 = std::is_same_v<floatX, fp16>;
#else
using floatX = float;
constexpr bool floatX_is_fp16 = false;
#endif

// bfloat16 is the upper half of a float32; round to nearest even, NaN stays NaN (quiet, sign kept).
constexpr uint16_t bf16_from_float(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float float_from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
