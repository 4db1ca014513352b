// safetensors: header layout, round trips, slices, dtypes, sharded models, and a clear refusal of each kind of bad file.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "llmc/ckpt/safetensors.h"
#include "refused.h"
#include "temp_dir.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A file from any text as header and any number of data bytes.
void raw_write(const std::string& path, const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    file_write(path, std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, '\1'));
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

// Tensors filled with their global index + 1000 x tensor number.
void model_write(const std::string& path, const std::vector<TensorInfo>& tensors) {
    const SafetensorsHeader header = safetensors_header(tensors);
    const File file = file_create(path);
    file_resize(file, header.file_bytes);
    pwrite_all(file, header.bytes.data(), header.bytes.size(), 0);
    for (size_t t = 0; t < header.tensors.size(); t++) {
        std::vector<float> values(tensor_elements(header.tensors[t]));
        for (size_t i = 0; i < values.size(); i++) values[i] = float(i + 1000 * t);
        pwrite_all(file, values.data(), values.size() * 4, header.bytes.size() + header.tensors[t].begin);
    }
    file_sync(file);
}

}  // namespace

TEST_CASE("header: the bytes of the format") {
    const SafetensorsHeader h =
        safetensors_header({{"b", "F32", {2, 3}}, {"a", "BF16", {4}}, {"s", "F32", {}}, {"e", "F32", {0, 7}}});
    uint64_t length = 0;
    std::memcpy(&length, h.bytes.data(), 8);
    CHECK(h.bytes.size() == 8 + length);
    CHECK(h.bytes.size() % 8 == 0);
    CHECK(
        h.bytes.substr(8).find(
            R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"a":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"s":{"dtype":"F32","shape":[],"data_offsets":[32,36]},"e":{"dtype":"F32","shape":[0,7],"data_offsets":[36,36]}})") ==
        0);
    CHECK(h.file_bytes == h.bytes.size() + 36);
    CHECK(h.tensors[1].begin == 24);
    CHECK(h.tensors[1].end == 32);
    refused([] { safetensors_header({{"a", "F32", {1}}, {"a", "F32", {1}}}); }, {"\"a\"", "taken"});
    refused([] { safetensors_header({{"__metadata__", "F32", {1}}}); }, {"__metadata__"});
    refused([] { safetensors_header({{"a", "float", {1}}}); }, {"a", "float"});
    refused([] { safetensors_header({{"a", "F32", {-1}}}); }, {"a", "impossible shape"});
}

TEST_CASE("write and read back, whole and in slices") {
    TempDir dir;
    model_write(dir / "model.safetensors", {{"x", "F32", {5, 3}}, {"y", "F32", {7}}, {"none", "F32", {0}}});
    const SafetensorsFile file = safetensors_open(dir / "model.safetensors");
    REQUIRE(file.tensors.size() == 3);
    CHECK(file.metadata.at("format") == "pt");
    CHECK(file.data_begin % 8 == 0);
    const TensorInfo& x = file.tensors[0];
    CHECK(x.name == "x");
    CHECK(x.shape == std::vector<long>{5, 3});
    float values[15] = {};
    safetensors_read(file, x, 0, 15, values);
    for (int i = 0; i < 15; i++) CHECK(values[i] == float(i));
    safetensors_read(file, x, 4, 3, values);
    CHECK(values[0] == 4);
    CHECK(values[2] == 6);
    const TensorInfo* y = &file.tensors[1];
    if (y->name != "y") y = &file.tensors[2];  // the empty one has the same begin
    safetensors_read(file, *y, 0, 7, values);
    CHECK(values[6] == 1006);
    refused([&] { safetensors_read(file, x, 13, 3, values); }, {"x", "3 elements from 13", "15"});
}

