// Token and position embeddings. Vocab-parallel: this rank holds the rows [first_row, first_row + rows) of the table;
// ids elsewhere (or -1: no token) give zeros, so that the sum over ranks is the embedding.
//
// Forward and both position ops move each element once. The gradient of the token table: tokens are sorted by their id, stably;
// windows of 32 sorted tokens are summed, each run of one id in the order of its tokens. A run that reaches over windows is put
// together from its pieces, in order, by a second kernel: the same bits in every run, without atomics on floats, and a frequent
// token is summed by many blocks.
#pragma once
#include "llmc/cuda/row.cuh"
#include "llmc/cuda/sort.cuh"

namespace cuda {

constexpr int embedding_threads = 256;  // in forward ops: a token has a warp
constexpr int gradient_threads = 128;   // in backward ops: a thread has a pack of columns
constexpr int embedding_window = 32;

template <bool Packed, class E>
__device__ __forceinline__ void row_add(float (&sum)[Pack<E>::size], const Pack<E>& pack) {
#pragma unroll
    for (int e = 0; e < Pack<E>::size; e++) sum[e] += to_float(pack[e]);
}

// Columns [p size, (p + 1) size) of a float row of C, loaded and stored.
template <bool Packed, int Size>
__device__ __forceinline__ void row_floats_load(float (&x)[Size], const float* row, int p, int C) {
#pragma unroll
    for (int part = 0; part < Size / 4; part++) {
        const Pack<float> pack = row_pack_load<Packed>(row, p * (Size / 4) + part, C);
#pragma unroll
        for (int e = 0; e < 4; e++) x[part * 4 + e] = pack[e];
    }
}
template <bool Packed, int Size>
__device__ __forceinline__ void row_floats_store(float* row, const float (&x)[Size], int p, int C) {
#pragma unroll
    for (int part = 0; part < Size / 4; part++) {
        Pack<float> pack;
#pragma unroll
        for (int e = 0; e < 4; e++) pack[e] = x[part * 4 + e];
        row_pack_store<Packed>(row, p * (Size / 4) + part, C, pack);
    }
}

template <class E, bool Packed>
__global__ void __launch_bounds__(embedding_threads, 6)
    embedding_forward_kernel(E* __restrict__ out, const int* __restrict__ ids, const E* __restrict__ wte, int first_row, int rows,
                             long N, int C) {
    const long token = (long(blockIdx.x) * embedding_threads + threadIdx.x) / warp_size;
    if (token >= N) return;
    const int row = ids[token] - first_row, packs = ceil_div(C, Pack<E>::size);
    const bool here = row >= 0 && row < rows;
#pragma unroll 4
    for (int p = int(threadIdx.x) % warp_size; p < packs; p += warp_size) {
        const Pack<E> pack = here ? row_pack_load<Packed>(wte + long(row) * C, p, C) : Pack<E>{};
        row_pack_store<Packed>(out + token * C, p, C, pack);
    }
}

template <class E, bool Packed>
__global__ void __launch_bounds__(embedding_threads, 6)
    position_forward_kernel(E* __restrict__ x, const E* __restrict__ wpe, long first_token, long n, int T, int C) {
    const long token = (long(blockIdx.x) * embedding_threads + threadIdx.x) / warp_size;
    if (token >= n) return;
    const long position = (first_token + token) % T;
    const int packs = ceil_div(C, Pack<E>::size);
#pragma unroll 4
    for (int p = int(threadIdx.x) % warp_size; p < packs; p += warp_size) {
        Pack<E> pack = row_pack_load<Packed>(x + token * C, p, C);
        const Pack<E> add = row_pack_load<Packed>(wpe + position * C, p, C);
#pragma unroll
        for (int e = 0; e < Pack<E>::size; e++) pack[e] = from_float<E>(to_float(pack[e]) + to_float(add[e]));
        row_pack_store<Packed>(x + token * C, p, C, pack);
    }
}

// A block has up to 128 packs of a position; tokens are added in order.
template <class E, bool Packed>
__global__ void __launch_bounds__(gradient_threads, 8)
    position_backward_kernel(float* __restrict__ dwpe, const E* __restrict__ dx, long first_token, long n, int T, int C,
                             bool accumulate) {
    constexpr int size = Pack<E>::size;
    const int p = int(blockIdx.y * gradient_threads + threadIdx.x), t = int(blockIdx.x);
    if (p >= ceil_div(C, size)) return;
    float sum[size] = {};
    if (accumulate) row_floats_load<Packed>(sum, dwpe + long(t) * C, p, C);
    if (t < T) {
#pragma unroll 4
        for (long i = ((t - first_token) % T + T) % T; i < n; i += T) {
            row_add<Packed, E>(sum, row_pack_load<Packed>(dx + i * C, p, C));
        }
    }
    row_floats_store<Packed>(dwpe + long(t) * C, sum, p, C);
}

// The key of a token in the sort: its row here; `rows` if it is not here, behind all others.
struct EmbeddingKey {
    const int* ids;
    int first_row, rows;
    __device__ __forceinline__ SortItem operator()(int i) const {
        const int row = ids[i] - first_row;
        return {row >= 0 && row < rows ? row : rows, i};
    }
};

// Sorted tokens of one window. A piece is the part of a run that is in one window of several: piece 0 of the run that comes
// from the window before, piece 1 of a run that begins here and goes on.
template <class E, bool Packed>
__global__ void __launch_bounds__(gradient_threads, 6)
    embedding_window_kernel(float* __restrict__ dwte, float* __restrict__ pieces /* [windows, 2, C] */,
                            const E* __restrict__ dout, const SortItem* __restrict__ sorted, int rows, int N, int C) {
    constexpr int size = Pack<E>::size, at_once = Packed ? 8 : 2;  // loads in flight, as far as registers go
    SHARED_ARRAY(int, key, [embedding_window + 2]);  // with the neighbours' of both sides; -1 where there is none
    SHARED_ARRAY(int, token, [embedding_window]);
    const int first = int(blockIdx.x) * embedding_window, thread = int(threadIdx.x);
    if (thread < embedding_window + 2) {
        const int i = first + thread - 1;
        const SortItem item = i >= 0 && i < N ? sorted[i] : SortItem{-1, -1};
        key[thread] = item.key;
        if (thread >= 1 && thread <= embedding_window) token[thread - 1] = item.position;
    }
    __syncthreads();
    const int p = int(blockIdx.y) * gradient_threads + thread;
    if (p >= ceil_div(C, size)) return;
    const auto is_token = [&](int t) { return key[t + 1] >= 0 && key[t + 1] < rows; };
    float sum[size] = {};
    for (int t = 0; t < embedding_window && is_token(t); t += at_once) {
        Pack<E> d[at_once];
#pragma unroll
        for (int u = 0; u < at_once; u++) {
            d[u] = is_token(t + u) ? row_pack_load<Packed>(dout + long(token[t + u]) * C, p, C) : Pack<E>{};
        }
#pragma unroll
        for (int u = 0; u < at_once; u++) {
            const int own = key[t + u + 1];
            row_add<Packed, E>(sum, d[u]);
            const bool last = t + u == embedding_window - 1;
            if (!is_token(t + u) || (own == key[t + u + 2] && !last)) continue;
            const bool goes_on = last && own == key[t + u + 2], began_before = own == key[0];
            if (goes_on || began_before) {
                row_floats_store<Packed>(pieces + (long(blockIdx.x) * 2 + !began_before) * C, sum, p, C);
            } else {
                float total[size];
                row_floats_load<Packed>(total, dwte + long(own) * C, p, C);
#pragma unroll
                for (int e = 0; e < size; e++) total[e] += sum[e];
                row_floats_store<Packed>(dwte + long(own) * C, total, p, C);
            }
#pragma unroll
            for (int e = 0; e < size; e++) sum[e] = 0;
        }
    }
}

// Of a run that begins in this window and goes on: its pieces, in order, onto its row. A thread has four columns.
template <bool Packed>
__global__ void __launch_bounds__(gradient_threads, 8)
    embedding_piece_kernel(float* __restrict__ dwte, const float* __restrict__ pieces, const SortItem* __restrict__ sorted,
                           int rows, int N, int C) {
    const int window = int(blockIdx.x), first = window * embedding_window, end = first + embedding_window;
    const int p = int(blockIdx.y * gradient_threads + threadIdx.x);
    if (end >= N || p >= ceil_div(C, 4)) return;
    const int key = sorted[end - 1].key;
    if (key == rows || sorted[end].key != key || (first > 0 && sorted[first - 1].key == key)) return;
    float sum[4], piece[4];
    row_floats_load<Packed>(sum, pieces + (long(window) * 2 + 1) * C, p, C);
    for (int w = window + 1; w * embedding_window < N && sorted[w * embedding_window].key == key; w++) {
        row_floats_load<Packed>(piece, pieces + long(w) * 2 * C, p, C);
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] += piece[e];
    }
    row_floats_load<Packed>(piece, dwte + long(key) * C, p, C);
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] += piece[e];
    row_floats_store<Packed>(dwte + long(key) * C, sum, p, C);
}

