// The emulator's instructions and number formats: mma, ldmatrix, cp.async, bits, atomics, floats of 16 and 8 bits.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define DOCTEST_CONFIG_SUPER_FAST_ASSERTS
#include "emu_test.h"

// --- tensor cores, ldmatrix, cp.async: the tables of the PTX ISA, written as formulas

template <class E>
__global__ void mma_tables(float* d, const E* a, const E* b, const float* c) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t ra[4], rb[2];
    float rc[4];
    auto pair = [](E low, E high) { return uint32_t(low.bits) | uint32_t(high.bits) << 16; };
    for (int i = 0; i < 8; i += 2) {  // "row = groupID for ai where 0 <= i < 2 || 4 <= i < 6, groupID + 8 otherwise"
        const int row = i < 2 || (i >= 4 && i < 6) ? g : g + 8;
        const int column = t * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        ra[i / 2] = pair(a[row * 16 + column], a[row * 16 + column + 1]);
    }
    for (int i = 0; i < 4; i += 2) {  // "row = (threadID_in_group * 2) + (i & 0x1), + 8 for bi where i >= 2; col = groupID"
        const int row = t * 2 + (i >= 2 ? 8 : 0);
        rb[i / 2] = pair(b[row * 8 + g], b[(row + 1) * 8 + g]);
    }
    for (int i = 0; i < 4; i++) rc[i] = c[(i < 2 ? g : g + 8) * 8 + t * 2 + (i & 1)];
    emu::mma_m16n8k16<E>(rc, ra, rb, rc);
    for (int i = 0; i < 4; i++) d[(i < 2 ? g : g + 8) * 8 + t * 2 + (i & 1)] = rc[i];
}

template <class E>
void mma_check() {
    std::vector<E> a(256), b(128);
    std::vector<float> c(128);
    for (int i = 0; i < 256; i++) a[i] = E(float(i * 7 % 31 - 15));
    for (int i = 0; i < 128; i++) b[i] = E(float(i * 5 % 29 - 14)), c[i] = float(i);
    E *da = upload(a), *db = upload(b);
    float *dc = upload(c), *dd = device_fresh<float>(128);
    run(mma_tables<E>, dim3(1), dim3(32), 0, dd, (const E*)da, (const E*)db, (const float*)dc);
    const auto d = download(dd, 128);
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < 8; column++) {
            float sum = c[row * 8 + column];
            for (int k = 0; k < 16; k++) sum += float(a[row * 16 + k]) * float(b[k * 8 + column]);
            CHECK(d[row * 8 + column] == sum);
        }
    }
    cudaFree(da), cudaFree(db), cudaFree(dc), cudaFree(dd);
}

TEST_CASE("mma.m16n8k16") {
    mma_check<__nv_bfloat16>();
    mma_check<__half>();
}

// out: 12 registers of each lane: x4, x4.trans, x2, x2.trans. Element (row, column) of matrix i is 100 i + 10 row + column.
__global__ void load_matrices(uint32_t* out) {
    EMU_SHARED_ARRAY(uint16_t, matrices, [4][8][8]);
    const int lane = threadIdx.x;
    for (int column = 0; column < 8; column++) matrices[lane / 8][lane % 8][column] = uint16_t(lane / 8 * 100 + lane % 8 * 10 + column);
    __syncwarp();
    uint32_t r[4][4] = {};
    emu::ldmatrix_x4(r[0], matrices[lane / 8][lane % 8]);
    emu::ldmatrix_x4_trans(r[1], matrices[lane / 8][lane % 8]);
    uint32_t two[2];
    emu::ldmatrix_x2(two, lane < 16 ? matrices[lane / 8][lane % 8] : nullptr);
    r[2][0] = two[0], r[2][1] = two[1];
    emu::ldmatrix_x2_trans(two, lane < 16 ? matrices[lane / 8][lane % 8] : nullptr);
    r[3][0] = two[0], r[3][1] = two[1];
    for (int i = 0; i < 16; i++) out[lane * 16 + i] = r[i / 4][i % 4];
}
__global__ void load_from_global(const float* at) {
    uint32_t r[4];
    emu::ldmatrix_x4(r, at);
}

