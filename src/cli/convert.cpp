#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/run_path.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/engine/pretrained.hpp"

namespace tessera::cli {
namespace {

struct ConvertArguments {
  std::vector<std::string> from, to;
  std::string dtype;
  bool follow_symlinks = false;
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

/// A run's or checkpoint's weights in one of the folder formats.
void export_run(const std::string& source, const std::string& format, const std::string& target,
                std::optional<DType> dtype) {
  LoadedModel loaded = load_model(source, 0, {});
  const Architecture config = architecture_of(loaded.config.model);
  const ViewSource weights = weights_of(*loaded.engine);
  ExportOptions options;
  options.dtype = dtype;
  options.extra_files = tokenizer_folder(loaded);
  format == "hf" ? export_hf(target, config, weights, options)
                 : export_tessera(target, config, weights, options);
}

void run_convert(const ConvertArguments& a) {
  const auto& [from, source] = std::tie(a.from[0], a.from[1]);
  const auto& [to, target] = std::tie(a.to[0], a.to[1]);
  const std::optional<DType> dtype = dtype_named(a.dtype);
  if (from == "tessera" && !is_model_folder(source)) {
    export_run(source, to, target, dtype);
    std::cout << "wrote " << target << std::endl;
    return;
  }
  const SymbolicLinks links = a.follow_symlinks ? SymbolicLinks::follow : SymbolicLinks::within_folder;
  if (from != to && !dtype) {
    from == "hf" ? convert_from_hf(source, target, links) : convert_to_hf(source, target, links);
  } else {
    const HfModel model = from == "hf" ? open_hf(source, links) : open_tessera(source, links);
    ExportOptions options;
    options.dtype = dtype;
    options.source = model.source();
    options.extra_files = source;
    options.links = links;
    to == "hf" ? export_hf(target, model.config(), model, options)
               : export_tessera(target, model.config(), model, options);
  }
  std::cout << "wrote " << target << std::endl;
}

}  // namespace

void add_convert(CLI::App& app, Program&) {
  auto* command = app.add_subcommand("convert", "Convert weights between Hugging Face folders and Tessera's");
  auto arguments = std::make_shared<ConvertArguments>();
  command
      ->add_option("--from", arguments->from, "hf DIR, or tessera DIR (converted folder, run or checkpoint)")
      ->required()
      ->expected(2)
      ->type_name("FORMAT DIR");
  command->add_option("--to", arguments->to, "hf DIR or tessera DIR; DIR must not exist or be empty")
      ->required()
      ->expected(2)
      ->type_name("FORMAT DIR");
  command->add_option("--dtype", arguments->dtype,
                      "store weights as float32, bfloat16 or float16 instead of as they are");
  command->add_flag("--follow_symlinks", arguments->follow_symlinks,
                    "also read files of the source that are links to places outside of its folder");
  command->callback([arguments] {
    for (const auto* side : {&arguments->from, &arguments->to}) {
      const std::string& name = (*side)[0];
      TESSERA_ENSURE(ConfigError, name == "hf" || name == "tessera", "unknown format \"", name,
                     "\": hf and tessera are known");
    }
    run_convert(*arguments);
  });
}

}  // namespace tessera::cli
