// GELU in its tanh form (arXiv 1606.08415), as GPT-2 has it:
//
//   gelu(x) = x (1 + tanh u) / 2 = x s,   u = sqrt(2 / pi) (x + 0.044715 x^3),   s = sigmoid(2 u) = 1 / (1 + e^(-2u))
//   gelu'(x) = s + 2 x s (1 - s) u'(x)
//
// The approximate exp and division are right to 1e-6 where their result is not negligible. Forward moves two elements of E an
// element, backward three.
#pragma once
#include "llmc/cuda/sweep.cuh"

namespace cuda {

constexpr float gelu_2c = 1.5957691216f;  // 2 sqrt(2 / pi)

// e^(-2u); bounded, so that what is made of it is finite. A NaN stays one.
__device__ __forceinline__ float gelu_exp(float x) {
    const float minus_2u = -gelu_2c * x * fmaf(0.044715f * x, x, 1.0f);
    return __expf(minus_2u > 80.0f ? 80.0f : minus_2u);
}

__device__ __forceinline__ float gelu(float x) { return __fdividef(x, 1.0f + gelu_exp(x)); }

__device__ __forceinline__ float gelu_slope(float x) {
    const float e = gelu_exp(x), s = __fdividef(1.0f, 1.0f + e);
    const float slope_2u = gelu_2c * fmaf(3.0f * 0.044715f * x, x, 1.0f);
    return fmaf(x * slope_2u, s * (e * s), s);
}

struct GeluForward {
    static __device__ __forceinline__ float apply(float x) { return gelu(x); }
};
struct GeluBackward {
    static __device__ __forceinline__ float apply(float dout, float x) { return dout * gelu_slope(x); }
};

template <class E>
void gelu_forward(E* out, const E* inp, size_t n, Stream stream) {
    sweep<GeluForward>(out, n, stream, inp);
}

// dinp = dout gelu'(inp); dinp may be dout.
template <class E>
void gelu_backward(E* dinp, const E* dout, const E* inp, size_t n, Stream stream) {
    sweep<GeluBackward>(dinp, n, stream, dout, inp);
}

}  // namespace cuda
