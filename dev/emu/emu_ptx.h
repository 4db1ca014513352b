// Twins of the PTX instructions that kernels use: tensor cores, ldmatrix, asynchronous copies to shared memory.
//
// Registers of lane l hold what the PTX ISA's tables say; with g = l / 4, t = l % 4, and pairs packed low half first:
//   mma m16n8k16  A (16 x 16) a[i]: row g + 8 (i % 2), columns 2t, 2t+1 (+ 8 for i >= 2)   B (16 x 8) b[i]: rows 2t, 2t+1 (+ 8 i),
//                 column g        C, D (16 x 8) c[0..3]: row g, columns 2t, 2t+1, then row g + 8
//   ldmatrix      lane 8 i + r gives the address of row r of the 8 x 8 matrix i; r[i]: row g, columns 2t, 2t+1 (trans: rows 2t,
//                 2t+1, column g)
//   cp.async      16 or 8 bytes that land at the wait for their group. Until then the destination is NaN: a kernel that does not
//                 wait, or refills what others still read, gets wrong numbers.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emu_shared.h"

namespace emu {

template <class E>
struct MmaFormat;
template <>
struct MmaFormat<__nv_bfloat16> : Bf16Format {};
template <>
struct MmaFormat<__half> : Fp16Format {};

struct MmaOperands {
    uint32_t a[4], b[2];
    float c[4];
};

// d = a b + c, row.col, products and sums in float.
template <class E>
EMU_NO_TSAN void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4],
                              const Location& location = Location::current()) {
    const MmaOperands operands = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
    float result[4];
    if (running) {
        running->in = &operands;
        running->out = result;
    }
    warp_meet(Wait::mma, ~0u, false, location, [](Thread* lanes, uint32_t members) EMU_NO_TSAN {
        if (members != ~0u) waiting_error("mma needs all 32 lanes of a warp");
        typedef float Row __attribute__((vector_size(32)));
        typedef MmaFormat<E> Format;
        float left[16][16];
        Row right[16], sum[16];
        for (int l = 0; l < 32; l++) {
            const MmaOperands& from = *static_cast<const MmaOperands*>(lanes[l].in);
            const int g = l / 4, t = l % 4;
            for (int half = 0; half < 2; half++) {
                for (int i = 0; i < 4; i++)
                    left[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] = Format::to_float(uint16_t(from.a[i] >> 16 * half));
                for (int i = 0; i < 2; i++) right[2 * t + half + 8 * i][g] = Format::to_float(uint16_t(from.b[i] >> 16 * half));
                sum[g][2 * t + half] = from.c[half];
                sum[g + 8][2 * t + half] = from.c[2 + half];
            }
        }
        for (int k = 0; k < 16; k++) {
            for (int row = 0; row < 16; row++) sum[row] += left[row][k] * right[k];
        }
        for (int l = 0; l < 32; l++) {
            float* to = static_cast<float*>(lanes[l].out);
            for (int i = 0; i < 4; i++) to[i] = sum[l / 4 + 8 * (i / 2)][l % 4 * 2 + i % 2];
        }
    });
    for (int i = 0; i < 4; i++) d[i] = result[i];
}

inline void shared_address_check(const char* instruction, const void* at, size_t multiple = 16) {
    const size_t offset = size_t(static_cast<const char*>(at) - shared.memory);
    if (!shared.memory || offset >= Shared::room * Shared::places)
        throw Error(text("%s by %s: %p is not in shared memory", instruction, thread_name(*running).c_str(), at));
    if (offset % multiple)
        throw Error(text("%s by %s: an address is not a multiple of %zu", instruction, thread_name(*running).c_str(), multiple));
}

struct MatrixRow {
    uint16_t at[8];
};

// Reads in the caller's name, so that sanitizers see it.
inline MatrixRow matrix_row(const void* from) {
    MatrixRow row;
    const uint16_t* at = static_cast<const uint16_t*>(from);
    for (int i = 0; i < 8; i++) row.at[i] = at[i];
    return row;
}

