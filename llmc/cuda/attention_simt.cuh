// Causal flash attention without tensor cores: float, and what attention_mma.cuh does not take. Any T, HS while shared memory
// lasts. Also what both ways share: shapes, the place of a block, the statistics of backward.
//
// A block of 128 threads holds Tile queries or keys in shared memory, as floats, and streams the rows of the other kind past
// them, Tile at a time. Eight lanes share a row of S. Tiles above the diagonal are skipped.
//
// Backward is two kernels of one source. With Own::keys the block's own rows are keys, which add up dK and dV over the queries
// from the diagonal on, of all query heads that read them; with Own::queries it adds up dQ over the keys up to the diagonal.
// S is computed in both, and no sum depends on the order of blocks: the same bits in every run.
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"

namespace cuda {

constexpr int attention_threads = 128;
constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

struct AttentionShape {
    int B, T, NH, NKV, HS;
};

// Elements from token to token in qkv [B, T, (NH + 2 NKV) HS] and in out [B, T, NH HS].
__device__ __forceinline__ long qkv_row(const AttentionShape& s) { return long(s.NH + 2 * s.NKV) * s.HS; }
__device__ __forceinline__ long out_row(const AttentionShape& s) { return long(s.NH) * s.HS; }

// The first row of a head: of queries 0 .. NH - 1, then keys, then values.
template <class E>
__device__ __forceinline__ E* qkv_head(E* qkv, const AttentionShape& s, int b, int head) {
    return qkv + b * s.T * qkv_row(s) + long(head) * s.HS;
}
template <class E>
__device__ __forceinline__ E* out_head(E* out, const AttentionShape& s, int b, int head) {
    return out + b * s.T * out_row(s) + long(head) * s.HS;
}

enum class Own { queries, keys };

// What a block works on. Blocks of a head follow each other, since they share its keys in the cache, the longest first:
// queries have most keys at the end of the sequence, keys have most queries at its start.
struct AttentionPlace {
    int first, head, b;  // first: row of the block's tile
};
template <Own own>
__device__ __forceinline__ AttentionPlace attention_place(const AttentionShape& s, int tile) {
    const int tiles = ceil_div(s.T, tile), heads = own == Own::keys ? s.NKV : s.NH, block = int(blockIdx.x);
    const int k = block % tiles;
    return {(own == Own::keys ? k : tiles - 1 - k) * tile, block / tiles % heads, block / tiles / heads};
}

inline dim3 attention_grid(const AttentionShape& s, int heads, int tile) {
    return unsigned(long(ceil_div(s.T, tile)) * heads * s.B);
}

// What backward needs to know of a query.
struct alignas(8) AttentionStatistic {
    float lse;  // times log2(e)
    float sum;  // rowsum(dout * out), D in the formulas
};

// statistics [B, NH, T]. Eight lanes a query; Packed: rows are whole packs.
template <class E, bool Packed>
__global__ void __launch_bounds__(attention_threads, 8)
    attention_statistics(AttentionStatistic* __restrict__ statistics, const float* __restrict__ lse, const E* __restrict__ dout,
                         const E* __restrict__ out, AttentionShape s) {
    constexpr int step = Packed ? Pack<E>::size : 1;
    const long rows = long(s.B) * s.T * s.NH, mine = (long(blockIdx.x) * attention_threads + threadIdx.x) / 8;
    const long row = min(mine, rows - 1);
    float sum = 0;
#pragma unroll 2
    for (int d = int(threadIdx.x) % 8 * step; d < s.HS; d += 8 * step) {
        if constexpr (Packed) {
            const Pack<E> a = pack_load(dout + row * s.HS + d), b = pack_load(out + row * s.HS + d);
#pragma unroll
            for (int e = 0; e < step; e++) sum = fmaf(to_float(a[e]), to_float(b[e]), sum);
        } else {
            sum = fmaf(to_float(dout[row * s.HS + d]), to_float(out[row * s.HS + d]), sum);
        }
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(full_warp, sum, offset);
    if (threadIdx.x % 8 == 0 && mine < rows) {
        const long token = row / s.NH, head = row % s.NH, at = (token / s.T * s.NH + head) * s.T + token % s.T;
        statistics[at] = {lse[at] * log2_e, sum};
    }
}

// Tiles in shared memory are [Tile, columns], columns = HS filled up to a multiple of 32 with zeros, rows one float longer,
// so that a column lies in different banks. Thread (row, lane) has rows row + 16 i and columns lane + 8 j.
__host__ __device__ constexpr int simt_columns(int HS) { return ceil_div(HS, 32) * 32; }
__host__ __device__ constexpr int simt_tile(int tile, int HS) { return tile * (simt_columns(HS) + 1); }

template <int Tile, class E>
__device__ __forceinline__ void simt_load(float* to, const E* from, long from_row, int rows, int HS) {
    const int columns = simt_columns(HS);
    for (int r = int(threadIdx.x) / warp_size; r < Tile; r += attention_threads / warp_size) {
        for (int d = int(threadIdx.x) % warp_size; d < columns; d += warp_size) {
            to[r * (columns + 1) + d] = r < rows && d < HS ? to_float(from[r * from_row + d]) : 0.0f;
        }
    }
}

// products [own row, streamed row] = own streamed^T
template <int Tile>
__device__ __forceinline__ void simt_products(float (&products)[Tile / 16][Tile / 8], const float* own, const float* streamed,
                                              int HS) {
    const int stride = simt_columns(HS) + 1;
    own += int(threadIdx.x) / 8 * stride;
    streamed += int(threadIdx.x) % 8 * stride;
#pragma unroll
    for (int i = 0; i < Tile / 16; i++) {
#pragma unroll
        for (int j = 0; j < Tile / 8; j++) products[i][j] = 0;
    }
    for (int d = 0; d < HS; d++) {
        float column[Tile / 8];
#pragma unroll
        for (int j = 0; j < Tile / 8; j++) column[j] = streamed[8 * j * stride + d];
#pragma unroll
        for (int i = 0; i < Tile / 16; i++) {
            const float row = own[16 * i * stride + d];
#pragma unroll
            for (int j = 0; j < Tile / 8; j++) products[i][j] = fmaf(row, column[j], products[i][j]);
        }
    }
}

// sums [own row, column] = shrink[own row] sums + weights [own row, streamed row] streamed [streamed row, column]
template <int Tile>
__device__ __forceinline__ void simt_add(float* sums, const float (&shrink)[Tile / 16], const float* weights,
                                         const float* streamed, int HS) {
    const int columns = simt_columns(HS), stride = columns + 1, row = int(threadIdx.x) / 8;
    for (int d = int(threadIdx.x) % 8; d < columns; d += 32) {
        float part[Tile / 16][4];
#pragma unroll
        for (int i = 0; i < Tile / 16; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) part[i][e] = sums[(row + 16 * i) * stride + d + 8 * e] * shrink[i];
        }
#pragma unroll 4
        for (int j = 0; j < Tile; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float value = streamed[j * stride + d + 8 * e];
#pragma unroll
                for (int i = 0; i < Tile / 16; i++) part[i][e] = fmaf(weights[(row + 16 * i) * (Tile + 1) + j], value, part[i][e]);
            }
        }
#pragma unroll
        for (int i = 0; i < Tile / 16; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sums[(row + 16 * i) * stride + d + 8 * e] = part[i][e];
        }
    }
}

