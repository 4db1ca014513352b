// A directory for a test's files, removed with it.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

struct TempDir {
    std::string path;
    TempDir() {
        std::string name = (std::filesystem::temp_directory_path() / "train_gpt_test_XXXXXX").string();
        path = mkdtemp(name.data());
    }
    ~TempDir() { std::filesystem::remove_all(path); }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
};

inline void file_write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
