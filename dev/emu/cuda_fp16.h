// IEEE half precision under CUDA's names.
#pragma once
#include "emu_half.h"

using __half_raw = emu::RawFloat16<emu::Fp16Format>;
using __half2_raw = emu::RawFloat16x2<emu::Fp16Format>;
using __half = emu::Float16<emu::Fp16Format>;
using __half2 = emu::Float16x2<emu::Fp16Format>;
using half = __half;
using half2 = __half2;

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline short __half_as_short(__half x) { return short(x.bits); }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
