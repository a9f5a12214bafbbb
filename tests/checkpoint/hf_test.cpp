#include "tessera/checkpoint/hf.hpp"

#include <functional>

#include "hf_folder.hpp"

namespace tessera::test {
namespace {

using Hf = ScratchTest;

struct Variant {
  std::string label;
  std::function<HfFolder()> make;
  friend std::ostream& operator<<(std::ostream& out, const Variant& variant) { return out << variant.label; }
};
class HfRoundTrip : public ScratchTest, public ::testing::WithParamInterface<Variant> {};

/// HF → Tessera → HF: the same tensors bit for bit, the same files, for every dtype, single and sharded.
TEST_P(HfRoundTrip, IsBitwise) {
  int round = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::uint64_t shard : {UINT64_MAX, std::uint64_t{700}}) {
      const fs::path base = dir_ / std::to_string(round++);
      HfFolder folder = GetParam().make();
      for (auto& [name, tensor] : folder.tensors()) {
        tensor.dtype = dtype;
        tensor.bytes = random_bytes(tensor.bytes.size() / 4 * size_of(dtype),
                                    static_cast<unsigned>(name.size()) + 31 * round);
      }
      if (folder.tensors().contains("lm_head.weight") && folder.config["tie_word_embeddings"] == true)
        folder.tensors()["lm_head.weight"] = folder.tensors().begin()->first.ends_with("wte.weight")
                                                 ? folder.tensors().begin()->second
                                                 : folder.tensors().at("transformer.wte.weight");
      for (const char* copy :
           {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}) {
        if (folder.tensors().contains("encoder.embed_tokens.weight"))
          folder.tensors()[copy] = folder.tensors().at("shared.weight");
      }
      folder.max_shard_bytes = shard;
      folder.write(base / "hf");
      convert_from_hf(base / "hf", base / "tessera");
      convert_to_hf(base / "tessera", base / "back");
      Tensors expected = folder.tensors();
      std::erase_if(expected, [](const auto& item) {
        return item.first.ends_with(".attn.bias") || item.first.ends_with("masked_bias") ||
               item.first.ends_with("inv_freq") ||
               item.first.ends_with("EncDecAttention.relative_attention_bias.weight");
      });
      EXPECT_EQ(read_folder(base / "back"), expected);
      EXPECT_EQ(slurp(base / "back" / "config.json"), slurp(base / "hf" / "config.json"));
      if (expected.size() == folder.tensors().size()) {
        ASSERT_EQ(files_of(base / "back"), files_of(base / "hf"));
        for (const auto& name : files_of(base / "hf"))
          EXPECT_EQ(slurp(base / "back" / name), slurp(base / "hf" / name)) << name;
      }
      for (const auto& [name, tensor] : read_folder(base / "tessera")) EXPECT_EQ(tensor.dtype, dtype) << name;
    }
  }
}

HfFolder tied_and_stored() {
  HfFolder folder = HfFolder::gpt2("transformer.", true, false);
  folder.add("lm_head.weight", {11, 6});
  return folder;
}
/// What saving with shared tensors merged makes of a tied model: only the head's name survives.
HfFolder tied_head_only() {
  HfFolder folder = tied_and_stored();
  folder.tensors().erase("transformer.wte.weight");
  return folder;
}

