#include "tessera/data/preprocess.hpp"

#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <memory>

#include "cli/commands.hpp"

namespace tessera::cli {
namespace {

void show_progress(const PreprocessProgress& p) {
  std::fprintf(stderr, "\r%3d %%  %lld documents, %lld tokens",
               static_cast<int>(p.total_bytes > 0 ? 100 * p.bytes / p.total_bytes : 100),
               static_cast<long long>(p.documents), static_cast<long long>(p.tokens));
}

void run_preprocess(PreprocessOptions options, const Program& program) {
  options.tokenizer.python = program.environment.python.value_or("python3");
  const bool terminal = isatty(STDERR_FILENO) != 0;
  if (terminal) options.progress = show_progress;
  const PreprocessResult result = preprocess(options);
  if (terminal) std::cerr << "\n";
  std::cout << result.documents << " documents, " << result.tokens << " tokens (" << result.dtype
            << ", vocabulary " << result.vocab_size << ") in";
  for (const std::string& prefix : result.prefixes) std::cout << " " << prefix << ".{idx,bin}";
  std::cout << std::endl;
}

}  // namespace

void add_preprocess(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("preprocess", "Tokenize text into an indexed dataset (.idx and .bin)");
  auto o = std::make_shared<PreprocessOptions>();
  command->add_option("--input", o->input, "JSONL or plain-text files, or folders of them")->required();
  command->add_option("--output-prefix", o->output_prefix, "writes PREFIX_KEY_document.idx and .bin")
      ->required();
  command->add_option("--json-keys", o->json_keys, "keys of the JSON objects to take text from")
      ->capture_default_str();
  command->add_flag("--append-eod", o->append_eod, "end every document with an end-of-document token");
  command->add_option("--workers", o->workers, "tokenizers at work at once")->capture_default_str();
  command
      ->add_option("--tokenizer-type", o->tokenizer.type, "bytes, HuggingFaceTokenizer or GPT2BPETokenizer")
      ->capture_default_str();
  command->add_option("--tokenizer-model", o->tokenizer.model,
                      "HuggingFaceTokenizer: tokenizer.json or its folder");
  command->add_option("--vocab-file", o->tokenizer.vocab_file, "GPT2BPETokenizer: vocab.json");
  command->add_option("--merge-file", o->tokenizer.merge_file, "GPT2BPETokenizer: merges.txt");
  command->callback([o, &program] { run_preprocess(*o, program); });
}

}  // namespace tessera::cli
