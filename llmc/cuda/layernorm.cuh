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
#include <algorithm>
#include <type_traits>

#include "llmc/cuda/row.cuh"
#include "llmc/residual_norm.h"

namespace cuda {

constexpr int norm_threads = 128;
constexpr int norm_max_columns = 8192;                         // of a row in registers
constexpr int norm_max_unpacked = 2048;                        // .. whose length is no multiple of a pack
constexpr int norm_partials = 2 * (norm_threads / warp_size);  // floats of shared memory that norm_row needs
constexpr int norm_long_threads = 512;

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
        const Pack<E> out = norm_apply<Packed>(x[k], mean, rstd, norm, p);
        if (norm.out) row_pack_store<Packed>(norm.out + row * C, p, C, out);
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

// residual [N, C] = a + (b + add_bias [C]) (null: none), out = layer norm of it.
template <class E>
void residual_layernorm_forward(E* residual, E* out, float* mean, float* rstd, const E* a, const E* b,
                                const std::type_identity_t<E>* add_bias, const E* weight, const E* bias, long N, int C, float eps,
                                Stream stream) {
    const ResidualNorm<E> norm = {residual, out, mean, rstd, a, add_bias, weight, bias, C, eps};
    const bool packed = rows_are_packed<E>(out, C) && all_aligned(residual, a, b, add_bias, weight, bias);
    if (packed) layernorm_launch<E, true>(norm, b, N, stream);
    else layernorm_launch<E, false>(norm, b, N, stream);
}

template <class E>
void layernorm_forward(E* out, float* mean, float* rstd, const E* inp, const E* weight, const E* bias, long N, int C, float eps,
                       Stream stream) {
    residual_layernorm_forward<E>(nullptr, out, mean, rstd, nullptr, inp, nullptr, weight, bias, N, C, eps, stream);
}

// --- backward. With h = (x - mean) rstd and g = dout weight:
//
//   dinp += (g - mean(g) - h mean(g h)) rstd,   dweight (+)= sum dout h,   dbias (+)= sum dout
//
// A block takes every gridDim.x-th row and sums its share of dweight and dbias in registers; a second kernel adds the blocks'
// shares in double, in a fixed order: the same bits in every run, on GPUs with as many SMs.

// Two sums over a block, every thread receives both. `partial`: shared memory, one float2 a warp, free again after the caller's
// next barrier.
template <int Threads>
__device__ __forceinline__ float2 block_sum_two(float x, float y, float2* partial) {
    const float2 own = {warp_sum(x), warp_sum(y)};
    if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = own;
    __syncthreads();
    float2 sum = {0, 0};
#pragma unroll
    for (int w = 0; w < Threads / warp_size; w++) {
        sum.x += partial[w].x;
        sum.y += partial[w].y;
    }
    return sum;
}

__device__ __forceinline__ float norm_gradient(float dinp, float g, float h, float g_mean, float gh_mean, float rstd) {
    return fmaf(fmaf(-h, gh_mean, g - g_mean), rstd, dinp);
}

// Blocks an SM that the registers of `values` values a thread allow.
constexpr int norm_backward_blocks(int threads, int values, bool packed) {
    return threads == 128 ? (values <= 8 ? 6 : packed ? 4 : 3) : values <= 16 ? 2 : 1;
}

// shares [gridDim.x, 2, C]: each block's sums for dweight and dbias.
template <class E, int Threads, int Packs, bool Packed>
__global__ void __launch_bounds__(Threads, norm_backward_blocks(Threads, Packs * Pack<E>::size, Packed))
    layernorm_backward_kernel(E* __restrict__ dinp, float* __restrict__ shares, const E* __restrict__ dout,
                              const E* __restrict__ inp, const E* __restrict__ weight, const float* __restrict__ mean,
                              const float* __restrict__ rstd, long N, int C) {
    constexpr int size = Pack<E>::size;
    SHARED_ARRAY(float2, partial, [2][Threads / warp_size]);
    const int thread = int(threadIdx.x);
    Pack<float> dweight[Packs][size / 4] = {}, dbias[Packs][size / 4] = {};
    Pack<E> w[Packs];
#pragma unroll
    for (int k = 0; k < Packs; k++) w[k] = row_pack_load<Packed>(weight, k * Threads + thread, C);
    int turn = 0;  // of the two halves of `partial`
    for (long row = blockIdx.x; row < N; row += gridDim.x, turn ^= 1) {
        Pack<E> d[Packs], x[Packs], dx[Packs];
#pragma unroll
        for (int k = 0; k < Packs; k++) {
            d[k] = row_pack_load<Packed>(dout + row * C, k * Threads + thread, C);
            x[k] = row_pack_load<Packed>(inp + row * C, k * Threads + thread, C);
            dx[k] = row_pack_load<Packed>(dinp + row * C, k * Threads + thread, C);
        }
        const float m = mean[row], r = rstd[row];
        float g_sum = 0, gh_sum = 0;
#pragma unroll
        for (int k = 0; k < Packs; k++) {
#pragma unroll
            for (int e = 0; e < size; e++) {  // beyond the row dout is 0
                const float h = (to_float(x[k][e]) - m) * r, dout_e = to_float(d[k][e]), g = dout_e * to_float(w[k][e]);
                g_sum += g;
                gh_sum = fmaf(g, h, gh_sum);
                dweight[k][e / 4][e % 4] = fmaf(dout_e, h, dweight[k][e / 4][e % 4]);
                dbias[k][e / 4][e % 4] += dout_e;
            }
        }
        const float2 sum = block_sum_two<Threads>(g_sum, gh_sum, partial[turn]);
        const float g_mean = sum.x / float(C), gh_mean = sum.y / float(C);
#pragma unroll
        for (int k = 0; k < Packs; k++) {
#pragma unroll
            for (int e = 0; e < size; e++) {
                const float h = (to_float(x[k][e]) - m) * r, g = to_float(d[k][e]) * to_float(w[k][e]);
                dx[k][e] = from_float<E>(norm_gradient(to_float(dx[k][e]), g, h, g_mean, gh_mean, r));
            }
            row_pack_store<Packed>(dinp + row * C, k * Threads + thread, C, dx[k]);
        }
    }
    float* share = shares + long(blockIdx.x) * 2 * C;
#pragma unroll
    for (int k = 0; k < Packs; k++) {
#pragma unroll
        for (int part = 0; part < size / 4; part++) {
            const int p = (k * Threads + thread) * (size / 4) + part;
            row_pack_store<Packed>(share, p, C, dweight[k][part]);
            row_pack_store<Packed>(share + C, p, C, dbias[k][part]);
        }
    }
}

// Rows of any length: packs are read twice, and the block's sums are in memory, each of them one thread's own.
template <class E, bool Packed>
__global__ void __launch_bounds__(norm_long_threads, 2)
    layernorm_backward_long_kernel(E* __restrict__ dinp, float* __restrict__ shares, const E* __restrict__ dout,
                                   const E* __restrict__ inp, const E* __restrict__ weight, const float* __restrict__ mean,
                                   const float* __restrict__ rstd, long N, int C) {
    constexpr int size = Pack<E>::size, threads = norm_long_threads;
    SHARED_ARRAY(float2, partial, [2][threads / warp_size]);
    const int packs = ceil_div(C, size);
    float *dweight = shares + long(blockIdx.x) * 2 * C, *dbias = dweight + C;
    int turn = 0;
    for (long row = blockIdx.x; row < N; row += gridDim.x, turn ^= 1) {
        const float m = mean[row], r = rstd[row];
        float g_sum = 0, gh_sum = 0;
        for (int p = int(threadIdx.x); p < packs; p += threads) {
            const Pack<E> d = row_pack_load<Packed>(dout + row * C, p, C), x = row_pack_load<Packed>(inp + row * C, p, C);
            const Pack<E> w = row_pack_load<Packed>(weight, p, C);
#pragma unroll
            for (int e = 0; e < size; e++) {
                const float g = to_float(d[e]) * to_float(w[e]);
                g_sum += g;
                gh_sum = fmaf(g, (to_float(x[e]) - m) * r, gh_sum);
            }
        }
        const float2 sum = block_sum_two<threads>(g_sum, gh_sum, partial[turn]);
        const float g_mean = sum.x / float(C), gh_mean = sum.y / float(C);
        const bool first = row == long(blockIdx.x);
        for (int p = int(threadIdx.x); p < packs; p += threads) {
            const Pack<E> d = row_pack_load<Packed>(dout + row * C, p, C), x = row_pack_load<Packed>(inp + row * C, p, C);
            const Pack<E> w = row_pack_load<Packed>(weight, p, C);
            Pack<E> dx = row_pack_load<Packed>(dinp + row * C, p, C);
            for (int e = 0; e < size && p * size + e < C; e++) {
                const float h = (to_float(x[e]) - m) * r, dout_e = to_float(d[e]);
                const int j = p * size + e;
                dx[e] = from_float<E>(norm_gradient(to_float(dx[e]), dout_e * to_float(w[e]), h, g_mean, gh_mean, r));
                dweight[j] = fmaf(dout_e, h, first ? 0.0f : dweight[j]);
                dbias[j] = dout_e + (first ? 0.0f : dbias[j]);
            }
            row_pack_store<Packed>(dinp + row * C, p, C, dx);
        }
    }
}

// dweight and dbias [C] (+)= shares [blocks, 2, C] summed over blocks. A block of threads has 32 columns; warp w sums the
// shares w, w + warps, .. and the warps' sums are added in order.
template <int Threads>
__global__ void __launch_bounds__(Threads, 2)
    layernorm_fold_kernel(float* __restrict__ dweight, float* __restrict__ dbias, const float* __restrict__ shares, int blocks,
                          int C, bool accumulate) {
    constexpr int warps = Threads / warp_size;
    SHARED_ARRAY(double, sums, [warps][warp_size]);
    const int warp = int(threadIdx.x) / warp_size, lane = int(threadIdx.x) % warp_size;
    const int column = int(blockIdx.x) * warp_size + lane;
    double sum = 0;
    if (column < 2 * C) {
#pragma unroll 4
        for (int b = warp; b < blocks; b += warps) sum += double(shares[long(b) * 2 * C + column]);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < 2 * C) {
        float* to = column < C ? dweight + column : dbias + (column - C);
        double total = accumulate ? double(*to) : 0.0;
        for (int w = 0; w < warps; w++) total += sums[w][lane];
        *to = float(total);
    }
}

template <class E, bool Packed>
void layernorm_backward_launch(E* dinp, float* dweight, float* dbias, const E* dout, const E* inp, const E* weight,
                               const float* mean, const float* rstd, long N, int C, bool accumulate, Stream stream) {
    const long multiprocessors = stream.device->properties.multiProcessorCount;
    const auto run = [&](auto kernel, int threads, int blocks_each) {
        const int blocks = int(std::min(N, multiprocessors * blocks_each));
        Scratch<float> shares(size_t(std::max(1, blocks)) * 2 * C, stream);
        if (N > 0) {
            launch(kernel, dim3(unsigned(blocks)), threads, 0, stream, dinp, shares.data, dout, inp, weight, mean, rstd, N, C);
        }
        constexpr int fold_threads = 512;
        launch(layernorm_fold_kernel<fold_threads>, dim3(unsigned(ceil_div(2 * C, warp_size))), fold_threads, 0, stream, dweight,
               dbias, shares.data, blocks, C, accumulate);
    };
    const auto run_in_registers = [&](auto threads, auto values) {
        constexpr int Threads = threads(), Values = values();
        run(layernorm_backward_kernel<E, Threads, Values / Pack<E>::size, Packed>, Threads,
            norm_backward_blocks(Threads, Values, Packed));
    };
    constexpr std::integral_constant<int, 128> narrow;
    constexpr std::integral_constant<int, 256> wide;
    if (C <= 1024) return run_in_registers(narrow, std::integral_constant<int, 8>());
    if (C <= 2048) return run_in_registers(narrow, std::integral_constant<int, 16>());
    if constexpr (Packed) {
        if (C <= 4096) return run_in_registers(wide, std::integral_constant<int, 16>());
        if (C <= 8192) return run_in_registers(wide, std::integral_constant<int, 32>());
    }
    run(layernorm_backward_long_kernel<E, Packed>, norm_long_threads, 2);
}

template <class E>
void layernorm_backward(E* dinp, float* dweight, float* dbias, const E* dout, const E* inp, const E* weight, const float* mean,
                        const float* rstd, long N, int C, bool accumulate, Stream stream) {
    if (rows_are_packed<E>(dinp, C) && all_aligned(dout, inp, weight)) {
        layernorm_backward_launch<E, true>(dinp, dweight, dbias, dout, inp, weight, mean, rstd, N, C, accumulate, stream);
    } else {
        layernorm_backward_launch<E, false>(dinp, dweight, dbias, dout, inp, weight, mean, rstd, N, C, accumulate, stream);
    }
}

}  // namespace cuda