/// As old versions stored it: each use of the table, and a bias that nothing reads.
HfFolder t5_with_copies() {
  HfFolder folder = HfFolder::t5(false);
  for (const char* copy : {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"})
    folder.tensors()[std::string(copy) + ".weight"] = folder.tensors().at("shared.weight");
  folder.add("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", {6, 3});
  return folder;
}

INSTANTIATE_TEST_SUITE_P(
    Variants, HfRoundTrip,
    ::testing::Values(Variant{"Gpt2", [] { return HfFolder::gpt2("transformer.", true, false); }},
                      Variant{"Gpt2Unprefixed", [] { return HfFolder::gpt2("", true, false); }},
                      Variant{"Gpt2Masks", [] { return HfFolder::gpt2("transformer.", true, true); }},
                      Variant{"Gpt2UnprefixedMasksUntied", [] { return HfFolder::gpt2("", false, true); }},
                      Variant{"Gpt2TiedAndStored", tied_and_stored},
                      Variant{"Llama", [] { return HfFolder::llama(false, false, false); }},
                      Variant{"LlamaTiedUnprefixed", [] { return HfFolder::llama(true, false, false, ""); }},
                      Variant{"LlamaAttentionBias", [] { return HfFolder::llama(false, true, false); }},
                      Variant{"LlamaAllBiases", [] { return HfFolder::llama(true, true, true); }},
                      Variant{"Bert", [] { return HfFolder::bert(false, true); }},
                      Variant{"BertMaskedLm", [] { return HfFolder::bert(false, false); }},
                      Variant{"MegatronBert", [] { return HfFolder::bert(true, true); }},
                      Variant{"MegatronBertMaskedLm", [] { return HfFolder::bert(true, false); }},
                      Variant{"T5", [] { return HfFolder::t5(false); }},
                      Variant{"T5V11", [] { return HfFolder::t5(true); }},
                      Variant{"MT5", [] { return HfFolder::t5(true, "mt5"); }},
                      Variant{"MT5OfItsConfigAlone",
                              [] {
                                HfFolder folder = HfFolder::t5(true, "mt5");
                                folder.tensors().erase("lm_head.weight");
                                return folder;
                              }},
                      Variant{"T5AllCopies", t5_with_copies},
                      Variant{"LlamaInvFreq",
                              [] {
                                HfFolder folder = HfFolder::llama(false, false, false);
                                folder.add("model.layers.0.self_attn.rotary_emb.inv_freq", {2});
                                return folder;
                              }}),
    [](const auto& info) { return info.param.label; });

template <typename T>
std::vector<T> as(const std::vector<std::byte>& bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

TEST_F(Hf, Gpt2LayoutIsTransposed) {
  HfFolder folder = HfFolder::gpt2("transformer.", true, true);
  folder.write(dir_ / "hf");
  const HfModel model = open_hf(dir_ / "hf");
  const auto hf = as<std::uint32_t>(folder.tensors().at("transformer.h.1.mlp.c_fc.weight").bytes);
  std::vector<std::byte> bytes(6 * 7 * 4);
  model.read("decoder.layers.1.mlp.linear_fc1.weight", bytes);
  const auto ours = as<std::uint32_t>(bytes);
  for (std::size_t out = 0; out < 7; ++out)
    for (std::size_t in = 0; in < 6; ++in) EXPECT_EQ(ours[out * 6 + in], hf[in * 7 + out]);
  ASSERT_EQ(model.tensors().size(), 2u + 2 * 12 + 2);
  EXPECT_EQ(model.tensors()[0].name, "embedding.word_embeddings.weight");
  EXPECT_EQ(model.tensors()[4].name, "decoder.layers.0.self_attention.linear_qkv.weight");
  EXPECT_EQ(model.tensors()[4].shape, (Shape{18, 6}));
  EXPECT_EQ(model.source()->ignored.size(), 4u);
  EXPECT_EQ(model.config().model.activation, MlpActivation::gelu_tanh);
  EXPECT_EQ(model.config().model.head_dim, 2);
}

TEST_F(Hf, LlamaPartsAreStackedByRows) {
  HfFolder folder = HfFolder::llama(false, true, false);
  folder.write(dir_ / "hf");
  convert_from_hf(dir_ / "hf", dir_ / "t");
  const HfModel model = open_model(dir_ / "t");
  const auto stacked = [&](std::initializer_list<const char*> names, const char* kind) {
    std::vector<std::byte> out;
    for (const char* name : names) {
      const auto& part = folder.tensors().at(std::string("model.layers.1.") + name + kind).bytes;
      out.insert(out.end(), part.begin(), part.end());
    }
    return out;
  };
  const auto expect = [&](const char* ours, const std::vector<std::byte>& want) {
    std::vector<std::byte> got(want.size());
    model.read(std::string("decoder.layers.1.") + ours, got);
    EXPECT_EQ(got, want) << ours;
  };
  expect("self_attention.linear_qkv.weight",
         stacked({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, ".weight"));
  expect("self_attention.linear_qkv.bias",
         stacked({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, ".bias"));
  expect("mlp.linear_fc1.weight", stacked({"mlp.gate_proj", "mlp.up_proj"}, ".weight"));
  expect("self_attention.linear_proj.bias", stacked({"self_attn.o_proj"}, ".bias"));
  EXPECT_EQ(read_folder(dir_ / "t").at("decoder.layers.0.self_attention.linear_qkv.weight").shape,
            (std::vector<std::int64_t>{40, 10}));
  EXPECT_TRUE(fs::exists(dir_ / "t" / "tokenizer.json"));
  EXPECT_FALSE(fs::exists(dir_ / "t" / "config.json"));
}

/// The binary head's tensors are there if and only if the architecture has it.
TEST_F(Hf, BertsHeadsAreThoseOfTheArchitecture) {
  for (const bool pairs : {true, false}) {
    HfFolder folder = HfFolder::bert(false, pairs);
    folder.config["architectures"][0] = pairs ? "BertForMaskedLM" : "BertForPreTraining";
    folder.write(dir_ / (pairs ? "more" : "fewer"));
    expect_error<CheckpointError>([&] { open_hf(dir_ / (pairs ? "more" : "fewer")); },
                                  pairs ? "4 unexpected" : "4 missing", "cls.seq_relationship.weight",
                                  "bert.pooler.dense.bias");
  }
  HfFolder folder = HfFolder::bert(false, true);
  folder.write(dir_ / "whole");
  const ModelConfig model = open_hf(dir_ / "whole").config().model;
  EXPECT_EQ(model.family.name, "bert");
  EXPECT_EQ(model.token_types, 2);
  EXPECT_EQ(model.padding_id, 0);  // Transformers' default
  EXPECT_EQ(model.norm_eps, 1e-12);
  EXPECT_EQ(model.activation, MlpActivation::gelu);
  EXPECT_TRUE(*model.binary_head);
}

/// Whether the head is scaled is up to config.json, whether it is tied to the weights where it is not.
TEST_F(Hf, T5sHeadIsScaledOrOwnOrNeither) {
  const auto open = [&](const HfFolder& folder, const char* name) {
    folder.write(dir_ / name);
    return open_hf(dir_ / name).config().model;
  };
  const ModelConfig first = open(HfFolder::t5(false), "first");
  EXPECT_EQ(first.family.name, "t5");
  EXPECT_EQ(first.num_layers, 3);
  EXPECT_EQ(first.encoder_layers, 2);
  EXPECT_EQ(first.head_dim, 5);
  EXPECT_EQ(first.relative_buckets, 6);
  EXPECT_EQ(first.relative_max_distance, 128);  // Transformers' default
  EXPECT_EQ(first.dropout, 0.1);
  EXPECT_EQ(first.attention_dropout, 0.1);
  EXPECT_TRUE(first.tied_head && *first.scaled_head);
  const ModelConfig own = open(HfFolder::t5(true), "own");
  EXPECT_EQ(own.activation, MlpActivation::geglu);
  EXPECT_FALSE(own.tied_head || *own.scaled_head);
  HfFolder saved = HfFolder::t5(true);  // as Transformers 5 saves it
  saved.config["tie_word_embeddings"] = true;
  saved.config["scale_decoder_outputs"] = false;
  EXPECT_EQ(open(saved, "saved"), own);
  saved.tensors().at("lm_head.weight") = saved.tensors().at("shared.weight");
  const ModelConfig neither = open(saved, "neither");
  EXPECT_TRUE(neither.tied_head);
  EXPECT_FALSE(*neither.scaled_head);
  HfFolder other = HfFolder::t5(false);
  other.add("lm_head.weight", {11, 12});
  other.write(dir_ / "other");
  expect_error<CheckpointError>([&] { open_hf(dir_ / "other"); }, "lm_head.weight", "tie_word_embeddings");
  const std::pair<const char*, Json> refused[] = {{"feed_forward_proj", "gated-relu"},
                                                  {"is_encoder_decoder", false},
                                                  {"is_decoder", true},
                                                  {"is_gated_act", true},
                                                  {"relative_attention_scale", 2.0}};
  for (const auto& [key, value] : refused) {
    HfFolder bad = HfFolder::t5(false);
    bad.config[key] = value;
    bad.write(dir_ / key);
    expect_error<ConfigError>([&] { parse_hf_config(bad.config.dump(), "config.json"); }, key);
  }
}

/// The architecture says which head there is, and the names of classes how many.
TEST(HfClasses, AreReadAndWrittenBack) {
  const auto config = [](const std::string& more, const std::string& head = "SequenceClassification") {
    return parse_hf_config(R"({"model_type": "bert", "architectures": ["BertFor)" + head + "\"]" + more + "}",
                           "config.json")
        .model;
  };
  const ModelConfig model = config(R"(, "id2label": {"0": "cat", "1": "dog", "2": "cow"})");
  EXPECT_EQ(model.num_labels, 3);
  EXPECT_FALSE(*model.binary_head);
  EXPECT_EQ(config("").num_labels, 2);  // Transformers' default
  EXPECT_EQ(config(R"(, "num_labels": 5)").num_labels, 5);
  EXPECT_FALSE(config(R"(, "num_labels": 5)", "MaskedLM").num_labels);
  const std::string kept =
      make_hf_config(architecture_of(model), R"({"id2label": {"0": "a", "1": "b", "2": "c"}})", DType::f32);
  EXPECT_NE(kept.find("BertForSequenceClassification"), std::string::npos);
  EXPECT_NE(kept.find("\"1\": \"b\""), std::string::npos);
  EXPECT_EQ(parse_hf_config(kept, "config.json").model, model);
  const std::string named =
      make_hf_config(architecture_of(model), R"({"id2label": {"0": "a"}, "label2id": {"a": 0}})", DType::f32);
  EXPECT_NE(named.find("\"LABEL_2\": 2"), std::string::npos);
  EXPECT_EQ(named.find("\"a\""), std::string::npos);
  EXPECT_EQ(config(R"(, "id2label": {"0": "a"})").num_labels, 1);
  const ModelConfig several = config(R"(, "problem_type": "multi_label_classification")");
  EXPECT_EQ(several.problem_type, ProblemType::multi_label_classification);
  EXPECT_EQ(parse_hf_config(make_hf_config(architecture_of(several), "", DType::f32), "config.json").model,
            several);
  test::expect_error<ConfigError>([&] { config(R"(, "id2label": {})"); }, "id2label", "no label");
  test::expect_error<ConfigError>([&] { config(R"(, "problem_type": "ranking")"); }, "problem_type",
                                  "ranking");
  test::expect_error<ConfigError>([&] { config(R"(, "classifier_dropout": 0.3)"); }, "classifier_dropout",
                                  "0.1");
  test::expect_error<ConfigError>(
      [&] { config("", "TokenClassification"); },
      "BertForPreTraining, BertForMaskedLM and BertForSequenceClassification are");
}

/// Three heads of four rows: what is stored as q k v of head 0, of head 1, ... is all q, all k, all v.
TEST_F(Hf, HeadsStoredOneByOneAreSortedAndWrittenBack) {
  for (const std::string head :
       {"embed_out", "lm_head"}) {  // as files have it, and as Transformers' modules do
    HfFolder folder = HfFolder::gpt_neox(head);
    folder.write(dir_ / head);
    const HfModel model = open_hf(dir_ / head);
    for (const std::string kind : {".weight", ".bias"}) {
      const std::vector<std::byte>& stored =
          folder.tensors().at("gpt_neox.layers.1.attention.query_key_value" + kind).bytes;
      const std::size_t bytes = stored.size() / 9;  // of the rows of a head's q, k or v
      std::vector<std::byte> want, got(stored.size());
      for (std::size_t part = 0; part < 3; ++part) {
        for (std::size_t h = 0; h < 3; ++h) {
          const auto* from = stored.data() + (3 * h + part) * bytes;
          want.insert(want.end(), from, from + bytes);
        }
      }
      model.read("decoder.layers.1.self_attention.linear_qkv" + kind, got);
      EXPECT_EQ(got, want);
    }
    std::vector<float> box(5 * 3), all(36 * 12);  // a rank's part that begins and ends within heads
    const std::string name = "decoder.layers.0.self_attention.linear_qkv.weight";
    model.read_f32(name, {{10, 4}, {5, 3}}, box);
    model.read_f32(name, all);
    for (std::size_t r = 0; r < 5; ++r)
      for (std::size_t c = 0; c < 3; ++c)
        EXPECT_EQ(std::memcmp(&box[3 * r + c], &all[12 * (10 + r) + 4 + c], 4), 0) << r << " " << c;
    convert_from_hf(dir_ / head, dir_ / (head + "_t"));
    convert_to_hf(dir_ / (head + "_t"), dir_ / (head + "_back"));
    EXPECT_EQ(read_folder(dir_ / (head + "_back")), folder.tensors());
    EXPECT_EQ(slurp(dir_ / (head + "_back") / "config.json"), slurp(dir_ / head / "config.json"));
    export_hf(dir_ / (head + "_new"), model.config(), model);
    EXPECT_TRUE(read_folder(dir_ / (head + "_new")).contains("embed_out.weight"));
    EXPECT_EQ(open_hf(dir_ / (head + "_new")).config(), model.config());
  }
}

TEST_F(Hf, TiedHeadStoredUnderItsOwnNameOnly) {
  HfFolder folder = tied_head_only();
  folder.write(dir_ / "hf");
  convert_from_hf(dir_ / "hf", dir_ / "t");
  convert_to_hf(dir_ / "t", dir_ / "back");
  EXPECT_EQ(read_folder(dir_ / "back"), folder.tensors());
}

TEST_F(Hf, TiedHeadThatDiffersIsRefused) {
  tied_and_stored().write(dir_ / "hf");
  expect_error<CheckpointError>([&] { open_hf(dir_ / "hf"); }, "lm_head.weight", "tie_word_embeddings");
}

TEST_F(Hf, MissingUnexpectedAndMisshapenTensorsAreListedTogether) {
  HfFolder folder = HfFolder::gpt2("transformer.", false, false);
  folder.tensors().erase("transformer.h.0.ln_1.bias");
  folder.tensors().erase("lm_head.weight");
  folder.add("transformer.h.2.ln_1.bias", {6});
  folder.add("score.weight", {2, 6});
  folder.tensors().erase("transformer.ln_f.weight");
  folder.add("transformer.ln_f.weight", {7});
  folder.dtype = DType::bf16;
  folder.tensors().erase("transformer.ln_f.bias");
  folder.dtype = DType::i32;
  folder.add("transformer.ln_f.bias", {6});
  folder.write(dir_ / "hf");
  expect_error<CheckpointError>(
      [&] { open_hf(dir_ / "hf"); }, "2 missing: transformer.h.0.ln_1.bias [6], lm_head.weight [11, 6]",
      "2 unexpected: score.weight [2, 6], transformer.h.2.ln_1.bias [6]",
      "transformer.ln_f.weight is [7], the configuration implies [6]", "transformer.ln_f.bias int32");
  HfFolder mixed = HfFolder::llama(false, false, false);
  mixed.dtype = DType::bf16;
  mixed.tensors().erase("model.layers.0.self_attn.k_proj.weight");
  mixed.add("model.layers.0.self_attn.k_proj.weight", {8, 10});
  mixed.write(dir_ / "mixed");
  expect_error<CheckpointError>([&] { open_hf(dir_ / "mixed"); },
                                "mixed dtype: model.layers.0.self_attn.k_proj.weight bfloat16");
}

/// One defect of a Hugging Face folder, and what its error must say.
struct Defect {
  const char* label;
  const char* file;  ///< of the folder
  std::string content;
  const char *place, *reason, *remedy;
  friend std::ostream& operator<<(std::ostream& out, const Defect& defect) { return out << defect.label; }
};

std::string config_with(const char* key, const Json& value) {
  Json config = HfFolder::gpt2("transformer.", true, false).config;
  config[key] = value;
  return config.dump();
}

constexpr const char *kConfig = "config.json", *kIndex = "model.safetensors.index.json",
                     *kWeights = "model.safetensors", *kSaveAgain = "save_pretrained() of Transformers",
                     *kChange = "Change it, or use another model", *kDownload = "download or save";
const Defect kDefects[] = {
    {"NoJson", kConfig, "{\"n_layer\": 2,", "", "is not valid JSON: parse error", kSaveAgain},
    {"Twice", kConfig, R"({"n_layer": 2, "n_layer": 3})", "", "\"n_layer\" appears twice", kSaveAgain},
    {"NoType", kConfig, R"({"n_layer": 2})", "$", "\"model_type\" is missing", kSaveAgain},
    {"List", kConfig, "[]", "$", "expected an object, found array", kSaveAgain},
    {"Text", kConfig, config_with("n_layer", "two"), "$.n_layer", "expected an integer, found string",
     kSaveAgain},
    {"Zero", kConfig, config_with("n_head", 0), "$.n_head", "0 is outside 1 to", kSaveAgain},
    {"Real", kConfig, config_with("vocab_size", 1.5), "$.vocab_size", "expected an integer", kSaveAgain},
    {"Eps", kConfig, config_with("layer_norm_epsilon", -1), "$.layer_norm_epsilon", "must be above 0",
     kChange},
    {"Heads", kConfig, config_with("n_head", 4), "$", "n_embd 6 is not a multiple of n_head 4", kChange},
    {"Dropout", kConfig, config_with("attn_pdrop", 2), "$.attn_pdrop", "must be at least 0 and below 1",
     kChange},
    {"Flag", kConfig, config_with("tie_word_embeddings", 1), "$.tie_word_embeddings",
     "expected true or false", kSaveAgain},
    {"Type", kConfig, config_with("model_type", "opt"), "$.model_type", "\"opt\" is not supported",
     "Use a model"},
    {"Map", kIndex, R"({"metadata": {}})", "$", "\"weight_map\" is missing", kSaveAgain},
    {"Outside", kIndex, R"({"weight_map": {"a": "../b.safetensors"}})", "$.weight_map.a",
     "is not the plain name of a file", "could read files elsewhere"},
    {"Number", kIndex, R"({"weight_map": {"a": 3}})", "$.weight_map.a", "expected a string", kSaveAgain},
    {"Short", kWeights, "abc", "header", "has only 3 bytes", kDownload},
    {"Header", kWeights, raw_file("{]", ""), "header", "is not valid JSON: parse error", kDownload},
};

struct HfDefect : ScratchTest, ::testing::WithParamInterface<Defect> {};
INSTANTIATE_TEST_SUITE_P(Files, HfDefect, ::testing::ValuesIn(kDefects),
                         [](const auto& info) { return std::string(info.param.label); });

TEST_P(HfDefect, IsToldInTheWordsOfTheFile) {
  HfFolder::gpt2("transformer.", true, false).write(dir_ / "hf");
  const Defect& defect = GetParam();
  if (defect.file == kIndex) fs::remove(dir_ / "hf" / kWeights);
  spill(dir_ / "hf" / defect.file, defect.content);
  try {
    open_hf(dir_ / "hf");
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    const std::string text = error.what();
    const std::string place = *defect.place == 0 ? "" : std::string(defect.place) + ": ";
    EXPECT_EQ(text.find((dir_ / "hf" / defect.file).string() + ": " + place), 0u) << text;
    for (const char* part : {defect.reason, defect.remedy})
      EXPECT_NE(text.find(part), std::string::npos) << text;
    for (const char* foreign : {"Tessera", "[json", "hidden_size", "==", "()]"})
      EXPECT_EQ(text.find(foreign), std::string::npos) << text;
  }
}

/// The bits, as float32, of element (row, column) of a matrix made of these parts.
std::uint32_t element_of(const HfMapping& mapping, Tensors& stored, std::int64_t row, std::int64_t column) {
  for (const HfPart& part : mapping.parts) {
    const std::int64_t rows = part.shape[part.transposed ? 1 : 0];
    if (row >= rows) {
      row -= rows;
      continue;
    }
    const std::int64_t at = part.transposed ? column * rows + row : row * part.shape[1] + column;
    const Stored& tensor = stored.at(part.name);
    std::uint32_t bits = 0;
    const std::size_t size = size_of(tensor.dtype);
    std::memcpy(&bits, tensor.bytes.data() + static_cast<std::size_t>(at) * size, size);
    return tensor.dtype == DType::bf16 ? bits << 16 : bits;
  }
  ADD_FAILURE() << "row " << row << " of " << mapping.name;
  return 0;
}

/// Compares every `step`-th element of boxes of every matrix.
void expect_boxes(const fs::path& dir, HfFolder& folder, std::int64_t step = 1) {
  folder.write(dir);
  const HfModel model = open_hf(dir);
  for (const HfMapping& mapping : hf_mappings(model.config())) {
    if (mapping.shape.rank() < 2) continue;
    const std::int64_t rows = mapping.shape[0], columns = mapping.shape[1];
    for (const TensorSlice& box :
         {TensorSlice::whole(mapping.shape), TensorSlice{{rows / 3, 0}, {rows / 2, columns}},
          TensorSlice{{0, columns / 2}, {rows, columns - columns / 2}},
          TensorSlice{{1, 1}, {rows - 2, columns - 2}}, TensorSlice{{rows - 1, columns - 1}, {1, 1}}}) {
      std::vector<float> got(static_cast<std::size_t>(box.shape.numel()));
      model.read_f32(mapping.name, box, got);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < box.shape.numel(); i += step) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, got.data() + i, sizeof bits);
        wrong += bits != element_of(mapping, folder.tensors(), box.offset[0] + i / box.shape[1],
                                    box.offset[1] + i % box.shape[1]);
      }
      EXPECT_EQ(wrong, 0) << mapping.name << ", " << box.shape << " from " << box.offset;
    }
  }
}

/// Of transposed matrices, of rows of several tensors, in fp32 and in 16 bits.
TEST_F(Hf, ABoxOfAParameterIsReadAlone) {
  int number = 0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (HfFolder folder :
         {HfFolder::gpt2("transformer.", true, false), HfFolder::llama(false, false, false)}) {
      for (auto& [name, tensor] : folder.tensors()) {
        tensor.dtype = dtype;
        tensor.bytes.resize(tensor.bytes.size() / 4 * size_of(dtype));
      }
      expect_boxes(dir_ / std::to_string(number++), folder);
    }
  }
}

