// Causal flash attention on tensor cores: bf16 and fp16, heads of up to 128 elements in multiples of 8, any T.
//
// A block of 4 warps owns 64 or 128 rows, queries or keys; rows of the other kind are streamed past them by cp.async, the next
// tile while this one is worked on. A head is filled up with zeros to Width = 32, 64, 96 or 128 columns, in shared memory only.
// Products are mma.m16n8k16 with float sums; accumulators of P and dS, rounded, are the A fragments of the next product as
// they lie in registers. Backward is two kernels of one source, as in attention_simt.cuh; there S^T = K Q^T is made for
// Own::keys, so that P^T and dS^T, too, are A fragments.
//
// A warp owns strips of 16 rows. With two, each B fragment that it reads serves two products, so that tensor cores and not
// shared memory set the pace; wide heads have registers for one only.
#pragma once
#include <type_traits>

#include "llmc/cuda/attention_simt.cuh"

namespace cuda {

constexpr int mma_columns = 8;  // 16 bytes: what ldmatrix and cp.async move at once, in elements
constexpr int strips(int width) { return width <= 64 ? 2 : 1; }
constexpr int warp_rows(int width) { return 16 * strips(width); }
constexpr int own_rows(int width) { return attention_threads / warp_size * warp_rows(width); }
constexpr int forward_streamed = 64, backward_streamed = 32;  // rows of the other kind in a tile

// Tiles [rows, Width] are in shared memory, at multiples of a group of 4 or 8 times 16 bytes; within a group the 16 bytes change
// places from row to row, so that the same columns of 8 rows are in 8 different banks of 16 bytes. tile_at: where row and chunk
// (16 bytes) are, in elements. tile_move: where 16 `down` rows below and 8 `right` columns from there is; `right` is added to a
// chunk without a carry. As one bit operation on an address that changes with the tile it costs no register outside the loop.
constexpr int tile_group(int width) { return width % 64 == 0 ? 64 : 32; }

template <int Width>
__device__ __forceinline__ int tile_at(int row, int chunk) {
    return row * Width + (chunk ^ (tile_group(Width) == 64 ? row % 8 : row / 2 % 4)) * mma_columns;
}
template <int Width>
__device__ __forceinline__ int tile_move(int at, int down, int right) {
    constexpr int group = tile_group(Width);
    return (at ^ mma_columns * right % group) + mma_columns * right / group * group + 16 * down * Width;
}

// Starts copying rows [Rows, HS] to a tile; rows from `rows` on and columns from HS on become zeros. Four threads a row.
template <int Width, int Rows, class E>
__device__ __forceinline__ void tile_load(E* shared, int tile, const E* from, int from_row, int rows, int HS) {
    const int chunk = int(threadIdx.x) % 4, row = int(threadIdx.x) / 4, to = tile + tile_at<Width>(row, chunk);
    const E* at = from + long(row) * from_row + chunk * mma_columns;
#pragma unroll
    for (int r = 0; r < Rows; r += attention_threads / 4) {
#pragma unroll
        for (int c = 0; c < Width / mma_columns; c += 4) {
            const bool there = row + r < rows && (chunk + c) * mma_columns < HS;
            cp_async_16(shared + tile_move<Width>(to, r / 16, c), there ? at + long(r) * from_row + c * mma_columns : from,
                        there ? 16 : 0);
        }
    }
}

// Fragments of a tile, [row, column]. A [16 own rows, 16 columns]: rows from `row` on, columns 16 k.
template <int Width, class E>
__device__ __forceinline__ void a_fragment(uint32_t (&a)[4], const E* shared, int tile, int row, int k) {
    const int lane = int(threadIdx.x) % warp_size;
    ldmatrix_x4(a, shared + tile_move<Width>(tile + row * Width + tile_at<Width>(lane % 16, lane / 16), 0, 2 * k));
}
// B [16 columns, 8 streamed rows] for rows 16 j .. and for rows 16 j + 8 ..: own streamed^T.
template <int Width, class E>
__device__ __forceinline__ void b_fragments(uint32_t (&b)[2][2], const E* shared, int tile, int j, int k) {
    const int lane = int(threadIdx.x) % warp_size;
    uint32_t r[4];
    ldmatrix_x4(r, shared + tile_move<Width>(tile + tile_at<Width>(lane % 8 + lane / 16 * 8, lane / 8 % 2), j, 2 * k));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}
// B [16 streamed rows, 8 columns] for columns 16 k .. and for columns 16 k + 8 ..: weights streamed.
template <int Width, class E>
__device__ __forceinline__ void b_fragments_of_columns(uint32_t (&b)[2][2], const E* shared, int tile, int j, int k) {
    const int lane = int(threadIdx.x) % warp_size;
    uint32_t r[4];
    ldmatrix_x4_trans(r, shared + tile_move<Width>(tile + tile_at<Width>(lane % 16, lane / 16), j, 2 * k));
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

// sums [strip, 16 own rows, Width] += weights [strip, 16, 16] streamed rows 16 j ..
template <int Width, int Strips, class E>
__device__ __forceinline__ void mma_add(float (&sums)[Strips][Width / 8][4], const uint32_t (&weights)[Strips][4], const E* shared,
                                        int streamed, int j) {
#pragma unroll
    for (int k = 0; k < Width / 16; k++) {
        uint32_t b[2][2];
        b_fragments_of_columns<Width>(b, shared, streamed, j, k);
#pragma unroll
        for (int i = 0; i < Strips; i++) mma_pair<E>(sums[i][2 * k], sums[i][2 * k + 1], weights[i], b);
    }
}

// The 16 rows of this warp from `first` on, row first + 8 i + .. times factor[i], to rows of E; by way of the same rows of a
// tile, so that 16 bytes at a time are written.
template <int Width, class E>
__device__ __forceinline__ void mma_store(E* to, long to_row, int first, int rows, int HS, E* shared, int tile,
                                          const float (&sums)[Width / 8][4], const float (&factor)[2]) {
    const int lane = int(threadIdx.x) % warp_size;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Width / 8; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            *reinterpret_cast<uint32_t*>(shared + tile + tile_at<Width>(first + 8 * i + lane / 4, n) + 2 * (lane % 4)) =
                pack_pair<E>(sums[n][2 * i] * factor[i], sums[n][2 * i + 1] * factor[i]);
        }
    }
    __syncwarp();
    constexpr int chunks = Width / mma_columns;
#pragma unroll
    for (int k = 0; k < 16 * chunks / warp_size; k++) {
        const int i = k * warp_size + lane, row = first + i / chunks, chunk = i % chunks;
        if (row < rows && chunk * mma_columns < HS) {
            pack_store(to + row * to_row + chunk * mma_columns, pack_load(shared + tile + tile_at<Width>(row, chunk)));
        }
    }
}

