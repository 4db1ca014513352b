// Linear layers by OpenBLAS: out [N, OC] = inp [N, C] weight^T [C, OC] + bias, and their gradients. All row-major.
//
// The bias is put into the output before the product is added to it: as cheap as the zeros that would be put there.
// Results are the same from run to run for a given number of threads, as OpenBLAS's are.
#pragma once
#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <vector>

#include "llmc/cpu/gelu.h"
#include "llmc/device.h"
#include "llmc/dtype.h"

namespace cpu {

// dbias [C] = the sum of the rows of dout [N, C]. Eight rows at a time in float32, those sums in double: 2048 rows keep
// float32's precision. Threads own columns, so the result does not depend on how many there are.
inline void bias_backward(float* dbias, const floatX* dout, long N, int C, bool accumulate, Stream) {
    constexpr int widest = 1024, group = 8;
    const int share = (C + omp_get_max_threads() - 1) / omp_get_max_threads();
    const int width = std::clamp((share + 15) / 16 * 16, 64, widest);
#pragma omp parallel for schedule(static)
    for (int first = 0; first < C; first += width) {
        const int count = std::min(width, C - first);
        double sum[widest] = {};
        long i = 0;
        for (; i + group <= N; i += group) {
            const floatX* row = dout + i * C + first;
#pragma omp simd
            for (int j = 0; j < count; j++) {
                const floatX* x = row + j;
                sum[j] += ((x[0] + x[C]) + (x[2L * C] + x[3L * C])) + ((x[4L * C] + x[5L * C]) + (x[6L * C] + x[7L * C]));
            }
        }
        for (; i < N; i++) {
            for (int j = 0; j < count; j++) sum[j] += dout[i * C + first + j];
        }
        for (int j = 0; j < count; j++) dbias[first + j] = float(accumulate ? dbias[first + j] + sum[j] : sum[j]);
    }
}

// Calls tile(row, rows, column, columns) for pieces of an [N, columns] matrix that stay in a core's cache from their product
// to what is done with it. Every thread gets the same number; OpenBLAS works on one thread inside.
template <class F>
inline void matmul_tiles(long N, int columns, F tile) {
    constexpr long tallest = 256, widest = 1536;
    const long threads = omp_get_max_threads();
    const long down = (N + tallest - 1) / tallest, height = (N + down - 1) / down;
    const long across = threads / std::gcd(threads, down) * ((columns + widest - 1) / widest);
    const int width = int((columns + across - 1) / across + 15) / 16 * 16;
#pragma omp parallel for collapse(2) schedule(static)
    for (long i = 0; i < down; i++) {
        for (long j = 0; j < across; j++) {
            const long row = i * height;
            const int column = int(j) * width;
            if (row < N && column < columns) tile(row, std::min(height, N - row), column, std::min(width, columns - column));
        }
    }
}

// out = inp weight^T + bias (null: none). With pre_gelu [N, OC] that goes there, and out = gelu(pre_gelu).
inline void matmul_forward(floatX* out, floatX* pre_gelu, const floatX* inp, const floatX* weight, const floatX* bias, long N,
                           int C, int OC, Stream) {
    const float beta = bias ? 1.0f : 0.0f;
    if (!pre_gelu) {
        if (bias) {
#pragma omp parallel for schedule(static)
            for (long i = 0; i < N; i++) std::memcpy(out + i * OC, bias, OC * sizeof(floatX));
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, int(N), OC, C, 1.0f, inp, C, weight, C, beta, out, OC);
        return;
    }
    matmul_tiles(N, OC, [&](long row, long rows, int column, int columns) {
        const long first = row * OC + column;
        for (long i = 0; bias && i < rows; i++) std::memcpy(pre_gelu + first + i * OC, bias + column, columns * sizeof(floatX));
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, int(rows), columns, C, 1.0f, inp + row * C, C,
                    weight + long(column) * C, C, beta, pre_gelu + first, OC);
        for (long i = 0; i < rows; i++) gelu_forward_piece(out + first + i * OC, pre_gelu + first + i * OC, columns);
    });
}

// dinp [N, C] = dout [N, OC] weight [OC, C], times gelu'(pre_gelu) if pre_gelu [N, C] is given.
inline void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pre_gelu, long N, int C,
                                  int OC, Stream) {
    if (!pre_gelu) {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, int(N), C, OC, 1.0f, dout, OC, weight, C, 0.0f, dinp, C);
        return;
    }
    matmul_tiles(N, C, [&](long row, long rows, int column, int columns) {
        floatX* first = dinp + row * C + column;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, int(rows), columns, OC, 1.0f, dout + row * OC, OC, weight + column,
                    C, 0.0f, first, C);
        for (long i = 0; i < rows; i++)
            gelu_backward_piece(first + i * C, first + i * C, pre_gelu + (row + i) * C + column, columns);
    });
}

// dweight [OC, C] (+)= dout^T inp; dbias [OC] (null: not wanted) (+)= the sum of dout's rows.
inline void matmul_backward_weight(float* dweight, float* dbias, const floatX* dout, const floatX* inp, long N, int C, int OC,
                                   bool accumulate, Stream stream) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, OC, C, int(N), 1.0f, dout, OC, inp, C, accumulate ? 1.0f : 0.0f, dweight,
                C);
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
