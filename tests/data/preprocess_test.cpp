#include "tessera/data/preprocess.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <map>

#include "raw_files.hpp"
#include "tessera/data/corpus_stats.hpp"
#include "tessera/data/dataset_record.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {
namespace {

using namespace testing;

using Ids = std::vector<std::int32_t>;

PreprocessOptions options_for(const ScratchFolder& folder, std::vector<std::string> input) {
  PreprocessOptions options;
  options.input = std::move(input);
  options.output_prefix = folder / "out";
  return options;
}

/// Bytes that the process has had in memory at most.
std::size_t most_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
}

/// Documents of a u16 dataset, taken from the raw bytes.
std::vector<Ids> raw_documents(const std::string& prefix) {
  const std::string index = slurp(prefix + ".idx");
  const std::string tokens = slurp(prefix + ".bin");
  const auto sequences = get<std::uint64_t>(index, 18);
  const auto entries = get<std::uint64_t>(index, 26);
  const std::size_t documents_at = 34 + 12 * sequences;
  std::vector<Ids> out;
  std::size_t at = 0;
  for (std::uint64_t d = 0; d + 1 < entries; ++d) {
    Ids ids;
    const auto end = get<std::int64_t>(index, documents_at + 8 * (d + 1));
    for (auto s = get<std::int64_t>(index, documents_at + 8 * d); s < end; ++s) {
      for (int i = 0; i < get<std::int32_t>(index, 34 + 4 * s); ++i, at += 2) {
        ids.push_back(get<std::uint16_t>(tokens, at));
      }
    }
    out.push_back(std::move(ids));
  }
  EXPECT_EQ(at, tokens.size());
  return out;
}

TEST(Preprocess, JsonLinesByHand) {
  const ScratchFolder folder;
  spill(folder / "in.jsonl",
        "\xEF\xBB\xBF{\"text\": \"ab\", \"id\": 3}\r\n"
        "\n"
        "{\"meta\": {\"text\": 5, \"list\": [{\"text\": \"no\"}]}, \"text\": \"\\u00e9\\n\"}\n"
        "{\"text\": \"\"}\n"
        "{\"text\": \"first\", \"text\": \"z\"}");
  PreprocessOptions options = options_for(folder, {folder / "in.jsonl"});
  options.append_eod = true;
  const PreprocessResult result = preprocess(options);
  EXPECT_EQ(result.prefixes, std::vector<std::string>{folder / "out_text_document"});
  EXPECT_EQ(raw_documents(folder / "out_text_document"),
            (std::vector<Ids>{{97, 98, 256}, {0xc3, 0xa9, 10, 256}, {}, {122, 256}}));
  EXPECT_EQ(result.documents, 4);
  EXPECT_EQ(result.tokens, 9);
  EXPECT_EQ(result.tokenizer, TokenizerRecord{});
  const auto record = read_dataset_record(folder / "out_text_document.idx");
  ASSERT_TRUE(record);
  EXPECT_EQ(record->tokenizer, TokenizerRecord{});
  EXPECT_TRUE(record->append_eod);
  EXPECT_EQ(result.bytes, static_cast<std::int64_t>(slurp(folder / "in.jsonl").size()));
  EXPECT_EQ(IndexedDataset(folder / "out_text_document").documents(), 4);
}

TEST(Preprocess, SeveralKeys) {
  const ScratchFolder folder;
  spill(folder / "in.jsonl", "{\"a\": \"1\", \"b\": \"22\"}\n{\"b\": \"4\", \"a\": \"333\"}\n");
  PreprocessOptions options = options_for(folder, {folder / "in.jsonl"});
  options.json_keys = {"a", "b"};
  preprocess(options);
  EXPECT_EQ(raw_documents(folder / "out_a_document"), (std::vector<Ids>{{49}, {51, 51, 51}}));
  EXPECT_EQ(raw_documents(folder / "out_b_document"), (std::vector<Ids>{{50, 50}, {52}}));
}

