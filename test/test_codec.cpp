// The codecs: the definition against independent vectors, published distortion, ml_dtypes' casts and golden bytes; then the
// fast code against the definition, to the bit.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "llmc/cpu/codec.h"

using Json = nlohmann::json;

// A file of the project, wherever the test is started from.
static std::ifstream project_file(const std::string& path) {
    std::ifstream file(path);
#ifdef PROJECT_ROOT
    if (!file) file.open(std::string(PROJECT_ROOT) + "/" + path);
#endif
    return file;
}

// cpu::codec_encode, with the number of groups that are not finite.
static size_t encode(const Codec& c, std::vector<uint8_t>& wire, const std::vector<float>& x, const RoundingKey& key,
                     size_t offset = 0) {
    uint64_t nonfinite = 0;
    cpu::codec_encode(c, wire.data() + offset, x.data(), x.size(), key, &nonfinite, {});
    return nonfinite;
}

static std::vector<uint8_t> bytes_from_hex(const std::string& hex) {
    std::vector<uint8_t> bytes(hex.size() / 2);
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = uint8_t(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
    return bytes;
}

static std::vector<float> floats_from_hex(const std::string& hex) {
    const std::vector<uint8_t> bytes = bytes_from_hex(hex);
    std::vector<float> x(bytes.size() / 4);
    memcpy(x.data(), bytes.data(), bytes.size());
    return x;
}

// Fp8 codes on a line, so that neighbours differ by one.
static int fp8_rank(uint8_t code) { return code & 0x80 ? -(code & 0x7f) : code; }

TEST_CASE("vectors computed in float64 apart from the project") {
    const char* named = std::getenv("CODEC_VECTORS");
    std::ifstream file = project_file(named ? named : "../shared/cases/codec/vectors.json");
    if (!file) {
        MESSAGE("skipped: no vectors; name the file in CODEC_VECTORS");
        return;
    }
    const Json cases = Json::parse(file)["cases"];
    for (const Json& c : cases) {
        const std::string name = c["name"];
        CAPTURE(name);
        const Codec codec = codec_parse(c["codec"].get<std::string>() + ":g=" + std::to_string(c["group"].get<int>()));
        const bool subnormal = name.starts_with("subnormal");
        const size_t n = c["n"], g = size_t(codec.group), groups = codec_groups(codec, n);
        const std::vector<float> x = floats_from_hex(c["input_f32_hex"]), expected = floats_from_hex(c["decoded_f32_hex"]);
        std::vector<uint8_t> wire(codec_bytes(codec, n));
        std::vector<float> decoded(n);
        CHECK(encode(codec, wire, x, {}) == 0);
        cpu::codec_decode(codec, decoded.data(), wire.data(), n, {});

        std::vector<uint8_t> codes;
        if (codec.kind == Codec::taco) codes = bytes_from_hex(c["codes_hex"]);
        size_t differ = 0;
        for (size_t group = 0; group < groups; group++) {
            const spec::Scales scales = spec::scales_load(codec, wire.data(), groups, group);
            const double s = c["s"][group];
            CHECK(std::abs(scales.s - s) <= std::max(1e-6 * s, 0x1p-149));
            if (codec.kind == Codec::taco) {
                const double alpha = c["alpha"][group];
                CHECK(std::abs(scales.alpha - alpha) <= 1e-6 * alpha);
            }
            uint8_t q[spec::max_group];
            spec::unpack(q, wire.data() + group * codec_payload_bytes(codec), codec.group, codec.bits);
            size_t differ_here = 0;
            double max_abs = 0;
            for (size_t i = 0; i < g; i++) {
                const size_t at = group * g + i;
                const int ours = codec.kind == Codec::taco ? fp8_rank(q[i]) : int8_t(q[i]);
                const int theirs = codec.kind == Codec::taco ? fp8_rank(codes[at]) : c["levels"][at].get<int>();
                CHECK(std::abs(ours - theirs) <= 1);
                differ_here += ours != theirs;
                if (at < n) max_abs = std::max<double>(max_abs, std::abs(x[at]));
            }
            differ += differ_here;
            for (size_t at = group * g; at < std::min(n, (group + 1) * g); at++) {
                const double error = std::abs(double(decoded[at]) - expected[at]);
                if (subnormal)
                    CHECK(error <= s);
                else if (max_abs == 0)
                    CHECK(decoded[at] == 0);
                else if (differ_here == 0)
                    CHECK(error <= 1e-5 * max_abs);
            }
        }
        if (!subnormal) CHECK(differ <= std::max<size_t>(1, groups * g / 1000));
    }
}

// --- the fast code against the definition

static const char* const grouped[] = {"fp8",     "fp8:fmt=e5m2", "int8",    "taco",    "taco:fmt=e5m2", "taco:target=100",
                                      "hadint4", "hadint5",      "hadint6", "hadint7", "hadint8"};

static std::vector<Codec> all_codecs() {
    std::vector<Codec> codecs = {codec_parse("none"), codec_parse("bf16")};
    for (const std::string name : grouped)
        for (const std::string g : {":g=32", ":g=64", ":g=128", ":g=256", ":g=512"})
            for (const std::string rounding : {"", ":sr"}) codecs.push_back(codec_parse(name + g + rounding));
    return codecs;
}

// Values made by exact arithmetic only, the same on every machine: roughly normal, with outliers, each `block` at its own
// magnitude; now and then zeros, float32 subnormals, values near overflow, and what is not finite.
static std::vector<float> wild_values(size_t n, size_t block, uint64_t seed) {
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) {
        const Philox bits = philox(seed, i, 0), of_block = philox(seed, i / block, 1);
        float sum = -2;
        for (const uint32_t word : bits) sum += uniform_from_bits(word);
        const uint32_t kind = of_block[0] % 64;
        int exponent = int(of_block[1] % 24) - 16;
        if (bits[0] % 100 == 0) sum *= 40;
        if (kind == 0) sum = 0;
        if (kind == 1) exponent = -126 - int(of_block[1] % 26);
        if (kind == 2) exponent = 100 + int(of_block[1] % 28);
        if (kind == 3) exponent = -80 + int(of_block[1] % 150);
        x[i] = std::ldexp(sum, exponent);
        if (kind == 4 && i % block == of_block[1] % block)
            x[i] = spec::float_of(of_block[2] % 3 == 0 ? 0x7f800000 : of_block[2] % 3 == 1 ? 0xff800000 : 0x7fc00001);
    }
    return x;
}