// out [N, C] = wte [rows, C] at ids [N].
template <class E>
void embedding_forward(E* out, const int* ids, const E* wte, int first_row, int rows, long N, int C, Stream stream) {
    if (N == 0) return;
    const bool packed = rows_are_packed<E>(out, C) && all_aligned(wte);
    const auto kernel = packed ? embedding_forward_kernel<E, true> : embedding_forward_kernel<E, false>;
    const dim3 blocks = unsigned(ceil_div(N, long(embedding_threads / warp_size)));
    launch(kernel, blocks, embedding_threads, 0, stream, out, ids, wte, first_row, rows, N, C);
}

// dwte [rows, C] += dout [N, C] at ids [N].
template <class E>
void embedding_backward(float* dwte, const E* dout, const int* ids, int first_row, int rows, long N, int C, Stream stream) {
    if (N == 0) return;
    check(N <= 1l << 30, "embedding_backward: %ld tokens, expected at most 2^30: use a smaller --micro-batch", N);
    const int n = int(N), windows = ceil_div(n, embedding_window);
    const Scratch<SortItem> items(size_t(2) * n, stream);
    const Scratch<int> counts(sort_count_size(n), stream);
    const Scratch<float> pieces(size_t(windows) * 2 * C, stream);
    const SortItem* sorted = sort(items.data, counts.data, EmbeddingKey{ids, first_row, rows}, n, rows, stream);

    const bool packed = rows_are_packed<E>(dout, C) && all_aligned(dwte);
    const auto blocks = [&](int size) { return dim3(unsigned(windows), unsigned(ceil_div(C, size * gradient_threads))); };
    launch(packed ? embedding_window_kernel<E, true> : embedding_window_kernel<E, false>, blocks(Pack<E>::size), gradient_threads,
           0, stream, dwte, pieces.data, dout, sorted, rows, n, C);
    launch(packed ? embedding_piece_kernel<true> : embedding_piece_kernel<false>, blocks(4), gradient_threads, 0, stream, dwte,
           pieces.data, sorted, rows, n, C);
}

