// Token files and tokenizers: what is read, the order of windows, and a clear refusal of each kind of bad file.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "llmc/data/tokenizer.h"
#include "llmc/data/tokens.h"
#include "refused.h"
#include "temp_dir.h"

namespace {

namespace fs = std::filesystem;

std::string file_read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

template <typename Id>
void tokens_write(const std::string& path, const std::vector<Id>& ids, const std::map<int, int>& header = {}) {
    int h[256] = {sizeof(Id) == 2 ? 20240520 : 20240801, sizeof(Id) == 2 ? 1 : 7, int(ids.size())};
    for (auto [i, value] : header) h[i] = value;
    std::string bytes(reinterpret_cast<char*>(h), sizeof h);
    bytes.append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(Id));
    file_write(path, bytes);
}

// Ids begin, begin + 1, ...
std::vector<uint16_t> counted(size_t n, int begin = 0) {
    std::vector<uint16_t> ids(n);
    std::iota(ids.begin(), ids.end(), uint16_t(begin));
    return ids;
}

void open_refused(const std::string& pattern, int T, const std::vector<std::string>& words) {
    refused([&] { tokens_open(pattern, T); }, words);
}

}  // namespace

TEST_CASE("uint16 and uint32 files give the same ids") {
    TempDir dir;
    tokens_write<uint16_t>(dir / "a.bin", {5, 6, 7, 8, 9});
    tokens_write<uint32_t>(dir / "b.bin", {5, 6, 7, 100000, 9});
    int out[5];
    tokens_val_window(tokens_open(dir / "a.bin", 4), 0, 4, 10, out);
    CHECK(std::vector<int>(out, out + 5) == std::vector<int>{5, 6, 7, 8, 9});
    tokens_val_window(tokens_open(dir / "b.bin", 4), 0, 4, 100001, out);
    CHECK(std::vector<int>(out, out + 5) == std::vector<int>{5, 6, 7, 100000, 9});
}

TEST_CASE("shards are sorted by name, and validation goes through them in order") {
    TempDir dir;
    tokens_write(dir / "v_000001.bin", counted(9, 100));
    tokens_write(dir / "v_000000.bin", counted(12, 0));
    tokens_write(dir / "other.bin", counted(50, 0));
    const TokenSet set = tokens_open(dir / "v_*.bin", 4);
    REQUIRE(set.shards.size() == 2);
    CHECK(set.tokens == 21);
    REQUIRE(tokens_val_windows(set, 4) == 4);  // (12 - 1) / 4 + (9 - 1) / 4
    const int first[] = {0, 4, 100, 104};
    for (size_t w = 0; w < 4; w++) {
        int out[5];
        tokens_val_window(set, w, 4, 1000, out);
        for (int i = 0; i < 5; i++) CHECK(out[i] == first[w] + i);
    }
    int out[5];
    refused([&] { tokens_val_window(set, 4, 4, 1000, out); }, {"window 4", "has 4"});
}

