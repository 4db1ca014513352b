// Sweeps over arrays: a thread takes a few elements next to each other, in accesses of 128 bits where all arrays are aligned to
// them, one by one elsewhere and in the tail.
#pragma once
#include <algorithm>

#include "llmc/cuda/row.cuh"

namespace cuda {

constexpr int sweep_threads = 256;

// Elements a thread: as many as 128 bits hold of the smallest type, so that a float array beside is two packs or one.
template <class... E>
constexpr int sweep_width = 16 / std::min({int(sizeof(E))...});

// x [Width] = from[first ..]; elements from n on are 0. `whole`: all are there, and `from + first` is aligned to 16 bytes.
template <int Width, class E>
__device__ __forceinline__ void sweep_load(float (&x)[Width], const E* from, size_t first, size_t n, bool whole) {
    if (whole) {
        Pack<E> packs[Width / Pack<E>::size];
#pragma unroll
        for (int k = 0; k < Width / Pack<E>::size; k++) packs[k] = pack_load(from + first + k * Pack<E>::size);
#pragma unroll
        for (int e = 0; e < Width; e++) x[e] = to_float(packs[e / Pack<E>::size][e % Pack<E>::size]);
    } else {
#pragma unroll
        for (int e = 0; e < Width; e++) x[e] = first + e < n ? to_float(from[first + e]) : 0.0f;
    }
}

template <int Width, class E>
__device__ __forceinline__ void sweep_store(E* to, const E (&x)[Width], size_t first, size_t n, bool whole) {
    if (whole) {
#pragma unroll
        for (int k = 0; k < Width / Pack<E>::size; k++) {
            Pack<E> pack;
#pragma unroll
            for (int e = 0; e < Pack<E>::size; e++) pack[e] = x[k * Pack<E>::size + e];
            pack_store(to + first + k * Pack<E>::size, pack);
        }
    } else {
#pragma unroll
        for (int e = 0; e < Width; e++) {
            if (first + e < n) to[first + e] = x[e];
        }
    }
}

// out[i] = rounded op(inp[i] ..); out may be one of the inputs.
template <class Op, class Out, class... In>
__global__ void __launch_bounds__(sweep_threads, 6) sweep_kernel(Out* out, const In*... inp, size_t n, bool aligned) {
    constexpr int width = sweep_width<Out, In...>;
    const size_t first = (size_t(blockIdx.x) * sweep_threads + threadIdx.x) * width;
    if (first >= n) return;
    const bool whole = aligned && first + width <= n;
    float x[sizeof...(In)][width];
    int array = 0;
    (sweep_load(x[array++], inp, first, n, whole), ...);
    Out result[width];
#pragma unroll
    for (int e = 0; e < width; e++) {
        if constexpr (sizeof...(In) == 1) result[e] = from_float<Out>(Op::apply(x[0][e]));
        else result[e] = from_float<Out>(Op::apply(x[0][e], x[1][e]));
    }
    sweep_store(out, result, first, n, whole);
}

template <class Op, class Out, class... In>
void sweep(Out* out, size_t n, Stream stream, const In*... inp) {
    if (n == 0) return;
    const size_t blocks = ceil_div(n, size_t(sweep_threads) * sweep_width<Out, In...>);
    launch(sweep_kernel<Op, Out, In...>, dim3(unsigned(blocks)), sweep_threads, 0, stream, out, inp..., n,
           all_aligned(out, inp...));
}

}  // namespace cuda