/// Packed files that unpack to far more than they are: one document may not take more memory than 64 MiB or
/// 200 times the file.
TEST(Preprocess, BombsAreRefusedBeforeTheyFillMemory) {
  const ScratchFolder folder;
  const auto make = [&](const std::string& program, const std::string& name) {
    const std::string line =
        "head -c 150000000 /dev/zero | tr '\\0' ' ' | " + program + " > '" + folder / name + "'";
    return std::system(line.c_str()) == 0;
  };
  ASSERT_TRUE(make("gzip", "bomb.jsonl.gz"));
  ASSERT_TRUE(make("gzip", "bomb.txt.gz"));
  const std::size_t before = most_memory();
  for (const char* name : {"bomb.jsonl.gz", "bomb.txt.gz"}) {
    mentions(message_of<DataError>([&] { preprocess(options_for(folder, {folder / name})); }),
             {name, "unpacks to more than", "unpack the file"});
  }
  if (std::system("command -v zstd > /dev/null") == 0) {
    ASSERT_TRUE(make("zstd -q -1", "bomb.jsonl.zst"));
    mentions(message_of<DataError>([&] { preprocess(options_for(folder, {folder / "bomb.jsonl.zst"})); }),
             {"bomb.jsonl.zst:1", "unpacks to more than"});
  }
#ifndef __SANITIZE_ADDRESS__  // it keeps what was freed
  EXPECT_LT(most_memory() - before, std::size_t{220} << 20);
#else
  (void)before;
#endif
}

TEST(Preprocess, FoldersOfPlainText) {
  const ScratchFolder folder;
  std::filesystem::create_directories(folder / "corpus/b");
  spill(folder / "corpus/c.txt", "\xffz");  // stray bytes are text to the byte tokenizer
  spill(folder / "corpus/b/x.py", "py");
  spill(folder / "corpus/a.jsonl", "{\"text\": \"j\"}\n");
  spill(folder / "corpus/.hidden", "no");
  spill(folder / "corpus/z.txt", "");
  preprocess(options_for(folder, {folder / "corpus"}));
  EXPECT_EQ(raw_documents(folder / "out_text_document"),
            (std::vector<Ids>{{106}, {112, 121}, {255, 122}, {}}));
}

TEST(Preprocess, WorkersDoNotChangeTheResult) {
  const ScratchFolder folder;
  std::string lines;
  for (int i = 0; i < 3000; ++i) {
    lines += "{\"text\": \"document " + std::to_string(i) +
             std::string(static_cast<std::size_t>(i % 97), 'x') + "\"}\n";
  }
  spill(folder / "in.jsonl", lines);
  std::map<int, std::pair<std::string, std::string>> bytes;
  for (const int workers : {1, 4}) {
    PreprocessOptions options = options_for(folder, {folder / "in.jsonl"});
    options.workers = workers;
    options.append_eod = true;
    options.overwrite = workers > 1;
    std::vector<std::int64_t> seen;
    options.progress = [&seen](const PreprocessProgress& p) {
      EXPECT_LE(p.bytes, p.total_bytes);
      seen.push_back(p.documents);
    };
    preprocess(options);
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
    ASSERT_GT(seen.size(), 3u);
    EXPECT_EQ(seen.back(), 3000);
    bytes[workers] = {slurp(folder / "out_text_document.idx"), slurp(folder / "out_text_document.bin")};
  }
  EXPECT_EQ(bytes[1], bytes[4]);
  EXPECT_EQ(raw_documents(folder / "out_text_document")[2][9], '2');
}

TEST(Preprocess, LinesLongerThanTheBuffer) {
  const ScratchFolder folder;
  const std::string longest(3'000'000, 'q');
  spill(folder / "in.jsonl", "{\"text\": \"a\"}\n{\"text\": \"" + longest + "\"}\n{\"text\": \"b\"}");
  preprocess(options_for(folder, {folder / "in.jsonl"}));
  const auto documents = raw_documents(folder / "out_text_document");
  ASSERT_EQ(documents.size(), 3u);
  EXPECT_EQ(documents[1], Ids(3'000'000, 'q'));
  EXPECT_EQ(documents[2], Ids{'b'});
}

