#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera {

/// The bytes of a file from its beginning, unpacked if they are gzip's or Zstandard's, whatever its name.
class TextSource {
 public:
  virtual ~TextSource() = default;
  /// Fills `out`; less than it holds only at the end. Errors: DataError for damaged or cut-off packing.
  virtual std::size_t read(std::span<char> out) = 0;
  /// Bytes of the file itself that are used up.
  virtual std::int64_t consumed() const = 0;
  /// Size of the packed file; -1 for one that is not packed.
  virtual std::int64_t packed_bytes() const { return -1; }
};

/// Errors: DataError if the file cannot be opened; ConfigError if it needs the program zstd, which is not
/// there.
std::unique_ptr<TextSource> open_text(const std::string& path);

/// The name's extension in small letters, without that of packing: ".jsonl" of "A.JSONL.gz".
std::string text_extension(const std::string& path);

}  // namespace tessera