static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

TEST_CASE("fast code gives the bytes and the floats of the definition") {
    std::map<std::pair<size_t, size_t>, std::vector<float>> values;
    const RoundingKey key = {.seed = 7, .step = 1, .micro_batch = 2, .layer = 3, .boundary = 4, .rank = 5};
    for (const Codec& codec : all_codecs()) {
        CAPTURE(codec_text(codec));
        const size_t g = codec_has_groups(codec) ? size_t(codec.group) : 64;
        const size_t many = codec.stochastic ? 2000 : 10000;
        for (const size_t n : {many * g, size_t(0), size_t(1), g - 1, g + 1, 3 * g + 17, 600 * g + g / 2}) {
            CAPTURE(n);
            std::vector<float>& x = values[{g, n}];
            if (x.empty()) x = wild_values(n, g, n);
            std::vector<uint8_t> expected(codec_bytes(codec, n) + 1, 0xab), wire = expected;
            const size_t not_finite = spec::codec_encode(codec, expected.data() + 1, x.data(), n, key);
            std::vector<float> expected_x(n + 1, 5), decoded(n + 1, 5);
            spec::codec_decode(codec, expected_x.data() + 1, expected.data() + 1, n);
            for (const int threads : {1, 2}) {
                omp_set_num_threads(threads);
                std::fill(wire.begin() + 1, wire.end(), uint8_t(0xcd));
                CHECK(encode(codec, wire, x, key, 1) == not_finite);
                CHECK(wire == expected);
                std::fill(decoded.begin() + 1, decoded.end(), 9.0f);
                cpu::codec_decode(codec, decoded.data() + 1, wire.data() + 1, n, {});
                CHECK(same_bits(decoded, expected_x));
            }
        }
    }
}

