#pragma once
#include "tessera/data/tokenizer.hpp"

namespace tessera {

/// `options` with the type that its files imply and a folder replaced by the file in it. Errors: ConfigError
/// for an unknown type, files that are missing among the options or belong to another type; DataError for
/// files that are not there.
TokenizerOptions settle(TokenizerOptions options);

/// Whether a type is that of a vocab.txt.
bool is_word_piece(const std::string& type);

}  // namespace tessera