TEST_F(Hf, ATransposedMatrixIsReadInSeveralBlocks) {
  HfFolder folder = HfFolder::gpt2("transformer.", true, false);
  const std::int64_t ffn = 180'000;  // rows of 0.7 MB, of which a block of 4 MB has five
  folder.config["n_layer"] = 1;
  folder.config["n_inner"] = ffn;
  std::erase_if(folder.tensors(),
                [](const auto& item) { return item.first.starts_with("transformer.h.1."); });
  folder.add("transformer.h.0.mlp.c_fc.weight", {6, ffn});
  folder.add("transformer.h.0.mlp.c_fc.bias", {ffn});
  folder.add("transformer.h.0.mlp.c_proj.weight", {ffn, 6});
  expect_boxes(dir_ / "hf", folder, 101);
}

TEST_F(Hf, ConvertedValuesAreReadAsFloat) {
  HfFolder folder = HfFolder::gpt2("", true, false);
  folder.tensors()["ln_f.bias"].dtype = DType::f16;
  const std::uint16_t halves[6] = {0x3c00, 0xc000, 0x0001, 0x7bff, 0x8000, 0x3555};
  folder.tensors()["ln_f.bias"].bytes.assign(reinterpret_cast<const std::byte*>(halves),
                                             reinterpret_cast<const std::byte*>(halves + 6));
  folder.write(dir_ / "hf");
  std::vector<float> values(6);
  open_hf(dir_ / "hf").read_f32("decoder.final_layernorm.bias", values);
  EXPECT_EQ(values, (std::vector<float>{1.0f, -2.0f, 0x1p-24f, 65504.0f, -0.0f, 0.333251953125f}));
}

