#include "tessera/data/tokenizer.hpp"

#include <cstdlib>

#include "data/documents.hpp"
#include "data/tokenizer_options.hpp"
#include "raw_files.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/preprocess.hpp"

namespace tessera {
namespace {

using namespace testing;

using Ids = std::vector<std::int32_t>;

/// The interpreter to test with: $PYTHON if set, else python3.
std::string python() {
  const char* given = std::getenv("PYTHON");
  return given != nullptr && *given != '\0' ? given : "python3";
}

bool has_tokenizers() { return std::system((python() + " -c 'import tokenizers' 2>/dev/null").c_str()) == 0; }

TEST(ByteTokenizer, RoundTrip) {
  auto tokenizer = make_tokenizer({});
  const std::string text("a\0\xff\n", 4);
  const Ids ids = tokenizer->encode(text);
  EXPECT_EQ(ids, (Ids{97, 0, 255, 10}));
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_EQ(tokenizer->decode(Ids{97, 256}), "a");
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->end_of_document(), 256);
  EXPECT_THROW(tokenizer->decode(Ids{257}), DataError);
  EXPECT_THROW(tokenizer->decode(Ids{-1}), DataError);
}

TEST(Utf8, FirstInvalidByte) {
  EXPECT_EQ(first_invalid_utf8("plain \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"), -1);
  EXPECT_EQ(first_invalid_utf8("ab\xff"), 2);
  EXPECT_EQ(first_invalid_utf8("\xc0\xaf"), 0);          // overlong
  EXPECT_EQ(first_invalid_utf8("\xe0\x9f\xbf"), 0);      // overlong
  EXPECT_EQ(first_invalid_utf8("a\xed\xa0\x80"), 1);     // surrogate
  EXPECT_EQ(first_invalid_utf8("\xf4\x90\x80\x80"), 0);  // above U+10FFFF
  EXPECT_EQ(first_invalid_utf8("abc\xe2\x82"), 3);       // cut off
}

TEST(TokenizerOptions, TheTypeFollowsFromTheFiles) {
  const ScratchFolder folder;
  for (const char* name : {"tokenizer.json", "vocab.json", "merges.txt"}) spill(folder / name, "{}");
  const std::string model = folder / "tokenizer.json", vocab = folder / "vocab.json",
                    merges = folder / "merges.txt";
  EXPECT_EQ(settle({}).type, "bytes");
  EXPECT_EQ(settle({.model = model}).type, "HuggingFaceTokenizer");
  EXPECT_EQ(settle({.model = folder.path()}).model, model);
  EXPECT_EQ(settle({.vocab_file = vocab, .merge_file = merges}).type, "GPT2BPETokenizer");
  std::filesystem::remove(model);
  EXPECT_EQ(settle({.model = folder.path()}).vocab_file, vocab) << "GPT-2's own pair of files in a folder";
  const auto refusal = [](const TokenizerOptions& options) {
    return message_of<ConfigError>([&] { settle(options); });
  };
  mentions(refusal({.type = "bytes", .model = vocab}), {"bytes needs no file", vocab, "--tokenizer-type"});
  mentions(refusal({.model = vocab, .vocab_file = vocab}), {"one tokenizer only"});
  mentions(refusal({.vocab_file = vocab}), {"--vocab-file and --merge-file"});
  mentions(refusal({.model = "llama.model"}), {"SentencePiece", "tokenizer.json"});
  mentions(refusal({.end_of_document = "<eos>"}), {"--eod-token", "256"});
}

TEST(TokenizerOptions, VocabTxtIsWordPiece) {
  const ScratchFolder folder;
  const std::string vocab = folder / "vocab.txt";
  spill(vocab, "[PAD]\r\n[CLS]\nab\n##c\n##d\n[MASK]\n[SEP]\nz");
  for (const TokenizerOptions& options :
       {TokenizerOptions{.vocab_file = vocab}, TokenizerOptions{.model = vocab},
        TokenizerOptions{.model = folder.path()}}) {
    EXPECT_EQ(settle(options).type, "BertWordPieceLowerCase");
    EXPECT_EQ(settle(options).vocab_file, vocab);
  }
  const TokenizerRecord record = describe_tokenizer({.model = vocab});
  EXPECT_EQ(record.vocab_size, 8);
  EXPECT_EQ(record.end_of_document, 6);
  EXPECT_EQ(settle(options_of(record)).vocab_file, vocab);
  const SpecialTokens special = special_tokens(options_of(record));
  EXPECT_EQ(special, (SpecialTokens{.cls = 1, .sep = 6, .mask = 5, .pad = 0, .continuations = {3, 4}}));
  // What the files beside it say counts.
  spill(folder / "tokenizer_config.json", R"({"do_lower_case": false, "mask_token": {"content": "z"}})");
  EXPECT_EQ(settle({.model = vocab}).type, "BertWordPieceCase");
  EXPECT_EQ(special_tokens({.model = vocab}).mask, 7);
  EXPECT_FALSE(same_ids(describe_tokenizer({.model = vocab}), record)) << "small letters only, and all";
  EXPECT_EQ(special_tokens({}), SpecialTokens{});  // bytes
  const auto refusal = [](const TokenizerOptions& options) {
    return message_of<ConfigError>([&] { settle(options); });
  };
  mentions(refusal({.type = "BertWordPieceCase"}), {"BertWordPieceCase", "--vocab-file", "vocab.txt"});
  mentions(refusal({.type = "BertWordPieceCase", .vocab_file = vocab, .merge_file = vocab}),
           {"whole tokenizer"});
}

TEST(DatasetRecord, KeepsSpecialTokens) {
  const ScratchFolder folder;
  write_counting(folder / "d", {7, 5});
  DatasetRecord record{.tokenizer = {.type = "BertWordPieceCase",
                                     .file = "/v/vocab.txt",
                                     .hash = "1",
                                     .vocab_size = 60,
                                     .end_of_document = 6},
                       .split_sentences = true,
                       .special = SpecialTokens{.cls = 1,
                                                .sep = 6,
                                                .mask = -1,
                                                .pad = 0,
                                                .bos = 7,
                                                .eos = 8,
                                                .sentinels = {51, 50},
                                                .continuations = {3, 4, 5, 9, 58, 59}}};
  write_dataset_record(folder / "d", record);
  const auto read = read_dataset_record(folder / "d").value();
  EXPECT_EQ(read.special, record.special);
  EXPECT_TRUE(read.split_sentences);
  EXPECT_EQ(read.tokenizer, record.tokenizer);
  std::string text = slurp(dataset_record_path(folder / "d"));
  const auto damaged = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    other.replace(other.find(from), from.size(), to);
    spill(dataset_record_path(folder / "d"), other);
    return message_of<DataError>([&] { read_dataset_record(folder / "d"); });
  };
  mentions(damaged("[58,2]", "[58,3]"), {"3 tokens from 58", "60"});
  mentions(damaged("[9,1]", "[1,1]"), {"do not rise"});
  mentions(damaged("[51,50]", "[51,60]"), {"token 60 of 60"});
  mentions(damaged("\"cls\":1", "\"cls\":60"), {"token 60 of 60"});
}

