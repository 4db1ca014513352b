// The codecs' kernels against cpu/codec.h: the same bytes, the same floats.
#pragma once
#include <doctest/doctest.h>

#include <cfloat>

#include "kernel_test.h"
#include "llmc/cpu/codec.h"
#include "llmc/cuda/codec_norm.cuh"

namespace codec_test {

// Groups of `block` values, each of its own distribution and magnitude: Gaussian, Laplace, with outliers, with zeros, tiny, huge,
// near overflow, all zeros, subnormals, and some with a value that is not finite.
inline std::vector<float> wild_values(size_t n, size_t block, uint64_t seed) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) {
        const Philox bits = philox(seed, i, 0), of_block = philox(seed, i / block, 1);
        const uint32_t kind = of_block[0] % 32;
        int exponent = int(of_block[1] % 24) - 16;
        float value = normals_from_bits(bits)[0];
        if (kind < 8) value *= std::fabs(value);                                               // heavy tails
        if (kind >= 8 && kind < 12 && bits[2] % 64 == 0) value *= 50;                          // outliers
        if (kind >= 12 && kind < 16 && bits[2] % 4 != 0) value = bits[2] % 8 > 4 ? 0 : -0.0f;  // mostly zeros
        if (kind == 16) exponent = -126 - int(of_block[1] % 26);
        if (kind == 17) exponent = 90 + int(of_block[1] % 37);
        if (kind == 18) exponent = -80 + int(of_block[1] % 150);
        if (kind == 19) value = bits[2] % 2 ? 0 : -0.0f;
        x[i] = std::ldexp(value, exponent);
        if (kind == 20 && i % block == of_block[1] % block)
            x[i] = spec::float_of(of_block[2] % 3 == 0 ? 0x7f800000 : of_block[2] % 3 == 1 ? 0xff800000 : 0x7fc00001);
    }
    return x;
}

// Groups of zeros of both signs, of subnormals, of the least and the largest values, and of values that are not finite, alone and
// among others.
inline std::vector<float> special_values(size_t g) {
    const float special[] = {0.0f,        0x1p-149f, 0x1.fffffcp-127f, 0x1p-126f, 0x1.8p-120f,
                             1.0f,        3e38f,     FLT_MAX,          INFINITY,  spec::float_of(0x7f800001),
                             spec::float_of(0x7fc00123)};
    std::vector<float> x;
    for (const float value : special) {
        const auto group = [&](auto at) {
            for (size_t i = 0; i < g; i++) x.push_back(at(i));
        };
        for (const float sign : {1.0f, -1.0f}) {
            const float signed_value = std::copysign(value, sign);
            group([&](size_t) { return signed_value; });
            group([&](size_t i) { return i % 2 ? value : signed_value; });
            for (const size_t place : {size_t(0), g - 1}) {
                for (const float other : {0.0f, 0.75f, -2e38f}) {
                    group([&](size_t i) { return i == place ? signed_value : i % 3 ? other : -0.5f * other; });
                }
            }
        }
    }
    return x;
}

// Rounded to E, as floats.
template <class E>
std::vector<float> rounded(std::vector<float> x) {
    for (float& value : x) value = host_float(host_round<E>(value));
    return x;
}

// NaNs are alike: a payload is only prescribed where a group is decoded to float.
inline size_t differences(const std::vector<float>& a, const std::vector<float>& b) {
    size_t count = a.size() != b.size();
    for (size_t i = 0; i < a.size() && i < b.size(); i++)
        count += spec::bits_of(a[i]) != spec::bits_of(b[i]) && !(std::isnan(a[i]) && std::isnan(b[i]));
    return count;
}

