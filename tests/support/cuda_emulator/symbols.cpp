/// Names of kernels for messages. Most have internal linkage, which only the symbol table of the file knows.

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "runtime.hpp"

namespace tessera_emulator {
namespace {

std::string demangled(const char* symbol) {
  int status = 0;
  char* const text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  if (status != 0 || text == nullptr) return symbol;
  const std::string result = text;
  std::free(text);
  return result;
}

/// The function that begins at `offset` from where the file is loaded; empty when the table is missing.
std::string search_symbols(const std::string& path, std::uintptr_t offset) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (bytes.size() < sizeof(ElfW(Ehdr))) return "";
  const auto* const header = reinterpret_cast<const ElfW(Ehdr)*>(bytes.data());
  if (header->e_shoff + header->e_shnum * sizeof(ElfW(Shdr)) > bytes.size()) return "";
  const auto* const sections = reinterpret_cast<const ElfW(Shdr)*>(bytes.data() + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char* const names = bytes.data() + sections[sections[i].sh_link].sh_offset;
    const auto* const symbols = reinterpret_cast<const ElfW(Sym)*>(bytes.data() + sections[i].sh_offset);
    for (std::size_t s = 0; s < sections[i].sh_size / sizeof(ElfW(Sym)); ++s) {
      if (symbols[s].st_value == offset && (symbols[s].st_info & 0xf) == STT_FUNC) {
        return demangled(names + symbols[s].st_name);
      }
    }
  }
  return "";
}

}  // namespace

std::string name_of(const void* function) {
  Dl_info info{};
  void* extra = nullptr;
  if (dladdr1(function, &info, &extra, RTLD_DL_LINKMAP) != 0) {
    if (info.dli_sname != nullptr && info.dli_saddr == function) return "kernel " + demangled(info.dli_sname);
    const auto load_address = static_cast<const link_map*>(extra)->l_addr;
    const bool is_program = *static_cast<const link_map*>(extra)->l_name == '\0';
    const std::string found = search_symbols(is_program ? "/proc/self/exe" : info.dli_fname,
                                             reinterpret_cast<std::uintptr_t>(function) - load_address);
    if (!found.empty()) return "kernel " + found;
  }
  std::ostringstream text;
  text << "kernel at " << function;
  return text.str();
}

}  // namespace tessera_emulator
