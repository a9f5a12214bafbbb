#include "cli/checkpoint_tools.hpp"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <set>

#include "cli/run_path.hpp"
#include "tessera/checkpoint/compare.hpp"
#include "tessera/checkpoint/megatron.hpp"
#include "tessera/engine/state.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

bool is_megatron(const fs::path& path) {
  std::error_code error;
  if (fs::exists(path / "latest_checkpointed_iteration.txt", error)) return true;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    if (entry.path().filename().string().starts_with("mp_rank_")) return true;
  }
  return false;
}

/// Weights under Tessera's names, wherever they lie.
struct OpenedWeights {
  std::string path{};
  std::shared_ptr<const WeightSource> weights{};
  Architecture config{};
  bool run = false;                            ///< a run's checkpoint
  bool has_state = false;                      ///< which has an optimizer's tensors
  std::optional<TokenizerRecord> tokenizer{};  ///< of the data that a run was trained on
};

OpenedWeights opened(const std::string& path, bool with_state) {
  OpenedWeights out{.path = path};
  if (is_megatron(path)) {
    const auto model = std::make_shared<MegatronModel>(open_megatron(path));
    for (const std::string& note : model->notes()) std::cerr << "note: " << path << ": " << note << std::endl;
    out.config = model->config();
    out.weights = model;
  } else if (is_model_folder(path)) {
    const auto model = std::make_shared<HfModel>(open_model(path));
    out.config = model->config();
    out.weights = model;
  } else {
    const auto weights = std::make_shared<CheckpointWeights>(checkpoint_in(path), with_state);
    const RunState state = read_run_state(weights->reader());
    out.config = architecture_of(state.config.model);
    out.tokenizer = state.tokenizer;
    out.run = true;
    out.has_state = weights->has_state();
    out.weights = weights;
  }
  return out;
}

struct DiffArguments {
  std::string a, b;
  CompareOptions options;
  bool all = false, weights_only = false;
};

void print_difference(const TensorDifference& d) {
  using Kind = TensorDifference::Kind;
  std::cout << d.name << ": ";
  switch (d.kind) {
    case Kind::only_in_a:
      std::cout << "only in A, " << d.a.dtype << " " << d.a.shape;
      break;
    case Kind::only_in_b:
      std::cout << "only in B, " << d.b.dtype << " " << d.b.shape;
      break;
    case Kind::shape:
      std::cout << "shape " << d.a.shape << " in A, " << d.b.shape << " in B";
      break;
    default:
      std::cout << (d.kind == Kind::equal ? "equal" : "different") << ", " << d.a.shape << ", " << d.a.dtype;
      if (d.a.dtype != d.b.dtype) std::cout << " in A, " << d.b.dtype << " in B";
      if (d.max_abs > 0 || d.different > 0)
        std::cout << ", " << d.different << " of " << d.a.shape.numel() << " values, largest difference "
                  << d.max_abs << " (relative " << d.max_rel << ")";
  }
  std::cout << "\n";
}

void run_diff(const DiffArguments& arguments, Program& program) {
  const bool both_runs = !is_megatron(arguments.a) && !is_model_folder(arguments.a) &&
                         !is_megatron(arguments.b) && !is_model_folder(arguments.b);
  const bool with_state = both_runs && !arguments.weights_only;
  const OpenedWeights a = opened(arguments.a, with_state), b = opened(arguments.b, with_state);
  if (!with_state && !arguments.weights_only && (a.has_state || b.has_state))
    std::cerr << "note: weights are compared, not the optimizer's state, which one side alone has"
              << std::endl;
  std::int64_t tensors = 0, different = 0;
  compare_weights(*a.weights, *b.weights, arguments.options, [&](const TensorDifference& d) {
    ++tensors;
    const bool equal = d.kind == TensorDifference::Kind::equal;
    different += equal ? 0 : 1;
    if (!equal || arguments.all) print_difference(d);
  });
  std::cout << tensors << " tensors, ";
  if (different == 0)
    std::cout << "all equal" << std::endl;
  else
    std::cout << different << " different" << std::endl;
  if (different > 0) program.exit_code = 1;
}

