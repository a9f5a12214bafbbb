#include <algorithm>

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_names.hpp"
#include "checkpoint/megatron_model.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

using namespace checkpoint_detail;

/// What the arguments leave open the tensors say: a model with a head for masked tokens is BERT.
void MegatronModel::Impl::settle_family(const MegatronArgs& args) {
  const auto has = [&](const char* name) { return weights.tensors.contains(name); };
  if (!has("lm_head.dense.weight")) return;
  ModelSettings& model = settings;
  model.family = find_spec("megatron-bert")->family;
  model.binary_head = has("binary_head.weight");
  const auto types = weights.tensors.find("embedding.token_type_embeddings.weight");
  if (types == weights.tensors.end() || types->second.ranks[0].second.shape.empty())
    bad_file(dir, "embedding.tokentype_embeddings", "is missing: a BERT without token types is not read",
             "Convert such a model with the program that trained it.");
  model.token_types = types->second.ranks[0].second.shape[0];
  if (args.fused_gelu)
    notes.push_back(
        "bias_gelu_fusion: Megatron's head for masked tokens has a GELU without tanh, Tessera's has the "
        "MLP's, "
        "with it: its logits differ by rounding of about 1e-3");
}

void MegatronModel::Impl::settle_vocabulary(const MegatronArgs& args, const MegatronReadOptions& options) {
  const auto it = weights.tensors.find(kEmbedding);
  std::int64_t rows = 0;
  if (it != weights.tensors.end()) {
    for (const auto& [file, each] : it->second.ranks) rows += each.shape.empty() ? 0 : each.shape[0];
  }
  const std::int64_t wanted = options.vocab_size.value_or(args.true_vocab);
  if (wanted > rows && rows > 0)
    bad_file(dir, "embedding.word_embeddings.weight",
             detail::concat("has ", rows, " rows; the vocabulary has ", wanted),
             "Give the size of the vocabulary that it was trained with.");
  settings.vocab_size = wanted > 0 ? wanted : rows;
  if (wanted > 0 && wanted < rows)
    notes.push_back(detail::concat(rows - wanted, " rows of padding of the vocabulary are left out"));
  if (wanted == 0)
    notes.push_back(detail::concat("the arguments do not say how many of the ", rows,
                                   " rows of the vocabulary are padding: all are kept"));
  architecture = architecture_of(settings);
}

/// Compares what is there with what the model has.
void MegatronModel::Impl::check(const std::set<std::string>& unexpected) {
  std::string problems;
  const auto add = [&](const std::string& text) { problems += (problems.empty() ? "" : "; ") + text; };
  std::set<std::string> left;
  for (const auto& [name, each] : weights.tensors) left.insert(name);
  const ModelConfig& m = architecture.model;
  if (m.num_heads % m.num_kv_heads != 0 || m.num_kv_heads % tensor != 0)
    add(detail::concat(m.num_heads, " heads and ", m.num_kv_heads, " groups of them for ", tensor,
                       " tensor ranks"));
  std::vector<std::int64_t> rows;  // of the padded vocabulary, by tensor rank
  if (const auto table = weights.tensors.find(kEmbedding); table != weights.tensors.end()) {
    for (const auto& [file, each] : table->second.ranks)
      rows.push_back(each.shape.empty() ? 0 : each.shape[0]);
  }
  for (const TensorSpec& spec : parameter_specs(architecture)) {
    const auto it = weights.tensors.find(spec.name);
    if (it == weights.tensors.end()) {
      add(detail::concat("missing: ", spec.name, " ", spec.shape));
      continue;
    }
    left.erase(spec.name);
    it->second.shape = spec.shape;
    const TensorSplit split = tensor_split(spec.name);
    if (static_cast<std::int64_t>(it->second.ranks.size()) != tensor)
      add(detail::concat(spec.name, " is there ", it->second.ranks.size(), " times, not on each of ", tensor,
                         " tensor ranks"));
    std::vector<std::int64_t> wanted;
    for (int i = 0; i < spec.shape.rank(); ++i) wanted.push_back(spec.shape[i]);
    if (split == TensorSplit::columns) wanted[1] /= tensor;
    const bool shares_rows = split == TensorSplit::rows || split == TensorSplit::query_key_value ||
                             split == TensorSplit::key_value || split == TensorSplit::gate_up;
    if (shares_rows) wanted[0] /= tensor;
    for (std::size_t rank = 0; rank < it->second.ranks.size(); ++rank) {
      const auto& [file, each] = it->second.ranks[rank];
      if (split == TensorSplit::vocabulary && rank < rows.size()) wanted[0] = rows[rank];
      if (each.shape != wanted || each.dtype != it->second.ranks.front().second.dtype)
        add(detail::concat(spec.name, " is ", each.describe(), " in ", file->path().string(),
                           "; the arguments imply ", spec.shape, " over ", tensor,
                           " tensor ranks in one type"));
    }
  }
  for (const std::string& name : left) add("unexpected: " + name);
  for (const std::string& name : unexpected) add("unexpected: " + name);
  if (!problems.empty())
    bad_file(dir, "the weights do not fit the model's arguments", problems,
             "Models of GPT's and Llama's kind, BERT and T5 are read.");
  settle_copies(weights);
}

/// What is there twice is compared.
void MegatronModel::Impl::settle_copies(Set& set) const {
  for (auto& [name, copy] : set.copies) {
    if (copy.ranks.size() != static_cast<std::size_t>(tensor)) continue;
    StoredTensor& first = set.tensors.at(name);
    copy.shape = first.shape;
    first.copy = &copy;
  }
}

}  // namespace tessera
