// Instructions that CUDA C++ has no name for: tensor cores, ldmatrix, cp.async, the fast 2^x. All inline PTX is here.
//
// Fragments of mma.m16n8k16, D [16, 8] = A [16, 16] B [16, 8] + C [16, 8]; lane l has g = l / 4 and t = 2 (l % 4):
//   a[0] A[g][t, t+1]   a[1] A[g+8][t, t+1]   a[2] A[g][t+8, t+9]   a[3] A[g+8][t+8, t+9]     (low half, high half)
//   b[0] B[t, t+1][g]   b[1] B[t+8, t+9][g]
//   c, d: [0] C[g][t]   [1] C[g][t+1]   [2] C[g+8][t]   [3] C[g+8][t+1]
// ldmatrix: lanes 8 i .. 8 i + 7 give the addresses of the rows (8 elements, 16 bytes) of matrix i, and r[i] is elements
// [g][t, t+1] of it, or with _trans of its transpose. Two accumulators side by side, rounded, are an A fragment as they are.
#pragma once
#include <cstdint>
#include <type_traits>

#include "llmc/dtype.h"

#ifdef CUDA_EMU
#include <cmath>

#include "emu_ptx.h"

namespace cuda {

using emu::cp_async_16;
using emu::cp_async_8;
using emu::cp_async_commit;
using emu::cp_async_wait;
using emu::ldmatrix_x4;
using emu::ldmatrix_x4_trans;
using emu::mma_m16n8k16;
inline float exp2_approximate(float x) { return std::exp2(x); }

}  // namespace cuda
#else

namespace cuda {

// d = a b + c, E bf16 or fp16, sums in float. Whole warps.
template <class E>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
    static_assert(std::is_same_v<E, bf16> || std::is_same_v<E, fp16>);
    if constexpr (std::is_same_v<E, bf16>) {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    } else {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

// "memory": not to be moved before the barrier that makes the rows visible.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

// Copies `bytes` from global to 16 or 8 bytes of shared memory, the rest zeros; both addresses multiples of 16 or 8. It has
// landed, for the thread that asked, after cp_async_wait; for others after the barrier that follows.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_8(void* shared, const void* global, int bytes = 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most N of this thread's committed groups are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 2^x to 2 units in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace cuda
#endif
