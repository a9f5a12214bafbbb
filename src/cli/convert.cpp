#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/run_path.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/megatron.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/run_exchange.hpp"

namespace tessera::cli {
namespace {

struct ConvertArguments {
  std::vector<std::string> from, to;
  std::string config, settings, dcp_key = "model", dtype, max_shard_size, names = "legacy",
                                ckpt_format = "torch";
  bool follow_symlinks = false, with_optimizer = false;
  std::optional<std::int64_t> vocab_size;
  MegatronExportOptions megatron;
};

std::optional<DType> dtype_named(const std::string& name) {
  if (name.empty()) return std::nullopt;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw ConfigError("--dtype " + name + ": float32, bfloat16 and float16 are supported");
}

/// The folder whose tokenizer files go with the weights: where the tokenizer lies that the model was trained
/// with, unless that is another one by now. Anything else but bytes is told of.
std::filesystem::path tokenizer_folder(const LoadedModel& loaded) {
  if (!loaded.tokenizer || loaded.tokenizer->type == "bytes") return {};
  const TokenizerRecord& made = *loaded.tokenizer;
  const std::filesystem::path file = made.file, name = file.filename();
  std::string why;
  try {
    if (!same_ids(describe_tokenizer(options_of(made)), made)) {
      why = "its content is another one now";
    } else if (name == "tokenizer.json" || name == "vocab.json") {
      return file.parent_path();
    } else {
      why = "it has another name than folders of models give it";
    }
  } catch (const Error& error) {
    why = error.what();
  }
  std::cerr << "note: the model was trained on data of " << to_text(made) << ", which is not copied (" << why
            << "): put it beside the weights as tokenizer.json" << std::endl;
  return {};
}

/// "5GB", "1.5GiB" or bytes.
std::uint64_t bytes_named(const std::string& text) {
  constexpr std::array<std::pair<const char*, double>, 8> units = {{{"", 1},
                                                                    {"B", 1},
                                                                    {"KB", 1e3},
                                                                    {"MB", 1e6},
                                                                    {"GB", 1e9},
                                                                    {"KIB", 0x1p10},
                                                                    {"MIB", 0x1p20},
                                                                    {"GIB", 0x1p30}}};
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit(end, text.data() + text.size());
  std::erase(unit, ' ');
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  for (const auto& [name, factor] : units) {
    if (error == std::errc() && unit == name && value * factor >= 1 && value * factor < 0x1p62)
      return static_cast<std::uint64_t>(value * factor);
  }
  throw ConfigError("--max_shard_size " + text +
                    ": give bytes, or a number with KB, MB, GB, KiB, MiB or GiB");
}

ExportOptions export_options(const ConvertArguments& a) {
  ExportOptions options;
  options.dtype = dtype_named(a.dtype);
  if (!a.max_shard_size.empty()) options.max_shard_bytes = bytes_named(a.max_shard_size);
  return options;
}

/// Says what the target will not have as the source has it.
void note_rounding(const WeightSource& weights, DType dtype) {
  std::size_t rounded = 0, all = 0;
  for (const TensorSpec& spec : weights.tensors()) {
    ++all;
    rounded += spec.dtype != dtype && dtype != DType::f32;
  }
  if (rounded > 0)
    std::cerr << "note: " << rounded << " of " << all << " tensors are rounded to " << name_of(dtype)
              << std::endl;
}

void note_padding(const ModelConfig& model, const MegatronExportOptions& options) {
  const std::int64_t step = options.vocab_divisible_by * options.tensor;
  const std::int64_t added = step > 0 ? (step - model.vocab_size % step) % step : 0;
  if (added > 0)
    std::cerr << "note: the vocabulary is padded by " << added << " rows, copies of its last one"
              << std::endl;
}

void write_model(const ConvertArguments& a, const Architecture& config, const WeightSource& weights,
                 const ExportOptions& options) {
  const auto& [to, target] = std::tie(a.to[0], a.to[1]);
  if (options.dtype) note_rounding(weights, *options.dtype);
  if (to == "hf") return export_hf(target, config, weights, options);
  if (to == "tessera") return export_tessera(target, config, weights, options);
  if (to == "dcp") return export_dcp(target, config, weights, a.dcp_key, options);
  MegatronExportOptions megatron = a.megatron;
  megatron.dtype = options.dtype;
  export_megatron(target, config, weights, megatron);
  note_padding(config.model, megatron);
}

void say(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) std::cerr << "note: " << note << std::endl;
}

void convert_from_megatron(const ConvertArguments& a, SymbolicLinks links) {
  const MegatronModel model = open_megatron(a.from[1], {.vocab_size = a.vocab_size, .links = links});
  say(model.notes());
  write_model(a, model.config(), model, export_options(a));
}

std::optional<TorchFormat> torch_format(const std::string& name) {
  if (name == "dcp") return TorchFormat::dcp;
  if (name == "deepspeed") return TorchFormat::deepspeed;
  if (name == "accelerate") return TorchFormat::accelerate;
  return std::nullopt;
}

void convert_from_torch(const ConvertArguments& a, TorchFormat format, SymbolicLinks links) {
  TorchFacts facts;
  const std::filesystem::path config = config_of(a.from[1], a.config);
  const HfModel model = open_torch(format, a.from[1], config, facts, links);
  say(facts.notes);
  if (facts.moments > 0)
    std::cerr << "note: " << facts.moments << " tensors of the optimizer are not taken over" << std::endl;
  ExportOptions options = export_options(a);
  options.source = model.source();
  options.extra_files = config.parent_path();
  options.links = links;
  write_model(a, model.config(), model, options);
}

/// A run's or checkpoint's weights in one of the folder formats.
void convert_run(const ConvertArguments& a) {
  LoadedModel loaded = load_model(a.from[1], {});
  const Architecture config = architecture_of(loaded.config.model);
  ExportOptions options = export_options(a);
  options.extra_files = tokenizer_folder(loaded);
  write_model(a, config, weights_of(*loaded.engine), options);
}

void convert_folder(const ConvertArguments& a, SymbolicLinks links) {
  const auto& [from, source] = std::tie(a.from[0], a.from[1]);
  const auto& [to, target] = std::tie(a.to[0], a.to[1]);
  const bool as_it_is = a.dtype.empty() && a.max_shard_size.empty();
  if (from == "hf" && to == "tessera" && as_it_is) return convert_from_hf(source, target, links);
  if (from == "tessera" && to == "hf" && as_it_is) return convert_to_hf(source, target, links);
  const HfModel model = from == "hf" ? open_hf(source, links) : open_tessera(source, links);
  ExportOptions options = export_options(a);
  options.source = model.source();
  options.extra_files = source;
  options.links = links;
  write_model(a, model.config(), model, options);
}

/// Everything that a run goes on with.
void convert_with_optimizer(const ConvertArguments& a, SymbolicLinks links) {
  if (a.to[0] == "megatron") {
    const auto run = open_run(checkpoint_in(a.from[1]));
    export_megatron_run(a.to[1], *run, a.megatron);
    return note_padding(run->config().model, a.megatron);
  }
  std::vector<std::string> notes;
  std::unique_ptr<RunSource> run;
  if (const auto format = torch_format(a.from[0])) {
    TorchFacts facts;
    run = open_torch_run(*format, a.from[1], config_of(a.from[1], a.config), load_config(a.settings), facts,
                         links);
    notes = facts.notes;
  } else {
    run = open_megatron_run(a.from[1], {.vocab_size = a.vocab_size, .links = links}, notes);
  }
  say(notes);
  write_run(a.to[1], *run);
}

void run_convert(const ConvertArguments& a) {
  const SymbolicLinks links = a.follow_symlinks ? SymbolicLinks::follow : SymbolicLinks::within_folder;
  if (a.with_optimizer) {
    convert_with_optimizer(a, links);
  } else if (a.from[0] == "megatron") {
    convert_from_megatron(a, links);
  } else if (const auto format = torch_format(a.from[0])) {
    convert_from_torch(a, *format, links);
  } else if (a.from[0] == "tessera" && !is_model_folder(a.from[1])) {
    convert_run(a);
  } else {
    convert_folder(a, links);
  }
  std::cout << "wrote " << a.to[1] << std::endl;
}

MegatronExportOptions::Names names_named(const std::string& name) {
  using Names = MegatronExportOptions::Names;
  if (name == "legacy") return Names::legacy;
  if (name == "local") return Names::local;
  TESSERA_ENSURE(ConfigError, name == "transformer_engine", "--names ", name,
                 ": legacy, local and transformer_engine are known");
  return Names::transformer_engine;
}

MegatronExportOptions::Format format_named(const std::string& name) {
  using Format = MegatronExportOptions::Format;
  if (name == "torch") return Format::torch;
  TESSERA_ENSURE(ConfigError, name == "torch_dist", "--ckpt_format ", name,
                 ": torch and torch_dist are written");
  return Format::torch_dist;
}

/// What belongs to Megatron's side, so that it is not given in vain.
void add_megatron_options(CLI::App& command, ConvertArguments& a) {
  command.add_option(
      "--vocab_size", a.vocab_size,
      "--from megatron: tokens of the tokenizer, without padding, where the checkpoint does not say");
  command.add_option("--tensor", a.megatron.tensor, "--to megatron: tensor ranks to write for");
  command.add_option("--pipeline", a.megatron.pipeline, "--to megatron: stages to write for");
  command.add_option("--virtual", a.megatron.virtual_stages,
                     "--to megatron: virtual stages of each pipeline rank");
  command.add_option("--data", a.megatron.data, "--to megatron: data ranks that its arguments name");
  command.add_flag("--distributed_optimizer", a.megatron.distributed_optimizer,
                   "--to megatron: files as its distributed optimizer has them; with --with_optimizer its "
                   "state of 2024 and later");
  command.add_flag("--torch_adam", a.megatron.torch_adam,
                   "--to megatron with --with_optimizer: for PyTorch's Adam, which Megatron takes where "
                   "neither Apex nor Transformer Engine is installed");
  command.add_option("--make_vocab_size_divisible_by", a.megatron.vocab_divisible_by,
                     "--to megatron: pad the vocabulary to a multiple of this times the tensor ranks");
  command.add_option("--names", a.names,
                     "--to megatron: legacy, local or transformer_engine (the layers' names)");
  command.add_option("--ckpt_format", a.ckpt_format,
                     "--to megatron: torch (a file of each rank) or torch_dist (one checkpoint that any "
                     "layout loads)");
}

void check_formats(const CLI::App& command, const ConvertArguments& a) {
  for (const auto* side : {&a.from, &a.to}) {
    const std::string& name = (*side)[0];
    const bool foreign = torch_format(name).has_value();
    TESSERA_ENSURE(ConfigError, name == "hf" || name == "tessera" || name == "megatron" || foreign,
                   "unknown format \"", name,
                   "\": hf, tessera, megatron, dcp, deepspeed and accelerate are known");
    TESSERA_ENSURE(
        ConfigError, side == &a.from || !foreign || name == "dcp", "--to ", name,
        ": these folders are read, not written. Write --to hf or --to dcp, which their programs load");
  }
  const bool torch = torch_format(a.from[0]).has_value();
  TESSERA_ENSURE(ConfigError, torch || a.config.empty(),
                 "--hf_config is for --from dcp, deepspeed and accelerate");
  TESSERA_ENSURE(ConfigError, a.to[0] == "dcp" || command.count("--dcp_key") == 0,
                 "--dcp_key is for --to dcp");
  const bool run = ((a.from[0] == "megatron" || torch) && a.to[0] == "tessera") ||
                   (a.from[0] == "tessera" && a.to[0] == "megatron" && !is_model_folder(a.from[1]));
  TESSERA_ENSURE(
      ConfigError, !a.with_optimizer || run,
      "--with_optimizer is for --to tessera from megatron, dcp, deepspeed or accelerate, and for a run "
      "--to megatron");
  TESSERA_ENSURE(
      ConfigError, (torch && a.with_optimizer) != a.settings.empty(),
      "--settings CONFIG.yaml says how a run from dcp, deepspeed or accelerate goes on: it goes with "
      "--with_optimizer, and not without");
  TESSERA_ENSURE(ConfigError, !a.with_optimizer || a.dtype.empty(),
                 "--dtype is for weights alone: a run with its optimizer keeps its own precision");
  TESSERA_ENSURE(ConfigError, a.to[0] == "hf" || a.max_shard_size.empty(), "--max_shard_size is for --to hf");
  TESSERA_ENSURE(ConfigError, a.from[0] == "megatron" || command.count("--vocab_size") == 0,
                 "--vocab_size is for --from megatron");
  for (const char* option : {"--tensor", "--pipeline", "--virtual", "--data", "--distributed_optimizer",
                             "--torch_adam", "--make_vocab_size_divisible_by", "--names", "--ckpt_format"}) {
    TESSERA_ENSURE(ConfigError, a.to[0] == "megatron" || command.count(option) == 0, option,
                   " is for --to megatron");
  }
  TESSERA_ENSURE(ConfigError, !a.megatron.torch_adam || a.with_optimizer,
                 "--torch_adam is about an optimizer's state: it goes with --with_optimizer");
  TESSERA_ENSURE(ConfigError, !a.megatron.torch_adam || !a.megatron.distributed_optimizer,
                 "--torch_adam is not for --distributed_optimizer, whose state is the same for all of them");
  TESSERA_ENSURE(ConfigError, a.ckpt_format != "torch_dist" || command.count("--names") == 0,
                 "--names is for --ckpt_format torch: tensors of torch_dist have one set of names");
  TESSERA_ENSURE(ConfigError,
                 a.ckpt_format != "torch_dist" || a.with_optimizer || !a.megatron.distributed_optimizer,
                 "--distributed_optimizer with --ckpt_format torch_dist is for a run, with --with_optimizer");
}

}  // namespace

