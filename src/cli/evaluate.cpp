// `tessera evaluate`: Megatron-LM's zero-shot tasks and multiple choice, by probabilities that the model
// gives to texts.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/json_lines.hpp"
#include "cli/model_command.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/engine/detokenize.hpp"
#include "tessera/engine/score.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

enum class Task { perplexity, lambada, cloze, multiple_choice };

struct EvaluateArguments : ModelArguments {
  Task task = Task::perplexity;
  std::vector<std::string> files;
  std::string output;
  std::int64_t seq_length = 0, overlap = 0;
  bool strict = false, wikitext = false;
};

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  TESSERA_ENSURE(IoError, in.good() || in.eof(), "cannot read ", path);
  TESSERA_ENSURE(DataError, !text.str().empty(), path, " is empty");
  return text.str();
}

/// Objects of a file of JSON lines, each taken by `take`, which says what is wrong with one.
void each_object(const std::string& path, const std::function<std::string(const Json&)>& take) {
  std::istringstream in(read_text(path));
  each_json_line(path, in,
                 [&](const Json& line) { return line.is_object() ? take(line) : "a line is a JSON object"; });
}

/// Megatron's words, less one: single spaces between a text's first and last visible character.
std::int64_t words_after_first(const std::string& text) {
  constexpr const char* kWhite = " \t\n\r\f\v";
  const std::size_t first = text.find_first_not_of(kWhite);
  if (first == std::string::npos) return 0;
  const std::size_t last = text.find_last_not_of(kWhite);
  return std::count(text.begin() + static_cast<std::ptrdiff_t>(first),
                    text.begin() + static_cast<std::ptrdiff_t>(last), ' ');
}

/// A text whose end, [begin of `tail`, end), is what the model is asked for.
struct Question {
  std::string head, tail;
};

/// "the text before" and " lastword".
std::optional<Question> last_word(const std::string& text) {
  const std::size_t end = text.find_last_not_of(" \t\r\n");
  const std::size_t space = end == std::string::npos ? end : text.find_last_of(" \t\r\n", end);
  const std::size_t before = space == std::string::npos ? space : text.find_last_not_of(" \t\r\n", space);
  if (before == std::string::npos) return std::nullopt;
  return Question{text.substr(0, before + 1), " " + text.substr(space + 1, end - space)};
}

/// What the model is asked for.
class Asked {
 public:
  std::vector<TextToScore> texts;
  std::int64_t shortened = 0;  ///< texts that had more tokens than the model has positions

  /// Tokens of head and tail, of which those of the tail are scored; as many of the head as there is room
  /// for.
  void add(std::vector<std::int32_t> head, const std::vector<std::int32_t>& tail, std::int64_t positions,
           const std::string& place) {
    TESSERA_ENSURE(DataError, !tail.empty() && !head.empty(), place, ": a part of it has no tokens");
    const auto room = positions + 1 - static_cast<std::int64_t>(tail.size());
    TESSERA_ENSURE(DataError, room >= 1, place, ": what is asked for has ", tail.size(),
                   " tokens, and the model ", positions, " positions");
    if (static_cast<std::int64_t>(head.size()) > room) {
      head.erase(head.begin(), head.end() - room);
      ++shortened;
    }
    const auto first = static_cast<std::int64_t>(head.size());
    head.insert(head.end(), tail.begin(), tail.end());
    texts.push_back({std::move(head), first});
  }
};

/// Sum of all scores of a text.
double sum_of(const TextScores& scores) {
  double sum = 0;
  for (const float logprob : scores.logprobs) sum += logprob;
  return sum;
}

