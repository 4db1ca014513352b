// Tokenizers, read from Hugging Face's tokenizer.json: two kinds.
//
// Byte-level BPE (GPT-2, Llama 3, Qwen, and ours for bytes): each byte of a token is written as one printable character
// (GPT-2's table: printable Latin-1 stands for itself, the other 68 bytes are U+0100 and up). Decoding always works;
// encoding only where the list of merges is empty (ids are then bytes), because merging also needs the model's Unicode
// regular expressions.
// WordLevel of single characters (nanoGPT's character level): both ways.
//
// decode gives bytes: a sample may end in the middle of a UTF-8 character. utf8_repair makes it fit for JSON or a terminal.
// Errors name the file and what in it is not understood.
#pragma once
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "llmc/check.h"

struct Tokenizer {
    enum Kind { byte_level, characters } kind = byte_level;
    std::string path;
    std::vector<std::string> pieces;                    // id -> bytes; empty for ids that the file does not use
    std::unordered_map<std::string, int> ids;           // one byte or one character -> id
    std::vector<std::pair<std::string, int>> specials;  // added tokens, found in a text before anything else
    size_t merges = 0;
};

// Length in bytes of the UTF-8 character at `at`, 0 if there is none (cut short, overlong, surrogate or above U+10FFFF).
inline size_t utf8_length(std::string_view text, size_t at) {
    const auto byte = [&](size_t i) { return at + i < text.size() ? unsigned(uint8_t(text[at + i])) : 0u; };
    const unsigned lead = byte(0);
    if (lead < 0x80) return at < text.size() ? 1 : 0;
    const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4) return 0;
    for (size_t i = 1; i < length; i++)
        if ((byte(i) & 0xC0) != 0x80) return 0;
    const unsigned second = byte(1);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second >= 0xA0)) return 0;
    if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second >= 0x90)) return 0;
    return length;
}

// Each byte that is no part of a UTF-8 character becomes U+FFFD.
inline std::string utf8_repair(std::string_view text) {
    std::string out;
    for (size_t at = 0; at < text.size();) {
        const size_t length = utf8_length(text, at);
        out += length ? std::string(text.substr(at, length)) : "\xEF\xBF\xBD";
        at += length ? length : 1;
    }
    return out;
}

inline std::string utf8_from_code_point(unsigned c) {
    if (c < 0x80) return {char(c)};
    return {char(0xC0 | c >> 6), char(0x80 | (c & 0x3F))};  // GPT-2's table ends at U+0143
}

// The character that stands for each byte.
inline std::array<std::string, 256> byte_level_characters() {
    std::array<std::string, 256> characters;
    unsigned moved = 256;
    for (unsigned b = 0; b < 256; b++) {
        const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        characters[b] = utf8_from_code_point(printable ? b : moved++);
    }
    return characters;
}

namespace tokenizer_detail {

using nlohmann::json;

// Largest id that we take to be meant: a corrupt one must not ask for all memory.
constexpr int64_t id_limit = int64_t(1) << 24;

inline std::string type_of(const json& j) {
    return j.is_object() && j.contains("type") && j["type"].is_string() ? j["type"].get<std::string>() : "none";
}

inline void piece_add(Tokenizer& t, const std::string& text, const json& id, const std::string& piece) {
    check(id.is_number_integer(), "tokenizer %s: the id of \"%s\" is not an integer", t.path.c_str(), utf8_repair(text).c_str());
    const int64_t value = id.get<int64_t>();
    check(value >= 0 && value < id_limit, "tokenizer %s: the id of \"%s\" is %lld, outside 0 to %lld", t.path.c_str(),
          text.c_str(), (long long)value, (long long)id_limit - 1);
    if (t.pieces.size() <= size_t(value)) t.pieces.resize(size_t(value) + 1);
    std::string& slot = t.pieces[size_t(value)];
    check(slot.empty() || slot == piece, "tokenizer %s: id %lld stands for both \"%s\" and \"%s\"", t.path.c_str(),
          (long long)value, utf8_repair(slot).c_str(), text.c_str());
    slot = piece;
}

// A token's bytes. One with a character outside GPT-2's table is taken as it is, as Hugging Face's decoder does.
inline std::string bytes_of(const std::unordered_map<std::string, char>& byte_of, const std::string& token) {
    std::string bytes;
    for (size_t at = 0; at < token.size();) {
        const size_t length = utf8_length(token, at);
        const auto found = byte_of.find(token.substr(at, length));
        if (length == 0 || found == byte_of.end()) return token;
        bytes += found->second;
        at += length;
    }
    return bytes;
}

inline void read_byte_level(Tokenizer& t, const json& root, const json& model) {
    const std::string decoder = type_of(root.value("decoder", json()));
    check(decoder == "ByteLevel", "tokenizer %s: a BPE model with decoder %s; only byte-level BPE (decoder ByteLevel) is read",
          t.path.c_str(), decoder.c_str());
    const json merges = model.value("merges", json::array());
    check(merges.is_array(), "tokenizer %s: model.merges is not a list", t.path.c_str());
    t.kind = Tokenizer::byte_level;
    t.merges = merges.size();
    std::unordered_map<std::string, char> byte_of;
    const auto characters = byte_level_characters();
    for (int b = 0; b < 256; b++) byte_of[characters[size_t(b)]] = char(b);
    for (const auto& [token, id] : model["vocab"].items()) {
        const std::string bytes = bytes_of(byte_of, token);
        piece_add(t, token, id, bytes);
        if (byte_of.count(token)) t.ids[bytes] = id.get<int>();
    }
    for (const json& added : root.value("added_tokens", json::array())) {
        check(added.is_object() && added.contains("content") && added["content"].is_string() && added.contains("id"),
              "tokenizer %s: an added token without id and content", t.path.c_str());
        const std::string content = added["content"].get<std::string>();
        piece_add(t, content, added["id"], bytes_of(byte_of, content));
        if (!content.empty()) t.specials.emplace_back(content, added["id"].get<int>());
    }
}

inline void read_characters(Tokenizer& t, const json& root, const json& model) {
    const std::string decoder = type_of(root.value("decoder", json()));
    check(decoder == "Fuse", "tokenizer %s: a WordLevel model with decoder %s; only single characters (decoder Fuse) are read",
          t.path.c_str(), decoder.c_str());
    t.kind = Tokenizer::characters;
    for (const auto& [token, id] : model["vocab"].items()) {
        check(!token.empty() && utf8_length(token, 0) == token.size(),
              "tokenizer %s: a WordLevel model with the word \"%s\"; only single characters are read", t.path.c_str(),
              token.c_str());
        piece_add(t, token, id, token);
        t.ids[token] = id.get<int>();
    }
}

}  // namespace tokenizer_detail