TEST_CASE("reductions are the decoded values summed in rank order") {
    const int peers = 4, me = 2;
    for (const Codec& codec : all_codecs()) {
        CAPTURE(codec_text(codec));
        for (const size_t n : {size_t(1), size_t(1000), size_t(34000)}) {
            std::vector<std::vector<uint8_t>> wires(peers, std::vector<uint8_t>(codec_bytes(codec, n)));
            std::vector<const uint8_t*> wire_pointers;
            std::vector<float> own = wild_values(n, 64, 100 + me), sum(n), decoded(n);
            for (int peer = 0; peer < peers; peer++) {
                const std::vector<float> x = wild_values(n, 64, 100 + uint64_t(peer));
                encode(codec, wires[size_t(peer)], x, {.rank = uint32_t(peer)});
                cpu::codec_decode(codec, decoded.data(), wires[size_t(peer)].data(), n, {});
                const std::vector<float>& from = peer == me ? own : decoded;
                for (size_t i = 0; i < n; i++) sum[i] = peer == 0 ? from[i] : sum[i] + from[i];
                wire_pointers.push_back(peer == me ? nullptr : wires[size_t(peer)].data());
            }
            const RoundingKey key = {.seed = 3, .rank = me};
            std::vector<uint8_t> expected(codec_bytes(codec, n)), wire(codec_bytes(codec, n));
            const uint64_t not_finite = encode(codec, expected, sum, key);
            for (const int threads : {1, 2}) {
                omp_set_num_threads(threads);
                std::vector<float> out = own;  // in place
                cpu::codec_decode_reduce(codec, out.data(), wire_pointers.data(), out.data(), peers, n, {});
                size_t wrong = 0;  // the payload of a NaN is left open
                for (size_t i = 0; i < n; i++)
                    wrong += spec::bits_of(out[i]) != spec::bits_of(sum[i]) && !(std::isnan(out[i]) && std::isnan(sum[i]));
                CHECK(wrong == 0);
                uint64_t counted = 0;
                cpu::codec_decode_reduce_encode(codec, wire.data(), wire_pointers.data(), own.data(), peers, n, key, &counted,
                                                {});
                CHECK(counted == not_finite);
                CHECK((wire == expected || codec.kind == Codec::none || codec.kind == Codec::bf16));
            }
        }
    }
}

TEST_CASE("division by multiplication is correctly rounded") {
#ifdef __AVX512F__
    uint64_t wrong = 0;
    for (uint64_t trial = 0; trial < 500000; trial++) {
        const Philox bits = philox(11, trial, 0);
        const float s = spec::float_of((bits[0] & 0x7fffff) | (67 + bits[1] % 120) << 23);
        const simd::Divider by = simd::divider(s);
        REQUIRE(by.quick);
        simd::v16 y;
        for (int i = 0; i < 16; i++) {
            const uint32_t word = philox(12, trial, uint64_t(i))[0];
            // Half of them next to a product of s and a multiple of 1/4: quotients at and beside ties.
            const float product = s * (float(word % 512) + 0.5f) * 0.5f;
            const float near = spec::float_of((spec::bits_of(product) + (word >> 9) % 5 - 2) | (word & 0x80000000));
            y[i] = i % 2 ? near : s * (uniform_from_bits(word) - 0.5f) * 512;
        }
        const simd::v16 fast = simd::divide<true>(y, by), exact = y / by.s;
        for (int i = 0; i < 16; i++) wrong += spec::bits_of(fast[i]) != spec::bits_of(exact[i]);
    }
    CHECK(wrong == 0);
#endif
}