// Zeros, then each thread's own elements of `sums`, times factor, as rows of E.
template <int Tile>
__device__ __forceinline__ void simt_clear(float* sums, int HS) {
    for (int i = int(threadIdx.x); i < simt_tile(Tile, HS); i += attention_threads) sums[i] = 0;
}
template <int Tile, class E>
__device__ __forceinline__ void simt_store(E* to, long to_row, int rows, const float* sums, const float (&factor)[Tile / 16],
                                           int HS) {
#pragma unroll
    for (int i = 0; i < Tile / 16; i++) {
        const int row = int(threadIdx.x) / 8 + 16 * i;
        if (row >= rows) continue;
        for (int d = int(threadIdx.x) % 8; d < HS; d += 8) {
            to[row * to_row + d] = from_float<E>(sums[row * (simt_columns(HS) + 1) + d] * factor[i]);
        }
    }
}

template <class E, int Tile>
__global__ void __launch_bounds__(attention_threads, 2)
    attention_forward_simt(E* __restrict__ out, float* __restrict__ lse, const E* __restrict__ qkv, AttentionShape s) {
    SHARED_DYNAMIC(float, shared);
    float *queries = shared, *keys = queries + simt_tile(Tile, s.HS), *values = keys + simt_tile(Tile, s.HS);
    float *sum_out = values + simt_tile(Tile, s.HS), *p = sum_out + simt_tile(Tile, s.HS);  // p [Tile, Tile + 1]
    const AttentionPlace place = attention_place<Own::queries>(s, Tile);
    const int q0 = place.first, row = int(threadIdx.x) / 8, lane = int(threadIdx.x) % 8, kv = place.head / (s.NH / s.NKV);
    const E* k = qkv_head(qkv, s, place.b, s.NH + kv);
    const E* v = qkv_head(qkv, s, place.b, s.NH + s.NKV + kv);
    const float scale = log2_e * rsqrtf(float(s.HS));
    float max[Tile / 16], sum[Tile / 16];  // of S; of exp(S - max), this lane's part
#pragma unroll
    for (int i = 0; i < Tile / 16; i++) max[i] = -INFINITY, sum[i] = 0;
    simt_load<Tile>(queries, qkv_head(qkv, s, place.b, place.head) + q0 * qkv_row(s), qkv_row(s), s.T - q0, s.HS);
    simt_clear<Tile>(sum_out, s.HS);
    for (int k0 = 0; k0 <= q0; k0 += Tile) {
        __syncthreads();
        simt_load<Tile>(keys, k + k0 * qkv_row(s), qkv_row(s), s.T - k0, s.HS);
        simt_load<Tile>(values, v + k0 * qkv_row(s), qkv_row(s), s.T - k0, s.HS);
        __syncthreads();
        float x[Tile / 16][Tile / 8], shrink[Tile / 16];
        simt_products<Tile>(x, queries, keys, s.HS);
#pragma unroll
        for (int i = 0; i < Tile / 16; i++) {
            const float before = max[i];
#pragma unroll
            for (int j = 0; j < Tile / 8; j++) {
                if (k0 + lane + 8 * j > q0 + row + 16 * i) x[i][j] = -INFINITY;
                max[i] = fmaxf(max[i], x[i][j]);
            }
#pragma unroll
            for (int offset = 4; offset > 0; offset /= 2) max[i] = fmaxf(max[i], __shfl_xor_sync(full_warp, max[i], offset));
            shrink[i] = exp2f((before - max[i]) * scale);
            sum[i] *= shrink[i];
#pragma unroll
            for (int j = 0; j < Tile / 8; j++) {
                const float weight = exp2f((x[i][j] - max[i]) * scale);
                sum[i] += weight;
                p[(row + 16 * i) * (Tile + 1) + lane + 8 * j] = weight;
            }
        }
        __syncwarp();
        simt_add<Tile>(sum_out, shrink, p, values, s.HS);
    }
#pragma unroll
    for (int i = 0; i < Tile / 16; i++) {
#pragma unroll
        for (int offset = 4; offset > 0; offset /= 2) sum[i] += __shfl_xor_sync(full_warp, sum[i], offset);
        const int query = q0 + row + 16 * i;
        if (lane == 0 && query < s.T) {
            lse[(long(place.b) * s.NH + place.head) * s.T + query] = max[i] * scale * ln_2 + logf(sum[i]);
        }
        sum[i] = 1.0f / sum[i];
    }
    simt_store<Tile>(out_head(out, s, place.b, place.head) + q0 * out_row(s), out_row(s), s.T - q0, sum_out, sum, s.HS);
}