// Room for a wire that starts `offset` bytes into aligned memory.
struct DeviceWire {
    DeviceBuffer<uint8_t> buffer;
    size_t offset;
    DeviceWire(size_t bytes, size_t offset) : buffer(bytes + offset), offset(offset) {}
    uint8_t* data() { return buffer.data + offset; }
    void upload(const std::vector<uint8_t>& bytes) {
        if (!bytes.empty()) device_upload(data(), bytes.data(), bytes.size(), kernel_test().stream);
    }
    std::vector<uint8_t> bytes() {
        const std::vector<uint8_t> all = buffer.download();
        return {all.begin() + long(offset), all.end()};
    }
};

// What the CPU puts on the wire for values of E.
template <class E>
std::vector<uint8_t> cpu_wire(const Codec& c, const std::vector<float>& x, const RoundingKey& key, uint64_t* nonfinite) {
    std::vector<uint8_t> wire(codec_wire_bytes<E>(c, x.size()));
    if (c.kind == Codec::none) {
        for (size_t i = 0; i < x.size(); i++) {
            const E value = host_round<E>(x[i]);
            memcpy(&wire[i * sizeof(E)], &value, sizeof(E));
        }
    } else {
        cpu::codec_encode(c, wire.data(), x.data(), x.size(), key, nonfinite, {});
    }
    return wire;
}

template <class E>
std::vector<float> cpu_decoded(const Codec& c, const std::vector<uint8_t>& wire, const std::vector<float>& x) {
    std::vector<float> decoded = x;
    if (c.kind != Codec::none) cpu::codec_decode(c, decoded.data(), wire.data(), x.size(), {});
    return decoded;
}

const std::vector<int> group_sizes = {32, 64, 128, 256, 512};
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
inline size_t many_groups(int, bool) { return 40; }
#else
inline size_t many_groups(int g, bool stochastic) { return stochastic ? 500 : g <= 128 ? 10000 : 1000; }
#endif

inline std::vector<Codec> codecs(const std::vector<const char*>& names, const std::vector<int>& sizes, bool stochastic) {
    std::vector<Codec> list;
    for (const char* name : names)
        for (const int g : sizes) {
            list.push_back(codec_parse(name + format_text(":g=%d", g)));
            if (stochastic) list.push_back(codec_parse(name + format_text(":g=%d:sr", g)));
        }
    return list;
}

const std::vector<const char*> grouped = {"fp8",     "fp8:fmt=e5m2", "int8",    "taco",    "taco:fmt=e5m2", "taco:target=100",
                                          "hadint4", "hadint5",      "hadint6", "hadint7", "hadint8"};
const RoundingKey key = {.seed = 7, .step = 1, .micro_batch = 2, .layer = 3, .boundary = 4, .rank = 5};

// Encodes and decodes values that are rounded to E; the wire begins `offset` bytes into aligned memory.
template <class E>
void check_through(const Codec& c, const std::vector<float>& x, size_t offset) {
    const size_t n = x.size();
    CAPTURE(codec_text(c));
    CAPTURE(n);
    CAPTURE(offset);
    Stream stream = kernel_test().stream;
    uint64_t expected_nonfinite = 0;
    const std::vector<uint8_t> expected = cpu_wire<E>(c, x, key, &expected_nonfinite);
    const DeviceBuffer<E> values(x);
    DeviceBuffer<E> decoded(n);
    DeviceBuffer<uint64_t> nonfinite(std::vector<uint64_t>{1000});
    DeviceWire wire(expected.size(), offset);
    cuda::codec_encode(c, wire.data(), values.data, n, key, nonfinite.data, stream);
    CHECK(wire.bytes() == expected);
    CHECK(nonfinite.download()[0] == 1000 + expected_nonfinite);
    cuda::codec_decode(c, decoded.data, wire.data(), n, stream);
    const std::vector<float> floats = decoded.floats(), expected_floats = rounded<E>(cpu_decoded<E>(c, expected, x));
    CHECK(differences(floats, expected_floats) == 0);
    if constexpr (std::is_same_v<E, float>)
        CHECK((c.kind == Codec::none || memcmp(floats.data(), expected_floats.data(), 4 * n) == 0));
    CHECK(wire.buffer.guards_hold());
    CHECK(decoded.guards_hold());
    CHECK(values.guards_hold());
}
template <class E>
void check_through(const Codec& c, size_t n, size_t offset, uint64_t seed) {
    check_through<E>(c, rounded<E>(wild_values(n, c.group ? size_t(c.group) : 64, seed)), offset);
}