inline Tokenizer tokenizer_load(const std::string& path) {
    namespace detail = tokenizer_detail;
    std::ifstream file(path, std::ios::binary);
    check(file.is_open(), "tokenizer %s cannot be opened: %s", path.c_str(), std::strerror(errno));
    Tokenizer t;
    t.path = path;
    try {
        const auto root = nlohmann::json::parse(file);
        check(root.is_object() && root.contains("model") && root["model"].is_object(),
              "tokenizer %s is not a Hugging Face tokenizer.json: it has no model", path.c_str());
        const auto& model = root["model"];
        check(model.contains("vocab") && model["vocab"].is_object() && !model["vocab"].empty(),
              "tokenizer %s: its model has no table of tokens (model.vocab)", path.c_str());
        std::string type = detail::type_of(model);
        if (type == "none" && model.contains("merges")) type = "BPE";  // GPT-2's own file does not say
        check(type == "BPE" || type == "WordLevel",
              "tokenizer %s: a model of type %s; BPE (byte-level) and WordLevel (characters) are read", path.c_str(),
              type.c_str());
        if (type == "BPE") detail::read_byte_level(t, root, model);
        if (type == "WordLevel") detail::read_characters(t, root, model);
    } catch (const nlohmann::json::exception& e) {
        fail("tokenizer %s is not valid JSON, or not a tokenizer.json (%s): it may be cut short; make or copy it again",
             path.c_str(), e.what());
    }
    return t;
}

// Number of ids: the largest one plus 1.
inline int tokenizer_vocab(const Tokenizer& t) { return int(t.pieces.size()); }

inline std::string tokenizer_decode(const Tokenizer& t, const int* ids, size_t n) {
    std::string text;
    for (size_t i = 0; i < n; i++) {
        check(ids[i] >= 0 && size_t(ids[i]) < t.pieces.size(), "tokenizer %s: id %d is outside its vocabulary of %d",
              t.path.c_str(), ids[i], tokenizer_vocab(t));
        text += t.pieces[size_t(ids[i])];
    }
    return text;
}

inline std::vector<int> tokenizer_encode(const Tokenizer& t, const std::string& text) {
    check(t.merges == 0,
          "tokenizer %s: text cannot be encoded here, because it has %zu BPE merges (only byte and character tokenizers can); "
          "give ids instead of text",
          t.path.c_str(), t.merges);
    std::vector<int> out;
    for (size_t at = 0; at < text.size();) {
        const std::pair<std::string, int>* special = nullptr;
        for (const auto& s : t.specials)
            if (text.compare(at, s.first.size(), s.first) == 0 && (!special || s.first.size() > special->first.size()))
                special = &s;
        if (special) {
            out.push_back(special->second);
            at += special->first.size();
            continue;
        }
        const size_t length = t.kind == Tokenizer::byte_level ? 1 : utf8_length(text, at);
        check(length > 0, "tokenizer %s: the text is not UTF-8 at byte %zu", t.path.c_str(), at);
        const auto found = t.ids.find(text.substr(at, length));
        if (found == t.ids.end() && t.kind == Tokenizer::byte_level)
            fail("tokenizer %s has no id for byte 0x%02x", t.path.c_str(), unsigned(uint8_t(text[at])));
        check(found != t.ids.end(),
              "tokenizer %s has no id for the character \"%s\": it does not occur in the text the vocabulary was made of",
              t.path.c_str(), text.substr(at, length).c_str());
        out.push_back(found->second);
        at += length;
    }
    return out;
}