TEST_CASE("each epoch visits every window once, in another order and with another phase") {
    TempDir dir;
    const int T = 8;
    const size_t counts[] = {1000, 9, 16, 17, 25, 333};  // T + 1, 2 T, ... are the short cases
    for (size_t s = 0; s < 6; s++) tokens_write(dir / ("t" + std::to_string(s) + ".bin"), counted(counts[s]));
    const TokenSet set = tokens_open(dir / "t*.bin", T);
    const size_t windows = tokens_train_windows(set, T);
    CHECK(windows == 124 + 1 + 1 + 1 + 2 + 40);
    std::vector<std::vector<size_t>> orders;
    std::set<size_t> phases;
    for (uint64_t epoch = 0; epoch < 20; epoch++) {
        std::set<std::pair<size_t, size_t>> places;
        std::vector<size_t> order;
        for (uint64_t i = 0; i < windows; i++) {
            const WindowPlace p = tokens_train_place(set, 42, epoch * windows + i, T);
            CHECK(p.begin + size_t(T) + 1 <= counts[p.shard]);
            places.insert({p.shard, p.begin});
            order.push_back(p.shard * 1000 + p.begin);
        }
        REQUIRE(places.size() == windows);
        for (auto a = places.begin(), b = std::next(a); b != places.end(); a++, b++)  // no token is a target twice
            CHECK((b->first != a->first || b->second == a->second + size_t(T)));
        phases.insert(places.begin()->second);
        orders.push_back(order);
    }
    CHECK(phases.size() > 4);
    for (size_t e = 1; e < orders.size(); e++) CHECK(orders[e] != orders[0]);
    for (uint64_t sample : {0, 7, 200}) {  // a pure function of seed and sample
        int a[T + 1], b[T + 1];
        tokens_train_window(set, 42, sample, T, 1000, a);
        tokens_train_window(tokens_open(dir / "t*.bin", T), 42, sample, T, 1000, b);
        CHECK(std::equal(a, a + T + 1, b));
        const WindowPlace p = tokens_train_place(set, 42, sample, T);
        for (int i = 0; i <= T; i++) CHECK(a[i] == int(p.begin) + i);
    }
    size_t same = 0;
    for (uint64_t i = 0; i < windows; i++) {
        const WindowPlace a = tokens_train_place(set, 1, i, T), b = tokens_train_place(set, 2, i, T);
        same += a.shard == b.shard && a.begin == b.begin;
    }
    CHECK(same < windows / 4);
}

TEST_CASE("the permutation is one for each size, and well mixed") {
    for (size_t n : {1, 2, 3, 5, 64, 65, 1000, 4097}) {
        std::vector<char> seen(n, 0);
        for (size_t i = 0; i < n; i++) {
            const size_t p = permutation_at(7, 3, i, n);
            REQUIRE(p < n);
            CHECK(!seen[p]);
            seen[p] = 1;
        }
    }
    const size_t n = 10000;  // correlation of i with its place: 0 within 4 standard deviations
    double sum = 0;
    size_t adjacent = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double(i) / n - 0.5) * (double(permutation_at(11, 0, i, n)) / n - 0.5) * 12;
        adjacent += permutation_at(11, 0, i, n) + 1 == permutation_at(11, 0, (i + 1) % n, n);
    }
    CHECK(std::abs(sum / n) < 4.0 / 100);
    CHECK(adjacent < 10);
    CHECK(permutation_at(1, 0, size_t(1) << 40, (size_t(1) << 41) + 5) < (size_t(1) << 41) + 5);
}

TEST_CASE("bad token files are refused with the file's name and the reason") {
    TempDir dir;
    const std::string bad = dir / "bad.bin";
    open_refused(bad, 4, {bad, "no token file matches", "data/prepare.py"});
    open_refused(dir / "*.bin", 4, {"*.bin", "no token file matches"});
    file_write(bad, "");
    open_refused(bad, 4, {bad, "0 bytes"});
    file_write(bad, std::string(1023, '\0'));
    open_refused(bad, 4, {bad, "1023 bytes"});
    tokens_write(bad, counted(10), {{0, 1234}});
    open_refused(bad, 4, {bad, "magic 1234", "20240520"});
    tokens_write(bad, counted(10), {{0, 20240522}});
    open_refused(bad, 4, {bad, "evaluation set"});
    tokens_write(bad, counted(10), {{1, 2}});
    open_refused(bad, 4, {bad, "version 2", "expected 1"});
    tokens_write(bad, std::vector<uint32_t>(10), {{1, 1}});
    open_refused(bad, 4, {bad, "version 1", "expected 7"});
    tokens_write(bad, counted(10), {{2, 11}});
    open_refused(bad, 4, {bad, "1044 bytes", "11 tokens", "1046", "cut short"});
    tokens_write(bad, counted(10), {{2, 9}});
    open_refused(bad, 4, {bad, "1044 bytes", "9 tokens", "too long"});
    tokens_write(bad, counted(10), {{2, -2}});
    open_refused(bad, 4, {bad, "impossible number", "-2"});
    tokens_write(bad, counted(10), {{2, -1}, {4, -1}, {5, -1}});
    open_refused(bad, 4, {bad, "impossible number"});
    tokens_write(bad, counted(10));
    open_refused(bad, 10, {bad, "10 tokens", "T = 10", "at least 11"});
    CHECK(tokens_open(bad, 9).tokens == 10);
    open_refused(bad, 0, {"at least 1"});
    tokens_write(dir / "bad2.bin", std::vector<uint32_t>(10));
    open_refused(dir / "bad*.bin", 4, {bad, "bad2.bin", "different tokenizers"});
    fs::remove(bad);
    fs::create_directory(bad);
    open_refused(bad, 4, {bad, "regular file"});
}

