#include <algorithm>
#include <charconv>
#include <numeric>

#include "base/config_rules.hpp"
#include "base/config_values.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

namespace {

/// More ranks than jobs have; all of them can still be planned one by one.
constexpr std::int64_t kMostRanks = std::int64_t{1} << 17;

/// Ranks that hold one copy of the model.
std::int64_t model_ranks(const ParallelConfig& c) { return c.tensor * c.pipeline * c.context; }

/// "parallel.tensor 2 x pipeline 2", the axes that count.
std::string product_text(const ParallelConfig& c, bool with_data) {
  std::string text;
  const auto factor = [&](const char* name, std::int64_t value, bool always) {
    if (value > 1 || always) text += detail::concat(text.empty() ? "parallel." : " x ", name, " ", value);
  };
  factor("tensor", c.tensor, true);
  factor("pipeline", c.pipeline, true);
  factor("context", c.context, false);
  if (with_data) factor("data", c.data.value_or(1), true);
  return text;
}

/// "1, 2 or 4": the numbers up to `most` with which a rule holds.
template <typename Holds>
std::string choices(std::int64_t most, Holds&& holds) {
  std::vector<std::int64_t> found;
  for (std::int64_t n = 1; n <= std::min<std::int64_t>(most, 128); ++n) {
    if (holds(n)) found.push_back(n);
  }
  std::string text;
  for (std::size_t i = 0; i < found.size(); ++i) {
    text += detail::concat(i == 0 ? "" : i + 1 == found.size() ? " or " : ", ", found[i]);
  }
  return text;
}

void check_context(Rules& rules, const Config& c) {
  rules.rule({"parallel.context", "model.family"}, [&] {
    return unless(c.parallel.context == 1 || std::string_view(spec_of(c.model.family).body) == "decoder",
                  "parallel.context (", c.parallel.context, ") is for decoders; model.family ",
                  c.model.family.name, " computes whole samples only: use 1");
  });
  rules.rule({"parallel.context_method", "parallel.context", "model.num_kv_heads", "model.num_heads",
              "parallel.tensor"},
             [&] {
               if (c.parallel.context_method != ContextMethod::ulysses) return std::string();
               const std::int64_t heads = std::max<std::int64_t>(1, c.model.num_kv_heads / c.parallel.tensor);
               return unless(heads % c.parallel.context == 0,
                             "parallel.context_method ulysses: parallel.context (", c.parallel.context,
                             ") does not divide the ", heads,
                             " key-value heads of a tensor rank; use all_gather or auto, or a context of ",
                             choices(heads, [&](std::int64_t n) { return heads % n == 0; }));
             });
}

void check_tensor(Rules& rules, const ModelSettings& given, const Config& c) {
  const std::int64_t t = c.parallel.tensor;
  const auto keys = [&](std::string_view culprit, std::initializer_list<std::string_view> more) {
    std::vector<std::string_view> list{"parallel.tensor", culprit};
    list.insert(list.end(), more.begin(), more.end());
    return list;
  };
  rules.rule(keys("model.num_heads", {}), [&] {
    const std::int64_t heads = c.model.num_heads;
    if (heads % t == 0) return std::string();
    return detail::concat("parallel.tensor (", t, ") does not divide model.num_heads (", heads, "); use ",
                          choices(heads, [&](std::int64_t n) { return heads % n == 0; }));
  });
  rules.rule(keys("model.num_kv_heads", {"model.num_heads"}), [&] {
    const std::int64_t heads = c.model.num_heads;
    const std::int64_t kv = c.model.num_kv_heads;
    // Without a number of their own they are the heads, whose fault is reported already.
    if (given.num_kv_heads == 0) return std::string();
    const auto fits = [&](std::int64_t n) { return kv % n == 0 || n % kv == 0; };
    if (fits(t)) return std::string();
    return detail::concat("parallel.tensor (", t, ") and model.num_kv_heads (", kv,
                          "): one must divide the other; use ",
                          choices(heads, [&](std::int64_t n) { return heads % n == 0 && fits(n); }));
  });
  rules.rule(keys("model.ffn_hidden_size", {"model.family", "model.hidden_size", "model.num_heads"}), [&] {
    const std::int64_t width = c.model.ffn_hidden_size;
    return unless(width % t == 0, "parallel.tensor (", t, ") does not divide model.ffn_hidden_size (", width,
                  "); the next that fits is ", (width + t - 1) / t * t);
  });
  rules.rule(keys("model.moe_ffn_hidden_size", {}), [&] {
    const std::int64_t width = expert_width(c.model);
    return unless(!c.model.moe_ffn_hidden_size || width % t == 0, "parallel.tensor (", t,
                  ") does not divide model.moe_ffn_hidden_size (", width, "); the next that fits is ",
                  (width + t - 1) / t * t);
  });
  rules.rule(keys("model.vocab_size", {}), [&] {
    return unless(c.model.vocab_size >= t, "parallel.tensor (", t, ") is more than model.vocab_size (",
                  c.model.vocab_size, "): some ranks would have no row of the table");
  });
  const auto shares_evenly = [&](const char* key, std::int64_t length) {
    return unless(!c.parallel.sequence || length % t == 0, key, " (", length,
                  ") is not a multiple of parallel.tensor (", t, "), which parallel.sequence needs; use ",
                  (length + t - 1) / t * t);
  };
  rules.rule({"training.seq_length", "parallel.tensor", "parallel.sequence", "parallel.context"}, [&] {
    if (c.parallel.context == 1) return shares_evenly("training.seq_length", c.training.seq_length);
    const std::int64_t least = c.parallel.context * std::lcm<std::int64_t>(2, c.parallel.sequence ? t : 1);
    const std::int64_t length = c.training.seq_length;
    return unless(length % least == 0, "training.seq_length (", length, ") is not a multiple of ", least,
                  ", which parallel.context (", c.parallel.context, ") needs",
                  c.parallel.sequence ? " beside parallel.sequence" : "", ": two chunks for each rank; use ",
                  (length + least - 1) / least * least);
  });
  rules.rule({"training.decoder_seq_length", "parallel.tensor", "parallel.sequence"}, [&] {
    return shares_evenly("training.decoder_seq_length", c.training.decoder_seq_length.value_or(t));
  });
}

std::string chunk_fault(const ParallelConfig& p) {
  return chunk_fault(p.schedule, chunks_of(p.schedule, p.virtual_stages));
}

/// Pieces the model is cut into.
std::int64_t pieces_of(const ParallelConfig& p) {
  return p.pipeline * chunks_of(p.schedule, p.virtual_stages);
}

std::string layout_fault(const Config& c) {
  const ParallelConfig& p = c.parallel;
  std::vector<std::int64_t> counts;
  try {
    counts = layers_per_piece(*p.pipeline_layout);
  } catch (const ConfigError& error) {
    return error.what();
  }
  const std::int64_t pieces = pieces_of(p), layers = c.model.num_layers;
  const auto given = static_cast<std::int64_t>(counts.size());
  if (given != pieces) {
    return detail::concat("parallel.pipeline_layout has ", given, " numbers, but there are ", pieces,
                          " pieces (pipeline ", p.pipeline, " x ", pieces / p.pipeline, " chunks)");
  }
  const std::int64_t sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (sum != layers) {
    return detail::concat("parallel.pipeline_layout adds up to ", sum, " layers, but model.num_layers is ",
                          layers);
  }
  // The first and the last piece still have the embedding and the head.
  for (std::size_t i = 1; i + 1 < counts.size(); ++i) {
    if (counts[i] == 0) {
      return detail::concat("parallel.pipeline_layout leaves piece ", i + 1,
                            " without a layer; only the first and the last may have none");
    }
  }
  return {};
}

/// Encoder and decoder on stages of their own.
std::string split_fault(const Config& c) {
  const ParallelConfig& p = c.parallel;
  const std::int64_t rank = *p.pipeline_split_rank;
  const ModelConfig& m = c.model;
  if (!m.encoder_layers)
    return detail::concat(
        "parallel.pipeline_split_rank is for models with an encoder and a decoder; model.family ",
        m.family.name, " has one of them");
  if (p.pipeline_layout)
    return "parallel.pipeline_split_rank and parallel.pipeline_layout both say where the model is cut: give "
           "one";
  if (pieces_of(p) != p.pipeline)
    return detail::concat(
        "parallel.pipeline_split_rank gives each stage layers of the encoder or of the decoder, but with "
        "parallel.schedule ",
        name_of(p.schedule), " a stage holds several pieces: use 1f1b, gpipe or zb-h1, or leave it out");
  if (rank >= p.pipeline)
    return detail::concat("parallel.pipeline_split_rank (", rank,
                          ") must be above 0 and below parallel.pipeline (", p.pipeline,
                          "): it is the first stage of the decoder");
  const std::int64_t encoder = *m.encoder_layers, decoder = m.num_layers - encoder;
  if (encoder < rank || decoder < p.pipeline - rank)
    return detail::concat("parallel.pipeline_split_rank (", rank, ") of ", p.pipeline,
                          " stages leaves one without a layer: the "
                          "encoder has ",
                          encoder, ", the decoder ", decoder);
  return {};
}

void check_pipeline(Rules& rules, const Config& c) {
  const ParallelConfig& p = c.parallel;
  rules.rule({"parallel.virtual_stages", "parallel.schedule"}, [&] { return chunk_fault(p); });
  rules.rule({"parallel.schedule", "parallel.pipeline"}, [&] {
    return unless(!traits_of(p.schedule).whole_rounds || p.pipeline > 1, "parallel.schedule ",
                  name_of(p.schedule), " needs parallel.pipeline above 1; use 1f1b");
  });
  const std::vector<std::string_view> cut = {"parallel.pipeline", "model.num_layers",
                                             "parallel.virtual_stages", "parallel.schedule"};
  // How many pieces there are means nothing while their number is at fault.
  if (!chunk_fault(p).empty()) return;
  if (p.pipeline_split_rank) {
    std::vector<std::string_view> keys{"parallel.pipeline_split_rank", "model.encoder_layers",
                                       "model.family"};
    keys.insert(keys.end(), cut.begin(), cut.end());
    rules.rule(keys, [&] { return split_fault(c); });
  }
  if (p.pipeline_layout) {
    std::vector<std::string_view> keys{"parallel.pipeline_layout"};
    keys.insert(keys.end(), cut.begin(), cut.end());
    rules.rule(keys, [&] { return layout_fault(c); });
  } else {
    rules.rule(cut, [&] {
      const std::int64_t pieces = pieces_of(p);
      return unless(c.model.num_layers >= pieces, "model.num_layers (", c.model.num_layers,
                    ") is less than the ", pieces, " pieces of the pipeline (pipeline ", p.pipeline, " x ",
                    pieces / p.pipeline, " chunks)");
    });
  }
}

/// What needs the data-parallel degree.
void check_data(Rules& rules, const Config& c) {
  const ParallelConfig& p = c.parallel;
  const TrainingConfig& t = c.training;
  if (!p.data) return;
  const std::vector<std::string_view> batch = {"training.global_batch_size", "training.micro_batch_size",
                                               "parallel.data"};
  const auto samples = [&] { return t.micro_batch_size * *p.data; };
  rules.rule(batch, [&] {
    // Without data ranks it is the rule of the micro-batch size, which is reported there.
    if (t.global_batch_size % t.micro_batch_size != 0) return std::string();
    const std::int64_t share = samples();
    return unless(t.global_batch_size % share == 0, "training.global_batch_size (", t.global_batch_size,
                  ") is not a multiple of training.micro_batch_size x parallel.data (", t.micro_batch_size,
                  " x ", *p.data, " = ", share, ")");
  });
  std::vector<std::string_view> groups{"parallel.schedule", "parallel.pipeline"};
  groups.insert(groups.end(), batch.begin(), batch.end());
  rules.rule(groups, [&] {
    const std::int64_t share = samples();
    if (t.global_batch_size % share != 0 || !traits_of(p.schedule).whole_rounds) return std::string();
    const std::int64_t micro_batches = t.global_batch_size / share;
    return unless(micro_batches % p.pipeline == 0, "schedule ", name_of(p.schedule),
                  " needs micro-batches in ", "groups of parallel.pipeline (", p.pipeline,
                  "), but there are ", micro_batches, " (training.global_batch_size ", t.global_batch_size,
                  " / (micro_batch_size ", t.micro_batch_size, " x data ", *p.data, "))");
  });
  rules.rule({"device.cuda_graph", "parallel.zero_stage", "parallel.data", "parallel.context"}, [&] {
    const bool passing = p.zero_stage > 1 && p.data.value_or(1) * p.context > 1;
    return unless(!passing || c.device.cuda_graph != AutoSwitch::on, "device.cuda_graph true needs ",
                  "parallel.zero_stage 0 or 1: memory that is there for a part of a pass is not recorded");
  });
  rules.rule({"parallel.zero_group", "parallel.data", "parallel.zero_stage", "parallel.context"}, [&] {
    if (!p.zero_group) return std::string();
    if (p.zero_stage == 0)
      return std::string("parallel.zero_group needs parallel.zero_stage above 0, which shares something out");
    const std::int64_t replicas = p.data.value_or(1) * p.context;
    return unless(!p.data || replicas % *p.zero_group == 0,
                  p.context > 1 ? "parallel.data x context" : "parallel.data", " (", replicas,
                  ") is not a multiple of parallel.zero_group (", *p.zero_group, ")");
  });
  rules.rule({"parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.context"}, [&] {
    const std::int64_t ranks = model_ranks(p) * *p.data;
    if (ranks <= kMostRanks) return std::string();
    return detail::concat(product_text(p, true), " are ", ranks, " ranks; at most ", kMostRanks,
                          " are possible");
  });
}

void check_recompute(Rules& rules, const Config& c) {
  const TrainingConfig& t = c.training;
  const bool full = t.recompute == Recompute::full;
  rules.rule({"training.recompute_layers", "model.num_layers", "training.recompute"}, [&] {
    return unless(!full || t.recompute_layers <= c.model.num_layers, "training.recompute_layers (",
                  t.recompute_layers, ") is more than model.num_layers (", c.model.num_layers, ")");
  });
  const bool automatic = t.recompute == Recompute::automatic;
  rules.rule({"training.recompute_method", "training.recompute"}, [&] {
    return unless(!automatic || t.recompute_method == RecomputeMethod::uniform, "training.recompute_method (",
                  name_of(t.recompute_method), ") is for training.recompute auto to find; leave it out");
  });
  rules.rule({"training.recompute_layers", "training.recompute"}, [&] {
    return unless(!automatic || t.recompute_layers == 1, "training.recompute_layers (", t.recompute_layers,
                  ") is for training.recompute auto to find; leave it out");
  });
  rules.rule({"training.recompute_partition", "training.recompute"}, [&] {
    return unless(!t.recompute_partition || full,
                  "training.recompute_partition needs training.recompute full, not ", name_of(t.recompute));
  });
  rules.rule(
      {"training.recompute_partition", "training.recompute", "parallel.tensor", "parallel.sequence"}, [&] {
        if (!t.recompute_partition || !full) return std::string();
        if (c.parallel.tensor == 1)
          return std::string("training.recompute_partition needs parallel.tensor above 1");
        return unless(
            !c.parallel.sequence,
            "training.recompute_partition has nothing to do under parallel.sequence, which shares out ",
            "a segment's input already; leave it out");
      });
}

/// Fills in `data` from the processes there are, or says why no value or not the given one fits.
std::string settle_data(ParallelConfig& p, std::optional<std::int64_t> world_size) {
  if (!world_size) {
    p.data = p.data.value_or(1);
    return {};
  }
  // What is out of range is reported as that, and may not be multiplied.
  for (const std::int64_t degree : {p.tensor, p.pipeline, p.context}) {
    if (degree < 1 || degree > 4096) return {};
  }
  if (p.data && (*p.data < 1 || *p.data > 1'000'000)) return {};
  const std::int64_t ranks = model_ranks(p), world = *world_size;
  if (world < 1 || world % ranks != 0) {
    const std::int64_t below = world / ranks * ranks;
    return detail::concat(product_text(p, false), " = ", ranks, " ranks hold one copy of the model, but ",
                          "there are ", world, " processes, not a multiple of it: no value of parallel.data ",
                          "fits; start ", below > 0 ? detail::concat(below, " or ") : std::string(),
                          below + ranks);
  }
  const std::int64_t data = world / ranks;
  if (p.data.value_or(data) == data) {
    p.data = data;
    return {};
  }
  return detail::concat(product_text(p, true), " = ", ranks * *p.data, " ranks, but there are ", world,
                        " processes: parallel.data would have to be ", data, " (or null: what is left)");
}

void check_expert_ranks(Rules& rules, const Config& c) {
  const std::int64_t ranks = c.parallel.expert;
  rules.rule({"parallel.expert", "model.num_experts"}, [&] {
    if (ranks == 1) return std::string();
    if (!c.model.num_experts)
      return detail::concat("parallel.expert (", ranks,
                            ") shares out the experts of a layer, and model.num_experts is null; use 1");
    const std::int64_t experts = *c.model.num_experts;
    return unless(experts % ranks == 0, "parallel.expert (", ranks, ") does not divide model.num_experts (",
                  experts, "); use ", choices(experts, [&](std::int64_t n) { return experts % n == 0; }));
  });
  rules.rule({"parallel.expert", "parallel.data", "parallel.context"}, [&] {
    if (!c.parallel.data) return std::string();
    const std::int64_t replicas = *c.parallel.data * c.parallel.context;
    return unless(replicas % ranks == 0, "parallel.expert (", ranks, ") does not divide the ", replicas,
                  " ranks of parallel.data x context (", *c.parallel.data, " x ", c.parallel.context,
                  "), among which experts are shared out");
  });
  rules.rule({"parallel.expert", "parallel.zero_group"}, [&] {
    return unless(ranks == 1 || !c.parallel.zero_group, "parallel.expert (", ranks,
                  ") and parallel.zero_group (", c.parallel.zero_group.value_or(0),
                  "): experts are shared out among the ranks that hold the same; leave one of the two out");
  });
}

void check_graph(Rules& rules, const Config& c) {
  rules.rule({"device.cuda_graph", "model.num_experts"}, [&] {
    return unless(c.device.cuda_graph != AutoSwitch::on || !c.model.num_experts,
                  "device.cuda_graph: the host reads how many tokens each expert gets (model.num_experts), "
                  "which no graph can repeat; make it auto, which then does without, or false");
  });
}

}  // namespace

