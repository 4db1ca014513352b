// Layer norm over the channels of each token, alone and fused with the residual addition before it.
//
//   out = (x - mean) rstd weight + bias,   rstd = 1 / sqrt(var + eps),   var = mean of (x - mean)^2
//
// x, out [N, C]; mean, rstd [N]; weight, bias [C]. Two passes for mean and variance: a large mean costs no precision.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "llmc/cpu/vecmath.h"
#include "llmc/device.h"

namespace cpu {

inline void layernorm_row(float* out, float* mean, float* rstd, const float* x, const float* weight, const float* bias, int C,
                          float eps) {
    const float m = lanes_sum(C, [&](int j) { return x[j]; }) / float(C);
    const float variance = lanes_sum(C, [&](int j) { return (x[j] - m) * (x[j] - m); }) / float(C);
    const float r = 1.0f / std::sqrt(variance + eps);
    *mean = m;
    *rstd = r;
#pragma omp simd
    for (int j = 0; j < C; j++) out[j] = std::fma((x[j] - m) * r, weight[j], bias[j]);
}

inline void layernorm_forward(float* out, float* mean, float* rstd, const float* inp, const float* weight, const float* bias,
                              long N, int C, float eps, Stream) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < N; i++) layernorm_row(out + i * C, mean + i, rstd + i, inp + i * C, weight, bias, C, eps);
}

// residual [N, C] = a + b + add_bias [C] (null: none), out = layer norm of it.
inline void residual_layernorm_forward(float* residual, float* out, float* mean, float* rstd, const float* a, const float* b,
                                       const float* add_bias, const float* weight, const float* bias, long N, int C, float eps,
                                       Stream) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < N; i++) {
        float* row = residual + i * C;
        const float *a_row = a + i * C, *b_row = b + i * C;
        if (add_bias) {
#pragma omp simd
            for (int j = 0; j < C; j++) row[j] = a_row[j] + (b_row[j] + add_bias[j]);
        } else {
#pragma omp simd
            for (int j = 0; j < C; j++) row[j] = a_row[j] + b_row[j];
        }
        layernorm_row(out + i * C, mean + i, rstd + i, row, weight, bias, C, eps);
    }
}

// With h = (x - mean) rstd and g = dout weight:  dinp += (g - mean(g) - h mean(g h)) rstd,  dweight (+)= sum dout h,
// dbias (+)= sum dout. Each block of 32 rows sums its share in float32, the blocks are summed in double, in order: the
// same bits at any number of threads.
inline void layernorm_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                               const float* weight, const float* mean, const float* rstd, long N, int C, bool accumulate,
                               Stream) {
    constexpr long block = 32;
    const long blocks = (N + block - 1) / block;
    std::vector<float> partial(size_t(blocks) * 2 * C);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long b = 0; b < blocks; b++) {
            float *dw = &partial[size_t(b) * 2 * C], *db = dw + C;
            for (long i = b * block; i < std::min(N, (b + 1) * block); i++) {
                const float *x = inp + i * C, *d = dout + i * C;
                float* dx = dinp + i * C;
                const float m = mean[i], r = rstd[i];
                const float g_mean = lanes_sum(C, [&](int j) { return d[j] * weight[j]; }) / float(C);
                const float gh_mean = lanes_sum(C, [&](int j) { return d[j] * weight[j] * ((x[j] - m) * r); }) / float(C);
#pragma omp simd
                for (int j = 0; j < C; j++) {
                    const float h = (x[j] - m) * r;
                    dw[j] = std::fma(d[j], h, dw[j]);
                    db[j] += d[j];
                    dx[j] = std::fma(std::fma(-h, gh_mean, std::fma(d[j], weight[j], -g_mean)), r, dx[j]);
                }
            }
        }
#pragma omp for schedule(static)
        for (int j = 0; j < C; j++) {
            double dw = accumulate ? dweight[j] : 0.0, db = accumulate ? dbias[j] : 0.0;
            for (long b = 0; b < blocks; b++) {
                dw += partial[size_t(b) * 2 * C + j];
                db += partial[size_t(b) * 2 * C + C + j];
            }
            dweight[j] = float(dw);
            dbias[j] = float(db);
        }
    }
}

}  // namespace cpu