TEST_CASE("the error of a code is measured") {
    for (const char* name : {"none", "bf16", "taco:g=64", "hadint5"}) {
        CAPTURE(std::string(name));
        const Codec codec = codec_parse(name);
        for (const size_t n : {size_t(0), size_t(77), size_t(50000)}) {
            std::vector<float> x(n), decoded(n);
            for (size_t i = 0; i < n; i++) x[i] = uniform_from_bits(philox(9, i, 0)[0]) - 0.5f;
            std::vector<uint8_t> wire(codec_bytes(codec, n));
            encode(codec, wire, x, {});
            cpu::codec_decode(codec, decoded.data(), wire.data(), n, {});
            double signal = 1, noise = 2;
            for (size_t i = 0; i < n; i++) signal += double(x[i]) * x[i], noise += std::pow(double(x[i]) - decoded[i], 2);
            double first[2] = {};
            for (const int threads : {1, 2}) {
                omp_set_num_threads(threads);
                double sums[2] = {1, 2};
                cpu::codec_error_add(codec, sums, x.data(), wire.data(), n, {});
                CHECK(std::abs(sums[0] - signal) <= 1e-12 * signal);
                CHECK(std::abs(sums[1] - noise) <= 1e-12 * noise);
                if (threads == 1) memcpy(first, sums, sizeof sums);
                CHECK(memcmp(first, sums, sizeof sums) == 0);
            }
        }
    }
}

TEST_CASE("one step from the product with the reciprocal is the quotient") {
    // With a and b in [1, 2), q = a r is within 1.5 units in the last place of a / b and b r within b 2^-25 of 1, so that the
    // step, before it is rounded, is within 1.5 b 2^-25 units. A quotient is |k| 2^-24 / b units from the middle m of two floats
    // if, with mantissas as integers, a 2^s = b m + k. So only |k| < 0.75 b^2 < 3 could go wrong: these are all.
    uint64_t tried = 0, wrong = 0;
#pragma omp parallel for reduction(+ : tried, wrong)
    for (uint64_t b = 1 << 23; b < 1 << 24; b++) {
        const float s = float(b), r = 1.0f / s;
        const int twos = __builtin_ctzll(b);
        if (twos > 1) continue;  // b m is a multiple of 4, k is not
        uint64_t inverse = b >> twos;
        for (int i = 0; i < 5; i++) inverse *= 2 - (b >> twos) * inverse;
        for (const int shift : {24, 25})
            for (const int64_t k : {-2, -1, 1, 2}) {
                if (k % (1 << twos) != 0) continue;
                const uint64_t modulus = uint64_t(1) << (shift - twos), first = uint64_t(-k / (1 << twos)) * inverse % modulus;
                for (uint64_t m = first; m < 1 << 25; m += modulus) {
                    const uint64_t a = (b * m + uint64_t(k)) >> shift;
                    if (m < 1 << 24 || m % 2 == 0 || a < 1 << 23 || a >= 1 << 24) continue;
                    const float y = float(a), q = y * r;
                    tried++;
                    wrong += std::fma(std::fma(q, s, -y), -r, q) != y / s;
                }
            }
    }
    CHECK(tried > 10'000'000);
    CHECK(wrong == 0);
}

// --- the definition

TEST_CASE("fp8 casts are ml_dtypes'") {
    std::ifstream file = project_file("test/golden/fp8.json");
    REQUIRE_MESSAGE(file, "test/golden/fp8.json is missing; make it with test/oracle/make_fp8.py");
    const Json table = Json::parse(file);
    for (const std::string name : {"e4m3", "e5m2"}) {
        CAPTURE(name);
        const Fp8Format format = name == "e4m3" ? Fp8Format::e4m3 : Fp8Format::e5m2;
        const std::vector<float> decoded = floats_from_hex(table[name]["decode"]);
        for (int code = 0; code < 256; code++)
            if (std::isfinite(decoded[size_t(code)]))
                CHECK(spec::bits_of(spec::fp8_decode(format, uint8_t(code))) == spec::bits_of(decoded[size_t(code)]));
        const std::vector<float> input = floats_from_hex(table[name]["input"]);
        const std::vector<uint8_t> codes = bytes_from_hex(table[name]["code"]);
        REQUIRE(input.size() == codes.size());
        REQUIRE(input.size() > 2000);
        for (size_t i = 0; i < input.size(); i++) {
            CAPTURE(input[i]);
            CHECK(int(spec::fp8_encode(format, input[i])) == int(codes[i]));
        }
    }
}