// Reduces the wires of `peers` ranks, one of them (`me`; -1: none) by its own values.
template <class E>
void check_reduce(const Codec& c, size_t n, int peers, int me, size_t offset) {
    CAPTURE(codec_text(c));
    CAPTURE(n);
    CAPTURE(peers);
    CAPTURE(me);
    Stream stream = kernel_test().stream;
    std::vector<std::unique_ptr<DeviceWire>> wires;
    std::vector<const uint8_t*> pointers;
    std::vector<float> own(n), sum(n);
    for (int peer = 0; peer < peers; peer++) {
        const std::vector<float> x = rounded<E>(wild_values(n, 64, 100 + uint64_t(peer)));
        const std::vector<uint8_t> bytes = cpu_wire<E>(c, x, {.rank = uint32_t(peer)}, nullptr);
        wires.push_back(std::make_unique<DeviceWire>(bytes.size(), offset));
        wires.back()->upload(bytes);
        pointers.push_back(peer == me ? nullptr : wires.back()->data());
        if (peer == me) own = x;
        const std::vector<float> from = peer == me ? x : cpu_decoded<E>(c, bytes, x);
        for (size_t i = 0; i < n; i++) sum[i] = peer == 0 ? from[i] : sum[i] + from[i];
    }
    DeviceBuffer<E> out(own);  // in place
    cuda::codec_decode_reduce(c, out.data, pointers.data(), out.data, peers, n, stream);
    CHECK(differences(out.floats(), rounded<E>(sum)) == 0);
    CHECK(out.guards_hold());

    uint64_t expected_nonfinite = 0;
    const std::vector<uint8_t> expected = cpu_wire<E>(c, sum, key, &expected_nonfinite);
    const DeviceBuffer<E> own_values(own);
    DeviceBuffer<uint64_t> nonfinite(std::vector<uint64_t>{0});
    DeviceWire wire(expected.size(), offset);
    cuda::codec_decode_reduce_encode(c, wire.data(), pointers.data(), own_values.data, peers, n, key, nonfinite.data, stream);
    if (codec_has_groups(c)) {
        CHECK(wire.bytes() == expected);
        CHECK(nonfinite.download()[0] == expected_nonfinite);
    } else {
        DeviceBuffer<E> decoded(n);
        cuda::codec_decode(c, decoded.data, wire.data(), n, stream);
        CHECK(differences(decoded.floats(), rounded<E>(cpu_decoded<E>(c, expected, rounded<E>(sum)))) == 0);
    }
    CHECK(wire.buffer.guards_hold());
}

