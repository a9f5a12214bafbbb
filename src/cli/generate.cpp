#include "tessera/engine/generate.hpp"

#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/run_path.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/data/tokenizer.hpp"
#include "tessera/engine/tune.hpp"

namespace tessera::cli {
namespace {

struct GenerateArguments {
  std::string model, prompt, tokenizer;
  std::int64_t samples = 1, threads = 0;
  SamplingOptions sampling;
};

/// What is named by --tokenizer, recorded with the weights, or configured, in this order.
TokenizerOptions tokenizer_options(const LoadedModel& loaded, const std::string& given) {
  if (given.empty() && loaded.tokenizer) return options_of(*loaded.tokenizer);
  const std::string& name = given.empty() ? loaded.config.data.tokenizer : given;
  if (name == "bytes") return {.type = name};
  return {.model = name};
}

/// Ids mean nothing without the tokenizer that made them: another one is refused, a guess is told of.
void check_tokenizer(const LoadedModel& loaded, const TokenizerOptions& options, const GenerateArguments& a) {
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

void run_generate(const GenerateArguments& a, const Program& program) {
  check(a.sampling);
  const LoadedModel loaded = load_model(a.model, a.threads, gemm_tables(program.environment));
  TokenizerOptions options = tokenizer_options(loaded, a.tokenizer);
  check_tokenizer(loaded, options, a);
  options.python = program.environment.python.value_or("python3");
  const auto tokenizer = make_tokenizer(options);
  Model& model = loaded.engine->model();
  TESSERA_ENSURE(ConfigError, tokenizer->vocab_size() <= model.vocab_size(), "the tokenizer ",
                 options.type == "bytes" ? options.type : options.model + options.vocab_file, " has ",
                 tokenizer->vocab_size(), " tokens, the model ", model.vocab_size(),
                 ": they do not belong together. A converted folder needs its tokenizer.json beside it");
  const std::vector<std::int32_t> prompt = tokenizer->encode(a.prompt);
  TESSERA_ENSURE(ConfigError, !prompt.empty(),
                 "--prompt is empty: generation needs at least one token to begin with");
  for (std::int64_t i = 0; i < a.samples; ++i) {
    SamplingOptions sampling = a.sampling;
    sampling.seed += static_cast<std::uint64_t>(i);
    sampling.stop_token = loaded.tokenizer ? loaded.tokenizer->end_of_document : tokenizer->end_of_document();
    std::vector<std::int32_t> text = prompt;
    const auto added = generate(loaded.engine->ctx(), model, prompt, sampling);
    text.insert(text.end(), added.begin(), added.end());
    const auto length = static_cast<std::int64_t>(text.size());
    if (length == model.max_positions() &&
        length < static_cast<std::int64_t>(prompt.size()) + sampling.max_new_tokens)
      std::cerr << "note: stopped at the model's last position: it has " << length << ", the prompt takes "
                << prompt.size() << std::endl;
    if (i > 0) std::cout << "----\n";
    std::cout << tokenizer->decode(text) << std::endl;
  }
}

}  // namespace

void add_generate(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("generate", "Write text with a trained model");
  auto a = std::make_shared<GenerateArguments>();
  command
      ->add_option("model", a->model,
                   "a run's folder, a checkpoint, or a model folder (Hugging Face or converted)")
      ->required();
  command->add_option("--prompt", a->prompt, "the text to continue")->required();
  command->add_option(
      "--tokenizer", a->tokenizer,
      "bytes, a tokenizer.json or a folder that holds one, where the model does not say which it "
      "has or that was moved");
  command->add_option("--max-new-tokens", a->sampling.max_new_tokens, "tokens to add at most")
      ->capture_default_str();
  command->add_option("--temperature", a->sampling.temperature, "0 = always the likeliest token")
      ->capture_default_str();
  command->add_option("--top-k", a->sampling.top_k, "draw among the k likeliest tokens; 0 = all")
      ->capture_default_str();
  command
      ->add_option("--top-p", a->sampling.top_p,
                   "draw among the likeliest tokens up to this probability; 0 = all")
      ->capture_default_str();
  command->add_option("--seed", a->sampling.seed, "the same seed writes the same text")
      ->capture_default_str();
  command->add_option("--num-samples", a->samples, "texts to write")->capture_default_str();
  command->add_option("--threads", a->threads, "CPU threads; 0 = all cores")->capture_default_str();
  command->callback([a, &program] { run_generate(*a, program); });
}

}  // namespace tessera::cli