TEST_CASE("bytes do not change") {
    // CODEC_GOLDEN names a file to write the table to, after a change of the format that is meant.
    const auto hash = [](const void* data, size_t size) {
        return format_text("%016llx",
                           static_cast<unsigned long long>(hash_name(std::string_view(static_cast<const char*>(data), size))));
    };
    Json found;
    for (const Codec& codec : all_codecs()) {
        const size_t g = codec_has_groups(codec) ? size_t(codec.group) : 64;
        const RoundingKey key = {.seed = 1, .step = 2, .micro_batch = 3, .layer = 4, .boundary = 5, .rank = 6};
        Json& entry = found[codec_text(codec)];
        for (const size_t n : {300 * g + 7, g - 9}) {
            const std::vector<float> x = wild_values(n, g, 2024 + n);
            std::vector<uint8_t> wire(codec_bytes(codec, n));
            std::vector<float> decoded(n);
            spec::codec_encode(codec, wire.data(), x.data(), n, key);
            spec::codec_decode(codec, decoded.data(), wire.data(), n);
            if (n > g) {
                entry["n"] = n;
                entry["wire_fnv1a"] = hash(wire.data(), wire.size());
                entry["decoded_fnv1a"] = hash(decoded.data(), 4 * n);
            } else if (g <= 128) {
                std::string hex;
                for (const uint8_t byte : wire) hex += format_text("%02x", byte);
                entry["short_n"] = n;
                entry["short_wire"] = hex;
            }
        }
    }
    if (const char* path = std::getenv("CODEC_GOLDEN")) std::ofstream(path) << found.dump(1) << "\n";
    std::ifstream file = project_file("test/golden/codec.json");
    REQUIRE_MESSAGE(file, "test/golden/codec.json is missing; CODEC_GOLDEN=test/golden/codec.json writes it");
    const Json expected = Json::parse(file);
    CHECK(expected.size() == found.size());
    for (const auto& [name, entry] : expected.items()) {
        CAPTURE(name);
        CHECK(found[name] == entry);
    }
}

TEST_CASE("distortion is as published") {
    const size_t n = 4 << 20;
    enum { gaussian, laplace, student, channels, distributions };
    // The 8 fall on 5 of the 8 groups, as random ones most often do. Where they fall moves fp8's figure by 4 dB, as a group's
    // largest value is exact.
    const auto large_channel = [](size_t i) {
        for (const size_t channel : {17, 81, 145, 209, 273, 337, 529, 785})
            if (i % 1024 == channel) return true;
        return false;
    };
    const char* const names[] = {"Gaussian", "Laplace", "Student t3", "8 channels of 1024 x40"};
    struct Row {
        const char* codec;
        double snr[distributions], small;  // dB; small: of the channels that are not x40; 0 where not published
    };
    const Row rows[] = {{"fp8", {31.8, 32.1, 33.0, 38.6}, 31.6},  {"taco", {31.8, 31.8, 31.8, 31.6}, 20.4},
                        {"int8", {43.8, 41.0, 37.2, 32.8}, 21.5}, {"hadint8", {43.8, 43.9, 44.4, 48.3}, 37.1},
                        {"hadint7", {37.7, 37.8, 38.3, 42.2}, 0}, {"hadint6", {31.5, 31.6, 32.1, 36.0}, 0},
                        {"hadint5", {25.2, 25.3, 25.8, 29.7}, 0}, {"hadint4", {18.6, 18.7, 19.2, 23.1}, 0}};
    std::vector<float> x(n), decoded(n);
    for (int kind = 0; kind < distributions; kind++) {
        for (size_t i = 0; i < n; i++) {
            const Philox bits = philox(uint64_t(kind), i, 0);
            const std::array<float, 4> normals = normals_from_bits(bits);
            const double u = uniform_from_bits(bits[0]) - 0.5 + 0x1p-25;
            x[i] = normals[0];
            if (kind == laplace) x[i] = float(std::copysign(std::log(1 - 2 * std::abs(u)), u));
            if (kind == student)
                x[i] /= std::sqrt((normals[1] * normals[1] + normals[2] * normals[2] + normals[3] * normals[3]) / 3);
            if (kind == channels && large_channel(i)) x[i] *= 40;
        }
        for (const Row& row : rows) {
            const Codec codec = codec_parse(row.codec);
            std::vector<uint8_t> wire(codec_bytes(codec, n));
            encode(codec, wire, x, {});
            cpu::codec_decode(codec, decoded.data(), wire.data(), n, {});
            double signal[2] = {}, noise[2] = {};
            for (size_t i = 0; i < n; i++) {
                const bool large = kind == channels && large_channel(i);
                signal[large] += double(x[i]) * x[i];
                noise[large] += (double(x[i]) - decoded[i]) * (double(x[i]) - decoded[i]);
            }
            const double snr = 10 * std::log10((signal[0] + signal[1]) / (noise[0] + noise[1]));
            const double small = 10 * std::log10(signal[0] / noise[0]);
            INFO(std::string(row.codec), " ", std::string(names[kind]), ": ", snr, " dB, small values ", small, " dB");
            CHECK(std::abs(snr - row.snr[kind]) <= 0.3);
            if (kind == channels && row.small > 0) CHECK(std::abs(small - row.small) <= 0.3);
        }
    }
}

