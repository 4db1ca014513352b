// GELU in its tanh form (arXiv 1606.08415), as GPT-2 has it:
//
//   gelu(x) = x (1 + tanh u) / 2 = x s,   u = sqrt(2 / pi) (x + 0.044715 x^3),   s = sigmoid(2 u) = 1 / (1 + e^(-2u))
//   gelu'(x) = s + 2 x s (1 - s) u'(x)
//
// With the sigmoid there is nothing to cancel: the error is about 1e-7 of max(|x|, 1) everywhere.
#pragma once
#include <algorithm>
#include <cstddef>

#include "llmc/cpu/vecmath.h"
#include "llmc/device.h"
#include "llmc/dtype.h"

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

// One thread's share; the matmuls call these on what they have just written. Memory far from the core comes in time only
// if it is asked for early: without the prefetches, backward was three times slower there.
template <class F>
inline void gelu_piece(const floatX* x, const floatX* y, size_t n, F element) {
    constexpr size_t block = 64, ahead = 512;
    for (size_t i = 0; i < n; i += block) {
        const size_t end = std::min(n, i + block);
        for (size_t k = i; k < end; k += 64 / sizeof(floatX)) {
            __builtin_prefetch(x + k + ahead);
            __builtin_prefetch(y + k + ahead);
        }
#pragma omp simd
        for (size_t k = i; k < end; k++) element(k);
    }
}

inline void gelu_forward_piece(floatX* out, const floatX* inp, size_t n) {
    gelu_piece(inp, out, n, [=](size_t i) { out[i] = gelu(inp[i]); });
}

inline void gelu_backward_piece(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    gelu_piece(inp, dout, n, [=](size_t i) { dinp[i] = dout[i] * gelu_slope(inp[i]); });
}

constexpr size_t gelu_share = 4096;

inline void gelu_forward(floatX* out, const floatX* inp, size_t n, Stream) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += gelu_share) gelu_forward_piece(out + i, inp + i, std::min(gelu_share, n - i));
}

// dinp = dout gelu'(inp); dinp may be dout.
inline void gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, Stream) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i += gelu_share) gelu_backward_piece(dinp + i, dout + i, inp + i, std::min(gelu_share, n - i));
}

}  // namespace cpu