TEST_CASE("ldmatrix") {
    uint32_t* out = device_fresh<uint32_t>(512);
    run(load_matrices, dim3(1), dim3(32), 0, out);
    const auto values = download(out, 512);
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 16; i++) {
            const int kind = i / 4, matrix = i % 4, row = lane / 4, column = lane % 4 * 2;
            if (kind >= 2 && matrix >= 2) continue;
            const int low = 100 * matrix + (kind % 2 ? 10 * column + row : 10 * row + column);
            CHECK(values[lane * 16 + i] == uint32_t(low | (low + (kind % 2 ? 10 : 1)) << 16));
        }
    }
    CHECK(contains(error_of([&] { run(load_from_global, dim3(1), dim3(32), 0, (const float*)out); }), "not in shared memory"));
    cudaFree(out);
}

// Two stages: stage i % 2 is filled while the other is used. wait: what cp_async_wait is given to be right is 1, then 0.
template <int wait>
__global__ void pipeline(float* out, const float4* in, int stages) {
    EMU_SHARED_ARRAY(float4, buffer, [2][32]);
    const int lane = threadIdx.x;
    emu::cp_async_16(&buffer[0][lane], &in[lane]);
    emu::cp_async_commit();
    float sum = 0;
    for (int i = 0; i < stages; i++) {
        if (i + 1 < stages) emu::cp_async_16(&buffer[(i + 1) % 2][lane], &in[(i + 1) * 32 + lane]);
        emu::cp_async_commit();
        emu::cp_async_wait<wait>();
        __syncwarp();
        sum += buffer[i % 2][31 - lane].x;
        __syncwarp();
    }
    out[lane] = sum;
}
__global__ void partial_copy(float4* out, const float4* in, int bytes, bool halves) {
    EMU_SHARED_ARRAY(float4, buffer, [1]);
    if (halves) {
        emu::cp_async_8(buffer, in, std::min(bytes, 8));
        emu::cp_async_8(&buffer[0].z, &in->z, std::max(bytes - 8, 0));
    } else {
        emu::cp_async_16(buffer, bytes ? in : nullptr, bytes);
    }
    emu::cp_async_commit();
    emu::cp_async_wait<0>();
    *out = buffer[0];
}

TEST_CASE("cp.async lands at the wait") {
    std::vector<float4> values(128);
    for (int i = 0; i < 128; i++) values[i] = {float(i), 2, 3, 4};
    float4* in = upload(values);
    float* out = device_fresh<float>(32);
    for (const char* order : all_orders) {
        emu::order_set(order);
        run(pipeline<1>, dim3(1), dim3(32), 0, out, (const float4*)in, 4);
        const auto sums = download(out, 32);
        for (int lane = 0; lane < 32; lane++) CHECK(sums[lane] == float(4 * (31 - lane) + 32 * 6));
        run(pipeline<2>, dim3(1), dim3(32), 0, out, (const float4*)in, 4);  // waits for too little
        for (float sum : download(out, 32)) CHECK(std::isnan(sum));
    }
    emu::order_set("forward");
    float4* part = device_fresh<float4>(1);
    for (int turn = 0; turn < 10; turn++) {
        const int floats = turn / 2;
        run(partial_copy, dim3(1), dim3(1), 0, part, (const float4*)in + 1, 4 * floats, turn % 2 == 1);
        const float4 copied = download(part, 1)[0], whole = values[1];
        CHECK(copied.x == (floats > 0 ? whole.x : 0));
        CHECK(copied.y == (floats > 1 ? whole.y : 0));
        CHECK(copied.z == (floats > 2 ? whole.z : 0));
        CHECK(copied.w == (floats > 3 ? whole.w : 0));
    }
    cudaFree(in), cudaFree(out), cudaFree(part);
}

// --- intrinsics and atomics