TEST(Preprocess, BadLinesAreNamed) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> bad = {
      {"{\"text\": \"a\"", {"in.jsonl:2:", "not valid JSON"}},
      {"[1]", {"in.jsonl:2", "an array"}},
      {"7", {"in.jsonl:2", "a number"}},
      {"{\"text\": 7}", {"in.jsonl:2", "\"text\" holds a number"}},
      {"{\"text\": [\"a\"]}", {"in.jsonl:2", "holds an array"}},
      {"{\"text\": null}", {"in.jsonl:2", "holds null"}},
      {"{\"body\": \"a\", \"n\": 1}", {"in.jsonl:2", "no key \"text\"", "body, n", "--json-keys"}},
      {"{\"text\": \"\xff\"}", {"in.jsonl:2:", "UTF-8"}},
      {"{\"text\": \"\\ud800\"}", {"in.jsonl:2:", "not valid JSON"}},
      {"{\"text\": \"a\"} {}", {"in.jsonl:2:", "not valid JSON"}},
      {std::string(200000, '['), {"in.jsonl:2", "an array"}},
      {"{\"x\": " + std::string(200000, '['), {"in.jsonl:2:", "not valid JSON"}},
  };
  for (const auto& [line, says] : bad) {
    const ScratchFolder folder;
    spill(folder / "in.jsonl", "{\"text\": \"good\"}\n" + line + "\n");
    mentions(message_of<DataError>([&] { preprocess(options_for(folder, {folder / "in.jsonl"})); }), says);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1)
        << "something was left behind";
  }
}

TEST(Preprocess, SentencesAreSequences) {
  const ScratchFolder folder;
  spill(folder / "in.jsonl",
        "{\"text\": \"ab\\n\\n  c d \\r\\ne\"}\n{\"text\": \" \\n \"}\n{\"text\": \"f\"}\n");
  PreprocessOptions options = options_for(folder, {folder / "in.jsonl"});
  options.split_sentences = true;
  options.append_eod = true;
  options.workers = 2;
  const PreprocessResult result = preprocess(options);
  ASSERT_EQ(result.prefixes, std::vector<std::string>{folder / "out_text_sentence"});
  EXPECT_EQ(result.documents, 3);
  EXPECT_EQ(result.sentences, 4);
  EXPECT_EQ(result.long_documents, 1);
  const IndexedDataset data(result.prefixes[0]);
  EXPECT_EQ(data.documents(), 3);
  EXPECT_EQ(data.document_begins(0, 4), (std::vector<std::int64_t>{0, 3, 3, 4}));
  EXPECT_EQ(data.sequence(1), (Ids{'c', ' ', 'd'}));
  EXPECT_EQ(data.sequence(2), (Ids{'e', 256}));  // Megatron's: after the last sentence
  EXPECT_TRUE(read_dataset_record(result.prefixes[0])->split_sentences);
  options.overwrite = true;
  options.sentence_splitter = "commas";
  mentions(message_of<ConfigError>([&] { preprocess(options); }), {"commas", "lines or punkt"});
}