// Minus infinity for each key behind its query in one accumulator; `query`, `key`: its corner's.
template <Own own>
__device__ __forceinline__ void mma_mask(float (&x)[4], int query, int key) {
    const int row = int(threadIdx.x) % warp_size / 4, column = int(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int down = row + e / 2 * 8, right = column + e % 2;
        if (own == Own::keys ? key + down > query + right : key + right > query + down) x[e] = -INFINITY;
    }
}

constexpr int mma_blocks = 2;  // on an SM: what registers allow

// What forward keeps of a warp's queries: the largest S, and, both to be divided by the sum of exp(S - max), of which each lane
// has a part, P V.
template <int Width>
struct ForwardSums {
    float max[strips(Width)][2], sum[strips(Width)][2], out[strips(Width)][Width / 8][4];
};

// Adds one tile of keys and values. `query`: the warp's first, as seen from the tile's first key.
template <int Width, class E>
__device__ __forceinline__ void forward_tile(ForwardSums<Width>& sums, const uint32_t (&queries)[strips(Width)][Width / 16][4],
                                             const E* shared, int keys, int values, int query, float scale) {
    constexpr int accumulators = forward_streamed / 8;
    float p[strips(Width)][accumulators][4] = {};
#pragma unroll
    for (int d = 0; d < Width / 16; d++) {
#pragma unroll
        for (int j = 0; j < accumulators / 2; j++) {
            uint32_t b[2][2];
            b_fragments<Width>(b, shared, keys, j, d);
#pragma unroll
            for (int i = 0; i < strips(Width); i++) mma_pair<E>(p[i][2 * j], p[i][2 * j + 1], queries[i][d], b);
        }
    }
    if (query < forward_streamed - 1) {
#pragma unroll
        for (int i = 0; i < strips(Width); i++) {
#pragma unroll
            for (int j = 0; j < accumulators; j++) mma_mask<Own::queries>(p[i][j], query + 16 * i, 8 * j);
        }
    }
#pragma unroll
    for (int i = 0; i < strips(Width); i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {  // rows .. and 8 + ..
            float most = sums.max[i][h], added = 0;
#pragma unroll
            for (int j = 0; j < accumulators; j++) most = fmaxf(most, fmaxf(p[i][j][2 * h], p[i][j][2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(full_warp, most, 2));
            most = fmaxf(most, __shfl_xor_sync(full_warp, most, 1));
            const float shift = most * scale, shrink = exp2_approximate(fmaf(sums.max[i][h], scale, -shift));
            sums.max[i][h] = most;
#pragma unroll
            for (int j = 0; j < accumulators; j++) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    p[i][j][e] = exp2_approximate(fmaf(p[i][j][e], scale, -shift));
                    added += p[i][j][e];
                }
            }
            sums.sum[i][h] = fmaf(sums.sum[i][h], shrink, added);
#pragma unroll
            for (int n = 0; n < Width / 8; n++) sums.out[i][n][2 * h] *= shrink, sums.out[i][n][2 * h + 1] *= shrink;
        }
    }
#pragma unroll
    for (int j = 0; j < accumulators / 2; j++) {
        uint32_t weights[strips(Width)][4];
#pragma unroll
        for (int i = 0; i < strips(Width); i++) pack_fragment<E>(weights[i], p[i][2 * j], p[i][2 * j + 1]);
        mma_add<Width>(sums.out, weights, shared, values, j);
    }
}

