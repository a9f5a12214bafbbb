#pragma once
/// The file that keeps winners of timed products between runs: text, one line a product, with a checksum of
/// all lines at the end. It is a memo: a file that is damaged or not ours counts as empty. Header only and
/// free of CUDA, so that it is tested in every build.

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {

/// An algorithm as cuBLASLt lets it be stored and restored by the same version.
using AlgorithmWords = std::array<std::uint64_t, 8>;
/// Algorithm by `gemm_cache_key`.
using GemmCache = std::map<std::string, AlgorithmWords>;

/// Key of one product (ProductKey::text) on GPUs of one name with one version of cuBLASLt.
inline std::string gemm_cache_key(std::string gpu, std::size_t version, const std::string& product) {
  for (char& c : gpu)
    if (c == '\t' || c == '\n') c = ' ';
  return gpu + '\t' + std::to_string(version) + '\t' + product;
}

namespace detail {

constexpr std::string_view kCacheTitle = "tessera gemm cache 1\n";
constexpr std::size_t kCacheBytes = std::size_t{16} << 20;  // a hundred thousand products
constexpr std::size_t kCacheKeyBytes = 1024;

inline std::uint64_t checksum(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

inline std::string hexadecimal(std::uint64_t word) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 16; i-- > 0; word >>= 4) text[i] = digits[word & 15u];
  return text;
}

inline std::optional<std::uint64_t> parse_hexadecimal(std::string_view text) {
  std::uint64_t word = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), word, 16);
  if (text.size() != 16 || error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return word;
}

/// "KEY<tab>8 words of 16 digits, separated by blanks"
inline bool parse_entry(std::string_view line, GemmCache& cache) {
  constexpr std::size_t kWords = 8 * 17 - 1;
  if (line.size() < kWords + 2 || line.size() > kWords + 1 + kCacheKeyBytes) return false;
  const std::size_t split = line.size() - kWords - 1;
  if (line[split] != '\t') return false;
  AlgorithmWords words{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::size_t begin = split + 1 + 17 * i;
    if (i > 0 && line[begin - 1] != ' ') return false;
    const auto word = parse_hexadecimal(line.substr(begin, 16));
    if (!word) return false;
    words[i] = *word;
  }
  return cache.emplace(line.substr(0, split), words).second;
}

}  // namespace detail

inline std::string print_gemm_cache(const GemmCache& cache) {
  std::string text(detail::kCacheTitle);
  for (const auto& [key, words] : cache) {
    text += key;
    char separator = '\t';
    for (const std::uint64_t word : words) {
      text += separator + detail::hexadecimal(word);
      separator = ' ';
    }
    text += '\n';
  }
  return text + "end " + detail::hexadecimal(detail::checksum(text)) + '\n';
}

/// Empty unless all of `text` is what print_gemm_cache writes.
inline GemmCache parse_gemm_cache(std::string_view text) {
  constexpr std::size_t kEnd = 4 + 16 + 1;
  if (text.size() < detail::kCacheTitle.size() + kEnd || !text.starts_with(detail::kCacheTitle)) return {};
  const std::string_view body = text.substr(0, text.size() - kEnd), end = text.substr(body.size());
  if (!end.starts_with("end ") || end.back() != '\n') return {};
  if (detail::parse_hexadecimal(end.substr(4, 16)) != detail::checksum(body)) return {};
  GemmCache cache;
  std::string_view rest = body.substr(detail::kCacheTitle.size());
  while (!rest.empty()) {
    const std::size_t length = rest.find('\n');
    if (length == std::string_view::npos || !detail::parse_entry(rest.substr(0, length), cache)) return {};
    rest.remove_prefix(length + 1);
  }
  return cache;
}

/// Empty where there is no file that can be read.
inline GemmCache load_gemm_cache(const std::string& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error || bytes > detail::kCacheBytes) return {};
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(bytes), '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(bytes))) return {};
  return parse_gemm_cache(text);
}

/// Adds `winners` to the file, which other processes may do at the same time: readers see the old file or the
/// new one. Errors: IoError naming the file.
inline void save_gemm_cache(const std::string& path, const GemmCache& winners) {
  GemmCache all = winners;
  all.merge(load_gemm_cache(path));
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  const std::string fresh = path + '.' + std::to_string(::getpid());
  bool written = false;
  {
    std::ofstream file(fresh, std::ios::binary | std::ios::trunc);
    written = static_cast<bool>((file << print_gemm_cache(all)).flush());
  }
  if (written) std::filesystem::rename(fresh, path, error);
  if (written && !error) return;
  std::error_code ignored;
  std::filesystem::remove(fresh, ignored);
  throw IoError(tessera::detail::concat(
      "cannot write the file of matrix product algorithms ", path,
      ": give a path in a folder that can be written, or none to choose anew in every run"));
}

}  // namespace tessera::kernels::cuda
