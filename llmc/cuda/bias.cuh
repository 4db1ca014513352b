// Biases beside a matmul: the gradient, which is a sum over rows, and rows that begin as the bias.
//
// Sums are in float32 and in a fixed order: a block sums a range of rows of 8 packs of columns (128 bytes), in 32 partial sums
// that are added at the end; where one range is not enough to fill the GPU, the same kernel then sums the ranges' sums. Reads
// dout once, and is bound by that.
#pragma once
#include <algorithm>

#include "llmc/cuda/row.cuh"

namespace cuda {

constexpr int bias_threads = 256, bias_blocks = 5 /* an SM */, bias_packs = 8, bias_rows = bias_threads / bias_packs;

// sums [gridDim.y, C] (+)= the sum of rows_each rows of x [N, C].
template <class E, bool Packed>
__global__ void __launch_bounds__(bias_threads, bias_blocks)
    bias_backward_kernel(float* __restrict__ sums, const E* __restrict__ x, long N, int C, long rows_each, bool accumulate) {
    constexpr int size = Pack<E>::size, columns = bias_packs * size;
    SHARED_ARRAY(float, partial, [bias_rows][columns + 4]);
    const int thread = int(threadIdx.x), part = thread / bias_packs, own = thread % bias_packs;
    const int p = int(blockIdx.x) * bias_packs + own;
    const long begin = long(blockIdx.y) * rows_each, end = begin + rows_each < N ? begin + rows_each : N;
    float sum[size] = {};
#pragma unroll(Packed ? 4 : 2)
    for (long row = begin + part; row < end; row += bias_rows) {
        const Pack<E> pack = row_pack_load<Packed>(x + row * C, p, C);
#pragma unroll
        for (int e = 0; e < size; e++) sum[e] += to_float(pack[e]);
    }
#pragma unroll
    for (int e = 0; e < size; e++) partial[part][own * size + e] = sum[e];
    __syncthreads();
    const int column = int(blockIdx.x) * columns + thread;
    if (thread < columns && column < C) {
        float* to = sums + long(blockIdx.y) * C + column;
        float total = accumulate ? *to : 0.0f;
#pragma unroll
        for (int i = 0; i < bias_rows; i++) total += partial[i][thread];
        *to = total;
    }
}

template <class E>
void bias_backward_launch(float* sums, const E* x, long N, int C, int ranges, bool accumulate, Stream stream) {
    const dim3 grid(unsigned(ceil_div(C, bias_packs * Pack<E>::size)), unsigned(ranges));
    const auto kernel = rows_are_packed<E>(x, C) ? bias_backward_kernel<E, true> : bias_backward_kernel<E, false>;
    launch(kernel, grid, bias_threads, 0, stream, sums, x, N, C, ceil_div(N, long(ranges)), accumulate);
}

// dbias [C] (+)= the sum of the rows of dout [N, C].
template <class E>
void bias_backward(float* dbias, const E* dout, long N, int C, bool accumulate, Stream stream) {
    constexpr long least_rows = 4 * bias_rows;  // of a range: shorter ones cost more to add up than they gain
    const int wide = ceil_div(C, bias_packs * Pack<E>::size);
    const long fill = ceil_div(stream.device->properties.multiProcessorCount * bias_blocks, wide);
    const int ranges = int(std::clamp(N / least_rows, 1l, fill));
    if (ranges == 1) return bias_backward_launch(dbias, dout, N, C, 1, accumulate, stream);
    const Scratch<float> sums(size_t(ranges) * C, stream);
    bias_backward_launch(sums.data, dout, N, C, ranges, false, stream);
    bias_backward_launch<float>(dbias, sums.data, ranges, C, 1, accumulate, stream);
}

template <class E, bool Packed>
__global__ void __launch_bounds__(bias_threads, 8)
    bias_fill_kernel(E* __restrict__ out, const E* __restrict__ bias, long N, int C) {
    const int packs = ceil_div(C, Pack<E>::size);
    const long i = long(blockIdx.x) * bias_threads + threadIdx.x, row = i / packs;
    const int p = int(i % packs);
    if (row < N) row_pack_store<Packed>(out + row * C, p, C, row_pack_load<Packed>(bias, p, C));
}

// Every row of out [N, C] becomes bias [C]: for a product that is added to it.
template <class E>
void bias_fill(E* out, const E* bias, long N, int C, Stream stream) {
    const long blocks = ceil_div(N * ceil_div(C, Pack<E>::size), long(bias_threads));
    const auto kernel = rows_are_packed<E>(out, C) && all_aligned(bias) ? bias_fill_kernel<E, true> : bias_fill_kernel<E, false>;
    launch(kernel, dim3(unsigned(blocks)), bias_threads, 0, stream, out, bias, N, C);
}

}  // namespace cuda