TEST_CASE("zeros, tiny, huge and broken groups") {
    const float inf = INFINITY, nan = NAN;
    for (const Codec& codec : all_codecs()) {
        if (!codec_has_groups(codec)) continue;
        CAPTURE(codec_text(codec));
        const size_t g = size_t(codec.group), n = 4 * g;
        std::vector<float> x(n), decoded(n);
        std::vector<uint8_t> wire(codec_bytes(codec, n));
        const auto through = [&] {
            const size_t not_finite = encode(codec, wire, x, {});
            cpu::codec_decode(codec, decoded.data(), wire.data(), n, {});
            return not_finite;
        };
        // Group 0: zeros. 1: subnormals down to the least. 2: fine but for one value. 3: the largest that still goes.
        for (const float broken : {nan, -nan, inf, -inf}) {
            for (size_t i = 0; i < g; i++) {
                x[i] = i % 2 ? -0.0f : 0.0f;
                x[g + i] = std::ldexp(float(i % 5) - 2.0f, -149);
                x[2 * g + i] = i == 5 ? broken : 1.0f;
                x[3 * g + i] = i % 2 ? -3e35f : 3e35f;
            }
            CHECK(through() == 1);
            for (size_t i = 0; i < g; i++) {
                CHECK(decoded[i] == 0);
                CHECK(std::abs(decoded[g + i]) <= 0x1p-140f);
                CHECK(std::isnan(decoded[2 * g + i]));
                CHECK(std::isfinite(decoded[3 * g + i]));
            }
            const spec::Scales scales = spec::scales_load(codec, wire.data(), 4, 2);
            CHECK(spec::bits_of(scales.s) == spec::quiet_nan);
            const size_t bytes = codec_payload_bytes(codec);
            for (size_t i = 0; i < bytes; i++) CHECK(int(wire[2 * bytes + i]) == 0);
        }
        // Finite, but the transform is not: said, not hidden. Without a transform it goes.
        std::fill(x.begin(), x.end(), 3e38f);
        CHECK(through() == (codec.kind == Codec::hadint ? 4 : 0));
        CHECK(std::isnan(decoded[0]) == (codec.kind == Codec::hadint));
        // Subnormals are as good as others when the scale has bits to spare, and no worse than a level at the bottom.
        for (const int exponent : {-128, -132, -136, -140}) {
            for (size_t i = 0; i < n; i++) x[i] = std::ldexp(uniform_from_bits(philox(5, i, 0)[0]) - 0.5f, exponent);
            CHECK(through() == 0);
            for (size_t i = 0; i < n; i++) CHECK(std::isfinite(decoded[i]));
            if (codec.kind != Codec::int8 && codec.kind != Codec::hadint) continue;
            double error = 0, signal = 0;
            for (size_t i = 0; i < n; i++) error += std::pow(double(decoded[i]) - x[i], 2), signal += std::pow(double(x[i]), 2);
            const double bound = codec.bits >= 7 && !codec.stochastic ? 0.03 : 0.45;
            if (exponent >= -136) CHECK(std::sqrt(error / signal) < bound);
        }
    }
}

