// Token and position embeddings. Vocab-parallel: this rank holds the rows [first_row, first_row + rows) of the table;
// ids elsewhere (or -1: no token) give zeros, so that the sum over ranks is the embedding.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "llmc/device.h"

namespace cpu {

// out [N, C] = wte [rows, C] at ids [N].
inline void embedding_forward(float* out, const int* ids, const float* wte, int first_row, int rows, long N, int C, Stream) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < N; i++) {
        const int row = ids[i] - first_row;
        if (row >= 0 && row < rows) {
            std::memcpy(out + i * C, wte + long(row) * C, C * sizeof(float));
        } else {
            std::memset(out + i * C, 0, C * sizeof(float));
        }
    }
}

// dwte [rows, C] += dout [N, C] at ids. A token can occur many times: threads own channels, not tokens, and add in the
// order of the tokens, so the bits do not depend on the number of threads.
inline void embedding_backward(float* dwte, const float* dout, const int* ids, int first_row, int rows, long N, int C, Stream) {
    const int share = (C + omp_get_max_threads() - 1) / omp_get_max_threads(), width = (share + 15) / 16 * 16;
#pragma omp parallel for schedule(static)
    for (int first = 0; first < C; first += width) {
        const int count = std::min(width, C - first);
        for (long i = 0; i < N; i++) {
            const int row = ids[i] - first_row;
            if (row < 0 || row >= rows) continue;
            float* sum = dwte + long(row) * C + first;
            const float* d = dout + i * C + first;
#pragma omp simd
            for (int j = 0; j < count; j++) sum[j] += d[j];
        }
    }
}

// x [n, C] += wpe [positions, C] at (first_token + i) % T: the tokens here are a stripe of the flattened batch.
inline void position_forward(float* x, const float* wpe, long first_token, long n, int T, int C, Stream) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i++) {
        float* row = x + i * C;
        const float* add = wpe + (first_token + i) % T * C;
#pragma omp simd
        for (int j = 0; j < C; j++) row[j] += add[j];
    }
}

// dwpe [positions, C] (+)= dx [n, C]; positions without a token here get 0 (or stay, with `accumulate`).
inline void position_backward(float* dwpe, const float* dx, long first_token, long n, int T, int C, int positions,
                              bool accumulate, Stream) {
#pragma omp parallel for schedule(static)
    for (int t = 0; t < positions; t++) {
        float* sum = dwpe + long(t) * C;
        if (!accumulate) std::memset(sum, 0, C * sizeof(float));
        if (t >= T) continue;
        for (long i = ((t - first_token) % T + T) % T; i < n; i += T) {
            const float* d = dx + i * C;
#pragma omp simd
            for (int j = 0; j < C; j++) sum[j] += d[j];
        }
    }
}

}  // namespace cpu
