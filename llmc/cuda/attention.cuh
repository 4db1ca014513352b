// Causal attention without a T x T matrix (FlashAttention, Dao et al. 2022, arXiv:2205.14135).
//
//   S = Q K^T / sqrt(HS), P = softmax(S) over the keys up to the query, out = P V, lse = log of the sum of exp(S)
//   dV = P^T dout, dP = dout V^T, dS = P (dP - D) / sqrt(HS), D = rowsum(dout out), dQ = dS K, dK = dS^T Q
//
// qkv [B, T, (NH + 2 NKV) HS], a row is q | k | v; out, dout [B, T, NH HS]; lse [B, NH, T] float. NKV divides NH: query heads
// share a key head in runs of NH / NKV. Any T and B. 16-bit types with HS a multiple of 8 up to 128 go to tensor cores
// (attention_mma.cuh), the rest does not (attention_simt.cuh). Work, with N = B NH T (T + 1) / 2 pairs of query and key:
//   forward            4 N HS FLOPs                     reads qkv, writes out and lse
//   backward: D                                         reads dout and out
//             dK, dV   8 N HS (S and dP are made here   reads qkv, dout, lse, D, writes dK and dV
//             dQ       6 N HS  and here)                reads qkv, dout, lse, D, writes dQ
#pragma once
#include <type_traits>

#include "llmc/cuda/attention_mma.cuh"
#include "llmc/cuda/attention_simt.cuh"

namespace cuda {

inline AttentionShape attention_shape(int B, int T, int NH, int NKV, int HS) {
    check(B > 0 && T > 0 && NH > 0 && NKV > 0 && HS > 0 && NH % NKV == 0,
          "attention: B %d, T %d, NH %d, NKV %d, HS %d: all must be positive and NKV must divide NH", B, T, NH, NKV, HS);
    return {B, T, NH, NKV, HS};
}

// Calls mma(std::integral_constant<int, Width>()) or, where tensor cores do not fit, simt(std::integral_constant<int, Tile>()).
template <class E, class Mma, class Simt, class... Pointers>
void attention_dispatch(int HS, Mma mma, Simt simt, const Pointers*... pointers) {
    if constexpr (!std::is_same_v<E, float>) {
        if (HS % mma_columns == 0 && HS <= 128 && (uintptr_t(pointers) | ...) % 16 == 0) {
            if (HS <= 32) mma(std::integral_constant<int, 32>());
            else if (HS <= 64) mma(std::integral_constant<int, 64>());
            else if (HS <= 96) mma(std::integral_constant<int, 96>());
            else mma(std::integral_constant<int, 128>());
            return;
        }
    }
    if (HS <= 64) simt(std::integral_constant<int, 32>());
    else simt(std::integral_constant<int, 16>());
}

template <class E>
void attention_forward(E* out, float* lse, const E* qkv, int B, int T, int NH, int NKV, int HS, Stream stream) {
    const AttentionShape s = attention_shape(B, T, NH, NKV, HS);
    attention_dispatch<E>(
        HS, [&](auto width) { attention_forward_mma_launch<E, decltype(width)::value>(out, lse, qkv, s, stream); },
        [&](auto tile) { attention_forward_simt_launch<E, decltype(tile)::value>(out, lse, qkv, s, stream); }, out, qkv);
}

template <class E>
void attention_backward(E* dqkv, const E* dout, const E* out, const float* lse, const E* qkv, int B, int T, int NH, int NKV, int HS,
                        Stream stream) {
    const AttentionShape s = attention_shape(B, T, NH, NKV, HS);
    const Scratch<AttentionStatistic> statistics(size_t(B) * size_t(NH) * size_t(T), stream);
    const dim3 blocks = unsigned(ceil_div(long(B) * T * NH * 8, long(attention_threads)));
    const bool packed = rows_are_packed<E>(dout, HS) && rows_are_packed<E>(out, HS);
    launch(packed ? attention_statistics<E, true> : attention_statistics<E, false>, blocks, attention_threads, 0, stream,
           statistics.data, lse, dout, out, s);
    attention_dispatch<E>(
        HS,
        [&](auto width) {
            attention_backward_mma_launch<E, decltype(width)::value>(dqkv, dout, statistics.data, qkv, s, stream);
        },
        [&](auto tile) {
            attention_backward_simt_launch<E, decltype(tile)::value>(dqkv, dout, statistics.data, qkv, s, stream);
        },
        dqkv, dout, qkv);
}

}  // namespace cuda