TEST_CASE("bits") {
    CHECK(__brev(1) == 0x80000000u);
    CHECK(__brev(0x12345678) == 0x1e6a2c48u);
    CHECK(__clz(0) == 32);
    CHECK(__clz(1) == 31);
    CHECK(__ffs(0) == 0);
    CHECK(__ffs(8) == 4);
    CHECK(__popc(0xf0f0) == 8);
    CHECK(__byte_perm(0x33221100, 0x77665544, 0x7410) == 0x77441100u);
    CHECK(__byte_perm(0x80, 0, 0x9888) == 0x00ffffffu);
    CHECK(__funnelshift_l(0x80000000u, 1, 1) == 3);
    CHECK(__funnelshift_r(0, 1, 1) == 0x80000000u);
    CHECK(__umulhi(0xffffffffu, 2) == 1);
    CHECK(__float2int_rn(2.5f) == 2);
    CHECK(__float2int_rz(-2.5f) == -2);
    CHECK(__float2int_rn(1e20f) == INT_MAX);
    CHECK(__float2int_rn(-1e20f) == INT_MIN);
    CHECK(__float2uint_rn(-1.0f) == 0);
    CHECK(__float2int_rn(NAN) == 0);
}

__global__ void atomics(int* i, unsigned* u, float* f, double* d, unsigned long long* l) {
    const int t = int(threadIdx.x);
    atomicAdd(f, 0.5f), atomicAdd(d, 0.25), atomicAdd(l, 1ull << 33), atomicAdd(&i[0], -1);
    atomicMax(&i[1], t), atomicMin(&i[2], -t), atomicMax(&u[0], unsigned(t));
    if (atomicCAS(&u[1], 0u, 7u) == 0) atomicExch(&i[3], 42);
}

TEST_CASE("atomics") {
    int* i = upload<int>({0, 0, 0, 0});
    unsigned* u = upload<unsigned>({0, 0});
    float* f = upload<float>({0});
    double* d = upload<double>({0});
    unsigned long long* l = upload<unsigned long long>({0});
    run(atomics, dim3(2), dim3(64), 0, i, u, f, d, l);
    CHECK(download(i, 4) == std::vector<int>{-128, 63, -63, 42});
    CHECK(download(u, 2) == std::vector<unsigned>{63, 7});
    CHECK(download(f, 1)[0] == 64);
    CHECK(download(d, 1)[0] == 32);
    CHECK(download(l, 1)[0] == 128ull << 33);
    cudaFree(i), cudaFree(u), cudaFree(f), cudaFree(d), cudaFree(l);
}

// --- 16- and 8-bit floats

// The value of a code: `exponent` bits of exponent, `mantissa` of mantissa, finite codes only.
double code_value(uint32_t code, int exponent, int mantissa) {
    const int bias = (1 << (exponent - 1)) - 1, e = int(code >> mantissa) & ((1 << exponent) - 1);
    const double m = code & ((1u << mantissa) - 1), sign = code >> (exponent + mantissa) ? -1 : 1;
    return sign * (e ? std::ldexp(1 + std::ldexp(m, -mantissa), e - bias) : std::ldexp(m, 1 - bias - mantissa));
}

// Codes 0 .. last are the finite values in order. Each is its own nearest; halfway between two the even code is.
template <class Decode, class Encode>
void rounding_check(int exponent, int mantissa, uint32_t last, Decode decode, Encode encode) {
    const uint32_t sign = 1u << (exponent + mantissa);
    int wrong = 0;
    for (uint32_t code = 0; code <= last; code++) {
        const double value = code_value(code, exponent, mantissa);
        wrong += decode(code) != value || decode(code | sign) != -value || !std::signbit(decode(code | sign));
        wrong += encode(float(value)) != code || encode(float(-value)) != (code | sign);
        if (code == last) break;
        const double middle = (value + code_value(code + 1, exponent, mantissa)) / 2;
        if (double(float(middle)) != middle) continue;
        wrong += encode(float(middle)) != code + (code & 1);
        wrong += encode(std::nextafter(float(middle), 0.0f)) != code;
        wrong += encode(std::nextafter(float(middle), INFINITY)) != code + 1;
        wrong += encode(-std::nextafter(float(middle), INFINITY)) != ((code + 1) | sign);
    }
    CHECK(wrong == 0);
}

