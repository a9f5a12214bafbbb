#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// The bytes of a file from its beginning, unpacked if they are gzip's or Zstandard's, and of Parquet as JSON
/// lines, whatever its name.
class TextSource {
 public:
  virtual ~TextSource() = default;
  /// Fills `out`; less than it holds only at the end. Errors: DataError for damaged or cut-off packing.
  virtual std::size_t read(std::span<char> out) = 0;
  /// Bytes of the file itself that are used up.
  virtual std::int64_t consumed() const = 0;
  /// Size of the packed file; -1 for one that is not packed.
  virtual std::int64_t packed_bytes() const { return -1; }
  /// Passes over the next bytes. Errors: as read; DataError if there are fewer.
  virtual void skip(std::int64_t count);
};

struct TextOptions {
  std::string python = "python3";   ///< interpreter with the package `pyarrow`, for Parquet
  std::vector<std::string> keys{};  ///< columns of Parquet to read
  double timeout_s = 600;           ///< for one answer of the Python process
};

/// Errors: DataError if the file cannot be opened, or is Parquet that cannot be read or lacks a column;
/// ConfigError if it is Parquet and Python or pyarrow is not there.
std::unique_ptr<TextSource> open_text(const std::string& path, const TextOptions& options = {});

/// Whether the file begins as Parquet does. Errors: DataError if it cannot be opened.
bool is_parquet(const std::string& path);

/// The name's extension in small letters, without that of packing: ".jsonl" of "A.JSONL.gz".
std::string text_extension(const std::string& path);

}  // namespace tessera