TEST_CASE("BF16 and F16 are read as float32") {
    TempDir dir;
    const std::vector<uint16_t> bf16 = {0x3f80, 0xc0a0, 0x0001, 0x7f80, 0x8000},
                                f16 = {0x3c00, 0xc500, 0x0001, 0x7c00, 0x8000, 0x03ff, 0x7bff, 0x3555, 0x7e00};
    const SafetensorsHeader h = safetensors_header({{"b", "BF16", {5}}, {"h", "F16", {9}}, {"i", "I16", {1}}});
    std::string bytes = h.bytes;
    bytes.append(reinterpret_cast<const char*>(bf16.data()), 10)
        .append(reinterpret_cast<const char*>(f16.data()), 18)
        .append(2, '\0');
    file_write(dir / "m.safetensors", bytes);
    const SafetensorsFile file = safetensors_open(dir / "m.safetensors");
    float b[5], f[9];
    safetensors_read(file, file.tensors[0], 0, 5, b);
    CHECK(b[0] == 1.0f);
    CHECK(b[1] == -5.0f);
    CHECK(b[2] == std::ldexp(1.0f, -133));
    CHECK(b[3] == std::numeric_limits<float>::infinity());
    CHECK(std::signbit(b[4]));
    safetensors_read(file, file.tensors[1], 0, 9, f);
    const float expected[] = {1.0f,  -5.0f,           0x1p-24f, std::numeric_limits<float>::infinity(),
                              -0.0f, 1023 * 0x1p-24f, 65504.0f, 0x1.554p-2f};
    for (int i = 0; i < 8; i++) CHECK(f[i] == expected[i]);
    CHECK(std::signbit(f[4]));
    CHECK(std::isnan(f[8]));
    safetensors_read(file, file.tensors[1], 6, 1, f);
    CHECK(f[0] == 65504.0f);
    refused([&] { safetensors_read(file, file.tensors[2], 0, 1, f); }, {"i", "I16", "BF16"});
    for (int i = 0; i < 0x10000; i++) {  // every float16, against the compiler's own conversion
        const uint16_t bits = uint16_t(i);
        const float ours = float_from_f16(bits), theirs = float(std::bit_cast<_Float16>(bits));
        if (!(std::isnan(ours) && std::isnan(theirs)) && std::bit_cast<uint32_t>(ours) != std::bit_cast<uint32_t>(theirs))
            FAIL(i);
    }
}

TEST_CASE("long reads go block by block") {
    TempDir dir;
    const size_t n = 200001;
    const SafetensorsHeader h = safetensors_header({{"b", "BF16", {long(n)}}});
    std::string bytes = h.bytes;
    for (size_t i = 0; i < n; i++) {
        const uint16_t v = bf16_from_float(float(i % 251));
        bytes.append(reinterpret_cast<const char*>(&v), 2);
    }
    file_write(dir / "m.safetensors", bytes);
    const SafetensorsFile file = safetensors_open(dir / "m.safetensors");
    std::vector<float> values(n);
    safetensors_read(file, file.tensors[0], 0, n, values.data());
    for (size_t i = 0; i < n; i++)
        if (values[i] != float(i % 251)) FAIL(i);
}