TEST_CASE("ids outside the vocabulary are refused in any window and by the full scan") {
    TempDir dir;
    auto ids = std::vector<uint16_t>(200000, 3);
    ids[150001] = 300;
    tokens_write(dir / "a.bin", ids);
    const TokenSet set = tokens_open(dir / "a.bin", 10);
    int out[11];
    CHECK_NOTHROW(tokens_val_window(set, 14999, 10, 256, out));
    refused([&] { tokens_val_window(set, 15000, 10, 256, out); }, {"a.bin", "token 150001", "id 300", "256"});
    CHECK_NOTHROW(tokens_val_window(set, 15000, 10, 301, out));
    refused([&] { tokens_check_all(set, 256); }, {"a.bin", "token 150001", "id 300"});
    refused([&] { tokens_check_all(set, 300); }, {"id 300"});
    CHECK_NOTHROW(tokens_check_all(set, 301));
    refused(
        [&] {
            for (uint64_t i = 0; i < 20000; i++) tokens_train_window(set, 1, i, 10, 256, out);
        },
        {"token 150001"});
    auto wide = std::vector<uint32_t>(20, 3);
    wide[7] = 0xfffffffeu;  // above INT_MAX
    tokens_write(dir / "b.bin", wide);
    refused([&] { tokens_val_window(tokens_open(dir / "b.bin", 10), 0, 10, 256, out); }, {"b.bin", "token 7", "id 4294967294"});
    refused([&] { tokens_check_all(tokens_open(dir / "b.bin", 10), 256); }, {"token 7"});
}

TEST_CASE("a shard of more than 2^31 tokens (sparse file)") {
    TempDir dir;
    const size_t count = (size_t(1) << 31) + 7;
    tokens_write(dir / "big.bin", std::vector<uint16_t>{1, 2, 3},
                 {{2, -1}, {4, int(count & 0xffffffffu)}, {5, int(count >> 32)}});
    fs::resize_file(dir / "big.bin", 1024 + 2 * count);
    {
        std::fstream f(dir / "big.bin", std::ios::binary | std::ios::in | std::ios::out);
        f.seekp(std::streamoff(1024 + 2 * (count - 1)));
        f.write("\x09\x01", 2);
    }
    const TokenSet set = tokens_open(dir / "big.bin", 6);
    CHECK(set.tokens == count);
    int out[7];
    tokens_val_window(set, tokens_val_windows(set, 6) - 1, 6, 1000, out);  // (count - 1) % 6 == 2: ends two before the last
    CHECK(out[6] == 0);
    token_shard_read(set.shards[0], count - 7, 7, 1000, out);
    CHECK(out[6] == 0x109);
    const WindowPlace place = tokens_train_place(set, 5, 12345678901ull, 6);
    CHECK(place.begin + 7 <= count);
    int header[256] = {20240520, 1, -1, 0, 7, 1}, width = 0;
    CHECK(token_header_check("x", header, 1024 + 2 * ((size_t(1) << 32) + 7), &width) == (size_t(1) << 32) + 7);
    CHECK(width == 2);
}

TEST_CASE("a set can be moved") {
    TempDir dir;
    tokens_write(dir / "a.bin", counted(20));
    TokenSet a = tokens_open(dir / "a.bin", 4), b;
    b = std::move(a);
    TokenSet c(std::move(b));
    int out[5];
    tokens_val_window(c, 1, 4, 100, out);
    CHECK(out[0] == 4);
}