// x [n, C] += wpe [positions, C] at (first_token + i) % T: the tokens here are a stripe of the flattened batch.
template <class E>
void position_forward(E* x, const E* wpe, long first_token, long n, int T, int C, Stream stream) {
    if (n == 0) return;
    const bool packed = rows_are_packed<E>(x, C) && all_aligned(wpe);
    const dim3 blocks = unsigned(ceil_div(n, long(embedding_threads / warp_size)));
    launch(packed ? position_forward_kernel<E, true> : position_forward_kernel<E, false>, blocks, embedding_threads, 0, stream, x,
           wpe, first_token, n, T, C);
}

// dwpe [positions, C] (+)= dx [n, C]; positions without a token here get 0 (or stay, with `accumulate`).
template <class E>
void position_backward(float* dwpe, const E* dx, long first_token, long n, int T, int C, int positions, bool accumulate,
                       Stream stream) {
    const bool packed = rows_are_packed<E>(dx, C) && all_aligned(dwpe);
    const dim3 blocks(unsigned(positions), unsigned(ceil_div(C, Pack<E>::size * gradient_threads)));
    launch(packed ? position_backward_kernel<E, true> : position_backward_kernel<E, false>, blocks, gradient_threads, 0, stream,
           dwpe, dx, first_token, n, T, C, accumulate);
}

}  // namespace cuda
