// Codecs: what is done to a tensor before it goes on the wire, written as text: "bf16", "taco", "hadint6:g=64:sr".
//
//   none                 float32, 4 bytes a value
//   bf16                 2 bytes a value
//   fp8, int8            groups of g values, one float32 scale each
//   taco                 groups, Hadamard transform, fp8, two float32 scales (HPDC'26, arXiv 2604.24088)
//   hadint4 .. hadint8   groups, Hadamard transform, integers of 4 to 8 bits, one float32 scale
//
// Options: g=32|64|128|256|512 (128), fmt=e4m3|e5m2 (e4m3), target= 1 to the format's maximum (the maximum), sr (stochastic
// rounding). A codec that cannot work is refused here, before anything runs. The arithmetic and the bytes are in spec.h.
#pragma once
#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "../check.h"

enum class Fp8Format { e4m3, e5m2 };

constexpr float fp8_max(Fp8Format format) { return format == Fp8Format::e4m3 ? 448.0f : 57344.0f; }

struct Codec {
    enum Kind { none, bf16, fp8, int8, taco, hadint };
    Kind kind = none;
    int bits = 32;  // of one value in the payload
    int group = 0;  // values that share a scale; 0: no groups
    Fp8Format format = Fp8Format::e4m3;
    float target = 0;         // fp8 and taco: the largest magnitude of a group is scaled to this
    bool stochastic = false;  // rounding
    bool operator==(const Codec&) const = default;
};

// Key of stochastic rounding: everything that tells one encoded tensor from another. Same key, same bytes.
struct RoundingKey {
    uint64_t seed = 0;
    uint32_t step = 0, micro_batch = 0, layer = 0, boundary = 0, rank = 0, stripe = 0;
};

constexpr bool codec_has_groups(const Codec& c) { return c.kind != Codec::none && c.kind != Codec::bf16; }
constexpr bool codec_has_hadamard(const Codec& c) { return c.kind == Codec::taco || c.kind == Codec::hadint; }
constexpr bool codec_has_fp8(const Codec& c) { return c.kind == Codec::taco || c.kind == Codec::fp8; }

constexpr size_t codec_groups(const Codec& c, size_t n) { return (n + size_t(c.group) - 1) / size_t(c.group); }
constexpr size_t codec_payload_bytes(const Codec& c) { return size_t(c.group) * size_t(c.bits) / 8; }  // of one group
constexpr size_t codec_scale_bytes(const Codec& c) { return c.kind == Codec::taco ? 8 : 4; }           // of one group

// Bytes on the wire of one stripe of n values.
constexpr size_t codec_bytes(const Codec& c, size_t n) {
    if (!codec_has_groups(c)) return n * size_t(c.bits) / 8;
    return codec_groups(c, n) * (codec_payload_bytes(c) + codec_scale_bytes(c));
}

// The same where `none` sends the storage type E itself: 2 bytes a value for 16-bit types.
template <class E>
constexpr size_t codec_wire_bytes(const Codec& c, size_t n) {
    return c.kind == Codec::none ? n * sizeof(E) : codec_bytes(c, n);
}

inline Codec codec_parse(const std::string& spec) {
    const char* const text = spec.c_str();
    const auto option_end = [&](size_t from) { return std::min(spec.find(':', from), spec.size()); };
    size_t at = option_end(0);
    const std::string name = spec.substr(0, at);

    Codec c;
    if (name == "none") {
    } else if (name == "bf16") {
        c.kind = Codec::bf16, c.bits = 16;
    } else if (name == "fp8" || name == "taco" || name == "int8") {
        c.kind = name == "fp8" ? Codec::fp8 : name == "taco" ? Codec::taco : Codec::int8;
        c.bits = 8, c.group = 128;
    } else if (name.size() == 7 && name.starts_with("hadint") && name[6] >= '4' && name[6] <= '8') {
        c.kind = Codec::hadint, c.bits = name[6] - '0', c.group = 128;
    } else {
        fail("codec '%s': unknown name '%s'; allowed: none, bf16, fp8, int8, taco, hadint4 .. hadint8", text, name.c_str());
    }

    bool has_group = false, has_format = false, has_target = false;
    while (at < spec.size()) {
        const size_t end = option_end(at + 1);
        const std::string option = spec.substr(at + 1, end - at - 1);
        const std::string key = option.substr(0, option.find('='));
        const std::string value = key.size() < option.size() ? option.substr(key.size() + 1) : "";
        at = end;
        const auto number = [&](auto& parsed) {
            const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
            return error == std::errc() && stop == value.data() + value.size();
        };
        const auto only_once = [&](bool& seen) {
            check(!seen, "codec '%s': option '%s' is given twice; give it once", text, key.c_str());
            seen = true;
        };
        const bool known = key == "g" || key == "fmt" || key == "target" || option == "sr";
        check(known, "codec '%s': unknown option '%s'; allowed: g=32|64|128|256|512, fmt=e4m3|e5m2, target=NUMBER, sr", text,
              option.c_str());
        check(codec_has_groups(c), "codec '%s': option '%s' does not apply to %s, which takes none", text, option.c_str(),
              name.c_str());
        check(codec_has_fp8(c) || (key != "fmt" && key != "target"),
              "codec '%s': option '%s' does not apply to %s, which takes g=32|64|128|256|512 and sr", text, option.c_str(),
              name.c_str());
        if (key == "g") {
            only_once(has_group);
            const bool valid = number(c.group) && c.group >= 32 && c.group <= 512 && (c.group & (c.group - 1)) == 0;
            check(valid, "codec '%s': group '%s' cannot work; allowed: 32, 64, 128, 256, 512", text, value.c_str());
        } else if (key == "fmt") {
            only_once(has_format);
            check(value == "e4m3" || value == "e5m2", "codec '%s': unknown format '%s'; allowed: e4m3, e5m2", text,
                  value.c_str());
            c.format = value == "e4m3" ? Fp8Format::e4m3 : Fp8Format::e5m2;
        } else if (key == "target") {
            only_once(has_target);
            check(number(c.target), "codec '%s': target '%s' is not a number", text, value.c_str());
        } else {
            only_once(c.stochastic);
        }
    }
    if (codec_has_fp8(c)) {
        // fmt= may follow target=, so the range is checked last. Above the maximum every group would be clipped.
        const float max = fp8_max(c.format);
        if (!has_target) c.target = max;
        check(c.target >= 1 && c.target <= max,
              "codec '%s': target %g cannot work with %s, whose largest value is %g; allowed: 1 to %g", text, double(c.target),
              c.format == Fp8Format::e4m3 ? "e4m3" : "e5m2", double(max), double(max));
    }
    return c;
}

// The shortest text that parses to this codec.
inline std::string codec_text(const Codec& c) {
    static const char* const names[] = {"none", "bf16", "fp8", "int8", "taco", "hadint"};
    std::string text = names[c.kind];
    if (c.kind == Codec::hadint) text += std::to_string(c.bits);
    if (!codec_has_groups(c)) return text;
    if (c.group != 128) text += ":g=" + std::to_string(c.group);
    if (codec_has_fp8(c) && c.format == Fp8Format::e5m2) text += ":fmt=e5m2";
    if (codec_has_fp8(c) && c.target != fp8_max(c.format)) text += format_text(":target=%.9g", double(c.target));
    if (c.stochastic) text += ":sr";
    return text;
}