template <class E, int Tile, Own own>
__global__ void __launch_bounds__(attention_threads, 2)
    attention_backward_simt(E* __restrict__ dqkv, const E* __restrict__ dout, const AttentionStatistic* __restrict__ statistics,
                            const E* __restrict__ qkv, AttentionShape s) {
    SHARED_DYNAMIC(float, shared);
    // Own::keys: own are k, v; streamed q, dout; sums dK, dV. Own::queries: own are q, dout; streamed k, v; sums dQ.
    constexpr bool keys = own == Own::keys;
    const int tile = simt_tile(Tile, s.HS), row = int(threadIdx.x) / 8, lane = int(threadIdx.x) % 8;
    float *own_0 = shared, *own_1 = own_0 + tile, *streamed_0 = own_1 + tile, *streamed_1 = streamed_0 + tile;
    float *sums_0 = streamed_1 + tile, *sums_1 = sums_0 + tile;
    float *ds = sums_0 + (keys ? 2 : 1) * tile, *p = ds + Tile * (Tile + 1);  // [own row, streamed row]
    const AttentionPlace place = attention_place<own>(s, Tile);
    const int group = s.NH / s.NKV, kv = keys ? place.head : place.head / group, rows = s.T - place.first;
    const E* k = qkv_head(qkv, s, place.b, s.NH + kv);
    const E* v = qkv_head(qkv, s, place.b, s.NH + s.NKV + kv);
    const float scale = rsqrtf(float(s.HS));
    float one[Tile / 16], scales[Tile / 16];
#pragma unroll
    for (int i = 0; i < Tile / 16; i++) one[i] = 1, scales[i] = scale;
    if constexpr (keys) {
        simt_load<Tile>(own_0, k + place.first * qkv_row(s), qkv_row(s), rows, s.HS);
        simt_load<Tile>(own_1, v + place.first * qkv_row(s), qkv_row(s), rows, s.HS);
        simt_clear<Tile>(sums_1, s.HS);
    }
    simt_clear<Tile>(sums_0, s.HS);
    for (int head = keys ? kv * group : place.head; head < (keys ? (kv + 1) * group : place.head + 1); head++) {
        const E* q = qkv_head(qkv, s, place.b, head);
        const E* dout_at = out_head(dout, s, place.b, head);
        const AttentionStatistic* of_head = statistics + (long(place.b) * s.NH + head) * s.T;
        if constexpr (!keys) {
            simt_load<Tile>(own_0, q + place.first * qkv_row(s), qkv_row(s), rows, s.HS);
            simt_load<Tile>(own_1, dout_at + place.first * out_row(s), out_row(s), rows, s.HS);
        }
        for (int first = keys ? place.first : 0; first < (keys ? s.T : place.first + 1); first += Tile) {
            __syncthreads();
            simt_load<Tile>(streamed_0, (keys ? q : k) + first * qkv_row(s), qkv_row(s), s.T - first, s.HS);
            if constexpr (keys) simt_load<Tile>(streamed_1, dout_at + first * out_row(s), out_row(s), s.T - first, s.HS);
            else simt_load<Tile>(streamed_1, v + first * qkv_row(s), qkv_row(s), s.T - first, s.HS);
            __syncthreads();
            float x[Tile / 16][Tile / 8], dp[Tile / 16][Tile / 8];
            simt_products<Tile>(x, own_0, streamed_0, s.HS);
            simt_products<Tile>(dp, own_1, streamed_1, s.HS);
#pragma unroll
            for (int i = 0; i < Tile / 16; i++) {
#pragma unroll
                for (int j = 0; j < Tile / 8; j++) {
                    const int own_row = place.first + row + 16 * i, streamed_row = first + lane + 8 * j;
                    const int query = keys ? streamed_row : own_row, key = keys ? own_row : streamed_row;
                    const int at = (row + 16 * i) * (Tile + 1) + lane + 8 * j;
                    const bool seen = key <= query && query < s.T;
                    const auto [lse, sum] = seen ? of_head[query] : AttentionStatistic{};
                    const float weight = seen ? exp2f(fmaf(x[i][j], scale * log2_e, -lse)) : 0.0f;
                    ds[at] = seen ? weight * (dp[i][j] - sum) : 0.0f;
                    if constexpr (keys) p[at] = weight;
                }
            }
            __syncwarp();
            simt_add<Tile>(sums_0, one, ds, streamed_0, s.HS);
            if constexpr (keys) simt_add<Tile>(sums_1, one, p, streamed_1, s.HS);
        }
    }
    E* to = qkv_head(dqkv, s, place.b, keys ? s.NH + kv : place.head) + place.first * qkv_row(s);
    simt_store<Tile>(to, qkv_row(s), rows, sums_0, scales, s.HS);
    if constexpr (keys) simt_store<Tile>(to + long(s.NKV) * s.HS, qkv_row(s), rows, sums_1, one, s.HS);
}

