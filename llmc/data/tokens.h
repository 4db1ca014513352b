// Token files (*.bin, llm.c's formats): many shards mapped into memory, and the order in which windows are read.
//
// A file is 256 little-endian int32 (h[0] magic, h[1] version, h[2] number of tokens; from 2^31 on h[2] = -1 and h[4], h[5]
// hold the low and the high half), then the tokens: uint16 (magic 20240520, version 1) or uint32 (20240801, 7).
// A window of T + 1 tokens gives T inputs and, shifted by one, T targets.
//
// Training order is a pure function of (seed, sample): nothing is stored, and it does not depend on the number of ranks.
// Each epoch visits every window once. A shard of n tokens has W = max(1, n / T - 1) windows; window k begins at
// phase % (slack + 1) + k T with slack = n - 1 - W T, and the phase is drawn anew for each epoch and shard, so that the
// borders between windows move. The windows of all shards are put in order by a pseudorandom permutation (a Feistel network
// on 2^(2h) >= windows values, walked along its cycles until the value is a window; Black and Rogaway 2002).
//
// Errors name the file, the token's offset in it, and what to do.
#pragma once
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "llmc/check.h"
#include "llmc/rng.h"

static_assert(std::endian::native == std::endian::little, "token files are little-endian and read as they are");

constexpr int token_magic_u16 = 20240520, token_version_u16 = 1;
constexpr int token_magic_u32 = 20240801, token_version_u32 = 7;
constexpr int token_magic_eval = 20240522;
constexpr size_t token_header_bytes = 1024;

// One mapped file. Owns the mapping.
struct TokenShard {
    std::string path;
    const unsigned char* map = nullptr;
    size_t map_bytes = 0;
    size_t count = 0;  // tokens
    int width = 0;     // bytes a token: 2 or 4

    TokenShard() = default;
    TokenShard(TokenShard&& other) noexcept { *this = std::move(other); }
    TokenShard& operator=(TokenShard&& other) noexcept {
        path.swap(other.path);
        std::swap(map, other.map);
        std::swap(map_bytes, other.map_bytes);
        std::swap(count, other.count);
        std::swap(width, other.width);
        return *this;
    }
    ~TokenShard() {
        if (map) munmap(const_cast<unsigned char*>(map), map_bytes);
    }
};

struct TokenSet {
    std::string pattern;
    std::vector<TokenShard> shards;  // sorted by path
    size_t tokens = 0;               // of all shards
};

// Number of tokens a header promises. `file_bytes` is the file's size.
inline size_t token_header_check(const std::string& path, const int* h, size_t file_bytes, int* width) {
    const char* file = path.c_str();
    check(h[0] != token_magic_eval,
          "token file %s is an evaluation set (magic %d), not training text: give a file with magic %d or %d", file, h[0],
          token_magic_u16, token_magic_u32);
    check(h[0] == token_magic_u16 || h[0] == token_magic_u32,
          "token file %s has magic %d, expected %d (uint16) or %d (uint32): not a token file; make one with data/prepare.py",
          file, h[0], token_magic_u16, token_magic_u32);
    *width = h[0] == token_magic_u16 ? 2 : 4;
    const int version = *width == 2 ? token_version_u16 : token_version_u32;
    check(h[1] == version, "token file %s has version %d, expected %d for magic %d: make it again with data/prepare.py", file,
          h[1], version, h[0]);
    size_t count = size_t(h[2]);
    if (h[2] == -1) count = size_t(uint32_t(h[4])) | size_t(uint32_t(h[5])) << 32;
    check(h[2] >= -1 && count <= (SIZE_MAX - token_header_bytes) / 4,
          "token file %s has an impossible number of tokens in its header (%d): make it again with data/prepare.py", file, h[2]);
    const size_t expected = token_header_bytes + count * size_t(*width);
    check(
        file_bytes == expected,
        "token file %s has %zu bytes, but its header says %zu tokens of %d bytes, which is %zu bytes: it is %s; copy or make it "
        "again",
        file, file_bytes, count, *width, expected, file_bytes < expected ? "cut short" : "too long");
    return count;
}