void add_convert(CLI::App& app, Program&) {
  auto* command = app.add_subcommand("convert",
                                     "Convert weights between Hugging Face's folders, Tessera's, Megatron's "
                                     "and those of PyTorch's programs");
  auto arguments = std::make_shared<ConvertArguments>();
  command
      ->add_option("--from", arguments->from,
                   "hf DIR, tessera DIR (converted folder, run or checkpoint), megatron DIR, dcp DIR, "
                   "deepspeed DIR or "
                   "accelerate DIR")
      ->required()
      ->expected(2)
      ->type_name("FORMAT DIR");
  command
      ->add_option("--to", arguments->to,
                   "hf DIR, tessera DIR, megatron DIR or dcp DIR; DIR must not exist or be empty")
      ->required()
      ->expected(2)
      ->type_name("FORMAT DIR");
  command->add_option("--dtype", arguments->dtype,
                      "store weights as float32, bfloat16 or float16 instead of as they are");
  command->add_option("--max_shard_size", arguments->max_shard_size,
                      "--to hf: bytes of a file of weights, or text such as 200MB; 5GB unless given");
  command->add_option(
      "--hf_config", arguments->config,
      "--from dcp, deepspeed, accelerate: the model's config.json, or its folder, where none lies beside "
      "the weights or above them");
  command->add_option(
      "--dcp_key", arguments->dcp_key,
      "--to dcp: the key of the dict that the weights are in (model unless given); \"\" for none");
  command->add_flag("--follow_symlinks", arguments->follow_symlinks,
                    "also read files of the source that are links to places outside of its folder");
  command->add_flag("--with_optimizer", arguments->with_optimizer,
                    "a run that goes on, with its optimizer: --to tessera from another program's checkpoint, "
                    "or --to megatron");
  command->add_option("--settings", arguments->settings,
                      "--with_optimizer from dcp, deepspeed, accelerate: the run's configuration, whose "
                      "model may be left out");
  add_megatron_options(*command, *arguments);
  command->callback([arguments, command] {
    check_formats(*command, *arguments);
    arguments->megatron.names = names_named(arguments->names);
    arguments->megatron.format = format_named(arguments->ckpt_format);
    run_convert(*arguments);
  });
}

}  // namespace tessera::cli
