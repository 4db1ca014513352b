// safetensors files: building and checking headers, reading and writing slices.
//
// A file is an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes without gaps:
//   {"__metadata__": {text: text}, NAME: {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ..}
// with offsets in bytes from the end of the JSON. We pad the JSON with spaces so that the data begin at a multiple of 8.
// The header is known before any tensor is written, so that each rank can pwrite its own slices.
// A model is one model.safetensors, or several files listed by name in model.safetensors.index.json.
//
// Reading checks: the length is sane and inside the file; JSON; no name twice; known dtypes; each tensor's bytes = shape x
// dtype; offsets in order, without gaps or overlaps; the file neither shorter nor longer. Errors name file and tensor.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/check.h"
#include "llmc/dtype.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian and read as they are");

// ---- files ----

// An open file. Owns the descriptor; a failed close is not seen here, so file_sync what must be on disk.
struct File {
    int fd = -1;
    std::string path;

    File() = default;
    File(int descriptor, std::string name) : fd(descriptor), path(std::move(name)) {}
    File(File&& other) noexcept : fd(std::exchange(other.fd, -1)), path(std::move(other.path)) {}
    File& operator=(File&& other) noexcept {
        std::swap(fd, other.fd);
        path.swap(other.path);
        return *this;
    }
    ~File() {
        if (fd >= 0) close(fd);
    }
};

inline File file_open(const std::string& path, int flags) {
    const int fd = open(path.c_str(), flags | O_CLOEXEC, 0666);
    const char* purpose = flags & O_CREAT                   ? "created"
                          : (flags & O_ACCMODE) == O_RDONLY ? "opened for reading"
                                                            : "opened for writing";
    check(fd >= 0, "%s cannot be %s: %s", path.c_str(), purpose, std::strerror(errno));
    return File(fd, path);
}
inline File file_open_read(const std::string& path) { return file_open(path, O_RDONLY); }
inline File file_open_write(const std::string& path) { return file_open(path, O_WRONLY); }  // exists already
inline File file_create(const std::string& path) { return file_open(path, O_WRONLY | O_CREAT | O_TRUNC); }

inline size_t file_size(const File& file) {
    struct stat info = {};
    check(fstat(file.fd, &info) == 0, "%s: its size cannot be read: %s", file.path.c_str(), std::strerror(errno));
    check(S_ISREG(info.st_mode), "%s is not a regular file", file.path.c_str());
    return size_t(info.st_size);
}

// Sets the size and reserves the blocks where the file system can, so that a full disk is found before the writing.
inline void file_resize(const File& file, size_t bytes) {
    check(ftruncate(file.fd, off_t(bytes)) == 0, "%s cannot be given %zu bytes: %s", file.path.c_str(), bytes,
          std::strerror(errno));
    if (bytes == 0) return;
    const int error = posix_fallocate(file.fd, 0, off_t(bytes));
    check(error == 0 || error == EINVAL || error == EOPNOTSUPP || error == ENOSYS, "%s cannot be given %zu bytes: %s",
          file.path.c_str(), bytes, std::strerror(error));
}

// Linux moves at most 2 GiB a call, and any call may move less than asked.
constexpr size_t io_piece_bytes = size_t(1) << 30;

inline void pread_all(const File& file, void* data, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n =
            pread(file.fd, static_cast<char*>(data) + done, std::min(bytes - done, io_piece_bytes), off_t(offset + done));
        if (n < 0 && errno == EINTR) continue;
        check(n >= 0, "%s: reading %zu bytes at %zu failed: %s", file.path.c_str(), bytes - done, offset + done,
              std::strerror(errno));
        check(n > 0, "%s ends at byte %zu, where %zu more bytes were expected: it is cut short", file.path.c_str(), offset + done,
              bytes - done);
        done += size_t(n);
    }
}

inline void pwrite_all(const File& file, const void* data, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n =
            pwrite(file.fd, static_cast<const char*>(data) + done, std::min(bytes - done, io_piece_bytes), off_t(offset + done));
        if (n < 0 && errno == EINTR) continue;
        check(n > 0, "%s: writing %zu bytes at %zu failed: %s", file.path.c_str(), bytes - done, offset + done,
              n < 0 ? std::strerror(errno) : "nothing was written");
        done += size_t(n);
    }
}

