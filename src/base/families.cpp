#include "tessera/base/families.hpp"

#include <algorithm>

#include "base/families/rows.hpp"

namespace tessera {

std::span<const ModelSpec> families() {
  using namespace rows;
  static const std::vector<ModelSpec> table = {gpt2(),          gpt_bigcode(), llama(),    qwen2(),
                                               mistral(),       starcoder2(),  gpt_neox(), bert(),
                                               megatron_bert(), t5(),          mt5()};
  return table;
}

const ModelSpec* find_spec(std::string_view name) {
  const auto table = families();
  const auto it =
      std::find_if(table.begin(), table.end(), [&](const ModelSpec& row) { return name == row.name; });
  return it == table.end() ? nullptr : &*it;
}

const ModelSpec& spec_of(Family family) {
  const ModelSpec* row = find_spec(family.name);
  TESSERA_CHECK(row != nullptr && row->is_family(), "there is no family '", family.name, "'");
  return *row;
}

}  // namespace tessera