TEST_CASE("bad files are refused with the file, the tensor and the reason") {
    TempDir dir;
    const std::string bad = dir / "bad.safetensors";
    const auto open_refused = [&](const std::vector<std::string>& words) {
        auto all = words;
        all.push_back(bad);
        refused([&] { safetensors_open(bad); }, all);
    };
    const auto header_refused = [&](const std::string& header, size_t data_bytes, const std::vector<std::string>& words) {
        raw_write(bad, header, data_bytes);
        open_refused(words);
    };
    open_refused({"cannot be opened", "No such file"});
    file_write(bad, "1234567");
    open_refused({"7 bytes", "cut short"});
    file_write(bad, std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8));
    open_refused({"header length", "corrupt"});
    file_write(bad, std::string("\x64\0\0\0\0\0\0\0{}", 10));
    open_refused({"header of 100 bytes", "cut short"});
    file_write(bad, std::string(8, '\0') + "{}");
    open_refused({"header length is 0"});
    header_refused("{\"a\": ", 0, {"JSON"});
    header_refused("[1]", 0, {"JSON object"});
    header_refused(R"({"a":1})", 0, {"a", "dtype"});
    header_refused(R"({"a":{"dtype":"F32","shape":[1]}})", 4, {"a", "data_offsets"});
    header_refused(R"({"a":)" + entry("F31", "[1]", "[0,4]") + "}", 4, {"a", "F31"});
    header_refused(R"({"a":)" + entry("F32", "[-1]", "[0,4]") + "}", 4, {"a", "-1"});
    header_refused(R"({"a":)" + entry("F32", "[1.5]", "[0,4]") + "}", 4, {"a", "1.5"});
    header_refused(R"({"a":)" + entry("F32", "[2]", "[0,4]") + "}", 4, {"a", "[2]", "4 bytes"});
    header_refused(R"({"a":)" + entry("F32", "[1]", "[0,8]") + "}", 8, {"a", "[1]", "8 bytes"});
    header_refused(R"({"a":)" + entry("F32", "[4294967296,4294967296]", "[0,0]") + "}", 0, {"a", "[4294967296, 4294967296]"});
    header_refused(R"({"a":)" + entry("F32", "[4611686018427387904]", "[0,0]") + "}", 0, {"a", "does not fit"});
    header_refused(R"({"a":)" + entry("F32", "[1]", "[4,0]") + "}", 4, {"a", "[4,0]"});
    header_refused(R"({"a":)" + entry("F32", "[1]", "[-4,0]") + "}", 4, {"a", "[-4,0]"});
    header_refused(R"({"a":)" + entry("F32", "[1]", "[0,4,8]") + "}", 4, {"a", "two data_offsets"});
    header_refused(R"({"a":)" + entry("F32", "[1]", "[0,4]") + R"(,"a":)" + entry("F32", "[1]", "[4,8]") + "}", 8,
                   {"\"a\"", "twice"});
    header_refused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, {"\"dtype\"", "twice"});
    header_refused(R"({"a":)" + entry("F32", "[1]", "[0,4]") + R"(,"b":)" + entry("F32", "[1]", "[8,12]") + "}", 12,
                   {"b", "gap"});
    header_refused(R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"b":)" + entry("F32", "[1]", "[4,8]") + "}", 8,
                   {"b", "overlap"});
    header_refused(R"({"a":)" + entry("F32", "[1]", "[4,8]") + "}", 8, {"a", "gap"});
    header_refused(R"({"a":)" + entry("F32", "[2]", "[0,8]") + "}", 7, {"8 bytes", "7 follow", "cut short"});
    header_refused(R"({"a":)" + entry("F32", "[2]", "[0,8]") + "}", 9, {"8 bytes", "9 follow", "too long"});
    header_refused(R"({"__metadata__":{"x":1}})", 0, {"__metadata__.x"});
    header_refused(R"({"__metadata__":[]})", 0, {"__metadata__"});
    fs::remove(bad);
    fs::create_directory(bad);
    open_refused({"regular file"});
}

TEST_CASE("order in the JSON does not matter, empty tensors and a header alone are fine") {
    TempDir dir;
    const std::string path = dir / "m.safetensors";
    raw_write(path,
              R"({"b":)" + entry("F32", "[1]", "[4,8]") + R"(,"z":)" + entry("F32", "[0]", "[4,4]") + R"(,"a":)" +
                  entry("F32", "[]", "[0,4]") + "}   ",
              8);
    const SafetensorsFile file = safetensors_open(path);
    REQUIRE(file.tensors.size() == 3);
    CHECK(file.tensors[0].name == "a");
    CHECK(file.tensors[1].name == "z");
    CHECK(file.tensors[2].name == "b");
    raw_write(path, "{}", 0);
    CHECK(safetensors_open(path).tensors.empty());
}

TEST_CASE("every truncation and every flipped header byte is refused or read, never a crash") {
    TempDir dir;
    model_write(dir / "good.safetensors", {{"x", "F32", {5, 3}}, {"y", "F32", {7}}});
    std::ifstream in(dir / "good.safetensors", std::ios::binary);
    const std::string good{std::istreambuf_iterator<char>(in), {}};
    const std::string bad = dir / "bad.safetensors";
    for (size_t n = 0; n < good.size(); n++) {
        file_write(bad, good.substr(0, n));
        CHECK_THROWS_AS(safetensors_open(bad), Error);
    }
    const size_t header_bytes = good.size() - 22 * 4;
    for (size_t i = 0; i < header_bytes; i++)
        for (int flip : {0x01, 0x10, 0x80}) {
            std::string changed = good;
            changed[i] = char(changed[i] ^ flip);
            file_write(bad, changed);
            try {
                safetensors_open(bad);
            } catch (const Error&) {
            }
        }
}

