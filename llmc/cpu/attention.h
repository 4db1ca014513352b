// Causal attention without a T x T matrix (FlashAttention, Dao et al. 2022, arXiv:2205.14135), in float32.
//
//   S = Q K^T / sqrt(HS), P = softmax(S) over the keys up to the query, out = P V, lse = log of the sum of exp(S)
//   dV = P^T dout, dP = dout V^T, dS = P (dP - D) / sqrt(HS), D = rowsum(dout out), dQ = dS K, dK = dS^T Q
//
// qkv [B, T, (NH + 2 NKV) HS], a row is q | k | v; out, dout [B, T, NH HS]; lse [B, NH, T]. NKV divides NH: query heads share
// a key head in runs of NH / NKV. Any T, HS and B.
//
// Work goes by tiles of 64 queries x 64 keys. Tiles above the diagonal are skipped, and most of what lies above it inside the
// tiles on it. Forward's tasks are blocks of queries; backward's are key heads, whose dK and dV are summed inside the task: the
// same bits in every run, at any number of threads. Scratch of a thread: a few tiles; in backward also T floats for each query
// head of a task.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#if defined __AVX512F__ || (defined __AVX2__ && defined __FMA__)
#include <immintrin.h>
#elif defined __ARM_NEON
#include <arm_neon.h>
#endif

#include "llmc/check.h"
#include "llmc/cpu/vecmath.h"
#include "llmc/device.h"