// Shared memory [2][keys, values][64, Width] of E; the queries pass through the second of these.
constexpr size_t forward_shared(int width) { return size_t(4) * forward_streamed * width * 2; }

template <class E, int Width>
__global__ void __launch_bounds__(attention_threads, mma_blocks)
    attention_forward_mma(E* __restrict__ out, float* __restrict__ lse, const E* __restrict__ qkv, AttentionShape s) {
    constexpr int tile = forward_streamed * Width;
    static_assert(own_rows(Width) <= 2 * forward_streamed);
    SHARED_DYNAMIC(E, shared);
    const AttentionPlace place = attention_place<Own::queries>(s, own_rows(Width));
    const int q0 = place.first, end = min(q0 + own_rows(Width), s.T), lane = int(threadIdx.x) % warp_size;
    const int first = int(threadIdx.x) / warp_size * warp_rows(Width);  // of the warp's queries, from q0
    const E* k = qkv_head(qkv, s, place.b, s.NH + place.head / (s.NH / s.NKV));
    const E* v = k + long(s.NKV) * s.HS;
    const float scale = log2_e * rsqrtf(float(s.HS));
    const auto load = [&](int k0) {
        const int to = k0 / forward_streamed % 2 * (2 * tile);
        tile_load<Width, forward_streamed>(shared, to, k + k0 * qkv_row(s), qkv_row(s), s.T - k0, s.HS);
        tile_load<Width, forward_streamed>(shared, to + tile, v + k0 * qkv_row(s), qkv_row(s), s.T - k0, s.HS);
        cp_async_commit();
    };
    tile_load<Width, own_rows(Width)>(shared, 2 * tile, qkv_head(qkv, s, place.b, place.head) + q0 * qkv_row(s), qkv_row(s),
                                      s.T - q0, s.HS);
    load(0);
    cp_async_wait<0>();
    __syncthreads();
    uint32_t queries[strips(Width)][Width / 16][4];
    ForwardSums<Width> sums = {};
#pragma unroll
    for (int i = 0; i < strips(Width); i++) {
        sums.max[i][0] = sums.max[i][1] = -INFINITY;
#pragma unroll
        for (int d = 0; d < Width / 16; d++) a_fragment<Width>(queries[i][d], shared, 2 * tile, first + 16 * i, d);
    }
    for (int k0 = 0; k0 < end; k0 += forward_streamed) {
        cp_async_wait<0>();
        __syncthreads();
        if (k0 + forward_streamed < end) load(k0 + forward_streamed);
        const int keys = k0 / forward_streamed % 2 * (2 * tile), query = q0 + first - k0;
        if (query + warp_rows(Width) > 0) forward_tile<Width>(sums, queries, shared, keys, keys + tile, query, scale);
    }
    // by way of the stage that the last tile did not use: nobody reads it any more
    const int unused = ceil_div(end, forward_streamed) % 2 * (2 * tile);
#pragma unroll
    for (int i = 0; i < strips(Width); i++) {
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = sums.sum[i][h];
            sum += __shfl_xor_sync(full_warp, sum, 2);
            sum += __shfl_xor_sync(full_warp, sum, 1);
            inverse[h] = 1.0f / sum;
            const int query = q0 + first + 16 * i + 8 * h + lane / 4;
            if (lane % 4 == 0 && query < s.T) {
                lse[(long(place.b) * s.NH + place.head) * s.T + query] = sums.max[i][h] * scale * ln_2 + logf(sum);
            }
        }
        mma_store<Width>(out_head(out, s, place.b, place.head) + q0 * out_row(s), out_row(s), first + 16 * i, s.T - q0, s.HS,
                         shared, unused, sums.out[i], inverse);
    }
}