/// Of a text in windows of `length` targets, each of which begins `step` after the one before: every token
/// but the first is a target once, with at least length - step tokens before it from the second window on.
std::vector<TextToScore> windows_of(const std::vector<std::int32_t>& tokens, std::int64_t length,
                                    std::int64_t step) {
  std::vector<TextToScore> windows;
  const std::int64_t targets = static_cast<std::int64_t>(tokens.size()) - 1;
  std::int64_t done = 0;
  for (std::int64_t start = 0; done < targets; start += step) {
    const std::int64_t end = std::min(start + length, targets);
    if (end > done) windows.push_back({{tokens.begin() + start, tokens.begin() + end + 1}, done - start + 1});
    done = std::max(done, end);
  }
  return windows;
}

class Evaluation {
 public:
  Evaluation(const EvaluateArguments& a, const Program& program, std::shared_ptr<Communicator> world)
      : a_(a), world_(std::move(world)), first_(world_->rank() == 0), loaded_(load(a, program, world_)) {
    if (first_) tokenizer_ = open_tokenizer(loaded_, a, program);
  }

  void run() {
    if (first_) ask();
    if (world_->size() > 1) share();
    const std::vector<TextScores> scores =
        score_texts(*loaded_.engine, asked_.texts, {.likeliest = by_last_word()});
    if (!first_) return;
    if (asked_.shortened > 0)
      std::cerr << "note: of " << asked_.shortened << " texts the beginning was left out: the model has "
                << positions() << " positions" << std::endl;
    tell(result(scores));
  }

 private:
  bool by_last_word() const { return a_.task == Task::lambada || a_.task == Task::cloze; }
  std::int64_t positions() const { return loaded_.engine->model().max_positions(); }

  void ask() {
    for (const std::string& file : a_.files) {
      if (a_.task == Task::perplexity) {
        ask_text(file);
      } else if (a_.task == Task::multiple_choice) {
        ask_choices(file);
      } else {
        ask_last_words(file);
      }
    }
    TESSERA_ENSURE(DataError, !asked_.texts.empty(), "the files hold nothing to evaluate");
  }

  void ask_text(const std::string& file) {
    const std::string text = read_text(file);
    const std::vector<std::int32_t> tokens =
        tokenizer_->encode(a_.wikitext ? detokenize_wikitext(text) : text);
    TESSERA_ENSURE(DataError, tokens.size() >= 2, file, " has ", tokens.size(),
                   " tokens; a perplexity needs two");
    const std::int64_t length = a_.seq_length > 0 ? a_.seq_length : positions();
    TESSERA_ENSURE(ConfigError, length <= positions(), "--seq-length ", length, ": the model has ",
                   positions(), " positions");
    const std::int64_t step = a_.overlap > 0 ? a_.overlap : length;
    TESSERA_ENSURE(ConfigError, step <= length, "--overlapping-eval ", step, " is above the ", length,
                   " tokens of a window");
    for (TextToScore& window : windows_of(tokens, length, step)) asked_.texts.push_back(std::move(window));
    words_ += words_after_first(text);
    targets_ += static_cast<std::int64_t>(tokens.size()) - 1;
  }

  void ask_last_words(const std::string& file) {
    std::vector<Question> questions;
    std::vector<std::string> heads, tails;
    each_object(file, [&](const Json& line) -> std::string {
      if (!line.contains("text") || !line["text"].is_string()) return R"(a line is {"text": "..."})";
      const auto question = last_word(line["text"].get<std::string>());
      if (!question) return "its text has fewer than two words";
      heads.push_back(question->head);
      tails.push_back(question->tail);
      return "";
    });
    auto tokens_of_heads = tokenizer_->encode_batch(heads);
    const bool words = a_.task == Task::cloze || a_.strict;
    if (words) {
      const auto tokens_of_tails = tokenizer_->encode_batch(tails);
      for (std::size_t i = 0; i < heads.size(); ++i)
        asked_.add(std::move(tokens_of_heads[i]), tokens_of_tails[i], positions(), file);
      return;
    }
    for (std::size_t i = 0; i < heads.size(); ++i) heads[i] += tails[i];
    for (std::vector<std::int32_t>& tokens : tokenizer_->encode_batch(heads)) {
      TESSERA_ENSURE(DataError, !tokens.empty(), file, ": a text has no tokens");
      const std::vector<std::int32_t> last{tokens.back()};
      tokens.pop_back();
      asked_.add(std::move(tokens), last, positions(), file);
    }
  }