namespace cpu {
namespace tile {

constexpr int block = 64;  // queries or keys in a tile

// A vector register of the machine. Contraction is off and GCC 12 does not make an FMA of std::fma on lanes: so by intrinsics.
#if defined __AVX512F__
constexpr int lanes = 16, panel_rows = 8, panel_vectors = 2;
typedef float Vector __attribute__((vector_size(64)));
inline Vector multiply_add(Vector a, Vector b, Vector c) { return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined __AVX2__ && defined __FMA__
constexpr int lanes = 8, panel_rows = 4, panel_vectors = 2;
typedef float Vector __attribute__((vector_size(32)));
inline Vector multiply_add(Vector a, Vector b, Vector c) { return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined __ARM_NEON && defined __aarch64__
constexpr int lanes = 4, panel_rows = 4, panel_vectors = 4;
typedef float Vector __attribute__((vector_size(16)));
inline Vector multiply_add(Vector a, Vector b, Vector c) {
    return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
constexpr int lanes = 4, panel_rows = 4, panel_vectors = 2;
typedef float Vector __attribute__((vector_size(16)));
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
#endif

inline Vector load(const float* from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, Vector v) { memcpy(to, &v, sizeof v); }

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// C [rows <= panel_rows, V vectors] = (add ? C : 0) + A [rows, depth] B [depth, V vectors]. A's element (i, k) is at
// a[i * a_row + k * a_step]. All of C stays in registers; rows that are not there repeat the last one and are not stored.
// Not inlined, and its loops unrolled by decree: otherwise GCC keeps the sums in memory.
template <int V>
__attribute__((noinline)) void panel_multiply_vectors(float* c, long c_row, const float* a, long a_row, long a_step,
                                                      const float* b, long b_row, int rows, int depth, bool add) {
    const float* a_at[panel_rows];
    Vector sum[panel_rows][V];
#pragma GCC unroll 8
    for (int i = 0; i < panel_rows; i++) {
        a_at[i] = a + std::min(i, rows - 1) * a_row;
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) sum[i][j] = Vector{};
    }
    for (int k = 0; k < depth; k++) {
        Vector b_at[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) b_at[j] = load(b + k * b_row + j * lanes);
#pragma GCC unroll 8
        for (int i = 0; i < panel_rows; i++) {
            const Vector a_ik = a_at[i][k * a_step] - Vector{};
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) sum[i][j] = multiply_add(a_ik, b_at[j], sum[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < panel_rows; i++) {
        if (i >= rows) continue;
        float* to = c + i * c_row;
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) store(to + j * lanes, add ? load(to + j * lanes) + sum[i][j] : sum[i][j]);
    }
}

// The same for any number of columns that is a multiple of `lanes`.
inline void panel_multiply(float* c, long c_row, const float* a, long a_row, long a_step, const float* b, long b_row, int rows,
                           int columns, int depth, bool add) {
    constexpr int width = panel_vectors * lanes;
    int j = 0;
    for (; j + width <= columns; j += width)
        panel_multiply_vectors<panel_vectors>(c + j, c_row, a, a_row, a_step, b + j, b_row, rows, depth, add);
    for (; j < columns; j += lanes) panel_multiply_vectors<1>(c + j, c_row, a, a_row, a_step, b + j, b_row, rows, depth, add);
}

// A square of lanes x lanes numbers, in registers: in each step the off-diagonal quarters of squares of 2 `stride` are swapped.
template <int stride>
inline void transpose_square(Vector* square) {
    typedef int Index __attribute__((vector_size(sizeof(Vector))));
    Index low, high;
    for (int l = 0; l < lanes; l++) {
        low[l] = l & stride ? lanes + l - stride : l;
        high[l] = l & stride ? lanes + l : l + stride;
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i++) {
        if (i & stride) continue;
        const Vector a = square[i], b = square[i + stride];
        square[i] = __builtin_shuffle(a, b, low);
        square[i + stride] = __builtin_shuffle(a, b, high);
    }
    if constexpr (stride > 1) transpose_square<stride / 2>(square);
}

// to [columns, block] = transpose of from [rows <= block, columns]; rows that are not there repeat the last one, so that no lane
// holds a number from elsewhere.
inline void transpose(float* to, const float* from, long from_row, int rows, int columns) {
    for (int i = 0; i < block; i += lanes) {
        int j = 0;
        for (; j + lanes <= columns; j += lanes) {
            Vector square[lanes];
#pragma GCC unroll 16
            for (int k = 0; k < lanes; k++) square[k] = load(from + std::min(i + k, rows - 1) * from_row + j);
            transpose_square<lanes / 2>(square);
#pragma GCC unroll 16
            for (int k = 0; k < lanes; k++) store(to + (j + k) * block + i, square[k]);
        }
        for (; j < columns; j++)
            for (int k = i; k < i + lanes; k++) to[j * block + k] = from[std::min(k, rows - 1) * from_row + j];
    }
}

// sums [rows]: each row of a times that of b.
inline void row_products(float* sums, const float* a, const float* b, long row, int rows, int columns) {
    for (int i = 0; i < rows; i += lanes) {
        Vector square[lanes];
        float rest[lanes];
        for (int k = 0; k < lanes; k++) {
            const float *x = a + std::min(i + k, rows - 1) * row, *y = b + std::min(i + k, rows - 1) * row;
            square[k] = Vector{};
            rest[k] = 0;
            int j = 0;
            for (; j + lanes <= columns; j += lanes) square[k] = multiply_add(load(x + j), load(y + j), square[k]);
            for (; j < columns; j++) rest[k] = std::fma(x[j], y[j], rest[k]);
        }
        transpose_square<lanes / 2>(square);
        for (int half = lanes / 2; half > 0; half /= 2)
            for (int k = 0; k < half; k++) square[k] += square[k + half];
        const Vector sum = square[0] + load(rest);
        memcpy(sums + i, &sum, size_t(std::min(lanes, rows - i)) * sizeof(float));
    }
}

inline void copy(float* to, long to_row, const float* from, long from_row, int rows, int columns) {
    for (int i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, size_t(columns) * sizeof(float));
}

// Rows of a head lie far apart, in qkv a token's whole row, which the processor does not foresee.
template <bool for_writing>
inline void prefetch(const float* from, long from_row, int rows, int columns) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j += 16) __builtin_prefetch(from + i * from_row + j, for_writing);
}

template <class Float>
struct Rows {
    Float* at;
    long row;
};

// The columns are lanes of products, so a row must be whole vectors: rows that are not are copied to `padded`.
inline Rows<const float> whole_vectors(float* padded, const float* from, long from_row, int rows, int columns) {
    if (columns % lanes == 0) return {from, from_row};
    const int padded_row = round_up(columns, lanes);
    copy(padded, padded_row, from, from_row, rows, columns);
    return {padded, padded_row};
}

// Floats for each thread, aligned to vectors. Not initialised.
struct Scratch {
    size_t each;
    float* memory;

    explicit Scratch(size_t floats)
        : each((floats + 15) / 16 * 16),
          memory(static_cast<float*>(operator new(each* size_t(omp_get_max_threads()) * sizeof(float), std::align_val_t(64)))) {}
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { operator delete(memory, std::align_val_t(64)); }
    float* mine() const { return memory + each * size_t(omp_get_thread_num()); }
};

inline float* take(float*& scratch, int floats) {
    float* taken = scratch;
    scratch += floats;
    return taken;
}

}  // namespace tile

inline void attention_shape_check(int B, int T, int NH, int NKV, int HS) {
    check(B > 0 && T > 0 && NH > 0 && NKV > 0 && HS > 0 && NH % NKV == 0,
          "attention: B %d, T %d, NH %d, NKV %d, HS %d: all must be positive and NKV must divide NH", B, T, NH, NKV, HS);
}

// One block of queries of one head: q, k, v are the head's first rows, `row` apart. S is held as [key, query], so that the
// softmax runs down columns, a query in each lane.
inline void attention_forward_block(float* out, long out_row, float* lse, const float* q, const float* k, const float* v,
                                    long row, int q0, int T, int HS, float* scratch) {
    using namespace tile;
    const int padded = round_up(HS, lanes), queries = std::min(block, T - q0);
    const float scale = 1.0f / std::sqrt(float(HS));
    float* qt = take(scratch, HS * block);
    float* p = take(scratch, block * block);
    float* sum_out = take(scratch, block * padded);
    float* padded_v = take(scratch, block * padded);
    const int columns = round_up(queries, lanes);
    alignas(64) float max[block], sum[block], shrink[block];  // max: of S; shrink: what earlier sums are multiplied by
    std::fill_n(max, block, -INFINITY);
    std::fill_n(sum, block, 0.0f);
    transpose(qt, q + q0 * row, row, queries, HS);
    for (int k0 = 0; k0 <= q0; k0 += block) {
        const int keys = std::min(block, T - k0);
        const bool diagonal = k0 == q0;
        std::copy_n(max, block, shrink);
        for (int i = 0; i < keys; i += panel_rows) {
            const int rows = std::min(panel_rows, keys - i), first = diagonal ? i / lanes * lanes : 0;
            float* group = p + i * block;
            prefetch<false>(v + (k0 + i) * row, row, rows, HS);
            prefetch<false>(k + (k0 + i + panel_rows) * row, row, std::min(panel_rows, T - (k0 + i + panel_rows)), HS);
            panel_multiply(group + first, block, k + (k0 + i) * row, row, 1, qt + first, block, rows, columns - first, HS, false);
            for (int r = 0; r < panel_rows; r++) {
                const int masked = r >= rows ? columns : diagonal ? i + r : 0;
                for (int j = first; j < masked; j++) group[r * block + j] = -INFINITY;
            }
#pragma omp simd simdlen(16)
            for (int j = first; j < columns; j++) {
                float most = max[j];
                for (int r = 0; r < panel_rows; r++) most = group[r * block + j] > most ? group[r * block + j] : most;
                max[j] = most;
            }
        }
#pragma omp simd simdlen(16)
        for (int j = 0; j < columns; j++) {
            const float now = max[j] * scale;
            shrink[j] = exp_fast(std::fma(shrink[j], scale, -now));
            sum[j] *= shrink[j];
        }
        for (int i = 0; i < keys; i += panel_rows) {
            float* group = p + i * block;
#pragma omp simd simdlen(16)
            for (int j = diagonal ? i / lanes * lanes : 0; j < columns; j++) {
                const float now = max[j] * scale;
                float added = 0;
                for (int r = 0; r < panel_rows; r++) {
                    const float x = exp_fast(std::fma(group[r * block + j], scale, -now));
                    group[r * block + j] = x;
                    added += x;
                }
                sum[j] += added;
            }
        }
        if (k0 > 0)
            for (int j = 0; j < queries; j++) {
                if (shrink[j] == 1.0f) continue;
                for (int d = 0; d < padded; d++) sum_out[j * padded + d] *= shrink[j];
            }
        const Rows<const float> values = whole_vectors(padded_v, v + k0 * row, row, keys, HS);
        for (int j = 0; j < queries; j += panel_rows) {
            const int rows = std::min(panel_rows, queries - j);
            float* out_at = out + (q0 + j) * out_row;
            if (diagonal) prefetch<true>(out_at, out_row, rows, HS);
            panel_multiply(sum_out + j * padded, padded, p + j, 1, block, values.at, values.row, rows, padded,
                           diagonal ? std::min(keys, j + panel_rows) : keys, k0 > 0);
            if (!diagonal) continue;
            for (int r = 0; r < rows; r++) {
                const float inverse = 1.0f / sum[j + r];
                for (int d = 0; d < HS; d++) out_at[r * out_row + d] = sum_out[(j + r) * padded + d] * inverse;
            }
        }
    }
    for (int j = 0; j < queries; j++) lse[q0 + j] = max[j] * scale + std::log(sum[j]);
}

inline void attention_forward(float* out, float* lse, const float* qkv, int B, int T, int NH, int NKV, int HS, Stream) {
    attention_shape_check(B, T, NH, NKV, HS);
    const long row = long(NH + 2 * NKV) * HS, out_row = long(NH) * HS;
    const int blocks = (T + tile::block - 1) / tile::block;
    const tile::Scratch scratch(size_t(tile::block) * size_t(HS + tile::block + 2 * tile::round_up(HS, tile::lanes)));
    // The longest tasks first, so that the last ones to end are short.
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int late = 0; late < blocks; late++) {
        for (long i = 0; i < long(B) * NH; i++) {
            const long b = i / NH, h = i % NH;
            const float* token = qkv + b * T * row;
            const float* k = token + (NH + h / (NH / NKV)) * HS;
            attention_forward_block(out + b * T * out_row + h * HS, out_row, lse + i * T, token + h * HS, k, k + long(NKV) * HS,
                                    row, (blocks - 1 - late) * tile::block, T, HS, scratch.mine());
        }
    }
}

// What one tile adds to the gradients; `first`: dq, or dk and dv, are written for the first time. All pointers are at the tile's
// first query or key.
struct AttentionTile {
    int queries, keys, HS;
    bool diagonal, first_of_queries, first_of_keys;
    tile::Rows<const float> q, k, dout;
    tile::Rows<float> dq, dk, dv;
    const float *kt, *vt, *lse, *D;
};

inline void attention_backward_tile(const AttentionTile& t, float* p, float* ds) {
    using namespace tile;
    const int padded = round_up(t.HS, lanes);
    const float scale = 1.0f / std::sqrt(float(t.HS));
    for (int i = 0; i < t.queries; i += panel_rows) {
        const int rows = std::min(panel_rows, t.queries - i);
        const int columns = round_up(t.diagonal ? std::min(t.keys, i + rows) : t.keys, lanes);
        panel_multiply(p + i * block, block, t.q.at + i * t.q.row, t.q.row, 1, t.kt, block, rows, columns, t.HS, false);
        panel_multiply(ds + i * block, block, t.dout.at + i * t.dout.row, t.dout.row, 1, t.vt, block, rows, columns, t.HS, false);
        float lse[panel_rows], D[panel_rows];
        for (int r = 0; r < panel_rows; r++) {
            lse[r] = t.lse[i + std::min(r, rows - 1)];
            D[r] = t.D[i + std::min(r, rows - 1)];
        }
        float *p_rows = p + i * block, *ds_rows = ds + i * block;
#pragma omp simd simdlen(16)
        for (int j = 0; j < columns; j++) {
            for (int r = 0; r < panel_rows; r++) {
                const float x = exp_fast(std::fma(p_rows[r * block + j], scale, -lse[r]));
                p_rows[r * block + j] = x;
                ds_rows[r * block + j] = x * (ds_rows[r * block + j] - D[r]) * scale;
            }
        }
        if (!t.diagonal) continue;
        for (int r = 0; r < rows; r++)
            for (int j = i + r + 1; j < columns; j++) p_rows[r * block + j] = ds_rows[r * block + j] = 0.0f;
    }
    for (int i = 0; i < t.queries; i += panel_rows) {
        const int rows = std::min(panel_rows, t.queries - i);
        if (t.first_of_queries) prefetch<true>(t.dq.at + i * t.dq.row, t.dq.row, rows, t.HS);
        panel_multiply(t.dq.at + i * t.dq.row, t.dq.row, ds + i * block, block, 1, t.k.at, t.k.row, rows, padded,
                       t.diagonal ? std::min(t.keys, i + rows) : t.keys, !t.first_of_queries);
    }
    for (int j = 0; j < t.keys; j += panel_rows) {
        const int rows = std::min(panel_rows, t.keys - j), start = t.diagonal ? j : 0;
        if (t.first_of_keys) prefetch<true>(t.dk.at + j * t.dk.row, t.dk.row, rows, t.HS);
        panel_multiply(t.dk.at + j * t.dk.row, t.dk.row, ds + start * block + j, 1, block, t.q.at + start * t.q.row, t.q.row,
                       rows, padded, t.queries - start, !t.first_of_keys);
    }
    for (int j = 0; j < t.keys; j += panel_rows) {
        const int rows = std::min(panel_rows, t.keys - j), start = t.diagonal ? j : 0;
        if (t.first_of_keys) prefetch<true>(t.dv.at + j * t.dv.row, t.dv.row, rows, t.HS);
        panel_multiply(t.dv.at + j * t.dv.row, t.dv.row, p + start * block + j, 1, block, t.dout.at + start * t.dout.row,
                       t.dout.row, rows, padded, t.queries - start, !t.first_of_keys);
    }
}

// One key head of one sequence and the `group` query heads that read it.
inline void attention_backward_head(float* dq, float* dk, float* dv, const float* dout, const float* out, long out_row,
                                    const float* lse, const float* q, const float* k, const float* v, long row, int T, int HS,
                                    int group, float* scratch) {
    using namespace tile;
    const int padded = round_up(HS, lanes), padded_tile = block * padded;
    const bool whole = HS == padded;
    float *kt = take(scratch, HS * block), *vt = take(scratch, HS * block);
    float *p = take(scratch, block * block), *ds = take(scratch, block * block);
    float *padded_q = take(scratch, padded_tile), *padded_dout = take(scratch, padded_tile),
          *padded_k = take(scratch, padded_tile);
    float *padded_dq = take(scratch, padded_tile), *padded_dk = take(scratch, padded_tile),
          *padded_dv = take(scratch, padded_tile);
    float* D = scratch;
    for (int g = 0; g < group; g++) row_products(D + g * T, dout + g * HS, out + g * HS, out_row, T, HS);
    AttentionTile t = {};
    t.HS = HS;
    t.kt = kt;
    t.vt = vt;
    for (int k0 = 0; k0 < T; k0 += block) {
        t.keys = std::min(block, T - k0);
        transpose(kt, k + k0 * row, row, t.keys, HS);
        transpose(vt, v + k0 * row, row, t.keys, HS);
        t.k = whole_vectors(padded_k, k + k0 * row, row, t.keys, HS);
        t.dk = whole ? Rows<float>{dk + k0 * row, row} : Rows<float>{padded_dk, padded};
        t.dv = whole ? Rows<float>{dv + k0 * row, row} : Rows<float>{padded_dv, padded};
        for (int g = 0; g < group; g++) {
            for (int q0 = k0; q0 < T; q0 += block) {
                float* dq_at = dq + q0 * row + g * HS;
                t.queries = std::min(block, T - q0);
                t.diagonal = q0 == k0;
                t.first_of_queries = k0 == 0;
                t.first_of_keys = g == 0 && q0 == k0;
                t.q = whole_vectors(padded_q, q + q0 * row + g * HS, row, t.queries, HS);
                t.dout = whole_vectors(padded_dout, dout + q0 * out_row + g * HS, out_row, t.queries, HS);
                t.dq = whole ? Rows<float>{dq_at, row} : Rows<float>{padded_dq, padded};
                t.lse = lse + g * T + q0;
                t.D = D + g * T + q0;
                if (!whole) copy(padded_dq, padded, dq_at, row, t.queries, HS);
                attention_backward_tile(t, p, ds);
                if (!whole) copy(dq_at, row, padded_dq, padded, t.queries, HS);
            }
        }
        if (whole) continue;
        copy(dk + k0 * row, row, padded_dk, padded, t.keys, HS);
        copy(dv + k0 * row, row, padded_dv, padded, t.keys, HS);
    }
}

inline void attention_backward(float* dqkv, const float* dout, const float* out, const float* lse, const float* qkv, int B,
                               int T, int NH, int NKV, int HS, Stream) {
    attention_shape_check(B, T, NH, NKV, HS);
    const long row = long(NH + 2 * NKV) * HS, out_row = long(NH) * HS;
    const int group = NH / NKV;
    const tile::Scratch scratch(size_t(tile::block) * size_t(2 * HS + 2 * tile::block + 6 * tile::round_up(HS, tile::lanes)) +
                                size_t(group) * size_t(T));
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (long b = 0; b < B; b++) {
        for (long h = 0; h < NKV; h++) {
            const long q_at = b * T * row + h * group * HS, k_at = b * T * row + (NH + h) * HS, v_at = k_at + long(NKV) * HS;
            const long out_at = b * T * out_row + h * group * HS;
            attention_backward_head(dqkv + q_at, dqkv + k_at, dqkv + v_at, dout + out_at, out + out_at, out_row,
                                    lse + (b * NH + h * group) * T, qkv + q_at, qkv + k_at, qkv + v_at, row, T, HS, group,
                                    scratch.mine());
        }
    }
}

}  // namespace cpu
