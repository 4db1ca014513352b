// The two 8-bit floats under CUDA's names, rounded to nearest even.
//
//   E4M3  bias 7, largest 448, no infinity, NaN 0x7f       E5M2  bias 15, largest 57344, infinity 0x7c, NaN 0x7d .. 0x7f
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned int;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) {
    const bool e4m3 = kind == __NV_E4M3;
    const int mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    const uint32_t largest = e4m3 ? 0x7e : 0x7b;
    const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7f;
    uint32_t code;
    if (size < uint32_t(128 - bias) << 23) {  // subnormal: the sum has the spacing of the subnormals, and rounds
        const float anchor = e4m3 ? 0x1p14f : 0x1p7f;
        code = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + anchor) - std::bit_cast<uint32_t>(anchor);
    } else {
        const int shift = 23 - mantissa;
        code = ((size + (1u << (shift - 1)) - 1 + (size >> shift & 1)) >> shift) - (uint32_t(127 - bias) << mantissa);
    }
    if (code > largest) code = saturate == __NV_SATFINITE ? largest : e4m3 ? 0x7f : 0x7c;
    return static_cast<__nv_fp8_storage_t>(sign | code);
}

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) {
    const unsigned low = __nv_cvt_float_to_fp8(v.x, saturate, kind), high = __nv_cvt_float_to_fp8(v.y, saturate, kind);
    return static_cast<__nv_fp8x2_storage_t>(low | high << 8);
}
inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float_to_fp8(__half(x), saturate, kind);
}
inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw x, __nv_saturation_t saturate,
                                                      __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float_to_fp8(__nv_bfloat16(x), saturate, kind);
}

// Exact: half has every value of both formats.
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) {
    const unsigned sign = (x & 0x80u) << 8, size = x & 0x7fu;
    if (kind == __NV_E5M2) return {static_cast<unsigned short>(size > 0x7c ? 0x7fff : sign | size << 8)};
    if (size == 0x7f) return {0x7fff};
    if (size >= 8) return {static_cast<unsigned short>(sign | ((size << 7) + (8u << 10)))};
    return {static_cast<unsigned short>(sign | __half(float(size) * 0x1p-9f).bits)};
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
    return {__nv_cvt_fp8_to_halfraw(x & 0xff, kind).x, __nv_cvt_fp8_to_halfraw(x >> 8, kind).x};
}

namespace emu {
template <__nv_fp8_interpretation_t kind>
struct Fp8 {
    __nv_fp8_storage_t __x;

    Fp8() = default;
    explicit Fp8(float x) : __x(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind)) {}
    explicit operator float() const { return __half(__nv_cvt_fp8_to_halfraw(__x, kind)); }
};
}  // namespace emu
using __nv_fp8_e4m3 = emu::Fp8<__NV_E4M3>;
using __nv_fp8_e5m2 = emu::Fp8<__NV_E5M2>;