void check_layout(Rules& rules, const ModelSettings& given, const Config& config) {
  check_tensor(rules, given, config);
  check_context(rules, config);
  check_pipeline(rules, config);
  check_data(rules, config);
  check_expert_ranks(rules, config);
  check_recompute(rules, config);
  check_graph(rules, config);
}

std::vector<std::int64_t> layers_per_piece(const std::string& layout) {
  std::vector<std::int64_t> counts;
  for (std::size_t begin = 0; begin <= layout.size();) {
    const std::size_t comma = std::min(layout.find(',', begin), layout.size());
    std::string_view text = std::string_view(layout).substr(begin, comma - begin);
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    std::int64_t count = -1;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), count);
    // A number of layers has at most six digits (model.num_layers), so their sum is safe.
    const bool whole = result.ec == std::errc() && result.ptr == text.data() + text.size();
    TESSERA_ENSURE(ConfigError, whole && count >= 0 && text.size() <= 6,
                   "parallel.pipeline_layout must be layers per piece such as \"3,4,4,1\", not ",
                   in_quotes(layout));
    counts.push_back(count);
    begin = comma + 1;
  }
  return counts;
}

std::int64_t processes_needed(const Config& config, std::int64_t devices) {
  const std::int64_t model = model_ranks(config.parallel);
  return model * config.parallel.data.value_or(std::max<std::int64_t>(1, devices / model));
}

ParallelConfig resolve_layout(const Settings& settings, std::optional<std::int64_t> world_size) {
  Config whole = settings;
  const std::string fault = settle_data(whole.parallel, world_size);
  std::vector<Finding> findings = check(whole);
  if (!fault.empty()) findings.push_back({{"parallel.data"}, fault});
  throw_findings(findings);
  return whole.parallel;
}

}  // namespace tessera