TEST_CASE("tokenizer.json beside the data") {
    TempDir dir;
    tokens_write(dir / "a.bin", counted(20));
    CHECK(tokens_tokenizer_path(tokens_open(dir / "*.bin", 4)) == "");
    file_write(dir / "tokenizer.json", "{}");
    CHECK(tokens_tokenizer_path(tokens_open(dir / "*.bin", 4)) == dir / "tokenizer.json");
}

// ---- tokenizers ----

namespace {

using nlohmann::json;

std::string code_point(int c) {
    return c < 128 ? std::string(1, char(c)) : std::string{char(0xC0 | c >> 6), char(0x80 | (c & 63))};
}

// GPT-2's bytes_to_unicode, written as OpenAI wrote it.
json bytes_vocab() {
    std::vector<int> bs, cs;
    for (auto [a, b] : {std::pair('!', '~')})
        for (int i = a; i <= b; i++) bs.push_back(i);
    for (int i = 0xA1; i <= 0xAC; i++) bs.push_back(i);
    for (int i = 0xAE; i <= 0xFF; i++) bs.push_back(i);
    cs = bs;
    for (int b = 0, n = 0; b < 256; b++)
        if (std::find(bs.begin(), bs.end(), b) == bs.end()) bs.push_back(b), cs.push_back(256 + n++);
    json vocab;
    for (size_t i = 0; i < 256; i++) vocab[code_point(cs[i])] = bs[i];
    return vocab;
}

json bytes_tokenizer() {
    return {{"added_tokens", json::array()},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", bytes_vocab()}, {"merges", json::array()}}}};
}

json chars_tokenizer() {
    return {{"decoder", {{"type", "Fuse"}}},
            {"model",
             {{"type", "WordLevel"},
              {"unk_token", "<unk>"},
              {"vocab", {{"\n", 0}, {" ", 1}, {"a", 2}, {"é", 3}, {"€", 4}, {"😀", 5}}}}}};
}

Tokenizer load(const TempDir& dir, const json& j) {
    file_write(dir / "tokenizer.json", j.dump());
    return tokenizer_load(dir / "tokenizer.json");
}

std::string decode(const Tokenizer& t, const std::vector<int>& ids) { return tokenizer_decode(t, ids.data(), ids.size()); }

}  // namespace

TEST_CASE("bytes: every byte there and back, id = value") {
    TempDir dir;
    const Tokenizer t = load(dir, bytes_tokenizer());
    CHECK(tokenizer_vocab(t) == 256);
    std::string text;
    for (int b = 0; b < 256; b++) text += char(b);
    const auto ids = tokenizer_encode(t, text);
    for (int b = 0; b < 256; b++) CHECK(ids[size_t(b)] == b);
    CHECK(decode(t, ids) == text);
    CHECK(tokenizer_encode(t, "").empty());
    const int outside = 256, negative = -1;
    refused([&] { tokenizer_decode(t, &outside, 1); }, {"id 256", "256"});
    refused([&] { tokenizer_decode(t, &negative, 1); }, {"id -1"});
}

TEST_CASE("GPT-2's own form: no model.type, merges, an added token; decodes, does not encode") {
    TempDir dir;
    json j = bytes_tokenizer();
    j["model"].erase("type");
    j["model"]["merges"] = {"Ġ t", "Ġt h"};
    j["model"]["vocab"]["Ġth"] = 256;
    j["model"]["vocab"]["Ċ"] = 10;
    j["model"]["vocab"]["âĤ¬"] = 257;  // the three bytes of the euro sign
    j["model"]["vocab"]["<|endoftext|>"] = 258;
    j["added_tokens"] = {{{"id", 258}, {"content", "<|endoftext|>"}, {"special", true}}, {{"id", 260}, {"content", "<a b>"}}};
    const Tokenizer t = load(dir, j);
    CHECK(tokenizer_vocab(t) == 261);
    CHECK(decode(t, {256, 'e', 10, 257, 258, 259, 260}) == " the\n€<|endoftext|><a b>");
    refused([&] { tokenizer_encode(t, "x"); }, {"2 BPE merges", "ids"});
    j["model"]["merges"] = json::array();
    CHECK(tokenizer_encode(load(dir, j), "a<|endoftext|>b<|") == std::vector<int>{'a', 258, 'b', '<', '|'});
    j["added_tokens"].push_back({{"id", 261}, {"content", "<|end"}});  // the longest one that fits is taken
    CHECK(tokenizer_encode(load(dir, j), "<|endoftext|><|end") == std::vector<int>{258, 261});
    j["model"]["vocab"].erase("b");
    refused([&] { tokenizer_encode(load(dir, j), "b"); }, {"byte 0x62"});
}

TEST_CASE("characters: UTF-8 there and back, unknown and malformed text refused") {
    TempDir dir;
    const Tokenizer t = load(dir, chars_tokenizer());
    CHECK(tokenizer_vocab(t) == 6);
    CHECK(tokenizer_encode(t, "a é€\n😀") == std::vector<int>{2, 1, 3, 4, 0, 5});
    CHECK(decode(t, {2, 1, 3, 4, 0, 5}) == "a é€\n😀");
    refused([&] { tokenizer_encode(t, "ab"); }, {"\"b\"", "does not occur"});
    refused([&] { tokenizer_encode(t, "a\xe2\x82"); }, {"not UTF-8", "byte 1"});
}

TEST_CASE("UTF-8") {
    for (const char* good : {"a", "é", "€", "😀", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"})
        CHECK(utf8_length(good, 0) == std::strlen(good));
    for (const char* bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xc3", "\xc3 ", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe2\x82",
                            "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", ""})
        CHECK(utf8_length(bad, 0) == 0);
    CHECK(utf8_length(std::string_view("\0", 1), 0) == 1);
    CHECK(utf8_repair("a\xe2\x82z€\xff") == "a\uFFFD\uFFFDz€\uFFFD");
    CHECK_NOTHROW(json(utf8_repair("\x80\xf0\x9f")).dump());
}

TEST_CASE("bad tokenizer files are refused") {
    TempDir dir;
    const std::string path = dir / "tokenizer.json";
    refused([&] { tokenizer_load(path); }, {path, "cannot be opened"});
    file_write(path, bytes_tokenizer().dump().substr(0, 500));
    refused([&] { tokenizer_load(path); }, {path, "not valid JSON"});
    file_write(path, "");
    refused([&] { tokenizer_load(path); }, {path, "not valid JSON"});
    const auto load_refused = [&](const json& j, const std::vector<std::string>& words) {
        refused([&] { load(dir, j); }, words);
    };
    load_refused(json::array(), {path, "no model"});
    load_refused({{"model", {{"type", "BPE"}}}}, {path, "model.vocab"});
    json j = bytes_tokenizer();
    j["model"]["type"] = "Unigram";
    load_refused(j, {"Unigram"});
    j = bytes_tokenizer();
    j["decoder"] = {{"type", "Sequence"}};
    load_refused(j, {"decoder Sequence", "byte-level"});
    j["decoder"] = nullptr;
    load_refused(j, {"decoder none"});
    j = bytes_tokenizer();
    j["model"]["merges"] = "x";
    load_refused(j, {"merges"});
    j = bytes_tokenizer();
    j["model"]["vocab"]["zz"] = -1;
    load_refused(j, {"\"zz\"", "-1"});
    j["model"]["vocab"]["zz"] = 4000000000u;
    load_refused(j, {"\"zz\"", "4000000000"});
    j["model"]["vocab"]["zz"] = "1";
    load_refused(j, {"\"zz\"", "not an integer"});
    j["model"]["vocab"]["zz"] = 65;
    load_refused(j, {"id 65", "both"});
    j = bytes_tokenizer();
    j["added_tokens"] = {{{"id", 300}}};
    load_refused(j, {"added token"});
    j = chars_tokenizer();
    j["model"]["vocab"]["word"] = 6;
    load_refused(j, {"\"word\"", "single characters"});
    j = chars_tokenizer();
    j["decoder"] = nullptr;
    load_refused(j, {"WordLevel", "decoder none"});
    CHECK(file_read(path).size() > 10);
}
