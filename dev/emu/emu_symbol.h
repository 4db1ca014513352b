// The name of a function of this program, from its symbol table: errors name the kernel.
#pragma once
#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace emu {

inline uintptr_t program_offset() {
    uintptr_t offset = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
            *static_cast<uintptr_t*>(out) = info->dlpi_addr;
            return 1;  // the first is the program itself
        },
        &offset);
    return offset;
}

// "a kernel" where there are no symbols.
inline std::string symbol_name(const void* function) {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    auto read_at = [&](uint64_t offset, void* to, size_t bytes) {
        return bool(file.seekg(std::streamoff(offset)).read(static_cast<char*>(to), std::streamsize(bytes)));
    };
    Elf64_Ehdr header;
    if (!read_at(0, &header, sizeof header)) return "a kernel";
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    if (!read_at(header.e_shoff, sections.data(), sections.size() * sizeof sections[0])) return "a kernel";
    const uint64_t address = reinterpret_cast<uintptr_t>(function) - program_offset();
    for (const Elf64_Shdr& section : sections) {
        if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
        std::vector<Elf64_Sym> symbols(section.sh_size / sizeof(Elf64_Sym));
        if (!read_at(section.sh_offset, symbols.data(), section.sh_size)) continue;
        for (const Elf64_Sym& symbol : symbols) {
            if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_value != address) continue;
            std::string name(512, '\0');
            file.clear();
            file.seekg(std::streamoff(sections[section.sh_link].sh_offset + symbol.st_name));
            file.read(name.data(), std::streamsize(name.size()));
            name = name.c_str();
            int status;
            char* readable = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
            if (readable) name = readable;
            free(readable);
            const size_t parameters = name.rfind('(');
            return parameters == std::string::npos || parameters == 0 ? name : name.substr(0, parameters);
        }
    }
    return "a kernel";
}

}  // namespace emu