inline void file_sync(const File& file) {
    check(fsync(file.fd) == 0, "%s cannot be written to disk (fsync): %s", file.path.c_str(), std::strerror(errno));
}

// Makes the names inside a directory, or a rename in it, survive a crash.
inline void directory_sync(const std::string& path) { file_sync(file_open(path, O_RDONLY | O_DIRECTORY)); }

inline std::string file_text(const std::string& path) {
    const File file = file_open_read(path);
    std::string text(file_size(file), '\0');
    pread_all(file, text.data(), text.size(), 0);
    return text;
}

// ---- headers ----

struct TensorInfo {
    std::string name, dtype;  // dtype as in the file: "F32", "BF16" ..
    std::vector<long> shape;
    size_t begin = 0, end = 0;  // bytes from the beginning of the data
};

// Bytes of one element, 0 for a dtype we do not know.
inline size_t dtype_bytes(const std::string& dtype) {
    if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
    if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
    if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
    if (dtype == "BOOL" || dtype == "I8" || dtype == "U8" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 1;
    return 0;
}

// Elements of a tensor; false where the product does not fit.
inline bool shape_elements(const std::vector<long>& shape, size_t* elements) {
    *elements = 1;
    for (long extent : shape)
        if (extent < 0 || __builtin_mul_overflow(*elements, size_t(extent), elements)) return false;
    return true;
}

inline size_t tensor_elements(const TensorInfo& tensor) {
    size_t elements = 0;
    check(shape_elements(tensor.shape, &elements), "tensor %s has an impossible shape", tensor.name.c_str());
    return elements;
}

inline std::string shape_text(const std::vector<long>& shape) {
    std::string text = "[";
    for (long extent : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
    return text + "]";
}

struct SafetensorsHeader {
    std::string bytes;                // length, JSON, padding: the first bytes of the file
    std::vector<TensorInfo> tensors;  // with offsets
    size_t file_bytes = 0;
};

// Tensors (name, dtype, shape) are laid out in the order given. transformers wants "format": "pt" in the metadata.
inline SafetensorsHeader safetensors_header(std::vector<TensorInfo> tensors,
                                            const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
    nlohmann::ordered_json root;
    root["__metadata__"] = metadata;
    size_t at = 0;
    std::set<std::string> names;
    for (auto& tensor : tensors) {
        check(tensor.name != "__metadata__" && names.insert(tensor.name).second, "safetensors: the tensor name \"%s\" is taken",
              tensor.name.c_str());
        const size_t width = dtype_bytes(tensor.dtype);
        check(width > 0, "safetensors: tensor %s has the unknown dtype %s", tensor.name.c_str(), tensor.dtype.c_str());
        tensor.begin = at;
        tensor.end = at += tensor_elements(tensor) * width;
        root[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
    }
    std::string json = root.dump();
    json.resize((json.size() + 7) / 8 * 8, ' ');
    const uint64_t length = json.size();
    SafetensorsHeader header;
    header.bytes.assign(reinterpret_cast<const char*>(&length), sizeof length);
    header.bytes += json;
    header.tensors = std::move(tensors);
    header.file_bytes = header.bytes.size() + at;
    return header;
}

struct SafetensorsFile {
    File file;
    size_t data_begin = 0;                        // where offset 0 lies in the file
    std::vector<TensorInfo> tensors;              // in the order of their offsets
    std::map<std::string, std::string> metadata;  // "format" ..
};

namespace safetensors_detail {

using nlohmann::json;

// JSON whose objects may not have a key twice (the library keeps the last one and says nothing).
inline json parse_strict(const std::string& path, const std::string& text) {
    std::vector<std::set<std::string>> keys;
    try {
        return json::parse(text, [&](int, json::parse_event_t event, json& value) {
            if (event == json::parse_event_t::object_start) keys.emplace_back();
            if (event == json::parse_event_t::object_end) keys.pop_back();
            if (event == json::parse_event_t::key)
                check(keys.back().insert(value.get<std::string>()).second, "%s: the name \"%s\" appears twice in its header",
                      path.c_str(), value.get<std::string>().c_str());
            return true;
        });
    } catch (const json::exception& e) {
        fail("%s: its header is not valid JSON (%s): the file is corrupt", path.c_str(), e.what());
    }
}

inline bool is_size(const json& value) { return value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t(INT64_MAX); }

inline TensorInfo tensor_read(const std::string& path, const std::string& name, const json& entry) {
    const char *file = path.c_str(), *tensor = name.c_str();
    check(entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() && entry.contains("shape") &&
              entry["shape"].is_array() && entry.contains("data_offsets") && entry["data_offsets"].is_array() &&
              entry["data_offsets"].size() == 2,
          "%s: tensor %s must have a dtype, a shape and two data_offsets: the file is corrupt", file, tensor);
    TensorInfo info;
    info.name = name;
    info.dtype = entry["dtype"].get<std::string>();
    const size_t width = dtype_bytes(info.dtype);
    check(width > 0, "%s: tensor %s has the unknown dtype %s", file, tensor, info.dtype.c_str());
    for (const json& extent : entry["shape"]) {
        check(is_size(extent), "%s: tensor %s has the extent %s in its shape", file, tensor, extent.dump().c_str());
        info.shape.push_back(extent.get<long>());
    }
    const json &begin = entry["data_offsets"][0], &end = entry["data_offsets"][1];
    check(is_size(begin) && is_size(end) && begin.get<size_t>() <= end.get<size_t>(), "%s: tensor %s has the data_offsets %s",
          file, tensor, entry["data_offsets"].dump().c_str());
    info.begin = begin.get<size_t>();
    info.end = end.get<size_t>();
    size_t bytes = 0;
    check(shape_elements(info.shape, &bytes) && !__builtin_mul_overflow(bytes, width, &bytes) && bytes == info.end - info.begin,
          "%s: tensor %s has shape %s and dtype %s, which does not fit its %zu bytes: the file is corrupt", file, tensor,
          shape_text(info.shape).c_str(), info.dtype.c_str(), info.end - info.begin);
    return info;
}

// Offsets must cover the data exactly; `tensors` comes back sorted by them.
inline void layout_check(const std::string& path, std::vector<TensorInfo>& tensors, size_t data_bytes) {
    std::stable_sort(tensors.begin(), tensors.end(),
                     [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    size_t at = 0;
    for (const auto& tensor : tensors) {
        check(tensor.begin == at,
              "%s: tensor %s begins at byte %zu of the data, where %zu was expected: tensors %s; the file is corrupt",
              path.c_str(), tensor.name.c_str(), tensor.begin, at, tensor.begin < at ? "overlap" : "leave a gap");
        at = tensor.end;
    }
    check(at == data_bytes, "%s: its header describes %zu bytes of tensors, but %zu follow: the file is %s; copy it again",
          path.c_str(), at, data_bytes, data_bytes < at ? "cut short" : "too long");
}

}  // namespace safetensors_detail

inline SafetensorsFile safetensors_open(const std::string& path) {
    namespace detail = safetensors_detail;
    constexpr uint64_t length_limit = 100'000'000;  // the reference implementation's
    SafetensorsFile out;
    out.file = file_open_read(path);
    const size_t file_bytes = file_size(out.file);
    check(file_bytes >= 8, "%s has %zu bytes and is no safetensors file: it is cut short", path.c_str(), file_bytes);
    uint64_t length = 0;
    pread_all(out.file, &length, 8, 0);
    check(length >= 2 && length <= length_limit,
          "%s: its header length is %llu, expected 2 to %llu: not a safetensors file, or corrupt", path.c_str(),
          (unsigned long long)length, (unsigned long long)length_limit);
    check(length <= file_bytes - 8, "%s: its header of %llu bytes does not fit the file's %zu: it is cut short; copy it again",
          path.c_str(), (unsigned long long)length, file_bytes);
    std::string text(length, '\0');
    pread_all(out.file, text.data(), length, 8);
    out.data_begin = size_t(length) + 8;
    const auto root = detail::parse_strict(path, text);
    check(root.is_object(), "%s: its header is not a JSON object: the file is corrupt", path.c_str());
    for (const auto& [name, entry] : root.items()) {
        if (name != "__metadata__") {
            out.tensors.push_back(detail::tensor_read(path, name, entry));
            continue;
        }
        check(entry.is_object(), "%s: its __metadata__ is not an object", path.c_str());
        for (const auto& [key, value] : entry.items()) {
            check(value.is_string(), "%s: __metadata__.%s is not a text", path.c_str(), key.c_str());
            out.metadata[key] = value.get<std::string>();
        }
    }
    detail::layout_check(path, out.tensors, file_bytes - out.data_begin);
    return out;
}

// ---- values ----

inline float float_from_f16(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000u) << 16, exponent = (x >> 10) & 31u, fraction = x & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, std::bit_cast<float>(sign | 0x3f800000u));
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// Elements [first, first + n) of a tensor (row-major) as float32. F32, BF16 and F16.
inline void safetensors_read(const SafetensorsFile& from, const TensorInfo& tensor, size_t first, size_t n, float* out) {
    const size_t elements = tensor_elements(tensor), width = dtype_bytes(tensor.dtype);
    check(first <= elements && n <= elements - first, "%s: %zu elements from %zu asked of tensor %s, which has %zu",
          from.file.path.c_str(), n, first, tensor.name.c_str(), elements);
    const size_t offset = from.data_begin + tensor.begin + first * width;
    if (tensor.dtype == "F32") return pread_all(from.file, out, n * 4, offset);
    const bool bf16 = tensor.dtype == "BF16";
    check(bf16 || tensor.dtype == "F16", "%s: tensor %s has dtype %s, expected F32, BF16 or F16", from.file.path.c_str(),
          tensor.name.c_str(), tensor.dtype.c_str());
    std::vector<uint16_t> block(std::min<size_t>(n, 1 << 16));
    for (size_t done = 0; done < n;) {
        const size_t count = std::min(block.size(), n - done);
        pread_all(from.file, block.data(), count * 2, offset + done * 2);
        for (size_t i = 0; i < count; i++) out[done + i] = bf16 ? float_from_bf16(block[i]) : float_from_f16(block[i]);
        done += count;
    }
}

// ---- a model's files ----

struct TensorPlace {
    size_t file;  // index into TensorFiles::files
    TensorInfo info;
};

struct TensorFiles {
    std::string path;  // as given: a directory or a file
    std::vector<SafetensorsFile> files;
    std::map<std::string, TensorPlace> tensors;  // of all files, by name
};

// `path` is a .safetensors file, or a directory with model.safetensors or model.safetensors.index.json.
inline TensorFiles tensor_files_open(const std::string& path) {
    namespace detail = safetensors_detail;
    struct stat info = {};
    check(stat(path.c_str(), &info) == 0, "%s cannot be opened: %s", path.c_str(), std::strerror(errno));
    const std::string single = path + "/model.safetensors", index = single + ".index.json";
    std::vector<std::pair<std::string, std::string>> promised;  // tensor, file
    std::set<std::string> paths;
    if (!S_ISDIR(info.st_mode)) {
        paths.insert(path);
    } else if (access(single.c_str(), F_OK) == 0) {
        paths.insert(single);
    } else {
        check(access(index.c_str(), F_OK) == 0, "%s holds neither model.safetensors nor model.safetensors.index.json%s",
              path.c_str(),
              access((path + "/pytorch_model.bin").c_str(), F_OK) == 0 ? ": convert its pytorch_model.bin to safetensors" : "");
        const auto root = detail::parse_strict(index, file_text(index));
        check(root.is_object() && root.contains("weight_map") && root["weight_map"].is_object() && !root["weight_map"].empty(),
              "%s has no weight_map", index.c_str());
        for (const auto& [name, file] : root["weight_map"].items()) {
            check(file.is_string() && file.get<std::string>().find('/') == std::string::npos,
                  "%s: the file of tensor %s must be a name in the same directory", index.c_str(), name.c_str());
            promised.emplace_back(name, path + "/" + file.get<std::string>());
            paths.insert(promised.back().second);
        }
    }
    TensorFiles found;
    found.path = path;
    for (const auto& file_path : paths) {
        found.files.push_back(safetensors_open(file_path));
        for (const auto& tensor : found.files.back().tensors) {
            const auto [place, is_new] = found.tensors.emplace(tensor.name, TensorPlace{found.files.size() - 1, tensor});
            check(is_new, "tensor %s is in two files, %s and %s", tensor.name.c_str(),
                  found.files[place->second.file].file.path.c_str(), file_path.c_str());
        }
    }
    for (const auto& [name, file_path] : promised) {
        const auto place = found.tensors.find(name);
        check(place != found.tensors.end() && found.files[place->second.file].file.path == file_path,
              "%s: tensor %s is not in the file %s, where its index puts it", path.c_str(), name.c_str(), file_path.c_str());
    }
    return found;
}
