// The codecs: the definition against independent vectors, published distortion, ml_dtypes' casts and golden bytes; then the
// fast code against the definition, to the bit.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

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
        CHECK(cpu::codec_encode(codec, wire.data(), x.data(), n, {}, {}) == 0);
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
    const RoundingKey key = {.seed = 7, .step = 1, .micro_batch = 2, .layer = 3, .boundary = 4, .rank = 5};
    for (const Codec& codec : all_codecs()) {
        CAPTURE(codec_text(codec));
        const size_t g = codec_has_groups(codec) ? size_t(codec.group) : 64;
        for (const size_t n : {10000 * g, size_t(0), size_t(1), g - 1, g + 1, 3 * g + 17, 600 * g + g / 2}) {
            CAPTURE(n);
            const std::vector<float> x = wild_values(n, g, n);
            std::vector<uint8_t> expected(codec_bytes(codec, n) + 1, 0xab), wire = expected;
            const size_t not_finite = spec::codec_encode(codec, expected.data() + 1, x.data(), n, key);
            std::vector<float> expected_x(n + 1, 5), decoded(n + 1, 5);
            spec::codec_decode(codec, expected_x.data() + 1, expected.data() + 1, n);
            for (const int threads : {1, 2}) {
                omp_set_num_threads(threads);
                std::fill(wire.begin() + 1, wire.end(), uint8_t(0xcd));
                CHECK(cpu::codec_encode(codec, wire.data() + 1, x.data(), n, key, {}) == not_finite);
                CHECK(wire == expected);
                std::fill(decoded.begin() + 1, decoded.end(), 9.0f);
                cpu::codec_decode(codec, decoded.data() + 1, wire.data() + 1, n, {});
                CHECK(same_bits(decoded, expected_x));
            }
        }
    }
}