// Fused with bias, residual and norm, and with the next encoding, against the single steps: every bit. `stored`: out is wanted.
template <class E>
void check_norm(const Codec& c, const Codec& next, int rows, int C, int peers, int me, bool add_bias, bool stored) {
    CAPTURE(codec_text(c));
    CAPTURE(codec_text(next));
    CAPTURE(C);
    Stream stream = kernel_test().stream;
    const size_t n = size_t(rows) * size_t(C);
    std::vector<std::unique_ptr<DeviceWire>> wires;
    std::vector<const uint8_t*> pointers, all_pointers;
    const DeviceBuffer<E> own(random_values<E>(n, 3));
    for (int peer = 0; peer < peers; peer++) {
        const std::vector<uint8_t> bytes = cpu_wire<E>(c, random_values<E>(n, 10 + uint64_t(peer)), {}, nullptr);
        wires.push_back(std::make_unique<DeviceWire>(bytes.size(), 0));
        wires.back()->upload(bytes);
        all_pointers.push_back(wires.back()->data());
        pointers.push_back(peer == me ? nullptr : wires.back()->data());
    }
    const size_t all = n * size_t(peers);
    const DeviceBuffer<E> a(random_values<E>(all, 4, 2)), bias_before(random_values<E>(size_t(C), 5));
    const DeviceBuffer<E> weight(random_values<E>(size_t(C), 6)), bias(random_values<E>(size_t(C), 7));
    struct Result {
        DeviceBuffer<E> residual, out;
        DeviceBuffer<float> mean, rstd;
        DeviceBuffer<uint64_t> nonfinite{std::vector<uint64_t>{5}};
        DeviceWire wire;
        Result(size_t n, size_t rows, size_t bytes) : residual(n), out(n), mean(rows), rstd(rows), wire(bytes, 0) {}
    };
    const auto same = [](const auto& x, const auto& y) {
        CHECK(memcmp(x.download().data(), y.download().data(), x.n * sizeof(*x.data)) == 0);
        CHECK(x.guards_hold());
    };
    const E* before = add_bias ? bias_before.data : nullptr;
    {
        Result fused(n, size_t(rows), codec_wire_bytes<E>(next, n)), single(n, size_t(rows), codec_wire_bytes<E>(next, n));
        const ResidualNorm<E> norm = {fused.residual.data,
                                      stored ? fused.out.data : nullptr,
                                      fused.mean.data,
                                      fused.rstd.data,
                                      a.data,
                                      before,
                                      weight.data,
                                      bias.data,
                                      C,
                                      1e-5f};
        CHECK(cuda::codec_decode_reduce_layernorm(c, pointers.data(), own.data, peers, n, norm, next, fused.wire.data(), key,
                                                  fused.nonfinite.data, stream));
        DeviceBuffer<E> b(n);
        cuda::codec_decode_reduce(c, b.data, pointers.data(), own.data, peers, n, stream);
        cuda::residual_layernorm_forward(single.residual.data, single.out.data, single.mean.data, single.rstd.data, a.data,
                                         b.data, before, weight.data, bias.data, rows, C, 1e-5f, stream);
        cuda::codec_encode(next, single.wire.data(), single.out.data, n, key, single.nonfinite.data, stream);
        same(fused.residual, single.residual);
        if (stored) same(fused.out, single.out);
        same(fused.mean, single.mean);
        same(fused.rstd, single.rstd);
        same(fused.wire.buffer, single.wire.buffer);
        same(fused.nonfinite, single.nonfinite);
    }
    Result fused(all, size_t(rows * peers), 1), single(all, size_t(rows * peers), 1);
    const ResidualNorm<E> norm = {
        fused.residual.data, fused.out.data, fused.mean.data, fused.rstd.data, a.data, before, weight.data, bias.data, C, 1e-5f};
    CHECK(cuda::codec_decode_layernorm(c, all_pointers.data(), peers, n, norm, stream));
    DeviceBuffer<E> b(all);
    for (int peer = 0; peer < peers; peer++)
        cuda::codec_decode(c, b.data + size_t(peer) * n, all_pointers[size_t(peer)], n, stream);
    cuda::residual_layernorm_forward(single.residual.data, single.out.data, single.mean.data, single.rstd.data, a.data, b.data,
                                     before, weight.data, bias.data, rows * peers, C, 1e-5f, stream);
    same(fused.residual, single.residual);
    same(fused.out, single.out);
    same(fused.mean, single.mean);
    same(fused.rstd, single.rstd);
}

}  // namespace codec_test

