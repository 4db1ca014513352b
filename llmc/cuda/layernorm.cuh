// Layer norm over the channels of each token, alone and fused with the residual addition before it.
//
//   out = (x - mean) rstd weight + bias,   rstd = 1 / sqrt(var + eps),   var = mean of (x - mean)^2
//
// x, out [N, C]; mean, rstd [N]; weight, bias [C]. A block of 128 threads has one row, in registers up to C = 8192: it is read
// once, and mean and variance are two passes over registers. Longer rows are read again from the caches.
//
// Layout of a row over a block: pack p (128 bits of E) belongs to thread p % Threads and is its pack number p / Threads.
// norm_row is all that follows once a block has its row so; kernels that make the row in other ways (cuda/codec_norm.cuh)
// call it too, and get the same bits: its arithmetic is written out, nothing is left to contraction.
#pragma once
#include <type_traits>

#include "llmc/cuda/common.cuh"
#include "llmc/residual_norm.h"

namespace cuda {

constexpr int norm_threads = 128;
constexpr int norm_max_columns = 8192;                         // of a row in registers
constexpr int norm_max_unpacked = 2048;                        // .. whose length is no multiple of a pack
constexpr int norm_partials = 2 * (norm_threads / warp_size);  // floats of shared memory that norm_row needs
constexpr int norm_long_threads = 512;

// Pack `p` of a row of C values; beyond the row zeros are read and nothing is written. Packed: rows are whole packs.
template <bool Packed, class E>
__device__ __forceinline__ Pack<E> row_pack_load(const E* row, int p, int C) {
    const int first = p * Pack<E>::size;
    Pack<E> pack{};
    if constexpr (Packed) {
        if (first < C) pack = pack_load(row + first);
    } else {
#pragma unroll
        for (int e = 0; e < Pack<E>::size; e++) pack[e] = first + e < C ? row[first + e] : from_float<E>(0.0f);
    }
    return pack;
}
template <bool Packed, class E>
__device__ __forceinline__ void row_pack_store(E* row, int p, int C, const Pack<E>& pack) {
    const int first = p * Pack<E>::size;
    if constexpr (Packed) {
        if (first < C) pack_store(row + first, pack);
    } else {
#pragma unroll
        for (int e = 0; e < Pack<E>::size; e++) {
            if (first + e < C) row[first + e] = pack[e];
        }
    }
}

// Whether element `e` of pack `p` is in the row.
template <bool Packed, class E>
__device__ __forceinline__ bool row_has(int p, int e, int C) {
    return p * Pack<E>::size + (Packed ? 0 : e) < C;
}

// b becomes a + (b + add_bias), rounded to E; null: no bias.
template <bool Packed, class E>
__device__ __forceinline__ Pack<E> norm_residual(float (&b)[Pack<E>::size], const Pack<E>& a, const E* add_bias, int p, int C) {
    Pack<E> sum;
    if (add_bias) {
        const Pack<E> add = row_pack_load<Packed>(add_bias, p, C);
#pragma unroll
        for (int e = 0; e < Pack<E>::size; e++) b[e] += to_float(add[e]);
    }
#pragma unroll
    for (int e = 0; e < Pack<E>::size; e++) {
        sum[e] = from_float<E>(to_float(a[e]) + b[e]);
        b[e] = to_float(sum[e]);
    }
    return sum;
}

__device__ __forceinline__ float norm_rstd(float squares, int C, float eps) { return 1.0f / sqrtf(squares / float(C) + eps); }

// x becomes the normalised value, rounded to E.
template <bool Packed, class E>
__device__ __forceinline__ Pack<E> norm_apply(float (&x)[Pack<E>::size], float mean, float rstd, const ResidualNorm<E>& norm,
                                              int p) {
    const Pack<E> weight = row_pack_load<Packed>(norm.weight, p, norm.C), bias = row_pack_load<Packed>(norm.bias, p, norm.C);
    Pack<E> out;
#pragma unroll
    for (int e = 0; e < Pack<E>::size; e++) {
        out[e] = from_float<E>(fmaf(__fmul_rn(x[e] - mean, rstd), to_float(weight[e]), to_float(bias[e])));
        x[e] = to_float(out[e]);
    }
    return out;
}

// From b (with norm.a) or the norm's input (without) in x, values of E, zeros beyond the row: writes residual, out, mean and
// rstd of row `row`; x becomes out. All norm_threads threads call it. `partial`: shared memory, norm_partials floats, free
// again after the caller's next barrier.
template <class E, int Packs, bool Packed>
__device__ __forceinline__ void norm_row(float (&x)[Packs][Pack<E>::size], const ResidualNorm<E>& norm, long row,
                                         float* partial) {
    constexpr int size = Pack<E>::size;
    const int C = norm.C, thread = int(threadIdx.x);
    if (norm.a) {
        constexpr int at_once = Packs * size <= 16 ? Packs : 16 / size;  // loads in flight, as far as registers go
#pragma unroll
        for (int first = 0; first < Packs; first += at_once) {
            Pack<E> a[at_once];
#pragma unroll
            for (int k = 0; k < at_once; k++) {
                a[k] = row_pack_load<Packed>(norm.a + row * C, (first + k) * norm_threads + thread, C);
            }
#pragma unroll
            for (int k = 0; k < at_once; k++) {
                const int p = (first + k) * norm_threads + thread;
                row_pack_store<Packed>(norm.residual + row * C, p, C,
                                       norm_residual<Packed>(x[first + k], a[k], norm.add_bias, p, C));
            }
        }
    }
    float sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < Packs; k++) {
#pragma unroll
        for (int e = 0; e < size; e++) sum += x[k][e];
    }
    const float mean = block_sum<norm_threads>(sum, partial) / float(C);
#pragma unroll
    for (int k = 0; k < Packs; k++) {
#pragma unroll
        for (int e = 0; e < size; e++) {
            const float off = row_has<Packed, E>(k * norm_threads + thread, e, C) ? x[k][e] - mean : 0.0f;
            squares = fmaf(off, off, squares);
        }
    }
    const float rstd = norm_rstd(block_sum<norm_threads>(squares, partial + norm_threads / warp_size), C, norm.eps);
    if (thread == 0) {
        norm.mean[row] = mean;
        norm.rstd[row] = rstd;
    }
#pragma unroll
    for (int k = 0; k < Packs; k++) {
        const int p = k * norm_threads + thread;
        row_pack_store<Packed>(norm.out + row * C, p, C, norm_apply<Packed>(x[k], mean, rstd, norm, p));
    }
}