template <int matrices, bool trans>
EMU_NO_TSAN void ldmatrix(uint32_t (&r)[matrices], const void* address, const Location& location) {
    MatrixRow row = {};
    uint32_t result[matrices];
    if (running) {
        if (running->lane < 8 * matrices) {
            shared_address_check("ldmatrix", address);
            row = matrix_row(address);
        }
        running->in = &row;
        running->out = result;
    }
    warp_meet(Wait::ldmatrix, ~0u, false, location, [](Thread* lanes, uint32_t members) EMU_NO_TSAN {
        if (members != ~0u) waiting_error("ldmatrix needs all 32 lanes of a warp");
        for (int l = 0; l < 32; l++) {
            for (int i = 0; i < matrices; i++) {
                uint32_t pair = 0;
                for (int half = 0; half < 2; half++) {
                    const int row = trans ? l % 4 * 2 + half : l / 4, column = trans ? l / 4 : l % 4 * 2 + half;
                    pair |= uint32_t(static_cast<const MatrixRow*>(lanes[8 * i + row].in)->at[column]) << 16 * half;
                }
                static_cast<uint32_t*>(lanes[l].out)[i] = pair;
            }
        }
    });
    for (int i = 0; i < matrices; i++) r[i] = result[i];
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row, const Location& location = Location::current()) {
    ldmatrix<4, false>(r, shared_row, location);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row, const Location& location = Location::current()) {
    ldmatrix<4, true>(r, shared_row, location);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* shared_row, const Location& location = Location::current()) {
    ldmatrix<2, false>(r, shared_row, location);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared_row, const Location& location = Location::current()) {
    ldmatrix<2, true>(r, shared_row, location);
}

}  // namespace emu

// --- cp.async

namespace emu {

struct AsyncCopy {
    uint2* to;
    uint2 data;
    uint32_t group;
};
constexpr uint32_t max_async_copies = 512;  // of one thread, of 8 bytes each, not landed

EMU_NO_TSAN inline void async_copy_note(uint2* to, uint2 data) {
    Thread* me = running;
    if (!me->copies) me->copies = new AsyncCopy[max_async_copies];
    if (me->copy_count == max_async_copies) throw Error("a thread has more than 4096 bytes of cp.async that it did not wait for");
    me->copies[me->copy_count++] = {to, data, me->copy_group};
}

// The first `bytes` of `size` come from `global`, the others are zero.
template <int size>
void cp_async(void* to, const void* global, int bytes) {
    if (!running) throw Error("cp.async outside a kernel");
    shared_address_check("cp.async", to, size);
    if (bytes < 0 || bytes > size || (bytes && reinterpret_cast<uintptr_t>(global) % size))
        throw Error(text("cp.async by %s: %d bytes from %p; expected 0 to %d, from a multiple of %d",
                         thread_name(*running).c_str(), bytes, global, size, size));
    uint2 data[size / 8] = {};
    for (int i = 0; i < bytes; i++) reinterpret_cast<char*>(data)[i] = static_cast<const char*>(global)[i];
    for (int i = 0; i < size / 8; i++) {
        static_cast<uint2*>(to)[i] = {~0u, ~0u};
        async_copy_note(static_cast<uint2*>(to) + i, data[i]);
    }
}
inline void cp_async_16(void* to, const void* global, int bytes = 16) { cp_async<16>(to, global, bytes); }
inline void cp_async_8(void* to, const void* global, int bytes = 8) { cp_async<8>(to, global, bytes); }

EMU_NO_TSAN inline void cp_async_commit() { running->copy_group++; }

// The oldest copy of this thread in a group before `group` (they differ by less than 2^31); false if there is none.
EMU_NO_TSAN inline bool async_copy_next(uint32_t group, AsyncCopy* copy, uint32_t* taken) {
    Thread* me = running;
    if (*taken == me->copy_count || int32_t(me->copies[*taken].group - group) >= 0) {
        for (uint32_t i = *taken; i < me->copy_count; i++) me->copies[i - *taken] = me->copies[i];
        me->copy_count -= *taken;
        return false;
    }
    *copy = me->copies[(*taken)++];
    return true;
}

// All groups but the last N have landed, for this thread.
template <int N>
void cp_async_wait() {
    AsyncCopy copy;
    uint32_t taken = 0;
    while (async_copy_next(running->copy_group - N, &copy, &taken)) *copy.to = copy.data;
}

}  // namespace emu