inline TokenShard token_shard_open(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    check(fd >= 0, "token file %s cannot be opened: %s", path.c_str(), std::strerror(errno));
    struct stat info = {};
    const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    const size_t bytes = regular ? size_t(info.st_size) : 0;
    TokenShard shard;
    shard.path = path;
    int error = 0;
    if (bytes >= token_header_bytes) {
        void* map = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
        error = map == MAP_FAILED ? errno : 0;
        if (!error) shard.map = static_cast<const unsigned char*>(map), shard.map_bytes = bytes;
    }
    close(fd);
    check(regular, "token file %s is not a regular file", path.c_str());
    check(bytes >= token_header_bytes,
          "token file %s has %zu bytes, less than its header of %zu: it is cut short or no token file", path.c_str(), bytes,
          token_header_bytes);
    check(!error, "token file %s cannot be mapped into memory: %s", path.c_str(), std::strerror(error));
    int header[token_header_bytes / 4];
    std::memcpy(header, shard.map, sizeof header);
    shard.count = token_header_check(path, header, bytes, &shard.width);
    return shard;
}

// Paths that match a shell pattern, sorted by bytes (not by locale, so that every host has the same order).
inline std::vector<std::string> paths_matching(const std::string& pattern) {
    glob_t found = {};
    const int rc = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_TILDE, nullptr, &found);
    std::vector<std::string> paths;
    if (rc == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    check(rc == 0 || rc == GLOB_NOMATCH, "the pattern '%s' could not be expanded: a folder in it cannot be read",
          pattern.c_str());
    std::sort(paths.begin(), paths.end());
    return paths;
}

// Opens every file that matches; each must hold at least one window of T + 1 tokens.
inline TokenSet tokens_open(const std::string& pattern, int T) {
    check(T >= 1, "the sequence length T is %d and must be at least 1", T);
    TokenSet set;
    set.pattern = pattern;
    const auto paths = paths_matching(pattern);
    check(!paths.empty(), "no token file matches '%s': check the path, or make the data with data/prepare.py", pattern.c_str());
    for (const auto& path : paths) {
        TokenShard shard = token_shard_open(path);
        check(shard.count > size_t(T),
              "token file %s holds %zu tokens, but T = %d needs at least %d: use a smaller T or more text", path.c_str(),
              shard.count, T, T + 1);
        check(
            set.shards.empty() || set.shards[0].width == shard.width,
            "token files %s and %s have tokens of %d and %d bytes: they come from different tokenizers; narrow the pattern '%s'",
            set.shards[0].path.c_str(), path.c_str(), set.shards[0].width, shard.width, pattern.c_str());
        set.tokens += shard.count;
        set.shards.push_back(std::move(shard));
    }
    return set;
}

// Copies `n` tokens to `out` and returns the largest. Ids above INT_MAX come out negative: the caller refuses them.
template <typename Id>
uint32_t token_ids_copy(int* out, const unsigned char* from, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        Id id;
        std::memcpy(&id, from + i * sizeof(Id), sizeof(Id));
        largest = std::max<uint32_t>(largest, id);
        out[i] = int(id);
    }
    return largest;
}

// Copies tokens [begin, begin + n) to `out` and checks that each is an id of the vocabulary.
inline void token_shard_read(const TokenShard& shard, size_t begin, size_t n, int vocab, int* out) {
    check(begin <= shard.count && n <= shard.count - begin, "token file %s: %zu tokens from %zu asked of %zu", shard.path.c_str(),
          n, begin, shard.count);
    const unsigned char* from = shard.map + token_header_bytes + begin * size_t(shard.width);
    const uint32_t largest = shard.width == 2 ? token_ids_copy<uint16_t>(out, from, n) : token_ids_copy<uint32_t>(out, from, n);
    if (largest < uint32_t(vocab)) return;
    for (size_t i = 0; i < n; i++)
        check(uint32_t(out[i]) < uint32_t(vocab),
              "token file %s: token %zu has id %u, but the vocabulary has %d ids: the data was made with another tokenizer",
              shard.path.c_str(), begin + i, uint32_t(out[i]), vocab);
}