  void ask_choices(const std::string& file) {
    std::vector<std::string> contexts, wholes;
    each_object(file, [&](const Json& line) -> std::string {
      const char* form = R"(a line is {"context": "...", "choices": ["...", "..."], "answer": 0})";
      const bool fits = line.contains("context") && line["context"].is_string() && line.contains("choices") &&
                        line["choices"].is_array() && line["choices"].size() >= 2 &&
                        std::ranges::all_of(line["choices"], [](const Json& c) { return c.is_string(); }) &&
                        line.contains("answer") && line["answer"].is_number_integer();
      if (!fits) return form;
      const auto answer = line["answer"].get<std::int64_t>();
      const auto count = static_cast<std::int64_t>(line["choices"].size());
      if (answer < 0 || answer >= count)
        return detail::concat("answer ", answer, " of ", count, " choices, from 0");
      Choices choices{.first = contexts.size() + choices_before_, .answer = answer};
      for (const Json& choice : line["choices"]) {
        contexts.push_back(line["context"].get<std::string>());
        wholes.push_back(contexts.back() + choice.get<std::string>());
        choices.bytes.push_back(static_cast<std::int64_t>(choice.get<std::string>().size()));
        if (contexts.back().empty() || choices.bytes.back() == 0) return "context or a choice is empty";
      }
      choices_.push_back(std::move(choices));
      return "";
    });
    choices_before_ += contexts.size();
    const auto heads = tokenizer_->encode_batch(contexts);
    const auto all = tokenizer_->encode_batch(wholes);
    for (std::size_t i = 0; i < all.size(); ++i) {
      // What the tokens of the context do not hold; where the two grow together, what comes behind as many.
      const auto cut = static_cast<std::ptrdiff_t>(std::min(heads[i].size(), all[i].size() - 1));
      asked_.add({all[i].begin(), all[i].begin() + cut}, {all[i].begin() + cut, all[i].end()}, positions(),
                 file);
    }
  }

  void share() {
    Json sent = Json::array();
    for (const TextToScore& text : asked_.texts) sent.push_back({text.first, text.tokens});
    const Json told = Json::parse(broadcast_bytes(*world_, first_ ? sent.dump() : ""));
    asked_.texts.clear();
    for (const Json& text : told)
      asked_.texts.push_back({text[1].get<std::vector<std::int32_t>>(), text[0].get<std::int64_t>()});
  }

  Json result(const std::vector<TextScores>& scores) const {
    if (a_.task == Task::perplexity) return perplexity(scores);
    if (a_.task == Task::multiple_choice) return accuracy_of_choices(scores);
    const auto right = std::ranges::count_if(scores, [](const TextScores& each) { return each.likeliest; });
    return {{"accuracy", static_cast<double>(right) / static_cast<double>(scores.size())},
            {"correct", right},
            {"examples", scores.size()}};
  }

  /// As Megatron-LM's tasks: the exponent is 20 at most, so that a model that knows nothing has a number.
  Json perplexity(const std::vector<TextScores>& scores) const {
    double sum = 0;
    for (const TextScores& each : scores) sum -= sum_of(each);
    const double loss = sum / static_cast<double>(targets_);
    Json out{{"loss", loss}, {"perplexity", std::exp(std::min(20.0, loss))}};
    if (words_ > 0) {
      out["adjusted_perplexity"] = std::exp(std::min(20.0, sum / static_cast<double>(words_)));
      out["tokens_per_word"] = static_cast<double>(targets_) / static_cast<double>(words_);
    }
    out["tokens"] = targets_ + static_cast<std::int64_t>(a_.files.size());
    out["words"] = words_ + static_cast<std::int64_t>(a_.files.size());
    return out;
  }