TEST_F(Hf, ExportOfTrainedWeightsIsAFolderOfItsOwn) {
  HfFolder::llama(false, false, false).write(dir_ / "hf");
  const HfModel model = open_hf(dir_ / "hf");
  std::vector<std::vector<std::byte>> data;
  std::vector<TensorView> views;
  for (const auto& spec : parameter_specs(model.config())) {
    data.push_back(random_bytes(spec.bytes(), 77));
    views.push_back({spec.name, spec.dtype, spec.shape, data.back().data()});
  }
  ExportOptions options;
  options.dtype = DType::bf16;
  options.max_shard_bytes = 500;
  export_hf(dir_ / "out", model.config(), ViewSource(views), options);
  const HfModel read = open_hf(dir_ / "out");
  EXPECT_EQ(read.config(), model.config());
  for (const auto& spec : read.tensors()) {
    EXPECT_EQ(spec.dtype, DType::bf16);
    std::vector<std::byte> got(spec.bytes()), want(spec.bytes());
    read.read(spec.name, got);
    for (const auto& view : views)
      if (view.name == spec.name) convert_floats(DType::f32, view.span(), DType::bf16, want);
    EXPECT_EQ(got, want) << spec.name;
  }
  // Trained on with other dropout: the original config.json is kept but for what changed.
  Architecture changed = model.config();
  changed.model.attention_dropout = 0.25;
  options = {};
  options.source = model.source();
  export_hf(dir_ / "again", changed, model, options);
  const Json config = Json::parse(slurp(dir_ / "again" / "config.json"));
  EXPECT_EQ(config["attention_dropout"], 0.25);
  EXPECT_EQ(open_hf(dir_ / "again").config(), changed);
  views.pop_back();
  expect_error<InvalidArgument>([&] { export_hf(dir_ / "no", model.config(), ViewSource(views), {}); },
                                "output_layer.weight [11, 10]");
  EXPECT_FALSE(fs::exists(dir_ / "no"));
}