TEST_CASE("16-bit floats: all codes, and rounding") {
    rounding_check(8, 7, 0x7f7f, [](uint32_t c) { return __bfloat162float(__ushort_as_bfloat16(uint16_t(c))); },
                   [](float x) { return uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(x))); });
    rounding_check(5, 10, 0x7bff, [](uint32_t c) { return __half2float(__ushort_as_half(uint16_t(c))); },
                   [](float x) { return uint32_t(__half_as_ushort(__float2half_rn(x))); });
    CHECK(__half_as_ushort(__float2half_rn(65519.996f)) == 0x7bff);
    CHECK(__half_as_ushort(__float2half_rn(65520.0f)) == 0x7c00);
    CHECK(__half_as_ushort(__float2half_rn(-INFINITY)) == 0xfc00);
    CHECK(__half_as_ushort(__float2half_rn(-NAN)) == 0x7fff);
    CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(3.4e38f)) == 0x7f80);
    CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(-NAN)) == 0x7fff);
    CHECK(std::isinf(__half2float(__ushort_as_half(0x7c00))));
    CHECK(std::isnan(__half2float(__ushort_as_half(0x7c01))));
    const __nv_bfloat162 pair = __float22bfloat162_rn(make_float2(1.5f, -2.0f));
    CHECK(__bfloat1622float2(pair).y == -2.0f);
    CHECK(float((pair * pair).x) == 2.25f);
    const __half2 halves = __float22half2_rn(make_float2(1.5f, -2.0f));
    CHECK(__half22float2(halves + halves).x == 3.0f);
    __half sum = __float2half_rn(2048.0f);
    sum += __float2half_rn(1.0f);
    CHECK(float(sum) == 2048.0f);
}

TEST_CASE("8-bit floats: all codes, and rounding") {
    const auto decode = [](__nv_fp8_interpretation_t kind) {
        return [kind](uint32_t c) { return __half2float(__nv_cvt_fp8_to_halfraw(uint8_t(c), kind)); };
    };
    const auto encode = [](__nv_fp8_interpretation_t kind) {
        return [kind](float x) { return uint32_t(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind)); };
    };
    rounding_check(4, 3, 0x7e, decode(__NV_E4M3), encode(__NV_E4M3));
    rounding_check(5, 2, 0x7b, decode(__NV_E5M2), encode(__NV_E5M2));
    for (float large : {480.0f, 1e6f, INFINITY}) {
        CHECK(__nv_cvt_float_to_fp8(large, __NV_SATFINITE, __NV_E4M3) == 0x7e);
        CHECK(__nv_cvt_float_to_fp8(-large, __NV_NOSAT, __NV_E4M3) == 0xff);
        CHECK(__nv_cvt_float_to_fp8(large * 1000, __NV_SATFINITE, __NV_E5M2) == 0x7b);
        CHECK(__nv_cvt_float_to_fp8(large * 1000, __NV_NOSAT, __NV_E5M2) == 0x7c);
    }
    CHECK(__nv_cvt_float_to_fp8(NAN, __NV_SATFINITE, __NV_E4M3) == 0x7f);
    CHECK(__nv_cvt_float_to_fp8(-NAN, __NV_SATFINITE, __NV_E5M2) == 0x7f);
    CHECK(std::isnan(__half2float(__nv_cvt_fp8_to_halfraw(0xff, __NV_E4M3))));
    CHECK(std::isinf(__half2float(__nv_cvt_fp8_to_halfraw(0x7c, __NV_E5M2))));
    CHECK(std::isnan(__half2float(__nv_cvt_fp8_to_halfraw(0x7d, __NV_E5M2))));
    CHECK(__nv_cvt_float2_to_fp8x2(make_float2(1, -1), __NV_SATFINITE, __NV_E4M3) == 0xb838);
    const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(0xb838, __NV_E4M3);
    CHECK(__half22float2(__half2(both)).y == -1.0f);
}