TEST(Preprocess, BadOptions) {
  const ScratchFolder folder;
  spill(folder / "in.jsonl", "\n");
  spill(folder / "in.txt", "a");
  const auto changed = [&](auto change) {
    PreprocessOptions options = options_for(folder, {folder / "in.jsonl"});
    change(options);
    return options;
  };
  using O = PreprocessOptions;
  mentions(message_of<DataError>([&] { preprocess(changed([](O&) {})); }), {"no document"});
  mentions(message_of<DataError>([&] { preprocess(changed([&](O& o) { o.input = {folder / "none"}; })); }),
           {"none", "No such file"});
  EXPECT_THROW(preprocess(changed([](O& o) { o.input.clear(); })), ConfigError);
  EXPECT_THROW(preprocess(changed([](O& o) { o.output_prefix.clear(); })), ConfigError);
  EXPECT_THROW(preprocess(changed([](O& o) { o.workers = 0; })), ConfigError);
  EXPECT_THROW(preprocess(changed([](O& o) { o.json_keys = {"a", "a"}; })), ConfigError);
  EXPECT_THROW(preprocess(changed([](O& o) { o.json_keys = {"../a"}; })), ConfigError);
  mentions(
      message_of<ConfigError>([&] { preprocess(changed([](O& o) { o.tokenizer.type = "wordpiece"; })); }),
      {"wordpiece", "bytes", "HuggingFaceTokenizer"});
  EXPECT_THROW(preprocess(changed([&](O& o) {
                 o.input = {folder / "in.txt"};
                 o.json_keys = {"a", "b"};
               })),
               ConfigError);
  std::filesystem::create_directory(folder / "empty");
  EXPECT_THROW(preprocess(changed([&](O& o) { o.input = {folder / "empty"}; })), DataError);
}

TEST(Preprocess, ReadsGzipAndZstandard) {
  const ScratchFolder folder;
  const auto shell = [&](const std::string& line) {
    return std::system(("cd " + folder.path() + " && " + line).c_str()) == 0;
  };
  spill(folder / "a.txt", "plain");
  spill(folder / "b.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
  ASSERT_TRUE(shell("gzip a.txt && gzip -c b.jsonl > B.JSONL.GZ && gzip -c b.jsonl >> B.JSONL.GZ"));
  const Ids one = {'o', 'n', 'e'}, two = {'t', 'w', 'o'};
  preprocess(options_for(folder, {folder / "a.txt.gz", folder / "B.JSONL.GZ"}));
  EXPECT_EQ(raw_documents(folder / "out_text_document"),
            (std::vector<Ids>{{'p', 'l', 'a', 'i', 'n'}, one, two, one, two}))
      << "a file of two gzip members is read to its end";
  const std::string packed = slurp(folder / "a.txt.gz");
  spill(folder / "cut.txt.gz", packed.substr(0, packed.size() - 9));
  PreprocessOptions options = options_for(folder, {folder / "cut.txt.gz"});
  options.overwrite = true;
  mentions(message_of<DataError>([&] { preprocess(options); }), {"cut.txt.gz", "cut off"});
  ASSERT_TRUE(shell("zstd -q b.jsonl")) << "the program zstd is not there: scripts/install_deps.sh --tests";
  const std::string frame = slurp(folder / "b.jsonl.zst");
  const std::string skipped("\x50\x2a\x4d\x18\x03\0\0\0abc", 11);
  options.input = {folder / "b.jsonl.zst"};
  const auto with = [&](const std::string& bytes) { spill(folder / "b.jsonl.zst", bytes); };
  with(skipped + frame + skipped + frame);
  preprocess(options);
  EXPECT_EQ(raw_documents(folder / "out_text_document"), (std::vector<Ids>{one, two, one, two}));
  const auto before = slurp(folder / "out_text_document.idx");
  for (std::size_t cut : {frame.size() - 6, frame.size() - 1, std::size_t{6}}) {
    with(frame.substr(0, cut));
    mentions(message_of<DataError>([&] { preprocess(options); }), {"b.jsonl.zst", "are cut off"});
  }
  std::string damaged = frame;
  damaged.back() = static_cast<char>(damaged.back() ^ 1);  // of the checksum
  with(damaged);
  mentions(message_of<DataError>([&] { preprocess(options); }), {"b.jsonl.zst", "is damaged", "checksum"});
  ASSERT_TRUE(shell("zstd -q --long=28 < b.jsonl > long.jsonl.zst"));
  options.input = {folder / "long.jsonl.zst"};
  mentions(message_of<DataError>([&] { preprocess(options); }), {"long.jsonl.zst", "window", "--long=31"});
  EXPECT_EQ(slurp(folder / "out_text_document.idx"), before) << "what was there is kept";
}

TEST(Preprocess, PatternsAreAsAShellMakesThem) {
  const ScratchFolder folder;
  for (const char* name : {"b2.jsonl", "b1.jsonl", "c.jsonl"})
    spill(folder / name, "{\"text\": \"" + std::string(name, 2) + "\"}\n");
  spill(folder / "a[1].jsonl", "{\"text\": \"a[\"}\n");  // a file of that very name comes before a pattern
  preprocess(options_for(folder, {folder / "c.jsonl", folder / "b?.jsonl", folder / "a[1].jsonl"}));
  EXPECT_EQ(raw_documents(folder / "out_text_document"),
            (std::vector<Ids>{{'c', '.'}, {'b', '1'}, {'b', '2'}, {'a', '['}}));
  PreprocessOptions options = options_for(folder, {folder / "d*.jsonl"});
  options.overwrite = true;
  mentions(message_of<DataError>([&] { preprocess(options); }), {"d*.jsonl", "nothing matches"});
}

/// A process that ends in the middle, as by a kill: no destructor runs.
void end_after(PreprocessOptions options, std::int64_t documents) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    options.progress = [documents](const PreprocessProgress& p) {
      if (p.documents >= documents) ::_exit(7);
    };
    preprocess(options);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(WEXITSTATUS(status), 7);
}