TEST_F(Hf, NothingIsOverwrittenAndNothingHalfWrittenStays) {
  HfFolder::gpt2("", true, false).write(dir_ / "hf");
  expect_error<CheckpointError>([&] { convert_from_hf(dir_ / "hf", dir_ / "hf"); }, "already exists");
  fs::create_directories(dir_ / "empty");
  convert_from_hf(dir_ / "hf", dir_ / "empty");
  EXPECT_EQ(files_of(dir_), (std::vector<std::string>{"empty", "hf"}));
  const HfModel model = open_hf(dir_ / "hf");
  fs::resize_file(dir_ / "hf" / "model.safetensors", fs::file_size(dir_ / "hf" / "model.safetensors") - 8);
  EXPECT_THROW(export_tessera(dir_ / "out", model.config(), model), CheckpointError);
  EXPECT_EQ(files_of(dir_), (std::vector<std::string>{"empty", "hf"}));
  expect_error<CheckpointError>([&] { open_model(dir_); }, "neither tessera.json nor config.json");
}

TEST_F(Hf, DamagedTesseraFoldersAreRefused) {
  HfFolder::gpt2("", true, false).write(dir_ / "hf");
  convert_from_hf(dir_ / "hf", dir_ / "t");
  const Json valid = Json::parse(slurp(dir_ / "t" / "tessera.json"));
  const auto refuse = [&](const Json& json, const char* what) {
    spill(dir_ / "t" / "tessera.json", json.dump());
    expect_error<CheckpointError>([&] { open_tessera(dir_ / "t"); }, what);
  };
  Json json = valid;
  json["model"]["num_layers"] = 3;
  refuse(json, "missing: decoder.layers.2.input_layernorm.weight [6]");
  json = valid;
  json["model"]["num_heads"] = "3";
  refuse(json, "$.num_heads: expected an integer");
  json = valid;
  json["model"]["speed"] = 3;
  refuse(json, "\"speed\" is not a known key");
  json = valid;
  json["source"]["weight_map"]["wte.weight"] = "../../x.safetensors";
  refuse(json, "$.source.weight_map.wte.weight");
  json = valid;
  json["source"]["embedding_names"] = Json::array();
  refuse(json, "embedding_names");
  spill(dir_ / "t" / "tessera.json", valid.dump());
  EXPECT_NO_THROW(open_tessera(dir_ / "t"));
}

}  // namespace
}  // namespace tessera::test