TEST_CASE("codec: bytes and floats are the CPU's, over many groups") {
    using namespace codec_test;
    for (const int g : group_sizes) {
        std::vector<float> x = wild_values(size_t(g) * many_groups(g, false), size_t(g), uint64_t(g));
        for (const Codec& c : codecs(grouped, {g}, false)) check_through<float>(c, x, 0);
        x.resize(size_t(g) * many_groups(g, true));
        for (const Codec& c : codecs(grouped, {g}, true)) {
            if (c.stochastic) check_through<float>(c, x, 0);
        }
    }
    for (const char* name : {"none", "bf16"}) check_through<float>(codec_parse(name), 40000, 0, 3);
}

TEST_CASE("codec: groups that are special") {
    using namespace codec_test;
    for (const int g : group_sizes) {
        const std::vector<float> x = special_values(size_t(g));
        for (const Codec& c : codecs(grouped, {g}, true)) {
            check_through<float>(c, x, 0);
            if (c.stochastic) continue;
            check_through<bf16>(c, rounded<bf16>(x), 0);
            check_through<fp16>(c, rounded<fp16>(x), 0);
        }
    }
}

TEST_CASE("codec: short stripes, unaligned wires, types of values, thread orders") {
    using namespace codec_test;
    std::vector<Codec> list = codecs(grouped, group_sizes, false);
    for (const Codec& c : codecs({"taco", "hadint5", "int8"}, {64, 128}, true)) list.push_back(c);
    list.push_back(codec_parse("none"));
    list.push_back(codec_parse("bf16"));
    uint64_t seed = 10;
    in_thread_orders([&] {
        for (const Codec& c : list) {
            const size_t g = c.group ? size_t(c.group) : 64;
            seed++;
            check_through<float>(c, 3 * g + 17, seed % 8, seed);
            check_through<bf16>(c, 9 * g - 5, seed % 3 ? 0 : seed % 16, seed);
            check_through<fp16>(c, g + 8, 4, seed);
            check_through<float>(c, 1 + seed % (g - 1), 8, seed);
        }
    });
    check_through<bf16>(codec_parse("taco"), 0, 0, 1);
    for (const Codec& c : list) check_through<bf16>(c, 5000, 0, seed++);
}

TEST_CASE("codec: reductions are the CPU's, with the own values in each place") {
    using namespace codec_test;
    std::vector<Codec> list = codecs(grouped, {32, 128}, false);
    for (const char* name : {"none", "bf16", "taco:sr", "hadint6:g=512:sr", "hadint7:g=256"}) list.push_back(codec_parse(name));
    int turn = 0;
    for (const Codec& c : list)
        for (int peers = 1; peers <= 8; peers++) {
            turn++;
            const size_t n = size_t(500 + 100 * (turn % 7));
            check_reduce<float>(c, n, peers, turn % (peers + 1) - 1, turn % 4 == 0 ? size_t(turn % 9) : 0);
            check_reduce<bf16>(c, n, peers, (turn + 1) % (peers + 1) - 1, turn % 4 == 1 ? size_t(turn % 9) : 0);
        }
    in_thread_orders([&] {
        for (const char* name : {"taco", "hadint8", "hadint5:g=32", "bf16"})
            for (int me = -1; me < 4; me++) check_reduce<bf16>(codec_parse(name), 700, 4, me, 0);
    });
}

TEST_CASE("codec: the error of a code is the CPU's") {
    using namespace codec_test;
    for (const char* name : {"none", "bf16", "taco:g=64", "hadint5"})
        for (const size_t n : {size_t(1), size_t(777), size_t(9000)}) {
            const Codec c = codec_parse(name);
            CAPTURE(codec_text(c));
            const std::vector<float> x = random_values<bf16>(n, 5);
            const std::vector<uint8_t> bytes = cpu_wire<bf16>(c, x, {}, nullptr);
            const DeviceBuffer<bf16> values(x);
            DeviceBuffer<double> sums(std::vector<double>{1, 2});
            DeviceWire wire(bytes.size(), 0);
            wire.upload(bytes);
            double expected[2] = {1, 2};
            if (c.kind == Codec::none) {
                for (const float value : x) expected[0] += double(value) * value;
            } else {
                cpu::codec_error_add(c, expected, x.data(), bytes.data(), n, {});
            }
            cuda::codec_error_add(c, sums.data, values.data, wire.data(), n, kernel_test().stream);
            for (int i = 0; i < 2; i++) CHECK(std::abs(sums.download()[size_t(i)] - expected[i]) <= 1e-12 * expected[i]);
        }
}