TEST(PythonTokenizer, MissingInterpreterAndOptions) {
  const ScratchFolder folder;
  const std::string model = folder / "1";
  spill(model, "{}");
  mentions(message_of<ConfigError>([&] {
             make_tokenizer({.type = "HuggingFaceTokenizer", .model = model, .python = "no-such-python"});
           }),
           {"no-such-python", "No such file", "pip install"});
  mentions(message_of<ConfigError>([] { make_tokenizer({.type = "HuggingFaceTokenizer"}); }),
           {"--tokenizer-model"});
  mentions(message_of<ConfigError>([] { make_tokenizer({.type = "GPT2BPETokenizer"}); }), {"--vocab-file"});
  // A program that ends at once stands for a Python that lacks the worker.
  mentions(message_of<ConfigError>([&] { make_tokenizer({.model = model, .python = "false"}); }),
           {"exit code 1", "pip install"});
  mentions(message_of<ConfigError>([&] {
             make_tokenizer({.type = "HuggingFaceTokenizer",
                             .model = model,
                             .python = "sleep",
                             .worker_script = "5",
                             .timeout_s = 0.05});
           }),
           {"sleep", "pip install"});
}

class WithPython : public ::testing::Test {
 protected:
  ScratchFolder folder_;
  TokenizerOptions options_{.type = "HuggingFaceTokenizer",
                            .model = folder_ / "tokenizer.json",
                            .python = python(),
                            .worker_script = "python/tessera/tokenize_worker.py"};

