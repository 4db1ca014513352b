// Softmax cross-entropy over a vocabulary that is split over ranks: logits [N, rows] are this rank's columns, of which the
// first valid_rows are tokens (first_row, first_row + 1, ..) and the rest is padding.
//
//   loss = log(sum of exp(x)) - x[target],   dlogits = (exp(x) / sum - [j is target]) scale
//
// classifier_local makes each rank's statistics, the ranks exchange them, classifier_finish ends with all of them.
// Target -1: loss 0, gradient 0. Logits are read once by each, and written once by classifier_finish.
#pragma once
#include <cmath>
#include <type_traits>

#include "llmc/cuda/row.cuh"

namespace cuda {

constexpr int classifier_threads = 512;  // a block has a row, in classifier_local
constexpr int classifier_finish_threads = 256;

// Logits of 16 bits are not worth expf's last digits.
template <class E>
__device__ __forceinline__ float classifier_exp(float x) {
    if constexpr (std::is_same_v<E, float>) return expf(x);
    else return __expf(x);
}

struct ClassifierSum {
    float max;
    float sum;  // of exp(x - max)
};

// max to `max`, which is not less.
template <class E>
__device__ __forceinline__ ClassifierSum classifier_raise(ClassifierSum s, float max) {
    return {max, s.max == max ? s.sum : s.sum * classifier_exp<E>(s.max - max)};  // -inf stays as it is
}

template <class E>
__device__ __forceinline__ ClassifierSum classifier_warp_sum(ClassifierSum s) {
    s = classifier_raise<E>(s, warp_max(s.max));
    return {s.max, warp_sum(s.sum)};
}

// stats [N, 3]: the largest logit here, sum of exp(x - max), the target's logit (-inf where it is not here). A thread keeps the
// sum for the largest logit so far, and scales it when a larger one comes.
template <class E, bool Packed>
__global__ void __launch_bounds__(classifier_threads, 3)
    classifier_local_kernel(float* __restrict__ stats, const E* __restrict__ logits, const int* __restrict__ targets, int first_row,
                            int valid_rows, int rows) {
    constexpr int size = Pack<E>::size, warps = classifier_threads / warp_size;
    SHARED_ARRAY(ClassifierSum, partial, [warps]);
    const long token = blockIdx.x;
    const E* row = logits + token * rows;
    ClassifierSum s = {-INFINITY, 0};
#pragma unroll 4
    for (int p = int(threadIdx.x); p < ceil_div(valid_rows, size); p += classifier_threads) {
        const Pack<E> pack = row_pack_load<Packed>(row, p, valid_rows);
        float x[size], max = s.max;
#pragma unroll
        for (int e = 0; e < size; e++) {
            x[e] = p * size + e < valid_rows ? to_float(pack[e]) : -INFINITY;
            max = fmaxf(max, x[e]);
        }
        s = classifier_raise<E>(s, max);
        const float base = max == -INFINITY ? 0.0f : max;
#pragma unroll
        for (int e = 0; e < size; e++) s.sum += classifier_exp<E>(x[e] - base);
    }
    s = classifier_warp_sum<E>(s);
    if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = s;
    __syncthreads();
    if (threadIdx.x < warp_size) {
        s = threadIdx.x < warps ? partial[threadIdx.x] : ClassifierSum{-INFINITY, 0};
        s = classifier_warp_sum<E>(s);
        if (threadIdx.x == 0) {
            const int target = targets[token] - first_row;
            stats[token * 3] = s.max;
            stats[token * 3 + 1] = s.sum;
            stats[token * 3 + 2] = target >= 0 && target < valid_rows ? to_float(row[target]) : -INFINITY;
        }
    }
}

struct ClassifierToken {
    float max;
    float factor;  // scale / sum of exp(x - max)
};

// losses and tokens [N] from stats [tp, N, 3], combined in their order: every rank gets the same bits. In double, by a thread
// a token: little work.
template <int Threads>
__global__ void __launch_bounds__(Threads, 4)
    classifier_combine_kernel(float* __restrict__ losses, ClassifierToken* __restrict__ tokens, const float* __restrict__ stats,
                              const int* __restrict__ targets, int tp, float scale, long N) {
    const long i = long(blockIdx.x) * Threads + threadIdx.x;
    if (i >= N) return;
    float max = -INFINITY, target = -INFINITY;
    for (int r = 0; r < tp; r++) max = fmaxf(max, stats[(r * N + i) * 3]);
    double sum = 0;
    for (int r = 0; r < tp; r++) {
        const float* stat = stats + (r * N + i) * 3;
        if (stat[1] != 0) sum += double(stat[1]) * exp(double(stat[0]) - double(max));  // 0: only padding there
        target = fmaxf(target, stat[2]);
    }
    losses[i] = targets[i] < 0 ? 0.0f : float(double(max) + log(sum) - double(target));
    tokens[i] = {max, float(double(scale) / sum)};
}

// dlogits in place of the logits, of `threads` packs of a row.
template <class E, bool Packed>
__global__ void __launch_bounds__(classifier_finish_threads, 6)
    classifier_finish_kernel(E* __restrict__ logits, const ClassifierToken* __restrict__ tokens, const int* __restrict__ targets,
                             int first_row, int valid_rows, int rows, float scale, int blocks_per_row) {
    constexpr int size = Pack<E>::size;
    const long token = blockIdx.x / unsigned(blocks_per_row);
    const int p = int(blockIdx.x % unsigned(blocks_per_row)) * classifier_finish_threads + int(threadIdx.x);
    const int valid = targets[token] < 0 ? 0 : valid_rows, target = targets[token] - first_row;
    E* row = logits + token * rows;
    Pack<E> pack{};
    if (p * size < valid) {
        const auto [max, factor] = tokens[token];
        pack = row_pack_load<Packed>(row, p, rows);
#pragma unroll
        for (int e = 0; e < size; e++) {
            const int j = p * size + e;
            const float exponential = classifier_exp<E>(to_float(pack[e]) - max);
            const float d = fmaf(exponential, factor, j == target ? -scale : 0.0f);
            pack[e] = from_float<E>(j < valid ? d : 0.0f);
        }
    }
    row_pack_store<Packed>(row, p, rows, pack);
}

template <class E>
void classifier_local(float* stats, const E* logits, const int* targets, int first_row, int valid_rows, int rows, long N,
                      Stream stream) {
    if (N == 0) return;
    launch(rows_are_packed<E>(logits, rows) ? classifier_local_kernel<E, true> : classifier_local_kernel<E, false>,
           dim3(unsigned(N)), classifier_threads, 0, stream, stats, logits, targets, first_row, valid_rows, rows);
}

// losses [N], and dlogits [N, rows] in place of the logits; with scale 0 the logits stay. stats [tp, N, 3] are all ranks'.
template <class E>
void classifier_finish(float* losses, E* logits, const float* stats, const int* targets, int first_row, int valid_rows, int rows,
                       int tp, float scale, long N, Stream stream) {
    if (N == 0) return;
    constexpr int combine_threads = 128;
    const Scratch<ClassifierToken> tokens(size_t(N), stream);
    launch(classifier_combine_kernel<combine_threads>, dim3(unsigned(ceil_div(N, long(combine_threads)))), combine_threads, 0,
           stream, losses, tokens.data, stats, targets, tp, scale, N);
    if (scale == 0.0f) return;
    const int blocks_per_row = ceil_div(rows, Pack<E>::size * classifier_finish_threads);
    check(N * blocks_per_row < 1l << 31, "classifier_finish: %ld tokens of %d columns are too many: use a smaller --micro-batch", N,
          rows);
    launch(rows_are_packed<E>(logits, rows) ? classifier_finish_kernel<E, true> : classifier_finish_kernel<E, false>,
           dim3(unsigned(N * blocks_per_row)), classifier_finish_threads, 0, stream, logits, tokens.data, targets, first_row,
           valid_rows, rows, scale, blocks_per_row);
}

}  // namespace cuda