TEST_CASE("codec: fused with the norm, the same bits as in single steps") {
    using namespace codec_test;
    for (const char* name :
         {"bf16", "fp8", "fp8:fmt=e5m2", "int8", "taco", "taco:fmt=e5m2", "hadint8", "hadint6", "hadint7:g=32"}) {
        const Codec c = codec_parse(name);
        check_norm<bf16>(c, c, 3, 768, 2, 0, true, true);
        check_norm<bf16>(c, c, 2, 1280, 3, 2, false, false);
        check_norm<float>(c, c, 2, 384, 2, 1, true, true);
    }
    const char* const all[] = {"none", "bf16", "fp8", "fp8:fmt=e5m2", "int8", "taco", "hadint8", "hadint6", "hadint5:g=32"};
    for (const char* name : all) {
        for (const char* next : all) {
            if (name != all[0]) check_norm<bf16>(codec_parse(name), codec_parse(next), 2, 512, 2, 0, true, true);
        }
    }
    const Codec taco = codec_parse("taco"), sr = codec_parse("taco:g=512:sr");
    check_norm<bf16>(taco, sr, 2, 512, 2, 0, true, false);
    check_norm<bf16>(taco, taco, 1, 4096, 2, 0, true, true);
    check_norm<bf16>(taco, taco, 1, 8192, 2, 0, true, true);
    check_norm<float>(taco, taco, 1, 2048, 2, -1, false, true);
    in_thread_orders([&] { check_norm<bf16>(taco, taco, 3, 1024, 4, 2, true, true); });
}

TEST_CASE("codec: what cannot be fused is left alone") {
    using namespace codec_test;
    DeviceBuffer<bf16> values(size_t(4096));
    DeviceBuffer<float> statistics(size_t(64));
    DeviceBuffer<uint8_t> wire(size_t(8192));
    const uint8_t* wires[] = {wire.data, wire.data};
    const auto fused = [&](const char* codec, const char* next, int C, size_t n, bool stored) {
        const ResidualNorm<bf16> norm = {values.data,
                                         stored ? values.data : nullptr,
                                         statistics.data,
                                         statistics.data,
                                         values.data,
                                         nullptr,
                                         values.data,
                                         values.data,
                                         C,
                                         1e-5f};
        return cuda::codec_decode_reduce_layernorm(codec_parse(codec), wires, values.data, 2, n, norm, codec_parse(next),
                                                   wire.data, key, nullptr, kernel_test().stream);
    };
    CHECK_FALSE(fused("none", "none", 256, 1024, true));
    CHECK_FALSE(fused("taco", "taco", 192, 384, true));       // rows are not whole groups
    CHECK_FALSE(fused("taco", "taco", 256, 640, true));       // nor the values whole rows
    CHECK_FALSE(fused("taco", "hadint8", 256, 1024, false));  // out is needed to encode it later
    CHECK_FALSE(fused("taco", "taco:g=512", 256, 1024, false));
    CHECK_FALSE(fused("bf16", "bf16", 250, 1000, true));
    CHECK_FALSE(fused("taco", "taco", 16384, 16384, true));
    const ResidualNorm<bf16> norm = {
        values.data, values.data, statistics.data, statistics.data, values.data, nullptr, values.data, values.data, 256, 1e-5f};
    CHECK_FALSE(cuda::codec_decode_layernorm(codec_parse("taco"), wires, 2, 384, norm, kernel_test().stream));
    for (const float value : values.floats()) REQUIRE(std::isnan(value));
    CHECK(values.guards_hold());
}
