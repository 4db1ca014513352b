// Causal flash attention on tensor cores: bf16 and fp16, heads of up to 128 elements in multiples of 8, any T.
//
// A block of 4 warps owns 64 rows, queries or keys, 16 to a warp; rows of the other kind are streamed past them by cp.async,
// the next tile while this one is worked on. A head is filled up with zeros to Width = 32, 64, 96 or 128 columns, in shared
// memory only. Products are mma.m16n8k16 with float sums; accumulators of P and dS, rounded, are the A fragments of the next
// product as they lie in registers. Backward is two kernels of one source, as in attention_simt.cuh; there S^T = K Q^T is made
// for Own::keys, so that P^T and dS^T, too, are A fragments.
#pragma once
#include <type_traits>

#include "llmc/cuda/attention_simt.cuh"

namespace cuda {

constexpr int mma_rows = 64;    // of a block
constexpr int mma_columns = 8;  // 16 bytes: what ldmatrix and cp.async move at once, in elements

// Rows of the other kind in a tile.
constexpr int forward_streamed = 64;
constexpr int backward_streamed(int width) { return width <= 64 ? 64 : 32; }

// Where 16 bytes of a tile [rows, Width] lie: within groups of 4 or 8 they change places from row to row, so that the same
// columns of 8 rows are in 8 different banks of 16 bytes.
template <int Width>
__device__ __forceinline__ int tile_at(int row, int chunk) {
    return row * Width + (chunk ^ (Width % 64 == 0 ? row % 8 : row / 2 % 4)) * mma_columns;
}

// Starts copying rows [Rows, HS] to a tile; rows from `rows` on and columns from HS on become zeros. Four threads a row.
template <int Width, int Rows, class E>
__device__ __forceinline__ void tile_load(E* tile, const E* from, long from_row, int rows, int HS) {
    const int chunk = int(threadIdx.x) % 4, row = int(threadIdx.x) / 4;
    constexpr int step = attention_threads / 4;
#pragma unroll
    for (int r = 0; r < Rows; r += step) {
        const E* at = from + (row + r) * from_row + chunk * mma_columns;
#pragma unroll
        for (int c = 0; c < Width / mma_columns; c += 4) {
            const bool there = row + r < rows && (chunk + c) * mma_columns < HS;
            cp_async_16(tile + tile_at<Width>(row + r, chunk + c), there ? at + c * mma_columns : from, there ? 16 : 0);
        }
    }
}

// Fragments of a tile, [row, column]. A [16 own rows, 16 columns]: rows 16 i, columns 16 k.
template <int Width, class E>
__device__ __forceinline__ void a_fragment(uint32_t (&a)[4], const E* tile, int i, int k) {
    const int lane = int(threadIdx.x) % warp_size;
    ldmatrix_x4(a, tile + tile_at<Width>(16 * i + lane % 16, 2 * k + lane / 16));
}
// B [16 columns, 8 streamed rows] for rows 16 j .. and for rows 16 j + 8 ..: own streamed^T.
template <int Width, class E>
__device__ __forceinline__ void b_fragments(uint32_t (&b)[2][2], const E* tile, int j, int k) {
    const int lane = int(threadIdx.x) % warp_size;
    uint32_t r[4];
    ldmatrix_x4(r, tile + tile_at<Width>(16 * j + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}
// B [16 streamed rows, 8 columns] for columns 16 k .. and for columns 16 k + 8 ..: weights streamed.
template <int Width, class E>
__device__ __forceinline__ void b_fragments_of_columns(uint32_t (&b)[2][2], const E* tile, int j, int k) {
    const int lane = int(threadIdx.x) % warp_size;
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile + tile_at<Width>(16 * j + lane % 16, 2 * k + lane / 16));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

template <class E>
__device__ __forceinline__ void mma_pair(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], const uint32_t (&b)[2][2]) {
    mma_m16n8k16<E>(left, a, b[0], left);
    mma_m16n8k16<E>(right, a, b[1], right);
}

// Two floats to a register, the first in its low half.
template <class E>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    std::conditional_t<std::is_same_v<E, bf16>, __nv_bfloat162, __half2> pair;
    if constexpr (std::is_same_v<E, bf16>) pair = __floats2bfloat162_rn(low, high);
    else pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
template <class E>
__device__ __forceinline__ void pack_fragment(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_pair<E>(left[0], left[1]), a[1] = pack_pair<E>(left[2], left[3]);
    a[2] = pack_pair<E>(right[0], right[1]), a[3] = pack_pair<E>(right[2], right[3]);
}

// sums [16 own rows, Width] += weights [16, 16] streamed rows 16 j ..
template <int Width, class E>
__device__ __forceinline__ void mma_add(float (&sums)[Width / 8][4], const uint32_t (&weights)[4], const E* streamed, int j) {
#pragma unroll
    for (int k = 0; k < Width / 16; k++) {
        uint32_t b[2][2];
        b_fragments_of_columns<Width>(b, streamed, j, k);
        mma_pair<E>(sums[2 * k], sums[2 * k + 1], weights, b);
    }
}

// The 16 rows of each warp, row 8 i + .. times factor[i], to rows of E; by way of the warp's own rows of a tile, so that 16
// bytes at a time are written.
template <int Width, class E>
__device__ __forceinline__ void mma_store(E* to, long to_row, int rows, int HS, E* tile, const float (&sums)[Width / 8][4],
                                          const float (&factor)[2]) {
    const int lane = int(threadIdx.x) % warp_size, first = int(threadIdx.x) / warp_size * 16;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Width / 8; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            *reinterpret_cast<uint32_t*>(tile + tile_at<Width>(first + 8 * i + lane / 4, n) + 2 * (lane % 4)) =
                pack_pair<E>(sums[n][2 * i] * factor[i], sums[n][2 * i + 1] * factor[i]);
        }
    }
    __syncwarp();
    constexpr int chunks = Width / mma_columns;
#pragma unroll
    for (int k = 0; k < 16 * chunks / warp_size; k++) {
        const int i = k * warp_size + lane, row = first + i / chunks, chunk = i % chunks;
        if (row < rows && chunk * mma_columns < HS) {
            pack_store(to + row * to_row + chunk * mma_columns, pack_load(tile + tile_at<Width>(row, chunk)));
        }
    }
}