struct AverageArguments {
  std::vector<std::string> from;
  std::string output;
  std::vector<double> weights;
  bool drop_optimizer = false;
};

/// Where the tokenizer of the first one lies, to be copied along.
fs::path tokenizer_of(const OpenedWeights& first) {
  if (!first.run) return first.path;
  if (!first.tokenizer || fs::path(first.tokenizer->file).filename() != "tokenizer.json") return {};
  try {
    if (same_ids(describe_tokenizer(options_of(*first.tokenizer)), *first.tokenizer))
      return fs::path(first.tokenizer->file).parent_path();
  } catch (const Error&) {  // it is not there any more: said below
  }
  std::cerr << "note: the tokenizer of " << first.path << ", " << to_text(*first.tokenizer)
            << ", is not as it was and is not copied" << std::endl;
  return {};
}

void run_average(const AverageArguments& a) {
  TESSERA_ENSURE(ConfigError, a.from.size() >= 2, "give at least two checkpoints to average");
  TESSERA_ENSURE(ConfigError, a.weights.empty() || a.weights.size() == a.from.size(), "--weights has ",
                 a.weights.size(), " numbers for ", a.from.size(), " checkpoints");
  std::vector<OpenedWeights> models;
  for (const std::string& path : a.from) {
    models.push_back(opened(path, false));
    TESSERA_ENSURE(ConfigError, !models.back().has_state || a.drop_optimizer, path,
                   " holds an optimizer's state, which has no mean: leave it out with --drop-optimizer");
    TESSERA_ENSURE(
        ConfigError,
        to_model_json({models.back().config.model, ""}) == to_model_json({models.front().config.model, ""}),
        path, " is of another model than ", a.from.front(),
        ": their settings differ (tessera checkpoint inspect)");
  }
  std::vector<std::shared_ptr<const WeightSource>> sources;
  for (const OpenedWeights& model : models) sources.push_back(model.weights);
  const std::vector<double> weights =
      a.weights.empty() ? std::vector<double>(sources.size(), 1.0) : a.weights;
  ExportOptions options;
  options.extra_files = tokenizer_of(models.front());
  export_tessera(a.output, models.front().config, AveragedWeights(std::move(sources), weights), options);
  std::cout << "wrote " << a.output << ", the mean of " << models.size() << " checkpoints" << std::endl;
}

}  // namespace

void add_checkpoint_diff(CLI::App& checkpoint, Program& program) {
  auto* diff = checkpoint.add_subcommand(
      "diff", "Compare two checkpoints, tensor by tensor; ends with 1 where they differ");
  const auto a = std::make_shared<DiffArguments>();
  const char* what = "a run, a checkpoint, or a model folder (Hugging Face's, Tessera's or Megatron's)";
  diff->add_option("a", a->a, what)->required();
  diff->add_option("b", a->b, what)->required();
  diff->add_option("--atol", a->options.atol, "values may differ by this")->check(CLI::NonNegativeNumber);
  diff->add_option("--rtol", a->options.rtol, "and by this times the larger of the two")
      ->check(CLI::NonNegativeNumber);
  diff->add_flag("--all", a->all, "also list tensors that are equal");
  diff->add_flag("--weights-only,--weights_only", a->weights_only, "not the optimizer's state of two runs");
  diff->callback([a, &program] { run_diff(*a, program); });
}

void add_checkpoint_average(CLI::App& checkpoint) {
  auto* average = checkpoint.add_subcommand("average", "Write the mean of several checkpoints' weights");
  const auto a = std::make_shared<AverageArguments>();
  average
      ->add_option("from", a->from,
                   "two or more: runs, checkpoints or model folders, of one model on any layouts")
      ->required();
  average->add_option("--output", a->output, "a Tessera folder to write, which must not exist or be empty")
      ->required();
  average->add_option("--weights", a->weights, "of each in the mean; equal unless given");
  average->add_flag("--drop-optimizer,--drop_optimizer", a->drop_optimizer,
                    "leave the optimizer's state of runs out, which has no mean");
  average->callback([a] { run_average(*a); });
}

}  // namespace tessera::cli
