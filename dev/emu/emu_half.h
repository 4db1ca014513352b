// 16-bit floats: a value, pairs of them and their arithmetic, for any format that converts to and from float.
//
// An operation is done in float and rounded once more. Float has more than twice the digits and two, so that is the correctly
// rounded result of +, -, *, / (Figueroa 1995), as from the GPU's own 16-bit units.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "emu_vector.h"

namespace emu {

// bfloat16: the upper half of a float.
struct Bf16Format {
    static uint16_t from_float(float x) {  // to nearest even; every NaN becomes 0x7fff
        const uint32_t bits = std::bit_cast<uint32_t>(x);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
        return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
    static uint16_t from_float_to_zero(float x) {
        const uint32_t bits = std::bit_cast<uint32_t>(x);
        return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : uint16_t(bits >> 16);
    }
    static float to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

// IEEE half: 5 bits of exponent, 10 of mantissa.
struct Fp16Format {
    static uint16_t from_float(float x) {
        const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffffu;
        if (size > 0x7f800000u) return 0x7fff;
        if (size >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // from 65520 on: infinity
        if (size < 0x38800000u) {  // below 2^-14 the spacing is 2^-24, that of floats from 0.5 on
            const float sum = std::bit_cast<float>(size) + 0.5f;
            return uint16_t(sign | (std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f)));
        }
        return uint16_t(sign | (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13);
    }
    static float to_float(uint16_t bits) {
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, size = bits & 0x7fff;
        if (size > 0x7c00) return std::bit_cast<float>(0x7fffffffu);
        if (size == 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u);
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(size << 13) * 0x1p112f));
    }
};

template <class Format>
struct RawFloat16 {
    unsigned short x;
};

template <class Format>
struct alignas(4) RawFloat16x2 {
    unsigned short x, y;
};

template <class Format>
struct Float16 {
    unsigned short bits;

    Float16() = default;
    Float16(const RawFloat16<Format>& raw) : bits(raw.x) {}
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    Float16(T x) : bits(Format::from_float(float(x))) {}

    operator float() const { return Format::to_float(bits); }
    operator RawFloat16<Format>() const { return {bits}; }

    friend Float16 operator+(Float16 a, Float16 b) { return float(a) + float(b); }
    friend Float16 operator-(Float16 a, Float16 b) { return float(a) - float(b); }
    friend Float16 operator*(Float16 a, Float16 b) { return float(a) * float(b); }
    friend Float16 operator/(Float16 a, Float16 b) { return float(a) / float(b); }
    friend Float16 operator-(Float16 a) { return RawFloat16<Format>{static_cast<unsigned short>(a.bits ^ 0x8000)}; }
    friend Float16& operator+=(Float16& a, Float16 b) { return a = a + b; }
    friend Float16& operator-=(Float16& a, Float16 b) { return a = a - b; }
    friend Float16& operator*=(Float16& a, Float16 b) { return a = a * b; }
    friend Float16& operator/=(Float16& a, Float16 b) { return a = a / b; }
    friend bool operator==(Float16 a, Float16 b) { return float(a) == float(b); }
    friend bool operator!=(Float16 a, Float16 b) { return float(a) != float(b); }
    friend bool operator<(Float16 a, Float16 b) { return float(a) < float(b); }
    friend bool operator>(Float16 a, Float16 b) { return float(a) > float(b); }
    friend bool operator<=(Float16 a, Float16 b) { return float(a) <= float(b); }
    friend bool operator>=(Float16 a, Float16 b) { return float(a) >= float(b); }
};

template <class Format>
struct alignas(4) Float16x2 {
    Float16<Format> x, y;

    Float16x2() = default;
    Float16x2(Float16<Format> x, Float16<Format> y) : x(x), y(y) {}
    Float16x2(const RawFloat16x2<Format>& raw) : x(RawFloat16<Format>{raw.x}), y(RawFloat16<Format>{raw.y}) {}

    friend Float16x2 operator+(Float16x2 a, Float16x2 b) { return {a.x + b.x, a.y + b.y}; }
    friend Float16x2 operator-(Float16x2 a, Float16x2 b) { return {a.x - b.x, a.y - b.y}; }
    friend Float16x2 operator*(Float16x2 a, Float16x2 b) { return {a.x * b.x, a.y * b.y}; }
};

}  // namespace emu

// --- CUDA's functions that have one name for both formats

#define EMU_EACH_FORMAT template <class F> inline
EMU_EACH_FORMAT emu::Float16<F> __hadd(emu::Float16<F> a, emu::Float16<F> b) { return a + b; }
EMU_EACH_FORMAT emu::Float16<F> __hsub(emu::Float16<F> a, emu::Float16<F> b) { return a - b; }
EMU_EACH_FORMAT emu::Float16<F> __hmul(emu::Float16<F> a, emu::Float16<F> b) { return a * b; }
EMU_EACH_FORMAT emu::Float16<F> __hdiv(emu::Float16<F> a, emu::Float16<F> b) { return a / b; }
EMU_EACH_FORMAT emu::Float16<F> __hneg(emu::Float16<F> a) { return -a; }
EMU_EACH_FORMAT emu::Float16<F> __habs(emu::Float16<F> a) {
    return emu::RawFloat16<F>{static_cast<unsigned short>(a.bits & 0x7fff)};
}
EMU_EACH_FORMAT bool __hisnan(emu::Float16<F> a) { return float(a) != float(a); }
EMU_EACH_FORMAT bool __hlt(emu::Float16<F> a, emu::Float16<F> b) { return a < b; }
EMU_EACH_FORMAT bool __hgt(emu::Float16<F> a, emu::Float16<F> b) { return a > b; }
EMU_EACH_FORMAT bool __heq(emu::Float16<F> a, emu::Float16<F> b) { return a == b; }
// A NaN loses to a number; -0 is less than 0.
EMU_EACH_FORMAT emu::Float16<F> __hmax(emu::Float16<F> a, emu::Float16<F> b) {
    if (__hisnan(a)) return float(b);
    return __hisnan(b) || a > b || (a == b && a.bits < 0x8000) ? a : b;
}
EMU_EACH_FORMAT emu::Float16<F> __hmin(emu::Float16<F> a, emu::Float16<F> b) {
    if (__hisnan(a)) return float(b);
    return __hisnan(b) || a < b || (a == b && a.bits >= 0x8000) ? a : b;
}
EMU_EACH_FORMAT emu::Float16x2<F> __hadd2(emu::Float16x2<F> a, emu::Float16x2<F> b) { return a + b; }
EMU_EACH_FORMAT emu::Float16x2<F> __hsub2(emu::Float16x2<F> a, emu::Float16x2<F> b) { return a - b; }
EMU_EACH_FORMAT emu::Float16x2<F> __hmul2(emu::Float16x2<F> a, emu::Float16x2<F> b) { return a * b; }
EMU_EACH_FORMAT emu::Float16x2<F> __hmax2(emu::Float16x2<F> a, emu::Float16x2<F> b) {
    return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
EMU_EACH_FORMAT emu::Float16x2<F> __habs2(emu::Float16x2<F> a) { return {__habs(a.x), __habs(a.y)}; }
EMU_EACH_FORMAT float __low2float(emu::Float16x2<F> a) { return a.x; }
EMU_EACH_FORMAT float __high2float(emu::Float16x2<F> a) { return a.y; }
#undef EMU_EACH_FORMAT