// Blocks an SM that registers and shared memory allow.
constexpr int forward_blocks(int width) { return width <= 64 ? 4 : width <= 96 ? 3 : 2; }
constexpr int backward_blocks(int width) { return width <= 32 ? 4 : width <= 64 ? 3 : 2; }

// Shared memory [2][keys, values][64, Width] of E; the queries pass through the second keys.
constexpr size_t forward_shared(int width) { return size_t(4) * forward_streamed * width * 2; }

template <class E, int Width>
__global__ void __launch_bounds__(attention_threads, forward_blocks(Width))
    attention_forward_mma(E* __restrict__ out, float* __restrict__ lse, const E* __restrict__ qkv, AttentionShape s) {
    constexpr int tile = forward_streamed * Width;
    SHARED_DYNAMIC(E, shared);
    const AttentionPlace place = attention_place<Own::queries>(s, mma_rows);
    const int q0 = place.first, warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size;
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);  // of this thread's first value in an accumulator
    const E* k = qkv_head(qkv, s, place.b, s.NH + place.head / (s.NH / s.NKV));
    const E* v = k + long(s.NKV) * s.HS;
    const float scale = log2_e * rsqrtf(float(s.HS));
    const auto load = [&](int k0) {
        E* to = shared + k0 / forward_streamed % 2 * (2 * tile);
        tile_load<Width, forward_streamed>(to, k + k0 * qkv_row(s), qkv_row(s), s.T - k0, s.HS);
        tile_load<Width, forward_streamed>(to + tile, v + k0 * qkv_row(s), qkv_row(s), s.T - k0, s.HS);
        cp_async_commit();
    };
    uint32_t queries[Width / 16][4];
    float sum_out[Width / 8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // max of S; sum: this lane's part
    tile_load<Width, mma_rows>(shared + 2 * tile, qkv_head(qkv, s, place.b, place.head) + q0 * qkv_row(s), qkv_row(s), s.T - q0,
                               s.HS);
    load(0);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int d = 0; d < Width / 16; d++) a_fragment<Width>(queries[d], shared + 2 * tile, warp, d);
    for (int k0 = 0; k0 <= q0; k0 += forward_streamed) {
        cp_async_wait<0>();
        __syncthreads();
        if (k0 < q0) load(k0 + forward_streamed);
        const E *keys = shared + k0 / forward_streamed % 2 * (2 * tile), *values = keys + tile;
        float p[forward_streamed / 8][4] = {};
#pragma unroll
        for (int d = 0; d < Width / 16; d++) {
#pragma unroll
            for (int j = 0; j < forward_streamed / 16; j++) {
                uint32_t b[2][2];
                b_fragments<Width>(b, keys, j, d);
                mma_pair<E>(p[2 * j], p[2 * j + 1], queries[d], b);
            }
        }
        if (k0 == q0) {
#pragma unroll
            for (int j = 0; j < forward_streamed / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (8 * j + column + e % 2 > row + e / 2 * 8) p[j][e] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float before = max[i];
#pragma unroll
            for (int j = 0; j < forward_streamed / 8; j++) max[i] = fmaxf(max[i], fmaxf(p[j][2 * i], p[j][2 * i + 1]));
            max[i] = fmaxf(max[i], __shfl_xor_sync(full_warp, max[i], 2));
            max[i] = fmaxf(max[i], __shfl_xor_sync(full_warp, max[i], 1));
            const float most = max[i] * scale, shrink = exp2_approximate(fmaf(before, scale, -most));
            sum[i] *= shrink;
#pragma unroll
            for (int n = 0; n < Width / 8; n++) sum_out[n][2 * i] *= shrink, sum_out[n][2 * i + 1] *= shrink;
#pragma unroll
            for (int j = 0; j < forward_streamed / 8; j++) {
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    p[j][e] = exp2_approximate(fmaf(p[j][e], scale, -most));
                    sum[i] += p[j][e];
                }
            }
        }
#pragma unroll
        for (int j = 0; j < forward_streamed / 16; j++) {
            uint32_t weights[4];
            pack_fragment<E>(weights, p[2 * j], p[2 * j + 1]);
            mma_add<Width>(sum_out, weights, values, j);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(full_warp, sum[i], 2);
        sum[i] += __shfl_xor_sync(full_warp, sum[i], 1);
        const int query = q0 + row + 8 * i;
        if (lane % 4 == 0 && query < s.T) {
            lse[(long(place.b) * s.NH + place.head) * s.T + query] = max[i] * scale * ln_2 + logf(sum[i]);
        }
        sum[i] = 1.0f / sum[i];
    }
    // the stage that the last tile did not use: nobody reads it any more, but for this warp's queries
    mma_store<Width>(out_head(out, s, place.b, place.head) + q0 * out_row(s), out_row(s), s.T - q0, s.HS,
                     shared + (q0 / forward_streamed + 1) % 2 * (2 * tile), sum_out, sum);
}