  Json accuracy_of_choices(const std::vector<TextScores>& scores) const {
    std::int64_t right = 0, right_by_length = 0;
    for (const Choices& question : choices_) {
      std::vector<double> sums, means;
      for (std::size_t i = 0; i < question.bytes.size(); ++i) {
        sums.push_back(sum_of(scores[question.first + i]));
        means.push_back(sums.back() / static_cast<double>(question.bytes[i]));
      }
      right += std::ranges::max_element(sums) - sums.begin() == question.answer;
      right_by_length += std::ranges::max_element(means) - means.begin() == question.answer;
    }
    const auto count = static_cast<double>(choices_.size());
    return {{"accuracy", static_cast<double>(right) / count},
            {"accuracy_by_length", static_cast<double>(right_by_length) / count},
            {"examples", choices_.size()}};
  }

  void tell(Json result) const {
    for (const auto& [name, value] : result.items())
      std::cout << name << "  " << (value.is_number_float() ? number(value.get<double>()) : value.dump())
                << "\n";
    std::cout << std::flush;
    if (a_.output.empty()) return;
    std::ofstream file(a_.output, std::ios::trunc);
    file << result.dump(2) << "\n";
    file.flush();
    TESSERA_ENSURE(IoError, file, "cannot write ", a_.output, ", the file of --output");
  }
  static std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value);
    return text;
  }

  /// Texts of one question, the length of each choice, and the right one.
  struct Choices {
    std::size_t first = 0;
    std::int64_t answer = 0;
    std::vector<std::int64_t> bytes = {};
  };

  const EvaluateArguments& a_;
  std::shared_ptr<Communicator> world_;
  bool first_;
  LoadedModel loaded_;
  std::unique_ptr<Tokenizer> tokenizer_;
  Asked asked_;
  std::int64_t words_ = 0, targets_ = 0;
  std::vector<Choices> choices_;
  std::size_t choices_before_ = 0;
};

}  // namespace

void add_evaluate(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("evaluate", "Measure a trained model on texts and questions");
  auto a = std::make_shared<EvaluateArguments>();
  add_model(*command, *a);
  const std::map<std::string, Task> tasks{{"perplexity", Task::perplexity},
                                          {"lambada", Task::lambada},
                                          {"cloze", Task::cloze},
                                          {"multiple-choice", Task::multiple_choice}};
  command
      ->add_option_function<std::string>(
          "--task", [a, tasks](const std::string& name) { a->task = tasks.at(name); },
          "perplexity of whole text files; lambada, cloze or multiple-choice of JSON lines")
      ->required()
      ->check(CLI::IsMember(tasks));
  command->add_option("--files", a->files, "what is read")->required();
  command->add_option("--output", a->output, "file for the results as JSON");
  command->add_option("--seq-length", a->seq_length,
                      "perplexity: tokens of a window; by default as many as the model has positions");
  command->add_option("--overlapping-eval", a->overlap,
                      "perplexity: from one window's begin to the next; by default a whole window");
  command->add_flag("--detokenize-wikitext", a->wikitext,
                    "perplexity: the model reads WikiText's tokenized text as people write it; words are "
                    "still counted in the files");
  command->add_flag("--strict-lambada", a->strict,
                    "lambada: all tokens of the last word, not the last token");
  command->callback([a, &program] {
    TESSERA_ENSURE(ConfigError, a->seq_length >= 0 && a->overlap >= 0,
                   "--seq-length and --overlapping-eval are numbers of tokens");
    TESSERA_ENSURE(ConfigError,
                   a->task == Task::perplexity || (a->seq_length == 0 && a->overlap == 0 && !a->wikitext),
                   "--seq-length, --overlapping-eval and --detokenize-wikitext are for --task perplexity");
    TESSERA_ENSURE(ConfigError, a->task == Task::lambada || !a->strict,
                   "--strict-lambada is for --task lambada");
    on_layout(*a, program,
              [&](const std::shared_ptr<Communicator>& world) { Evaluation(*a, program, world).run(); });
  });
}

}  // namespace tessera::cli