// ---- training order ----

inline size_t train_windows(size_t count, int T) {
    return std::max<size_t>(1, count / size_t(T) - (count >= 2 * size_t(T) ? 1 : 0));
}

// Windows in one epoch.
inline size_t tokens_train_windows(const TokenSet& set, int T) {
    size_t windows = 0;
    for (const auto& shard : set.shards) windows += train_windows(shard.count, T);
    return windows;
}

// Position `index` of the permutation of [0, n) that belongs to `key` and `epoch`.
inline size_t permutation_at(uint64_t key, uint64_t epoch, size_t index, size_t n) {
    const int half = (std::bit_width(n - 1) + 1) / 2;
    const uint64_t mask = (uint64_t(1) << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t mixed = left ^ (philox(key, right | round << 56, epoch)[0] & mask);
            left = right;
            right = mixed;
        }
        index = size_t(left << half | right);
    } while (index >= n);
    return index;
}

struct WindowPlace {
    size_t shard, begin;
};

inline WindowPlace tokens_train_place(const TokenSet& set, uint64_t seed, uint64_t sample, int T) {
    const size_t windows = tokens_train_windows(set, T);
    const uint64_t epoch = sample / windows;
    size_t k = permutation_at(seed ^ hash_name("window order"), epoch, size_t(sample % windows), windows);
    size_t s = 0;
    while (k >= train_windows(set.shards[s].count, T)) k -= train_windows(set.shards[s++].count, T);
    const size_t count = set.shards[s].count, slack = count - 1 - train_windows(count, T) * size_t(T);
    const Philox bits = philox(seed ^ hash_name("window phase"), s, epoch);
    const uint64_t phase = bits[0] | uint64_t(bits[1]) << 32;
    return {s, size_t(phase % (slack + 1)) + k * size_t(T)};
}

inline void tokens_train_window(const TokenSet& set, uint64_t seed, uint64_t sample, int T, int vocab, int* out /*[T + 1]*/) {
    const WindowPlace place = tokens_train_place(set, seed, sample, T);
    token_shard_read(set.shards[place.shard], place.begin, size_t(T) + 1, vocab, out);
}

// ---- validation: in order, window after window; the tail of a shard that fills no window is left out ----

inline size_t tokens_val_windows(const TokenSet& set, int T) {
    size_t windows = 0;
    for (const auto& shard : set.shards) windows += (shard.count - 1) / size_t(T);
    return windows;
}

inline void tokens_val_window(const TokenSet& set, size_t index, int T, int vocab, int* out /*[T + 1]*/) {
    size_t s = 0, k = index;
    while (s < set.shards.size() && k >= (set.shards[s].count - 1) / size_t(T)) k -= (set.shards[s++].count - 1) / size_t(T);
    check(s < set.shards.size(), "validation window %zu asked, but '%s' has %zu at T = %d", index, set.pattern.c_str(),
          tokens_val_windows(set, T), T);
    token_shard_read(set.shards[s], k * size_t(T), size_t(T) + 1, vocab, out);
}

// --check-data: every id of every file.
inline void tokens_check_all(const TokenSet& set, int vocab) {
    std::vector<int> block(1 << 16);
    for (const auto& shard : set.shards)
        for (size_t begin = 0; begin < shard.count; begin += block.size())
            token_shard_read(shard, begin, std::min(block.size(), shard.count - begin), vocab, block.data());
}

// "" if no tokenizer.json lies beside the first shard.
inline std::string tokens_tokenizer_path(const TokenSet& set) {
    const std::string& first = set.shards.at(0).path;
    const size_t slash = first.find_last_of('/');
    const std::string path = (slash == std::string::npos ? "" : first.substr(0, slash + 1)) + "tokenizer.json";
    return access(path.c_str(), F_OK) == 0 ? path : "";
}
