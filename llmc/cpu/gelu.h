// GELU in its tanh form (arXiv 1606.08415), as GPT-2 has it:
//
//   gelu(x) = x (1 + tanh u) / 2 = x s,   u = sqrt(2 / pi) (x + 0.044715 x^3),   s = sigmoid(2 u) = 1 / (1 + e^(-2u))
//   gelu'(x) = s + 2 x s (1 - s) u'(x)
//
// With the sigmoid there is nothing to cancel: the error is about 1e-7 of max(|x|, 1) everywhere.
#pragma once
#include <cstddef>

#include "llmc/cpu/vecmath.h"
#include "llmc/device.h"

namespace cpu {

constexpr float gelu_2c = 1.5957691216f;  // 2 sqrt(2 / pi)

// e^(-2u); bounded, so that what is made of it is finite. Beyond the bound gelu is 0 to float32's precision of x.
inline float gelu_exp(float x) {
    const float minus_2u = -gelu_2c * x * std::fma(0.044715f * x, x, 1.0f);
    return exp_fast(minus_2u > 80.0f ? 80.0f : minus_2u);
}

inline float gelu(float x) { return x / (1.0f + gelu_exp(x)); }

inline float gelu_slope(float x) {
    const float e = gelu_exp(x), s = 1.0f / (1.0f + e);
    const float slope_2u = gelu_2c * std::fma(3.0f * 0.044715f * x, x, 1.0f);
    return std::fma(x * slope_2u, s * (e * s), s);
}

inline void gelu_forward(float* out, const float* inp, size_t n, Stream) {
    const auto element = [=](size_t i) { out[i] = gelu(inp[i]); };
    parallel_sweep(n, element, out, inp);
}

// dinp = dout gelu'(inp); dinp may be dout.
inline void gelu_backward(float* dinp, const float* dout, const float* inp, size_t n, Stream) {
    const auto element = [=](size_t i) { dinp[i] = dout[i] * gelu_slope(inp[i]); };
    parallel_sweep(n, element, dout, inp);
}

}  // namespace cpu
