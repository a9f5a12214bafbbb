#include "tessera/data/preprocess.hpp"

#include <unistd.h>

#include <algorithm>
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

/// "--a-b,--a_b": Megatron's tools take both.
std::string both_spellings(const std::string& name) {
  std::string other = name;
  std::replace(other.begin() + 2, other.end(), '-', '_');
  return other == name ? name : name + "," + other;
}

void run_preprocess(PreprocessOptions options, const Program& program) {
  options.tokenizer.python = program.environment.python.value_or("python3");
  const bool terminal = isatty(STDERR_FILENO) != 0;
  if (terminal) options.progress = show_progress;
  const PreprocessResult result = preprocess(options);
  if (terminal) std::cerr << "\n";
  for (const std::string& note : result.notes) std::cerr << "note: " << note << "\n";
  if (result.documents_kept > 0)
    std::cerr << "went on after the " << result.documents_kept << " documents of an earlier call\n";
  std::cout << result.documents << " documents, ";
  if (result.sentences > 0) std::cout << result.sentences << " sentences, ";
  std::cout << result.tokens << " tokens (" << result.dtype << ", vocabulary " << result.tokenizer.vocab_size
            << ") in";
  for (const std::string& prefix : result.prefixes) std::cout << " " << prefix << ".{idx,bin}";
  std::cout << std::endl;
}

}  // namespace

void add_preprocess(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("preprocess", "Tokenize text into an indexed dataset (.idx and .bin)");
  auto o = std::make_shared<PreprocessOptions>();
  const auto option = [&](const std::string& name, auto& value, const char* meaning) {
    return command->add_option(both_spellings(name), value, meaning);
  };
  const auto flag = [&](const std::string& name, bool& value, const char* meaning) {
    command->add_flag(both_spellings(name), value, meaning);
  };
  TokenizerOptions& tokenizer = o->tokenizer;
  option("--input", o->input,
         "JSON lines, plain text (both also packed: .gz, .zst) or Parquet; files, patterns in quotes, or "
         "folders")
      ->required();
  option("--output-prefix", o->output_prefix, "writes PREFIX_KEY_document.idx, .bin and .tessera.json")
      ->required();
  option("--json-keys", o->json_keys, "keys of the JSON objects, or columns, to take text from")
      ->capture_default_str();
  flag("--append-eod", o->append_eod, "end every document with an end-of-document token");
  flag("--split-sentences", o->split_sentences,
       "for BERT: each sentence a sequence of its own; writes PREFIX_KEY_sentence instead");
  option("--sentence-splitter", o->sentence_splitter,
         "lines: one sentence on each line of a text; punkt: by the Python package nltk")
      ->capture_default_str();
  option("--lang", o->language, "punkt's language")->capture_default_str();
  flag("--overwrite", o->overwrite, "replace a dataset that is there");
  option("--workers", o->workers, "tokenizers at work at once")->capture_default_str();
  option("--tokenizer-type", tokenizer.type,
         "bytes, HuggingFaceTokenizer, GPT2BPETokenizer, BertWordPieceLowerCase or BertWordPieceCase; else "
         "what the "
         "files below imply, bytes without any");
  option("--tokenizer-model", tokenizer.model, "HuggingFaceTokenizer: tokenizer.json or its folder");
  option("--vocab-file", tokenizer.vocab_file, "GPT2BPETokenizer: vocab.json; BertWordPiece...: vocab.txt");
  option("--merge-file", tokenizer.merge_file, "GPT2BPETokenizer: merges.txt");
  option("--eod-token", tokenizer.end_of_document,
         "the token that ends a document; else the tokenizer's own end of text");
  command->callback([o, &program] { run_preprocess(*o, program); });
}

}  // namespace tessera::cli