// products [strip, 16 own rows from `first` on, streamed row] += own streamed^T
template <int Width, int Strips, int Accumulators, class E>
__device__ __forceinline__ void mma_products(float (&products)[Strips][Accumulators][4], const E* shared, int own, int streamed,
                                             int first) {
#pragma unroll
    for (int d = 0; d < Width / 16; d++) {
        uint32_t a[Strips][4];
#pragma unroll
        for (int i = 0; i < Strips; i++) a_fragment<Width>(a[i], shared, own, first + 16 * i, d);
#pragma unroll
        for (int j = 0; j < Accumulators / 2; j++) {
            uint32_t b[2][2];
            b_fragments<Width>(b, shared, streamed, j, d);
#pragma unroll
            for (int i = 0; i < Strips; i++) mma_pair<E>(products[i][2 * j], products[i][2 * j + 1], a[i], b);
        }
    }
}

// Adds what one tile gives: sums_0 += dS streamed_0 and, for keys, sums_1 += P streamed_1. Positions are those of tiles in
// shared memory. `query` and `key`: the warp's first and the tile's first, or the other way round. Statistics are of the
// queries: the warp's rows, or, for keys, the tile's.
template <Own own, int Width, int Sums, class E>
__device__ __forceinline__ void backward_tile(float (&sums_0)[strips(Width)][Width / 8][4], float (&sums_1)[Sums][Width / 8][4],
                                              const E* shared, int own_0, int own_1, int streamed_0, int streamed_1, int first,
                                              int query, int key, float scale,
                                              const AttentionStatistic (&own_statistics)[strips(Width)][2],
                                              const AttentionStatistic* streamed_statistics) {
    constexpr bool keys = own == Own::keys;
    constexpr int accumulators = backward_streamed / 8;
    float p[strips(Width)][accumulators][4] = {}, ds[strips(Width)][accumulators][4] = {};
    mma_products<Width>(p, shared, own_0, streamed_0, first);
    mma_products<Width>(ds, shared, own_1, streamed_1, first);
    if (query < key + (keys ? warp_rows(Width) : backward_streamed) - 1) {
#pragma unroll
        for (int i = 0; i < strips(Width); i++) {
#pragma unroll
            for (int j = 0; j < accumulators; j++) {
                mma_mask<own>(p[i][j], query + (keys ? 8 * j : 16 * i), key + (keys ? 16 * i : 8 * j));
            }
        }
    }
#pragma unroll
    for (int j = 0; j < accumulators / 2; j++) {
#pragma unroll
        for (int n = 2 * j; n < 2 * j + 2; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + int(threadIdx.x) % 4 * 2 + e % 2;
#pragma unroll
                for (int i = 0; i < strips(Width); i++) {
                    const auto [lse, sum] = keys ? streamed_statistics[column] : own_statistics[i][e / 2];
                    p[i][n][e] = exp2_approximate(fmaf(p[i][n][e], scale * log2_e, -lse));
                    ds[i][n][e] = p[i][n][e] * (ds[i][n][e] - sum);
                }
            }
        }
        uint32_t weights[strips(Width)][4];
        if constexpr (keys) {
#pragma unroll
            for (int i = 0; i < strips(Width); i++) pack_fragment<E>(weights[i], p[i][2 * j], p[i][2 * j + 1]);
            mma_add<Width>(sums_1, weights, shared, streamed_1, j);
        }
#pragma unroll
        for (int i = 0; i < strips(Width); i++) pack_fragment<E>(weights[i], ds[i][2 * j], ds[i][2 * j + 1]);
        mma_add<Width>(sums_0, weights, shared, streamed_0, j);
    }
}