TEST_CASE("codes of infinity and NaN are never written") {
    const std::vector<float> x = wild_values(64 * 5000, 64, 77);
    for (const char* name : {"fp8:g=64", "taco:g=64", "fp8:g=64:sr", "taco:g=64:sr"})
        for (const char* format : {"", ":fmt=e5m2"}) {
            const Codec codec = codec_parse(std::string(name) + format);
            std::vector<uint8_t> wire(codec_bytes(codec, x.size()));
            encode(codec, wire, x, {});
            uint8_t max = 0;
            for (size_t i = 0; i < x.size(); i++) max = std::max(max, uint8_t(wire[i] & 0x7f));
            CHECK(int(max) == (codec.format == Fp8Format::e4m3 ? 0x7e : 0x7b));
        }
}

TEST_CASE("stochastic rounding is unbiased") {
    const int trials = 4000;
    for (const char* name : {"int8:g=64:sr", "fp8:g=64:sr", "fp8:g=64:fmt=e5m2:sr", "hadint4:g=64:sr", "hadint7:g=64:sr",
                             "taco:g=64:sr", "taco:g=64:fmt=e5m2:sr"}) {
        CAPTURE(std::string(name));
        const Codec codec = codec_parse(name);
        const size_t n = 128;
        std::vector<float> x(n), decoded(n);
        // Down to the subnormals of both fp8 formats.
        for (size_t i = 0; i < n; i++) x[i] = std::ldexp(uniform_from_bits(philox(6, i, 0)[0]) - 0.5f, -int(i % 20));
        std::vector<double> mean(n), square(n);
        std::vector<uint8_t> wire(codec_bytes(codec, n));
        for (int trial = 0; trial < trials; trial++) {
            encode(codec, wire, x, {.step = uint32_t(trial)});
            cpu::codec_decode(codec, decoded.data(), wire.data(), n, {});
            for (size_t i = 0; i < n; i++) {
                const double error = double(decoded[i]) - x[i];
                mean[i] += error / trials;
                square[i] += error * error / trials;
            }
        }
        double chi = 0;
        for (size_t i = 0; i < n; i++) {
            // Beside the sample's own spread: that of a value so near a code that no trial may have moved it (integers; the
            // codes of fp8 are too near for that), and the rounding of the arithmetic.
            const double step = codec_has_fp8(codec) ? 0 : 0.5 / ((1 << (codec.bits - 1)) - 1);
            const double deviation = std::sqrt((square[i] + step * step / trials) / trials) + 1e-6 * std::abs(x[i]) + 1e-9;
            CHECK(std::abs(mean[i]) < 5 * deviation);
            chi += mean[i] * mean[i] / (deviation * deviation) / double(n);
        }
        CHECK(chi < 1.5);
    }
}

TEST_CASE("stochastic rounding follows its key") {
    const size_t n = 1000;
    const std::vector<float> x = wild_values(n, n, 3);
    for (const char* name : {"int8:sr", "taco:sr", "hadint5:sr"}) {
        const Codec codec = codec_parse(name);
        const auto encoded = [&](const RoundingKey& key) {
            std::vector<uint8_t> wire(codec_bytes(codec, n));
            encode(codec, wire, x, key);
            return wire;
        };
        const RoundingKey key = {1, 2, 3, 4, 5, 6};
        const std::vector<uint8_t> wire = encoded(key);
        CHECK(wire == encoded(key));
        CHECK(wire != encoded({9, 2, 3, 4, 5, 6}));
        CHECK(wire != encoded({1, 9, 3, 4, 5, 6}));
        CHECK(wire != encoded({1, 2, 9, 4, 5, 6}));
        CHECK(wire != encoded({1, 2, 3, 9, 5, 6}));
        CHECK(wire != encoded({1, 2, 3, 4, 9, 6}));
        CHECK(wire != encoded({1, 2, 3, 4, 5, 9}));
    }
}