TEST(Preprocess, GoesOnAfterAKill) {
  const ScratchFolder folder;
  std::string lines;
  for (int i = 0; i < 4000; ++i)
    lines += "{\"text\": \"" + std::string(static_cast<std::size_t>(i % 89), 'a' + i % 26) + "\"}\n";
  spill(folder / "a.jsonl",
        lines.substr(0, lines.size() / 2 + lines.substr(lines.size() / 2).find('\n') + 1));
  spill(folder / "b.jsonl", lines.substr(slurp(folder / "a.jsonl").size()));
  ASSERT_EQ(
      std::system(("gzip -c '" + (folder / "b.jsonl") + "' > '" + (folder / "b.jsonl.gz") + "'").c_str()), 0);
  PreprocessOptions options = options_for(folder, {folder / "a.jsonl", folder / "b.jsonl.gz"});
  options.append_eod = true;
  options.workers = 2;
  preprocess(options);
  const std::string left = folder / "out_text_document.unfinished";
  EXPECT_FALSE(std::filesystem::exists(left));
  const auto all =
      std::pair{slurp(folder / "out_text_document.idx"), slurp(folder / "out_text_document.bin")};
  std::filesystem::remove(folder / "out_text_document.idx");
  std::filesystem::remove(folder / "out_text_document.bin");
  options.keep_every_s = 0;
  for (const std::int64_t documents : {600, 1800, 2600, 3400}) end_after(options, documents);
  EXPECT_FALSE(std::filesystem::exists(folder / "out_text_document.bin"));
  std::ofstream(left + "/0.bin", std::ios::app) << "what came after the last mark";
  PreprocessOptions again = options;
  std::int64_t first = 0;
  again.progress = [&first](const PreprocessProgress& p) { first = first > 0 ? first : p.documents; };
  const PreprocessResult result = preprocess(again);
  EXPECT_GE(result.documents_kept, 3400);
  EXPECT_GT(first, 3400) << "it did not begin anew";
  EXPECT_EQ(result.documents, 4000);
  EXPECT_EQ(slurp(folder / "out_text_document.idx"), all.first);
  EXPECT_EQ(slurp(folder / "out_text_document.bin"), all.second);
  EXPECT_FALSE(std::filesystem::exists(left));
}

