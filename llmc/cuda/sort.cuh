// Stable sort of N small keys with their positions: least significant digit first, 8 bits a pass, as many passes as the largest
// key has bytes. A block has 1024 keys, in order. Per pass one kernel counts the digits of each block, and one finds from all
// blocks' counts where each key goes. Integer atomics only count, so nothing depends on their order.
#pragma once
#include <utility>

#include "llmc/cuda/common.cuh"

namespace cuda {

struct SortItem {
    int key;
    int position;  // 0 .. N - 1, where the key stood
};

constexpr int sort_threads = 256, sort_warps = sort_threads / warp_size;
constexpr int sort_rounds = 4;  // keys a thread
constexpr int sort_keys = sort_threads * sort_rounds;
constexpr int sort_digits = 256;
static_assert(sort_threads == sort_digits, "a thread has a digit");

// Warps have stretches of 32 x rounds keys, in order: round r of a lane.
__device__ __forceinline__ int sort_index(int round) {
    return int(blockIdx.x) * sort_keys + (int(threadIdx.x) / warp_size * sort_rounds + round) * warp_size +
           int(threadIdx.x) % warp_size;
}

// counts [gridDim.x, 256]
template <class Load>
__global__ void __launch_bounds__(sort_threads, 4) sort_count_kernel(int* __restrict__ counts, Load load, int n, int shift) {
    SHARED_ARRAY(int, count, [sort_digits]);
    count[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < sort_rounds; r++) {
        const int i = sort_index(r);
        if (i < n) atomicAdd(&count[load(i).key >> shift & (sort_digits - 1)], 1);
    }
    __syncthreads();
    counts[blockIdx.x * sort_digits + threadIdx.x] = count[threadIdx.x];
}

// Exclusive sums of x over the threads of a block of 256, in their order. `partial`: shared memory, [warps].
__device__ __forceinline__ int sort_scan(int x, int* partial) {
    const int lane = int(threadIdx.x) % warp_size, warp = int(threadIdx.x) / warp_size;
    int sum = x;
#pragma unroll
    for (int offset = 1; offset < warp_size; offset *= 2) {
        const int below = __shfl_up_sync(full_warp, sum, offset);
        if (lane >= offset) sum += below;
    }
    if (lane == warp_size - 1) partial[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += partial[w];
    return sum - x;
}

// A key goes behind all smaller digits, behind its own digit in earlier blocks, in earlier warps and in earlier rounds and lanes.
template <class Load>
__global__ void __launch_bounds__(sort_threads, 4)
    sort_scatter_kernel(SortItem* __restrict__ to, const int* __restrict__ counts, Load load, int n, int shift) {
    SHARED_ARRAY(int, next, [sort_warps][sort_digits]);  // first counts, then places
    SHARED_ARRAY(int, partial, [sort_warps]);
    const int thread = int(threadIdx.x), warp = thread / warp_size, lane = thread % warp_size;
    for (int w = 0; w < sort_warps; w++) next[w][thread] = 0;
    int total = 0, before = 0;  // of digit `thread`, in all blocks and in earlier ones
#pragma unroll 8
    for (int b = 0; b < int(gridDim.x); b++) {
        const int count = counts[b * sort_digits + thread];
        total += count;
        before += b < int(blockIdx.x) ? count : 0;
    }
    before += sort_scan(total, partial);  // has a barrier: `next` is 0 everywhere
    SortItem item[sort_rounds];
    int rank[sort_rounds];
#pragma unroll
    for (int r = 0; r < sort_rounds; r++) {
        const int i = sort_index(r);
        item[r] = i < n ? load(i) : SortItem{-1, -1};
        // lanes of the same digit; those beyond n have none
        const int digit = item[r].key >> shift & (sort_digits - 1);
        unsigned same = __ballot_sync(full_warp, i < n);
#pragma unroll
        for (int bit = 1; bit < sort_digits; bit *= 2) {
            const unsigned ones = __ballot_sync(full_warp, (digit & bit) != 0);
            same &= digit & bit ? ones : ~ones;
        }
        const unsigned earlier = same & ((1u << lane) - 1);
        if (i < n) rank[r] = next[warp][digit] + __popc(earlier);
        __syncwarp();
        if (i < n && earlier == 0) next[warp][digit] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int w = 0; w < sort_warps; w++) {
        const int count = next[w][thread];
        next[w][thread] = before;
        before += count;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < sort_rounds; r++) {
        if (sort_index(r) < n) to[next[warp][item[r].key >> shift & (sort_digits - 1)] + rank[r]] = item[r];
    }
}

struct SortLoad {
    const SortItem* from;
    __device__ __forceinline__ SortItem operator()(int i) const { return from[i]; }
};

// items [2, n] and counts [sort_count_size(n)] are the sort's memory. Keys are key(i).key, 0 .. max_key, with position i.
// Returns where in `items` they are sorted.
inline size_t sort_count_size(int n) { return size_t(ceil_div(n, sort_keys)) * sort_digits; }

template <class Load>
const SortItem* sort(SortItem* items, int* counts, Load key, int n, int max_key, Stream stream) {
    const dim3 blocks = unsigned(ceil_div(n, sort_keys));
    const auto pass = [&](SortItem* to, auto load, int shift) {
        launch(sort_count_kernel<decltype(load)>, blocks, sort_threads, 0, stream, counts, load, n, shift);
        launch(sort_scatter_kernel<decltype(load)>, blocks, sort_threads, 0, stream, to, counts, load, n, shift);
    };
    SortItem *to = items, *other = items + n;
    pass(to, key, 0);
    for (int shift = 8; max_key >> shift != 0; shift += 8) {
        pass(other, SortLoad{to}, shift);
        std::swap(to, other);
    }
    return to;
}

}  // namespace cuda
