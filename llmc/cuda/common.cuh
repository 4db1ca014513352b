// What all kernels share: launching, shared memory, 128-bit packs, sums over warps and blocks.
//
// Kernels are launched by `launch`, and shared memory is declared by two macros, because the same source also runs in the
// emulator (dev/emu), whose host compiler knows neither <<<>>> nor __shared__.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "llmc/cuda/device.cuh"
#include "llmc/dtype.h"

#ifdef CUDA_EMU
#define SHARED_ARRAY(T, name, ...) EMU_SHARED_ARRAY(T, name, __VA_ARGS__)
#define SHARED_DYNAMIC(T, name) EMU_SHARED_DYNAMIC(T, name)
#else
#define SHARED_ARRAY(T, name, ...) __shared__ __align__(16) T name __VA_ARGS__
#define SHARED_DYNAMIC(T, name)                                            \
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[]; \
    T* name = reinterpret_cast<T*>(dynamic_shared_memory)
#endif

namespace cuda {

// Puts a kernel on a stream. `dynamic_shared` in bytes.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t dynamic_shared, Stream stream, A... args) {
    if (dynamic_shared > 48 * 1024) {
        cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        int(dynamic_shared)),
                   "cudaFuncSetAttribute");
    }
#ifdef CUDA_EMU
    emu::launch(kernel, grid, block, dynamic_shared, stream.handle, P(args)...);
#else
    kernel<<<grid, block, dynamic_shared, stream.handle>>>(P(args)...);
    cuda_check(cudaGetLastError(), "the launch of a kernel");
#endif
}

constexpr int warp_size = 32;
constexpr unsigned full_warp = 0xffffffffu;

template <class I>
__host__ __device__ constexpr I ceil_div(I a, I b) {
    return (a + b - 1) / b;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

// Rounds to nearest even: from_float<E>(x).
template <class E>
__device__ __forceinline__ E from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
    return __float2half_rn(x);
}

// 128 bits of E, moved by one instruction; the address is a multiple of 16.
template <class E>
struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(E);
    E at[size];

    __device__ __forceinline__ E& operator[](int i) { return at[i]; }
    __device__ __forceinline__ const E& operator[](int i) const { return at[i]; }
};

template <class E>
__device__ __forceinline__ Pack<E> pack_load(const E* from) {
    Pack<E> pack;
    *reinterpret_cast<uint4*>(pack.at) = *reinterpret_cast<const uint4*>(from);
    return pack;
}

// For data that is read once: not kept in the caches.
template <class E>
__device__ __forceinline__ Pack<E> pack_load_once(const E* from) {
    Pack<E> pack;
    *reinterpret_cast<uint4*>(pack.at) = __ldcs(reinterpret_cast<const uint4*>(from));
    return pack;
}

template <class E>
__device__ __forceinline__ void pack_store(E* to, const Pack<E>& pack) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pack.at);
}

// Whether rows of `columns` E, from an aligned base, start at multiples of 16 bytes: then packs may be used.
template <class E>
bool rows_are_packed(const void* base, long columns) {
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && columns * long(sizeof(E)) % 16 == 0;
}

// Over the 32 lanes, in a fixed tree; every lane receives it.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_warp, x, offset);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = warp_size / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(full_warp, x, offset));
    return x;
}

// Over a block of Threads threads, every one of which calls it and receives the sum. `partial` is shared memory of one
// float a warp, free again after the caller's next barrier.
template <int Threads>
__device__ __forceinline__ float block_sum(float x, float* partial) {
    constexpr int warps = Threads / warp_size;
    static_assert(Threads % warp_size == 0 && warps <= warp_size);
    x = warp_sum(x);
    if (threadIdx.x % warp_size == 0) partial[threadIdx.x / warp_size] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < warps; w++) sum += partial[w];
    return sum;
}

}  // namespace cuda
