#include "cli/model_command.hpp"

#include <iostream>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/data/tokenizer_record.hpp"
#include "tessera/engine/tune.hpp"
#include "tessera/launch/launch.hpp"
#include "tessera/launch/settings.hpp"
#include "tessera/launch/world.hpp"

namespace tessera::cli {
namespace {

void check_tokenizer(const LoadedModel& loaded, const TokenizerOptions& options, const ModelArguments& a) {
  if (loaded.tokenizer) {
    const TokenizerRecord& made = *loaded.tokenizer;
    std::optional<TokenizerRecord> found;
    try {
      found = describe_tokenizer(options);
    } catch (const DataError& error) {
      throw ConfigError(detail::concat(error.what(), ". The model was trained on data of ", to_text(made),
                                       ": name the place where that lies now with --tokenizer"));
    }
    TESSERA_ENSURE(ConfigError, same_ids(*found, made), "the model was trained on data of ", to_text(made),
                   ", and this is ", to_text(*found), ": name its own tokenizer with --tokenizer");
  } else if (a.tokenizer.empty() && options.type == "bytes" &&
             loaded.engine->model().vocab_size() != TokenizerRecord{}.vocab_size) {
    const std::int64_t tokens = loaded.engine->model().vocab_size();
    TESSERA_ENSURE(CheckpointError, !is_model_folder(a.model), a.model,
                   " has no tokenizer.json, and a vocabulary of ", tokens,
                   " is not that of bytes: put the model's tokenizer.json into the folder, or name it with "
                   "--tokenizer");
    std::cerr << "note: nothing says which tokenizer made what the model was trained on; its " << tokens
              << " ids are taken for bytes. --tokenizer names another one" << std::endl;
  }
}

}  // namespace

void add_model(CLI::App& command, ModelArguments& a) {
  command
      .add_option("model", a.model,
                  "a run's folder, a checkpoint, or a model folder (Hugging Face or converted)")
      ->required();
  command.add_option(
      "overrides", a.overrides,
      "section.key=value, e.g. parallel.tensor=2: what to compute with; one process by default");
  command.add_option(
      "--tokenizer", a.tokenizer,
      "bytes, a tokenizer.json or a folder that holds one, where the model does not say which it "
      "has or that was moved");
  command.add_option("--threads", a.threads, "CPU threads; 0 = all cores")->capture_default_str();
}

LoadedModel load(const ModelArguments& a, const Program& program,
                 const std::shared_ptr<Communicator>& world) {
  const std::int64_t shared = program.environment.threads.value_or(0);
  return load_model(a.model, {.threads = a.threads > 0 ? a.threads : shared,
                              .gemm_tables = gemm_tables(program.environment),
                              .overrides = a.overrides,
                              .world = world->size() > 1 ? world : nullptr,
                              .device_index = program.environment.local_rank.value_or(0)});
}

TokenizerOptions tokenizer_named(const std::string& name) {
  if (name == "bytes") return {.type = name};
  return {.model = name};
}

TokenizerOptions tokenizer_options(const LoadedModel& loaded, const std::string& given) {
  if (given.empty() && loaded.tokenizer) return options_of(*loaded.tokenizer);
  return tokenizer_named(given.empty() ? loaded.config.data.tokenizer : given);
}

std::unique_ptr<Tokenizer> open_tokenizer(const LoadedModel& loaded, const ModelArguments& a,
                                          const Program& program) {
  TokenizerOptions options = tokenizer_options(loaded, a.tokenizer);
  check_tokenizer(loaded, options, a);
  options.python = program.environment.python.value_or("python3");
  auto tokenizer = make_tokenizer(options);
  const std::int64_t tokens = loaded.engine->model().vocab_size();
  TESSERA_ENSURE(ConfigError, tokenizer->vocab_size() <= tokens, "the tokenizer ",
                 options.type == "bytes" ? options.type : options.model + options.vocab_file, " has ",
                 tokenizer->vocab_size(), " tokens, the model ", tokens,
                 ": they do not belong together. A converted folder needs its tokenizer.json beside it");
  return tokenizer;
}

void on_layout(const ModelArguments& a, Program& program,
               const std::function<void(const std::shared_ptr<Communicator>&)>& work) {
  std::int64_t processes = 1;
  if (!a.overrides.empty()) {
    const ParallelConfig& layout = config_to_load(a.model, {.overrides = a.overrides}).parallel;
    processes = layout.tensor * layout.pipeline * layout.context * layout.data.value_or(1);
  }
  if (!program.environment.launched() && processes > 1) {
    LaunchProgram self;
    self.command = with_self({"tessera"}, program);
    self.command.insert(self.command.end(), program.arguments.begin(), program.arguments.end());
    self.environment = inherited_environment();
    self.python = program.environment.python.value_or("");
    const LaunchResult result = launch(local_launch(static_cast<int>(processes), self), program.log);
    program.exit_code = result.exit_code;
    return print_report(result);
  }
  const auto world = connect_world(program.environment, ParallelConfig().timeout_s);
  try {
    work(world);
  } catch (const std::exception& error) {
    tell_others(*world, error);
    throw;
  }
}

}  // namespace tessera::cli