// --- names and sizes

TEST_CASE("texts of codecs") {
    for (const Codec& codec : all_codecs()) CHECK(codec_parse(codec_text(codec)) == codec);
    CHECK(codec_text(codec_parse("taco:g=128:fmt=e4m3:target=448")) == "taco");
    CHECK(codec_text(codec_parse("taco:sr:target=448:g=256:fmt=e5m2")) == "taco:g=256:fmt=e5m2:target=448:sr");
    CHECK(codec_parse("fp8:target=12.7") == codec_parse(codec_text(codec_parse("fp8:target=12.7"))));

    const std::pair<const char*, const char*> refused[] = {
        {"", "allowed: none, bf16, fp8, int8, taco, hadint4 .. hadint8"},
        {"tacos", "unknown name 'tacos'; allowed"},
        {"hadint3", "unknown name 'hadint3'"},
        {"hadint9", "unknown name 'hadint9'"},
        {"hadint", "unknown name 'hadint'"},
        {"taco:g=16", "allowed: 32, 64, 128, 256, 512"},
        {"taco:g=1024", "allowed: 32, 64, 128, 256, 512"},
        {"taco:g=100", "group '100' cannot work"},
        {"taco:g=-128", "group '-128' cannot work"},
        {"taco:g=128x", "group '128x' cannot work"},
        {"taco:g", "group '' cannot work"},
        {"taco:g=32:g=64", "given twice"},
        {"taco:target=57734", "target 57734 cannot work with e4m3, whose largest value is 448; allowed: 1 to 448"},
        {"taco:fmt=e5m2:target=57734", "whose largest value is 57344; allowed: 1 to 57344"},
        {"taco:target=57344:fmt=e4m3", "allowed: 1 to 448"},
        {"taco:target=0", "allowed: 1 to 448"},
        {"fp8:target=-1", "allowed: 1 to 448"},
        {"fp8:target=nan", "allowed: 1 to 448"},
        {"fp8:target=many", "not a number"},
        {"taco:fmt=e3m4", "allowed: e4m3, e5m2"},
        {"taco:clip", "unknown option 'clip'; allowed: g="},
        {"taco:", "unknown option ''"},
        {"taco:sr=1", "unknown option 'sr=1'"},
        {"bf16:sr", "does not apply to bf16"},
        {"none:g=64", "does not apply to none"},
        {"int8:fmt=e4m3", "does not apply to int8"},
        {"hadint4:target=7", "does not apply to hadint4"},
    };
    for (const auto& [text, reason] : refused) {
        CAPTURE(std::string(text));
        std::string message = "accepted";
        try {
            codec_parse(text);
        } catch (const Error& error) {
            message = error.what();
        }
        CHECK_MESSAGE(message.find(reason) != std::string::npos, message);
        CHECK(message.find("codec '" + std::string(text) + "'") == 0);
    }
}

TEST_CASE("bytes on the wire") {
    CHECK(codec_bytes(codec_parse("none"), 1000) == 4000);
    CHECK(codec_bytes(codec_parse("bf16"), 1000) == 2000);
    CHECK(codec_bytes(codec_parse("taco"), 0) == 0);
    CHECK(codec_bytes(codec_parse("taco"), 1) == 136);
    CHECK(codec_bytes(codec_parse("taco"), 1280) == 1360);  // 1 + 8/G a value
    CHECK(codec_bytes(codec_parse("taco:g=32"), 1280) == 1600);
    CHECK(codec_bytes(codec_parse("int8"), 1280) == 1320);
    CHECK(codec_bytes(codec_parse("hadint6"), 1281) == 11 * (96 + 4));
    CHECK(codec_bytes(codec_parse("hadint5:g=32"), 32) == 24);
    CHECK(codec_wire_bytes<float>(codec_parse("none"), 1000) == 4000);
    CHECK(codec_wire_bytes<uint16_t>(codec_parse("none"), 1000) == 2000);
    CHECK(codec_wire_bytes<uint16_t>(codec_parse("taco"), 1280) == 1360);
}
