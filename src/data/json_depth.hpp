#pragma once
/// A limit on how deep JSON from a file is nested: copying, comparing and printing a document call themselves
/// for each level.

#include <string>
#include <string_view>

namespace tessera {

/// Errors: DataError, naming `origin`, if arrays and objects are nested more than 64 deep in `text`.
void refuse_deep_json(std::string_view text, const std::string& origin);

}  // namespace tessera