TEST_CASE("a model directory: one file, or several with an index") {
    TempDir dir;
    refused([&] { tensor_files_open(dir / "absent"); }, {"absent", "No such file"});
    refused([&] { tensor_files_open(dir.path); }, {dir.path, "neither model.safetensors"});
    file_write(dir / "pytorch_model.bin", "");
    refused([&] { tensor_files_open(dir.path); }, {"pytorch_model.bin", "convert"});

    model_write(dir / "model-00001-of-00002.safetensors", {{"x", "F32", {5}}, {"y", "F32", {2}}});
    model_write(dir / "model-00002-of-00002.safetensors", {{"z", "F32", {3}}});
    const std::string index = dir / "model.safetensors.index.json";
    json map = {{"x", "model-00001-of-00002.safetensors"},
                {"y", "model-00001-of-00002.safetensors"},
                {"z", "model-00002-of-00002.safetensors"}};
    const auto write_index = [&](const json& weight_map) {
        file_write(index, json{{"metadata", {{"total_size", 40}}}, {"weight_map", weight_map}}.dump());
    };
    write_index(map);
    {
        const TensorFiles weights = tensor_files_open(dir.path);
        CHECK(weights.files.size() == 2);
        REQUIRE(weights.tensors.size() == 3);
        const TensorPlace& z = weights.tensors.at("z");
        float values[3];
        safetensors_read(weights.files[z.file], z.info, 0, 3, values);
        CHECK(values[2] == 2);
        const TensorPlace& y = weights.tensors.at("y");
        safetensors_read(weights.files[y.file], y.info, 0, 2, values);
        CHECK(values[1] == 1001);
    }
    json wrong = map;
    wrong["z"] = "model-00001-of-00002.safetensors";
    write_index(wrong);
    refused([&] { tensor_files_open(dir.path); }, {"tensor z", "model-00001"});
    wrong["x"] = "model-00002-of-00002.safetensors";
    write_index(wrong);
    refused([&] { tensor_files_open(dir.path); }, {"tensor x", "model-00002", "its index"});
    wrong = map;
    wrong["w"] = "model-00002-of-00002.safetensors";
    write_index(wrong);
    refused([&] { tensor_files_open(dir.path); }, {"tensor w", "model-00002"});
    wrong["w"] = "model-00003.safetensors";
    write_index(wrong);
    refused([&] { tensor_files_open(dir.path); }, {"model-00003.safetensors", "No such file"});
    wrong["w"] = "../evil.safetensors";
    write_index(wrong);
    refused([&] { tensor_files_open(dir.path); }, {"tensor w", "same directory"});
    write_index(json::object());
    refused([&] { tensor_files_open(dir.path); }, {"weight_map"});
    file_write(index, "{");
    refused([&] { tensor_files_open(dir.path); }, {index, "JSON"});
    write_index(map);
    model_write(dir / "model-00002-of-00002.safetensors", {{"x", "F32", {5}}, {"z", "F32", {3}}});
    refused([&] { tensor_files_open(dir.path); }, {"tensor x", "two files"});

    model_write(dir / "model.safetensors", {{"alone", "F32", {5}}});
    CHECK(tensor_files_open(dir.path).tensors.count("alone") == 1);
    CHECK(tensor_files_open(dir / "model.safetensors").tensors.count("alone") == 1);
}

TEST_CASE("errors of the disk name the file and the reason") {
    TempDir dir;
    refused([&] { file_create(dir / "no/such/dir"); }, {"no/such/dir", "created", "No such file"});
    refused([&] { file_open_write(dir / "absent"); }, {"absent", "opened for writing"});
    file_write(dir / "f", "0123456789");
    char data[8];
    const File file = file_open_read(dir / "f");
    refused([&] { pread_all(file, data, 8, 5); }, {dir / "f", "ends at byte 10", "3 more bytes"});
    refused([&] { pwrite_all(file, data, 8, 0); }, {dir / "f", "writing 8 bytes at 0", "Bad file descriptor"});
    CHECK(file_text(dir / "f") == "0123456789");
    const File full = file_open_write("/dev/full");
    refused([&] { pwrite_all(full, data, 8, 0); }, {"/dev/full", "No space left on device"});
    CHECK_NOTHROW(directory_sync(dir.path));
    refused([&] { directory_sync(dir / "absent"); }, {"absent"});
}