// Shared memory: own [2][own_rows, Width], streamed [2][2][backward_streamed, Width] of E, statistics [2][backward_streamed].
constexpr size_t backward_shared(int width) {
    return size_t(2 * own_rows(width) + 4 * backward_streamed) * width * 2 + 2 * backward_streamed * sizeof(AttentionStatistic);
}

// Own::keys: own are k, v; streamed q, dout; sums dK, dV. Own::queries: own are q, dout; streamed k, v; sums dQ.
template <class E, int Width, Own own>
__global__ void __launch_bounds__(attention_threads, mma_blocks)
    attention_backward_mma(E* __restrict__ dqkv, const E* __restrict__ dout, const AttentionStatistic* __restrict__ statistics,
                           const E* __restrict__ qkv, AttentionShape s) {
    constexpr bool keys = own == Own::keys;
    constexpr int rows = backward_streamed, tile = rows * Width, own_0 = 0, own_1 = own_rows(Width) * Width, stages = 2 * own_1;
    SHARED_DYNAMIC(E, shared);  // positions in it are in elements
    AttentionStatistic* streamed_statistics = reinterpret_cast<AttentionStatistic*>(shared + stages + 4 * tile);  // [2][rows]
    const AttentionPlace place = attention_place<own>(s, own_rows(Width));
    const int thread = int(threadIdx.x), first = thread / warp_size * warp_rows(Width), group = s.NH / s.NKV;
    const int kv = keys ? place.head : place.head / group, there = s.T - place.first;
    const E* k = qkv_head(qkv, s, place.b, s.NH + kv);
    const E* v = k + long(s.NKV) * s.HS;
    const float scale = rsqrtf(float(s.HS));

    // Streamed are, of each query head in turn, the queries from the diagonal on; or the keys up to the diagonal. `head` and `at`:
    // of the tile that was asked for last.
    const int start = keys ? place.first : 0, tiles = ceil_div(keys ? s.T - start : min(place.first + own_rows(Width), s.T), rows);
    const int turns = keys ? tiles * group : tiles;
    int head = keys ? kv * group : place.head, at = start;
    const auto load = [&](int turn) {
        const int to = stages + turn % 2 * (2 * tile);
        const E* from_0 = keys ? qkv_head(qkv, s, place.b, head) : k;
        const E* from_1 = keys ? out_head(dout, s, place.b, head) : v;
        const long row_1 = keys ? out_row(s) : qkv_row(s);
        tile_load<Width, rows>(shared, to, from_0 + at * qkv_row(s), qkv_row(s), s.T - at, s.HS);
        tile_load<Width, rows>(shared, to + tile, from_1 + at * row_1, row_1, s.T - at, s.HS);
        if (keys && thread < rows) {  // zeros beyond T: with q and dout 0 they give dS = 0
            const AttentionStatistic* from = statistics + (long(place.b) * s.NH + head) * s.T;
            cp_async_8(streamed_statistics + turn % 2 * rows + thread, at + thread < s.T ? from + at + thread : from,
                       at + thread < s.T ? 8 : 0);
        }
        cp_async_commit();
    };

    const E* own_from_0 = keys ? k : qkv_head(qkv, s, place.b, place.head);
    const E* own_from_1 = keys ? v : out_head(dout, s, place.b, place.head);
    const long own_row_1 = keys ? qkv_row(s) : out_row(s);
    tile_load<Width, own_rows(Width)>(shared, own_0, own_from_0 + place.first * qkv_row(s), qkv_row(s), there, s.HS);
    tile_load<Width, own_rows(Width)>(shared, own_1, own_from_1 + place.first * own_row_1, own_row_1, there, s.HS);
    load(0);
    AttentionStatistic own_statistics[strips(Width)][2] = {};
    if constexpr (!keys) {
#pragma unroll
        for (int i = 0; i < 2 * strips(Width); i++) {
            const int query = place.first + first + 8 * i + thread % warp_size / 4;
            if (query < s.T) own_statistics[i / 2][i % 2] = statistics[(long(place.b) * s.NH + place.head) * s.T + query];
        }
    }
    float sums_0[strips(Width)][Width / 8][4] = {}, sums_1[keys ? strips(Width) : 1][Width / 8][4] = {};
    for (int turn = 0; turn < turns; turn++) {
        cp_async_wait<0>();
        __syncthreads();
        const int streamed = stages + turn % 2 * (2 * tile), own_at = place.first + first;
        const int query = keys ? at : own_at, key = keys ? own_at : at;
        if (turn + 1 < turns) {
            at += rows;
            if (keys && at >= s.T) at = start, head++;
            load(turn + 1);
        }
        if (query + (keys ? rows : warp_rows(Width)) > key) {
            backward_tile<own, Width>(sums_0, sums_1, shared, own_0, own_1, streamed, streamed + tile, first, query, key, scale,
                                      own_statistics, streamed_statistics + turn % 2 * rows);
        }
    }
    E* to = qkv_head(dqkv, s, place.b, keys ? s.NH + kv : place.head) + place.first * qkv_row(s);
    const float scales[2] = {scale, scale}, ones[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < strips(Width); i++) {
        mma_store<Width>(to, qkv_row(s), first + 16 * i, there, s.HS, shared, own_0, sums_0[i], scales);
        if constexpr (keys) {
            mma_store<Width>(to + long(s.NKV) * s.HS, qkv_row(s), first + 16 * i, there, s.HS, shared, own_1, sums_1[i], ones);
        }
    }
}

template <class E, int Width>
void attention_forward_mma_launch(E* out, float* lse, const E* qkv, const AttentionShape& s, Stream stream) {
    launch(attention_forward_mma<E, Width>, attention_grid(s, s.NH, own_rows(Width)), attention_threads, forward_shared(Width), stream,
           out, lse, qkv, s);
}

template <class E, int Width>
void attention_backward_mma_launch(E* dqkv, const E* dout, const AttentionStatistic* statistics, const E* qkv,
                                   const AttentionShape& s, Stream stream) {
    launch(attention_backward_mma<E, Width, Own::keys>, attention_grid(s, s.NKV, own_rows(Width)), attention_threads,
           backward_shared(Width), stream, dqkv, dout, statistics, qkv, s);
    launch(attention_backward_mma<E, Width, Own::queries>, attention_grid(s, s.NH, own_rows(Width)), attention_threads,
           backward_shared(Width), stream, dqkv, dout, statistics, qkv, s);
}

}  // namespace cuda
