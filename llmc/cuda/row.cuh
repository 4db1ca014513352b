// Rows of C values in packs of 128 bits: any C, any alignment.
#pragma once
#include "llmc/cuda/common.cuh"

namespace cuda {

// To 16 bytes; null is.
template <class... Pointers>
bool all_aligned(const Pointers*... pointers) {
    return (reinterpret_cast<uintptr_t>(pointers) | ...) % 16 == 0;
}

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

}  // namespace cuda
