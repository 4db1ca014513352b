// AdamW (arXiv 1711.05101) with PyTorch's arithmetic, and the norm of a gradient.
//
//   p *= 1 - lr decay;  m += (1 - b1) (g - m);  v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^step)  m / (sqrt(v) / sqrt(1 - b2^step) + eps)
//
// Both are single sweeps over memory (AdamW moves 28 bytes a parameter), which is what bounds them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "llmc/adamw.h"
#include "llmc/check.h"
#include "llmc/cpu/vecmath.h"
#include "llmc/device.h"

namespace cpu {

// Sum of x^2 in double. Blocks of fixed size are summed in lanes, their sums in order: the same bits at any number of threads.
inline double global_norm_squared(const float* x, size_t n, Stream) {
    constexpr size_t block = 1 << 14;
    constexpr int lanes = 32;
    std::vector<double> sums((n + block - 1) / block);
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < sums.size(); b++) {
        const size_t end = std::min(n, (b + 1) * block);
        double lane[lanes] = {};
        size_t i = b * block;
        for (; i + lanes <= end; i += lanes) {
#pragma omp simd
            for (int k = 0; k < lanes; k++) lane[k] = std::fma(double(x[i + k]), double(x[i + k]), lane[k]);
        }
        for (; i < end; i++) lane[0] += double(x[i]) * x[i];
        for (double part : lane) sums[b] += part;
    }
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

// master must be null: float32 weights are their own.
inline void adamw_update(float* p, float* master, const float* g, float* m, float* v, size_t n, AdamW hyper, Stream) {
    check(!master, "adamw_update: float32 weights have no master copy, expected null");
    const double correction1 = 1.0 - std::pow(double(hyper.beta1), double(hyper.step));
    const double correction2 = 1.0 - std::pow(double(hyper.beta2), double(hyper.step));
    const float keep = float(1.0 - double(hyper.lr) * hyper.weight_decay);
    const float rate1 = float(1.0 - double(hyper.beta1)), rate2 = float(1.0 - double(hyper.beta2));
    const float step_size = float(hyper.lr / correction1), root2 = float(1.0 / std::sqrt(correction2));
    const float beta2 = hyper.beta2, eps = hyper.eps, grad_scale = hyper.grad_scale;
    const auto element = [=](size_t i) {
        const float grad = g[i] * grad_scale;
        const float m_new = std::fma(rate1, grad - m[i], m[i]);
        const float v_new = std::fma(rate2 * grad, grad, beta2 * v[i]);
        m[i] = m_new;
        v[i] = v_new;
        p[i] = std::fma(-step_size, m_new / std::fma(std::sqrt(v_new), root2, eps), p[i] * keep);
    };
    parallel_sweep(n, element, p, g, m, v);
}

}  // namespace cpu
