// AdamW (arXiv 1711.05101) with PyTorch's arithmetic, and the norm of a gradient.
//
//   p *= 1 - lr decay;  m += (1 - b1) (g - m);  v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^step)  m / (sqrt(v) / sqrt(1 - b2^step) + eps)
//
// A single sweep over memory, which is what bounds it: 28 bytes a parameter in float, 24 with weights of 16 bits, 30 with a
// float32 master beside them. Weights of 16 bits without one are rounded stochastically: an update far below their spacing
// still arrives, in the mean.
#pragma once
#include <cmath>
#include <type_traits>
#include <vector>

#include "llmc/adamw.h"
#include "llmc/cuda/sweep.cuh"
#include "llmc/rng.h"

namespace cuda {

constexpr int norm_squared_threads = 512, norm_squared_max_blocks = 1024;

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_warp, x, offset);
    return x;
}

// sums [gridDim.x]: of x^2, in double, over every gridDim.x-th stretch of threads x 4 elements.
template <int Threads>
__global__ void __launch_bounds__(Threads, 4)
    norm_squared_kernel(double* __restrict__ sums, const float* __restrict__ x, size_t n, bool aligned) {
    SHARED_ARRAY(double, partial, [Threads / warp_size]);
    double sum = 0;
    const size_t stride = size_t(gridDim.x) * Threads * 4;
#pragma unroll 4
    for (size_t first = (size_t(blockIdx.x) * Threads + threadIdx.x) * 4; first < n; first += stride) {
        float values[4];
        sweep_load(values, x, first, n, aligned && first + 4 <= n);
#pragma unroll
        for (int e = 0; e < 4; e++) sum = fma(double(values[e]), double(values[e]), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0;
        for (int w = 0; w < Threads / warp_size; w++) total += partial[w];
        sums[blockIdx.x] = total;
    }
}

// Sum of x^2 in double: over blocks on the GPU, whose number depends on n only, and over their sums, in order, on the host.
inline double global_norm_squared(const float* x, size_t n, Stream stream) {
    if (n == 0) return 0;
    constexpr size_t stretch = norm_squared_threads * 4;
    const size_t blocks = std::min<size_t>(ceil_div(n, stretch), norm_squared_max_blocks);
    const Scratch<double> sums(blocks, stream);
    launch(norm_squared_kernel<norm_squared_threads>, dim3(unsigned(blocks)), norm_squared_threads, 0, stream, sums.data, x, n,
           all_aligned(x));
    std::vector<double> found(blocks);
    device_download(found.data(), sums.data, blocks * sizeof(double), stream);
    double total = 0;
    for (double sum : found) total += sum;
    return total;
}

// Up or down with probabilities that make the mean x: random bits are added below the mantissa that stays.
__device__ __forceinline__ bf16 round_stochastic(bf16*, float x, uint32_t random) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return from_float<bf16>(x);  // infinite or NaN
    return from_float<bf16>(__uint_as_float((bits + (random >> 16)) & 0xffff0000u));
}
// Below 2^-14 the spacing of fp16 stays: such values are lifted by 2^-14, where the spacing is the same.
__device__ __forceinline__ fp16 round_stochastic(fp16*, float x, uint32_t random) {
    const float size = fabsf(x), lift = size < 0x1p-14f ? 0x1p-14f : 0.0f;
    if (!(size < INFINITY)) return from_float<fp16>(x);
    const uint32_t bits = (__float_as_uint(size + lift) + (random >> 19)) & 0xffffe000u;
    return from_float<fp16>(copysignf(__uint_as_float(bits) - lift, x));
}

// What the host makes of AdamW's settings.
struct AdamWStep {
    float rate1, rate2, beta2, eps, grad_scale;
    float keep, step_size, root2;  // 1 - lr decay, lr / correction1, 1 / sqrt(correction2)
    uint64_t seed, step;
};

// master: null, or [n] float32 weights, of which p are the nearest E. Element i is rounded by word i % 4 of
// Philox(seed, i / 4, step).
template <class E, bool Master>
__global__ void __launch_bounds__(sweep_threads, 4)
    adamw_kernel(E* __restrict__ p, float* __restrict__ master, const float* __restrict__ g, float* __restrict__ m,
                 float* __restrict__ v, size_t n, AdamWStep hyper, bool aligned) {
    constexpr int width = sweep_width<E>;
    const size_t first = (size_t(blockIdx.x) * sweep_threads + threadIdx.x) * width;
    if (first >= n) return;
    const bool whole = aligned && first + width <= n;
    float grad[width], m_new[width], v_new[width], weight[width];
    sweep_load(grad, g, first, n, whole);
    sweep_load(m_new, m, first, n, whole);
    sweep_load(v_new, v, first, n, whole);
    if constexpr (Master) sweep_load(weight, master, first, n, whole);
    else sweep_load(weight, p, first, n, whole);
#pragma unroll
    for (int e = 0; e < width; e++) {
        const float scaled = __fmul_rn(grad[e], hyper.grad_scale);
        m_new[e] = fmaf(hyper.rate1, scaled - m_new[e], m_new[e]);
        v_new[e] = fmaf(hyper.rate2 * scaled, scaled, hyper.beta2 * v_new[e]);
        weight[e] = fmaf(-hyper.step_size, m_new[e] / fmaf(sqrtf(v_new[e]), hyper.root2, hyper.eps), weight[e] * hyper.keep);
    }
    sweep_store(m, m_new, first, n, whole);
    sweep_store(v, v_new, first, n, whole);
    E rounded[width];
    if constexpr (Master || std::is_same_v<E, float>) {
        if constexpr (Master) sweep_store(master, weight, first, n, whole);
#pragma unroll
        for (int e = 0; e < width; e++) rounded[e] = from_float<E>(weight[e]);
    } else {
#pragma unroll
        for (int draw = 0; draw < width / 4; draw++) {
            const Philox random = philox(hyper.seed, first / 4 + draw, hyper.step);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                rounded[draw * 4 + e] = round_stochastic(static_cast<E*>(nullptr), weight[draw * 4 + e], random[e]);
            }
        }
    }
    sweep_store(p, rounded, first, n, whole);
}

template <class E>
void adamw_update(E* p, float* master, const float* g, float* m, float* v, size_t n, AdamW hyper, Stream stream) {
    if (n == 0) return;
    const double correction1 = 1.0 - std::pow(double(hyper.beta1), double(hyper.step));
    const double correction2 = 1.0 - std::pow(double(hyper.beta2), double(hyper.step));
    const AdamWStep step = {float(1.0 - double(hyper.beta1)),
                            float(1.0 - double(hyper.beta2)),
                            hyper.beta2,
                            hyper.eps,
                            hyper.grad_scale,
                            float(1.0 - double(hyper.lr) * hyper.weight_decay),
                            float(hyper.lr / correction1),
                            float(1.0 / std::sqrt(correction2)),
                            hyper.seed,
                            uint64_t(hyper.step)};
    const dim3 blocks = unsigned(ceil_div(n, size_t(sweep_threads) * sweep_width<E>));
    launch(master ? adamw_kernel<E, true> : adamw_kernel<E, false>, blocks, sweep_threads, 0, stream, p, master, g, m, v, n, step,
           all_aligned(p, master, g, m, v));
}

}  // namespace cuda