// Calls f(std::integral_constant<int, Packs>()) with the least number of packs a thread whose block holds a row of C values.
template <class E, class F>
void norm_packs_dispatch(int C, F f) {
    constexpr int size = Pack<E>::size;
    if (C <= 8 * norm_threads) f(std::integral_constant<int, 8 / size>());
    else if (C <= 16 * norm_threads) f(std::integral_constant<int, 16 / size>());
    else if (C <= 32 * norm_threads) f(std::integral_constant<int, 32 / size>());
    else f(std::integral_constant<int, 64 / size>());
}

// Blocks an SM that the registers of a row of `values` floats a thread allow.
constexpr int norm_blocks(int values) { return values <= 8 ? 12 : values <= 16 ? 7 : values <= 32 ? 5 : 4; }

// x: b with norm.a, else the norm's input.
template <class E, int Packs, bool Packed>
__global__ void __launch_bounds__(norm_threads, norm_blocks(Packs * Pack<E>::size))
    layernorm_kernel(ResidualNorm<E> norm, const E* __restrict__ x) {
    SHARED_ARRAY(float, partial, [norm_partials]);
    const long row = blockIdx.x;
    float values[Packs][Pack<E>::size];
#pragma unroll
    for (int k = 0; k < Packs; k++) {
        const Pack<E> pack = row_pack_load<Packed>(x + row * norm.C, k * norm_threads + int(threadIdx.x), norm.C);
#pragma unroll
        for (int e = 0; e < Pack<E>::size; e++) values[k][e] = to_float(pack[e]);
    }
    norm_row<E, Packs, Packed>(values, norm, row, partial);
}