// Bytes of shared memory: tiles of rows, and P or dS or both.
constexpr size_t simt_forward_shared(int tile, int HS) { return sizeof(float) * size_t(4 * simt_tile(tile, HS) + tile * (tile + 1)); }
constexpr size_t simt_backward_shared(int tile, int HS, Own own) {
    const int both = own == Own::keys ? 1 : 0;
    return sizeof(float) * size_t((5 + both) * simt_tile(tile, HS) + (1 + both) * tile * (tile + 1));
}

inline size_t simt_shared_check(size_t bytes, int HS, Stream stream) {
    const size_t most = stream.device->properties.sharedMemPerBlockOptin;
    check(bytes <= most,
          "attention: heads of %d elements need %zu bytes of shared memory in a block, this GPU has %zu: use smaller heads", HS,
          bytes, most);
    return bytes;
}

template <class E, int Tile>
void attention_forward_simt_launch(E* out, float* lse, const E* qkv, const AttentionShape& s, Stream stream) {
    launch(attention_forward_simt<E, Tile>, attention_grid(s, s.NH, Tile), attention_threads,
           simt_shared_check(simt_forward_shared(Tile, s.HS), s.HS, stream), stream, out, lse, qkv, s);
}

template <class E, int Tile>
void attention_backward_simt_launch(E* dqkv, const E* dout, const AttentionStatistic* statistics, const E* qkv,
                                    const AttentionShape& s, Stream stream) {
    launch(attention_backward_simt<E, Tile, Own::keys>, attention_grid(s, s.NKV, Tile), attention_threads,
           simt_shared_check(simt_backward_shared(Tile, s.HS, Own::keys), s.HS, stream), stream, dqkv, dout, statistics, qkv, s);
    launch(attention_backward_simt<E, Tile, Own::queries>, attention_grid(s, s.NH, Tile), attention_threads,
           simt_shared_check(simt_backward_shared(Tile, s.HS, Own::queries), s.HS, stream), stream, dqkv, dout, statistics, qkv, s);
}

}  // namespace cuda
