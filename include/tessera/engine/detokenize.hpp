#pragma once
#include <string>

namespace tessera {

/// WikiText's tokenized text ("1 @,@ 000 cats ' ( old )") as people write it, by the rules of Megatron-LM's
/// tasks.
std::string detokenize_wikitext(std::string text);

}  // namespace tessera