// Rows of any length: each thread reads its packs again for mean, variance and out.
template <class E, bool Packed>
__global__ void __launch_bounds__(norm_long_threads, 2) layernorm_long_kernel(ResidualNorm<E> norm, const E* x) {
    constexpr int size = Pack<E>::size, threads = norm_long_threads;
    SHARED_ARRAY(float, partial, [2][threads / warp_size]);
    const long row = blockIdx.x;
    const int C = norm.C, packs = ceil_div(C, size);
    float values[size];
    const auto load = [&](const E* from, int p) {
        const Pack<E> pack = row_pack_load<Packed>(from + row * C, p, C);
#pragma unroll
        for (int e = 0; e < size; e++) values[e] = to_float(pack[e]);
    };
    float sum = 0, squares = 0;
    for (int p = int(threadIdx.x); p < packs; p += threads) {
        load(x, p);
        if (norm.a) {
            const Pack<E> a = row_pack_load<Packed>(norm.a + row * C, p, C);
            row_pack_store<Packed>(norm.residual + row * C, p, C, norm_residual<Packed>(values, a, norm.add_bias, p, C));
        }
#pragma unroll
        for (int e = 0; e < size; e++) sum += values[e];
    }
    const E* again = norm.a ? norm.residual : x;  // a thread reads back what it wrote itself
    const float mean = block_sum<threads>(sum, partial[0]) / float(C);
    for (int p = int(threadIdx.x); p < packs; p += threads) {
        load(again, p);
#pragma unroll
        for (int e = 0; e < size; e++) {
            const float off = row_has<Packed, E>(p, e, C) ? values[e] - mean : 0.0f;
            squares = fmaf(off, off, squares);
        }
    }
    const float rstd = norm_rstd(block_sum<threads>(squares, partial[1]), C, norm.eps);
    if (threadIdx.x == 0) {
        norm.mean[row] = mean;
        norm.rstd[row] = rstd;
    }
    for (int p = int(threadIdx.x); p < packs; p += threads) {
        load(again, p);
        row_pack_store<Packed>(norm.out + row * C, p, C, norm_apply<Packed>(values, mean, rstd, norm, p));
    }
}

template <class E, bool Packed>
void layernorm_launch(const ResidualNorm<E>& norm, const E* x, long N, Stream stream) {
    if (N == 0) return;
    const dim3 rows = unsigned(N);
    if (norm.C > (Packed ? norm_max_columns : norm_max_unpacked)) {
        launch(layernorm_long_kernel<E, Packed>, rows, norm_long_threads, 0, stream, norm, x);
        return;
    }
    norm_packs_dispatch<E>(norm.C, [&](auto packs) {
        constexpr int Packs = decltype(packs)::value;
        if constexpr (Packed || Packs * Pack<E>::size * norm_threads <= norm_max_unpacked) {
            launch(layernorm_kernel<E, Packs, Packed>, rows, norm_threads, 0, stream, norm, x);
        }
    });
}

template <class... Pointers>
bool norm_is_packed(size_t bytes_per_row, const Pointers*... pointers) {
    return ((uintptr_t(pointers) | ...) | bytes_per_row) % 16 == 0;
}

// residual [N, C] = a + (b + add_bias [C]) (null: none), out = layer norm of it.
template <class E>
void residual_layernorm_forward(E* residual, E* out, float* mean, float* rstd, const E* a, const E* b,
                                const std::type_identity_t<E>* add_bias, const E* weight, const E* bias, long N, int C, float eps,
                                Stream stream) {
    const ResidualNorm<E> norm = {residual, out, mean, rstd, a, add_bias, weight, bias, C, eps};
    if (norm_is_packed(C * sizeof(E), residual, out, a, b, add_bias, weight, bias)) layernorm_launch<E, true>(norm, b, N, stream);
    else layernorm_launch<E, false>(norm, b, N, stream);
}

template <class E>
void layernorm_forward(E* out, float* mean, float* rstd, const E* inp, const E* weight, const E* bias, long N, int C, float eps,
                       Stream stream) {
    residual_layernorm_forward<E>(nullptr, out, mean, rstd, nullptr, inp, nullptr, weight, bias, N, C, eps, stream);
}

}  // namespace cuda