/// A disk that is full is a limit on the file's size here; what fitted counts when there is room again.
TEST(Preprocess, GoesOnWhenThereIsRoomAgain) {
  const ScratchFolder folder;
  std::string lines;
  for (int i = 0; i < 3000; ++i) lines += "{\"text\": \"" + std::string(1000, 'a' + i % 26) + "\"}\n";
  spill(folder / "in.jsonl", lines);
  PreprocessOptions options = options_for(folder, {folder / "in.jsonl"});
  options.keep_every_s = 0;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{3'000'000, 3'000'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      preprocess(options);
    } catch (const IoError& error) {
      const std::string said = error.what();
      ::_exit(said.find("What was done is kept in") != std::string::npos ? 7 : 8);
    } catch (...) {
      ::_exit(9);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(WEXITSTATUS(status), 7);
  EXPECT_FALSE(std::filesystem::exists(folder / "out_text_document.bin"));
  const PreprocessResult result = preprocess(options);
  EXPECT_GT(result.documents_kept, 500);
  EXPECT_EQ(result.tokens, 3'000'000);
  EXPECT_EQ(IndexedDataset(folder / "out_text_document").document(2999), Ids(1000, 'a' + 2999 % 26));
}

TEST(Preprocess, BeginsAnewWhereWhatIsLeftDoesNotFit) {
  const ScratchFolder folder;
  const auto lines = [](char c) {
    std::string text;
    for (int i = 0; i < 1500; ++i) text += std::string("{\"text\": \"") + c + "\"}\n";
    return text;
  };
  PreprocessOptions options = options_for(folder, {folder / "in.jsonl"});
  options.keep_every_s = 0;
  options.overwrite = true;
  const std::string left = folder / "out_text_document.unfinished";
  const auto check = [&](char c, const char* says) {
    const PreprocessResult result = preprocess(options);
    EXPECT_EQ(result.documents_kept, 0);
    ASSERT_EQ(result.notes.size(), 1u);
    mentions(result.notes[0], {says, "begun anew"});
    EXPECT_EQ(raw_documents(folder / "out_text_document"), (std::vector<Ids>(1500, Ids{c})));
  };
  spill(folder / "in.jsonl", lines('a'));
  end_after(options, 600);
  spill(folder / "in.jsonl", lines('b') + "\n");
  check('b', "other input or options");
  for (const char* file : {"/0.bin", "/0.lengths", "/0.documents", "/progress.json"}) {
    end_after(options, 600);
    spill(left + file, "x");
    check('b', file);
  }
  // Who writes has it alone.
  const int lock = (std::filesystem::create_directory(left), ::open(left.c_str(), O_RDONLY));
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  mentions(message_of<ConfigError>([&] { preprocess(options); }), {"another process", left});
  ::close(lock);
}

TEST(Preprocess, BinaryFilesAreRefusedAndPassedOverInFolders) {
  const ScratchFolder folder;
  std::filesystem::create_directories(folder / "corpus");
  spill(folder / "corpus/a.txt", "text");
  spill(folder / "corpus/b.png", std::string("\x89PNG\0\0", 6));
  spill(folder / "noise", std::string(100, '\xfe'));
  spill(folder / "utf16.txt", std::string("\xff\xfe"
                                          "a\0",
                                          4));
  const PreprocessResult result = preprocess(options_for(folder, {folder / "corpus"}));
  EXPECT_EQ(raw_documents(folder / "out_text_document"), (std::vector<Ids>{{'t', 'e', 'x', 't'}}));
  ASSERT_EQ(result.notes.size(), 1u);
  mentions(result.notes[0], {"passed over", "b.png"});
  const auto refusal = [&](const std::string& path) {
    PreprocessOptions options = options_for(folder, {path});
    options.overwrite = true;
    return message_of<DataError>([&] { preprocess(options); });
  };
  mentions(refusal(folder / "corpus/b.png"), {"b.png", "binary", "unpack"});
  mentions(refusal(folder / "noise"), {"noise", "UTF-8", "iconv"});
  mentions(refusal(folder / "utf16.txt"), {"UTF-16", "iconv"});
  std::filesystem::remove(folder / "corpus/a.txt");
  mentions(refusal(folder / "corpus"), {"no files of text", "b.png"});
}

TEST(Preprocess, NamesInCapitalsByteOrderMarksAndJsonUnderOtherNames) {
  const ScratchFolder folder;
  spill(folder / "A.JSONL", "{\"text\": \"j\"}\n");
  spill(folder / "b.txt", "\xEF\xBB\xBFt");
  spill(folder / "c.data", "\n{\"k\": 1}");
  const PreprocessResult result =
      preprocess(options_for(folder, {folder / "A.JSONL", folder / "b.txt", folder / "c.data"}));
  EXPECT_EQ(raw_documents(folder / "out_text_document"),
            (std::vector<Ids>{{'j'}, {'t'}, {'\n', '{', '"', 'k', '"', ':', ' ', '1', '}'}}));
  ASSERT_EQ(result.notes.size(), 2u);
  mentions(result.notes[0], {"begins like JSON", "c.data", ".jsonl"});
  mentions(result.notes[1], {"mixed", "1 file of JSON lines", "2 of plain text"});
}

TEST(Preprocess, KeepsWhatIsThereAndRefusesNothing) {
  const ScratchFolder folder;
  spill(folder / "in.txt", "a");
  spill(folder / "empty.txt", "");
  spill(folder / "empty.jsonl", "{\"text\": \"\"}\n{\"text\": \"\"}\n");
  mentions(message_of<DataError>([&] { preprocess(options_for(folder, {folder / "empty.txt"})); }),
           {"empty.txt", "no text"});
  mentions(message_of<DataError>([&] { preprocess(options_for(folder, {folder / "empty.jsonl"})); }),
           {"empty.jsonl", "all its documents are empty"});
  EXPECT_FALSE(std::filesystem::exists(folder / "out_text_document.idx"));
  PreprocessOptions options = options_for(folder, {folder / "in.txt"});
  preprocess(options);
  spill(folder / "in.txt", "b");
  mentions(message_of<ConfigError>([&] { preprocess(options); }),
           {"out_text_document.idx", "there already", "--overwrite"});
  EXPECT_EQ(raw_documents(folder / "out_text_document"), (std::vector<Ids>{{'a'}}));
  options.overwrite = true;
  preprocess(options);
  EXPECT_EQ(raw_documents(folder / "out_text_document"), (std::vector<Ids>{{'b'}}));
}

TEST(CorpusBaselines, ComparedWithHandCounts) {
  const ScratchFolder folder;
  IndexedDatasetWriter writer(folder / "d", DType::u16);
  writer.add_document(Ids{0, 1, 0});
  writer.add_document(Ids{1});
  writer.add_document(Ids{0, 1, 2});
  writer.finish();
  // Training stream 0 1 0 1: counts 2, 2, 0 (+1 each, of 7); pairs 01 twice, 10 once; from 0: 2 + 3, from 1:
  // 1 + 3.
  const auto base = corpus_baselines(IndexedDataset(folder / "d"), {0, 2}, {2, 3}, 3);
  EXPECT_NEAR(base.unigram, -(std::log(3.0 / 7) + std::log(3.0 / 7) + std::log(1.0 / 7)) / 3, 1e-12);
  EXPECT_NEAR(base.bigram, -(std::log(3.0 / 5) + std::log(1.0 / 4)) / 2, 1e-12);
  EXPECT_EQ(base.train_tokens, 4);
  EXPECT_EQ(base.valid_tokens, 3);
  EXPECT_THROW(corpus_baselines(IndexedDataset(folder / "d"), {0, 2}, {2, 3}, 2), DataError);
  EXPECT_THROW(corpus_baselines(IndexedDataset(folder / "d"), {0, 2}, {3, 3}, 3), DataError);
}

}  // namespace
}  // namespace tessera
