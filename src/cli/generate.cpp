#include "tessera/engine/generate.hpp"

#include <iostream>
#include <memory>

#include "cli/commands.hpp"
#include "cli/run_path.hpp"
#include "tessera/data/tokenizer.hpp"

namespace tessera::cli {
namespace {

struct GenerateArguments {
  std::string model, prompt;
  std::int64_t samples = 1, threads = 0;
  SamplingOptions sampling;
};

std::unique_ptr<Tokenizer> tokenizer_of(const Config& config, const Program& program) {
  TokenizerOptions options;
  if (config.data.tokenizer != "bytes") {
    options.type = "HuggingFaceTokenizer";
    options.model = config.data.tokenizer;
    options.python = program.environment.python.value_or("python3");
  }
  return make_tokenizer(options);
}

void run_generate(const GenerateArguments& a, const Program& program) {
  check(a.sampling);
  const LoadedModel loaded = load_model(a.model, a.threads);
  const auto tokenizer = tokenizer_of(loaded.config, program);
  Model& model = loaded.engine->model();
  TESSERA_ENSURE(ConfigError, tokenizer->vocab_size() <= model.vocab_size(), "the tokenizer ",
                 loaded.config.data.tokenizer, " has ", tokenizer->vocab_size(), " tokens, the model ",
                 model.vocab_size(),
                 ": they do not belong together. A converted folder needs its tokenizer.json beside it");
  const std::vector<std::int32_t> prompt = tokenizer->encode(a.prompt);
  TESSERA_ENSURE(ConfigError, !prompt.empty(),
                 "--prompt is empty: generation needs at least one token to begin with");
  for (std::int64_t i = 0; i < a.samples; ++i) {
    SamplingOptions sampling = a.sampling;
    sampling.seed += static_cast<std::uint64_t>(i);
    sampling.stop_token = tokenizer->end_of_document();
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
