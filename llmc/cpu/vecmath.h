// Arithmetic that the compiler turns into vectors: exp, gelu and sums in lanes. Scalar functions without branches; loops
// around them are marked `#pragma omp simd`. They are the same bits on every CPU: FMAs are written out.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace cpu {

// e^x, relative error below 1.2e-7; 0 below -87.33 (no subnormal results), inf above 88.72, NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a minimax polynomial (Cephes' expf), n added to the exponent.
inline float exp_fast(float x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const float shifted = std::fma(x, 1.44269504f, shift);
    const float n = shifted - shift;
    const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r) + 1.0f;
    const float y = std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
    const float above = x <= 88.72f ? y : x * INFINITY;
    return x < -87.33f ? 0.0f : above;
}

// Calls element(first), .. element(end - 1), in vectors, on elements of `arrays`, whose memory is asked for 2 KB ahead: what
// is far from the core comes too late otherwise (gelu's backward took three times as long).
template <class F, class... T>
inline void vector_sweep(size_t first, size_t end, F element, const T*... arrays) {
    constexpr size_t block = 64, ahead = 512, cache_line = 16;
    for (size_t i = first; i < end; i += block) {
        const size_t stop = std::min(end, i + block);
        for (size_t k = i; k < stop; k += cache_line) (__builtin_prefetch(arrays + k + ahead), ...);
#pragma omp simd
        for (size_t k = i; k < stop; k++) element(k);
    }
}

// The same for 0 .. n - 1, on all threads.
template <class F, class... T>
inline void parallel_sweep(size_t n, F element, const T*... arrays) {
    constexpr size_t piece = 4096;
#pragma omp parallel for schedule(static) if (n > piece)
    for (size_t first = 0; first < n; first += piece) vector_sweep(first, std::min(n, first + piece), element, arrays...);
}

// value(0), .. value(n - 1) are folded by `join` into lanes, and the lanes in halves: a fixed order.
template <class F, class Join>
inline float lanes_fold(int n, float start, F value, Join join) {
    constexpr int lanes = 32;
    float lane[lanes];
    std::fill_n(lane, lanes, start);
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
#pragma omp simd
        for (int k = 0; k < lanes; k++) lane[k] = join(lane[k], value(i + k));
    }
    for (int k = 0; i < n; i++, k++) lane[k] = join(lane[k], value(i));
    for (int half = lanes / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) lane[k] = join(lane[k], lane[k + half]);
    }
    return lane[0];
}

template <class F>
inline float lanes_sum(int n, F value) {
    return lanes_fold(n, 0.0f, value, [](float a, float b) { return a + b; });
}

// NaNs are passed over; -inf where there is nothing else.
template <class F>
inline float lanes_max(int n, F value) {
    return lanes_fold(n, -INFINITY, value, [](float a, float b) { return b > a ? b : a; });
}

}  // namespace cpu