  void SetUp() override {
    if (!std::filesystem::exists(options_.worker_script)) GTEST_SKIP() << "run from the repository's root";
    if (!has_tokenizers()) {
      GTEST_SKIP() << "`" << python() << "` has no package tokenizers; set PYTHON to one that has";
    }
    // Whole words; id 9 is the highest, 5 to 8 are unused.
    spill(folder_ / "tokenizer.json", R"({"version": "1.0", "truncation": null, "padding": null,
      "added_tokens": [{"id": 4, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
                        "normalized": false, "special": true}],
      "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
      "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2, "é": 3, "<|endoftext|>": 4,
                                               "last": 9}, "unk_token": "[UNK]"}})");
  }
};

TEST_F(WithPython, EncodesAndDecodes) {
  auto tokenizer = make_tokenizer(options_);
  EXPECT_EQ(tokenizer->vocab_size(), 10);
  EXPECT_EQ(tokenizer->end_of_document(), 4);
  EXPECT_EQ(tokenizer->encode("hello world  \xc3\xa9 what"), (Ids{1, 2, 3, 0}));
  const std::vector<std::string> texts = {"", "last", "world hello"};
  EXPECT_EQ(tokenizer->encode_batch(texts), (std::vector<Ids>{{}, {9}, {2, 1}}));
  EXPECT_EQ(tokenizer->decode(Ids{1, 4, 2}), "hello world");
  EXPECT_THROW(tokenizer->decode(Ids{10}), DataError);
  EXPECT_THROW(tokenizer->encode("\xff"), DataError);
  EXPECT_EQ(tokenizer->encode("hello"), Ids{1}) << "a refusal must not end the worker";
}

TEST_F(WithPython, EndOfDocumentFromTheFilesBeside) {
  spill(folder_ / "tokenizer_config.json", R"({"eos_token": {"content": "world"}})");
  options_.model = folder_.path();
  EXPECT_EQ(make_tokenizer(options_)->end_of_document(), 2);
  options_.end_of_document = "last";
  EXPECT_EQ(make_tokenizer(options_)->end_of_document(), 9);
  options_.end_of_document = "absent";
  mentions(message_of<DataError>([&] { make_tokenizer(options_); }), {"absent"});
}

TEST_F(WithPython, DamagedModelFiles) {
  options_.model = folder_ / "none.json";
  mentions(message_of<DataError>([&] { make_tokenizer(options_); }), {"none.json", "no such file"});
  spill(folder_ / "none.json", "{\"version\": ");
  mentions(message_of<DataError>([&] { make_tokenizer(options_); }), {"none.json", "cannot be read"});
}

TEST_F(WithPython, PreprocessWithTwoProcesses) {
  std::string lines;
  for (int i = 0; i < 1200; ++i)
    lines += i % 3 == 0 ? "{\"text\": \"hello\"}\n" : "{\"text\": \"last world\"}\n";
  spill(folder_ / "in.jsonl", lines);
  std::vector<std::string> bytes;
  for (const int workers : {1, 2}) {
    PreprocessOptions options;
    options.input = {folder_ / "in.jsonl"};
    options.output_prefix = folder_ / "out";
    options.append_eod = true;
    options.workers = workers;
    options.overwrite = workers > 1;
    options.tokenizer = options_;
    EXPECT_EQ(preprocess(options).tokens, 400 * 2 + 800 * 3);
    bytes.push_back(slurp(folder_ / "out_text_document.bin"));
    const auto record = read_dataset_record(folder_ / "out_text_document");
    ASSERT_TRUE(record);
    EXPECT_EQ(record->tokenizer, describe_tokenizer(options_));
    EXPECT_EQ(record->tokenizer.vocab_size, 10);
  }
  EXPECT_EQ(bytes[0], bytes[1]);
  EXPECT_EQ(get<std::uint64_t>(bytes[0], 0), 0x0002'0009'0004'0001u);
  spill(folder_ / "bad.txt", "ab\xff");
  PreprocessOptions options;
  options.input = {folder_ / "bad.txt"};
  options.output_prefix = folder_ / "bad";
  options.tokenizer = options_;
  mentions(message_of<DataError>([&] { preprocess(options); }), {"bad.txt", "byte 2", "UTF-8"});
}

}  // namespace
}  // namespace tessera