// Shared memory: own [2][64, Width], streamed [2][2][backward_streamed, Width] of E, statistics [2][2][backward_streamed].
constexpr size_t backward_shared(int width) {
    return size_t(2 * mma_rows + 4 * backward_streamed(width)) * width * 2 + 4 * backward_streamed(width) * sizeof(float);
}

// Own::keys: own are k, v; streamed q, dout; sums dK, dV. Own::queries: own are q, dout; streamed k, v; sums dQ.
template <class E, int Width, Own own>
__global__ void __launch_bounds__(attention_threads, backward_blocks(Width))
    attention_backward_mma(E* __restrict__ dqkv, const E* __restrict__ dout, const float* __restrict__ lse,
                           const float* __restrict__ row_sums, const E* __restrict__ qkv, AttentionShape s) {
    constexpr bool keys = own == Own::keys;
    constexpr int rows = backward_streamed(Width), tile = rows * Width, own_tile = mma_rows * Width;
    SHARED_DYNAMIC(E, shared);
    E *own_0 = shared, *own_1 = own_0 + own_tile, *stages = own_1 + own_tile;  // [2][2][rows, Width]
    float* statistics = reinterpret_cast<float*>(stages + 4 * tile);           // [2][lse log2(e), D][rows], of streamed queries
    const AttentionPlace place = attention_place<own>(s, mma_rows);
    const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size;
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);  // of this thread's first value in an accumulator
    const int group = s.NH / s.NKV, kv = keys ? place.head : place.head / group;
    const E* k = qkv_head(qkv, s, place.b, s.NH + kv);
    const E* v = k + long(s.NKV) * s.HS;
    const float scale = rsqrtf(float(s.HS));

    // tile `turn` of all that are streamed: of each query head in turn, from the diagonal on; or the keys up to the diagonal
    const int first_tile = keys ? place.first / rows : 0;
    const int tiles = ceil_div(keys ? s.T : min(place.first + mma_rows, s.T), rows) - first_tile;
    const auto head_of = [&](int turn) { return keys ? kv * group + turn / tiles : place.head; };
    const auto first_of = [&](int turn) { return (first_tile + turn % tiles) * rows; };
    const auto load = [&](int turn) {
        const int first = first_of(turn), there = s.T - first;
        E* to = stages + turn % 2 * (2 * tile);
        if constexpr (keys) {
            tile_load<Width, rows>(to, qkv_head(qkv, s, place.b, head_of(turn)) + first * qkv_row(s), qkv_row(s), there, s.HS);
            tile_load<Width, rows>(to + tile, out_head(dout, s, place.b, head_of(turn)) + first * out_row(s), out_row(s), there,
                                   s.HS);
        } else {
            tile_load<Width, rows>(to, k + first * qkv_row(s), qkv_row(s), there, s.HS);
            tile_load<Width, rows>(to + tile, v + first * qkv_row(s), qkv_row(s), there, s.HS);
        }
        cp_async_commit();
    };
    // lse log2(e) and D of a query; beyond T those that make P = 0
    const auto statistic = [&](int head, int query, bool is_sum) {
        const long at = (long(place.b) * s.NH + head) * s.T + query;
        if (is_sum) return query < s.T ? row_sums[at] : 0.0f;
        return query < s.T ? lse[at] * log2_e : INFINITY;
    };
    // of a tile: the first threads have one each, in a register until the tile's turn is next
    const auto statistic_of = [&](int turn) {
        const int i = int(threadIdx.x);
        return i < 2 * rows ? statistic(head_of(turn), first_of(turn) + i % rows, i >= rows) : 0.0f;
    };
    const auto statistic_put = [&](int turn, float value) {
        if (int(threadIdx.x) < 2 * rows) statistics[turn % 2 * (2 * rows) + int(threadIdx.x)] = value;
    };

    const int own_rows = s.T - place.first;
    float own_lse[2] = {}, own_sum[2] = {};
    if constexpr (keys) {
        tile_load<Width, mma_rows>(own_0, k + place.first * qkv_row(s), qkv_row(s), own_rows, s.HS);
        tile_load<Width, mma_rows>(own_1, v + place.first * qkv_row(s), qkv_row(s), own_rows, s.HS);
        statistic_put(0, statistic_of(0));
    } else {
        tile_load<Width, mma_rows>(own_0, qkv_head(qkv, s, place.b, place.head) + place.first * qkv_row(s), qkv_row(s), own_rows,
                                   s.HS);
        tile_load<Width, mma_rows>(own_1, out_head(dout, s, place.b, place.head) + place.first * out_row(s), out_row(s),
                                   own_rows, s.HS);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            own_lse[i] = statistic(place.head, place.first + row + 8 * i, false);
            own_sum[i] = statistic(place.head, place.first + row + 8 * i, true);
        }
    }
    load(0);
    float sums_0[Width / 8][4] = {}, sums_1[keys ? Width / 8 : 1][4] = {};
    const int turns = keys ? tiles * group : tiles;
    for (int turn = 0; turn < turns; turn++) {
        cp_async_wait<0>();
        __syncthreads();
        float next_statistic = 0;
        if (turn + 1 < turns) {
            load(turn + 1);
            if constexpr (keys) next_statistic = statistic_of(turn + 1);
        }
        const E *streamed_0 = stages + turn % 2 * (2 * tile), *streamed_1 = streamed_0 + tile;
        const float* lse_at = statistics + turn % 2 * (2 * rows);
        float x[rows / 8][4] = {}, dp[rows / 8][4] = {};
#pragma unroll
        for (int d = 0; d < Width / 16; d++) {
            uint32_t a_0[4], a_1[4];
            a_fragment<Width>(a_0, own_0, warp, d);
            a_fragment<Width>(a_1, own_1, warp, d);
#pragma unroll
            for (int j = 0; j < rows / 16; j++) {
                uint32_t b[2][2];
                b_fragments<Width>(b, streamed_0, j, d);
                mma_pair<E>(x[2 * j], x[2 * j + 1], a_0, b);
                b_fragments<Width>(b, streamed_1, j, d);
                mma_pair<E>(dp[2 * j], dp[2 * j + 1], a_1, b);
            }
        }
        const int beyond = keys ? first_of(turn) - place.first : place.first - first_of(turn);  // queries before keys
        if (beyond < (keys ? mma_rows : rows)) {
#pragma unroll
            for (int j = 0; j < rows / 8; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int own_row = row + e / 2 * 8, streamed_row = 8 * j + column + e % 2;
                    if (beyond + (keys ? streamed_row - own_row : own_row - streamed_row) < 0) x[j][e] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < rows / 16; j++) {
#pragma unroll
            for (int n = 2 * j; n < 2 * j + 2; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int at = 8 * n + column + e % 2;
                    const float lse_here = keys ? lse_at[at] : own_lse[e / 2], sum = keys ? lse_at[rows + at] : own_sum[e / 2];
                    x[n][e] = exp2_approximate(fmaf(x[n][e], scale * log2_e, -lse_here));
                    dp[n][e] = x[n][e] * (dp[n][e] - sum);
                }
            }
            uint32_t weights[4];
            if constexpr (keys) {
                pack_fragment<E>(weights, x[2 * j], x[2 * j + 1]);
                mma_add<Width>(sums_1, weights, streamed_1, j);
            }
            pack_fragment<E>(weights, dp[2 * j], dp[2 * j + 1]);
            mma_add<Width>(sums_0, weights, streamed_0, j);
        }
        if constexpr (keys) {
            if (turn + 1 < turns) statistic_put(turn + 1, next_statistic);
        }
    }
    E* to = qkv_head(dqkv, s, place.b, keys ? s.NH + kv : place.head) + place.first * qkv_row(s);
    const float scales[2] = {scale, scale};
    mma_store<Width>(to, qkv_row(s), own_rows, s.HS, own_0, sums_0, scales);
    if constexpr (keys) {
        const float ones[2] = {1, 1};
        mma_store<Width>(to + long(s.NKV) * s.HS, qkv_row(s), own_rows, s.HS, own_1, sums_1, ones);
    }
}

template <class E, int Width>
void attention_forward_mma_launch(E* out, float* lse, const E* qkv, const AttentionShape& s, Stream stream) {
    launch(attention_forward_mma<E, Width>, attention_grid(s, s.NH, mma_rows), attention_threads, forward_shared(Width), stream,
           out, lse, qkv, s);
}

template <class E, int Width>
void attention_backward_mma_launch(E* dqkv, const E* dout, const float* lse, const float* row_sums, const E* qkv,
                                   const AttentionShape& s, Stream stream) {
    launch(attention_backward_mma<E, Width, Own::keys>, attention_grid(s, s.NKV, mma_rows), attention_threads,
           backward_shared(Width), stream, dqkv, dout, lse, row_sums, qkv, s);
    launch(attention_backward_mma<E, Width, Own::queries>, attention_grid(s, s.NH, mma_rows), attention_threads,
           backward_shared(Width), stream, dqkv, dout, lse, row_sums, qkv, s);
}

}  // namespace cuda
