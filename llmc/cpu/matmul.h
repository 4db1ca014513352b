// Linear layers by OpenBLAS: out [N, OC] = inp [N, C] weight^T [C, OC] + bias, and their gradients. All row-major.
//
// Outputs are filled with the bias or zeros first, and the product is added: 3% faster than letting OpenBLAS overwrite them.
// Results are the same from run to run for a given number of threads, as OpenBLAS's are.
#pragma once
#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "llmc/cpu/gelu.h"
#include "llmc/device.h"

namespace cpu {

// dbias [C] = the sum of the rows of dout [N, C]. Eight rows at a time in float32, those sums in double: 2048 rows keep
// float32's precision. Threads own columns, so the result does not depend on how many there are.
inline void bias_backward(float* dbias, const float* dout, long N, int C, bool accumulate, Stream) {
    constexpr int widest = 1024, group = 8;
    const int share = (C + omp_get_max_threads() - 1) / omp_get_max_threads();
    const int width = std::clamp((share + 15) / 16 * 16, 64, widest);
#pragma omp parallel for schedule(static)
    for (int first = 0; first < C; first += width) {
        const int count = std::min(width, C - first);
        double sum[widest] = {};
        long i = 0;
        for (; i + group <= N; i += group) {
            const float* row = dout + i * C + first;
#pragma omp simd
            for (int j = 0; j < count; j++) {
                const float* x = row + j;
                sum[j] += ((x[0] + x[C]) + (x[2L * C] + x[3L * C])) + ((x[4L * C] + x[5L * C]) + (x[6L * C] + x[7L * C]));
            }
        }
        for (; i < N; i++) {
            for (int j = 0; j < count; j++) sum[j] += dout[i * C + first + j];
        }
        for (int j = 0; j < count; j++) dbias[first + j] = float(accumulate ? dbias[first + j] + sum[j] : sum[j]);
    }
}

// Every row of x [rows, columns] becomes `value` [columns], or 0 where that is null.
inline void rows_fill(float* x, const float* value, long rows, int columns) {
    const size_t bytes = columns * sizeof(float);
#pragma omp parallel for schedule(static)
    for (long i = 0; i < rows; i++) {
        if (value) {
            std::memcpy(x + i * columns, value, bytes);
        } else {
            std::memset(x + i * columns, 0, bytes);
        }
    }
}

// out [N, OC] = inp [N, C] weight^T + bias (null: none). With pre_gelu [N, OC] that goes there, and out = gelu(pre_gelu).
inline void matmul_forward(float* out, float* pre_gelu, const float* inp, const float* weight, const float* bias, long N,
                           int C, int OC, Stream stream) {
    float* product = pre_gelu ? pre_gelu : out;
    rows_fill(product, bias, N, OC);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, int(N), OC, C, 1.0f, inp, C, weight, C, 1.0f, product, OC);
    if (pre_gelu) gelu_forward(out, pre_gelu, size_t(N) * OC, stream);
}

// dinp [N, C] = dout [N, OC] weight [OC, C], times gelu'(pre_gelu) if pre_gelu [N, C] is given.
inline void matmul_backward_input(float* dinp, const float* dout, const float* weight, const float* pre_gelu, long N, int C,
                                  int OC, Stream stream) {
    rows_fill(dinp, nullptr, N, C);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, int(N), C, OC, 1.0f, dout, OC, weight, C, 1.0f, dinp, C);
    if (pre_gelu) gelu_backward(dinp, dinp, pre_gelu, size_t(N) * C, stream);
}

// dweight [OC, C] (+)= dout^T inp; dbias [OC] (null: not wanted) (+)= the sum of dout's rows.
inline void matmul_backward_weight(float* dweight, float* dbias, const float* dout, const float* inp, long N, int C, int OC,
                                   bool accumulate, Stream stream) {
    if (!accumulate) rows_fill(dweight, nullptr, OC, C);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, OC, C, int(N), 1.0f, dout, OC, inp, C, 1.0f, dweight, C);
    if (dbias) bias_backward(dbias, dout, N, OC, accumulate, stream);
}

// GFLOP/s of OpenBLAS at the forward shape [M, K] x [N, K]^T: the best of the repetitions that fit in 50 ms (at least two,
// the first only warms up). The yardstick of a step's speed.
inline double sgemm_rate_measure(int M, int N, int K) {
    using clock = std::chrono::steady_clock;
    std::vector<float> a(size_t(M) * K, 0.5f), b(size_t(N) * K, 0.5f), c(size_t(M) * N);
    double best = 0, spent = 0;
    for (int i = 0; i < 2 || spent < 0.05; i++) {
        const clock::time_point begin = clock::now();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, M, N, K, 1.0f, a.data(), K, b.data(), K, 0.0f, c.data(), N);
        const double seconds = std::chrono::duration<double>(clock::now() - begin).count();
        spent += seconds;
        if (i > 0) best = std::max(best, 2e-9 * M * N * K / std::max(seconds, 1e-9));
    }
    return best;
}

}  // namespace cpu
