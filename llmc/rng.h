// Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC'11). A number is a pure function of its key and
// counter, so it does not depend on the number of ranks or threads, nor on what was drawn before.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

using Philox = std::array<uint32_t, 4>;

constexpr Philox philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    Philox c = {uint32_t(counter_low), uint32_t(counter_low >> 32), uint32_t(counter_high), uint32_t(counter_high >> 32)};
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
        c = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1, uint32_t(p0)};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// [0, 1), 24 bits.
constexpr float uniform_from_bits(uint32_t bits) { return float(bits >> 8) * 0x1p-24f; }

// Four standard normals from one draw, by Box-Muller in double: rounded to float they are the same on every host.
inline std::array<float, 4> normals_from_bits(const Philox& bits) {
    std::array<float, 4> out;
    for (int pair = 0; pair < 2; pair++) {
        const double radius = std::sqrt(-2.0 * std::log((double(bits[2 * pair]) + 1.0) * 0x1p-32));
        const double angle = double(bits[2 * pair + 1]) * (0x1p-32 * 6.283185307179586);
        out[2 * pair] = float(radius * std::cos(angle));
        out[2 * pair + 1] = float(radius * std::sin(angle));
    }
    return out;
}

// Names become keys by FNV-1a, so that a stream of numbers belongs to a name and not to a position in a table.
constexpr uint64_t hash_name(std::string_view name) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (char c : name) hash = (hash ^ uint8_t(c)) * 0x100000001b3u;
    return hash;
}
