#include "tessera/engine/generate.hpp"

#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/json_lines.hpp"
#include "cli/model_command.hpp"
#include "cli/text_ends.hpp"
#include "tessera/comm/bytes.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateArguments : ModelArguments {
  std::string prompt, input, output;
  std::vector<std::string> stop;
  std::int64_t samples = 1;
  GenerationOptions sampling;
};

/// Objects of a file of JSON lines, each with a "prompt".
std::vector<Json> read_prompts(const std::string& path) {
  std::ifstream in(path);
  TESSERA_ENSURE(IoError, in, "cannot read ", path, ", the file of --input");
  std::vector<Json> lines;
  each_json_line(path, in, [&](Json line) -> std::string {
    const bool fits = line.is_object() && line.contains("prompt") && line["prompt"].is_string() &&
                      !line["prompt"].get<std::string>().empty();
    if (!fits) return R"(a line is an object with a prompt that is not empty: {"prompt": "..."})";
    lines.push_back(std::move(line));
    return "";
  });
  TESSERA_ENSURE(DataError, !lines.empty(), path, " has no prompts");
  return lines;
}

/// Whether a text of new tokens ends in one of `ends`; looks at as many tokens as can hold one.
std::function<bool(std::span<const std::int32_t>)> stop_at(const std::vector<std::string>& ends,
                                                           const std::shared_ptr<Tokenizer>& tokenizer,
                                                           const TextEnds& known) {
  if (ends.empty()) return {};
  std::size_t longest = 0;
  for (const std::string& end : ends) {
    TESSERA_ENSURE(ConfigError, !end.empty(), "--stop is empty");
    longest = std::max(longest, end.size());
  }
  return [ends, tokenizer, known, most = longest + 8](std::span<const std::int32_t> tokens) {
    const auto last = tokens.last(std::min(tokens.size(), most));
    const std::string tail = tokenizer->decode(known.shown({last.begin(), last.end()}));
    return std::ranges::any_of(ends,
                               [&](const std::string& end) { return tail.find(end) != std::string::npos; });
  };
}

/// What rank 0 has read, on every rank.
std::vector<std::vector<std::int32_t>> share_prompts(Communicator& world,
                                                     const std::vector<std::vector<std::int32_t>>& own) {
  if (world.size() == 1) return own;
  return Json::parse(broadcast_bytes(world, Json(own).dump())).get<std::vector<std::vector<std::int32_t>>>();
}

/// One process's part of the command.
class Writer {
 public:
  Writer(const GenerateArguments& a, const Program& program, std::shared_ptr<Communicator> world)
      : a_(a), world_(std::move(world)), first_(world_->rank() == 0), loaded_(load(a, program, world_)) {
    if (first_ || !a.stop.empty()) tokenizer_ = open_tokenizer(loaded_, a, program);
  }

  void run() {
    std::vector<std::vector<std::int32_t>> prompts;
    if (first_) {
      if (!a_.input.empty()) {
        lines_ = read_prompts(a_.input);
      } else {
        lines_.push_back(Json{{"prompt", a_.prompt}});
      }
      std::vector<std::string> texts;
      for (const Json& line : lines_) texts.push_back(line["prompt"].get<std::string>());
      prompts = tokenizer_->encode_batch(texts);
      TESSERA_ENSURE(ConfigError, !a_.input.empty() || !prompts[0].empty(),
                     "--prompt is empty: generation needs at least one token to begin with");
    }
    GenerationOptions options = a_.sampling;
    ends_ = text_ends(loaded_, a_, tokenizer_.get(), *world_);
    options.decoder_start = ends_.start;
    for (auto& prompt : prompts) ends_.finish_prompt(prompt);
    prompts = share_prompts(*world_, prompts);
    if (ends_.end >= 0) options.stop_tokens = {ends_.end};
    options.num_samples = options.num_beams > 1 ? 1 : a_.samples;
    options.num_return = options.num_beams > 1 ? a_.samples : 1;
    options.stop = stop_at(a_.stop, tokenizer_, ends_);
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<Generated> all = Generator(*loaded_.engine).run(prompts, options);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!first_) return;
    if (a_.input.empty()) {
      print(prompts[0], all[0]);
    } else {
      write_lines(all);
      tell_rate(all, seconds);
    }
  }

 private:
  void print(const std::vector<std::int32_t>& prompt, const Generated& texts) {
    const std::int64_t positions = loaded_.engine->model().max_positions();
    for (std::size_t i = 0; i < texts.size(); ++i) {
      std::vector<std::int32_t> text = ends_.encodes ? std::vector<std::int32_t>() : prompt;
      const auto added = ends_.shown(texts[i].tokens);
      text.insert(text.end(), added.begin(), added.end());
      const auto length = static_cast<std::int64_t>(text.size());
      if (!ends_.encodes && length == positions &&
          length < static_cast<std::int64_t>(prompt.size()) + a_.sampling.max_new_tokens)
        std::cerr << "note: stopped at the model's last position: it has " << length << ", the prompt takes "
                  << prompt.size() << std::endl;
      if (i > 0) std::cout << "----\n";
      std::cout << tokenizer_->decode(text) << std::endl;
    }
  }

  /// Each line of the input with "text", what was added to the prompt, or with "texts" where there are
  /// several.
  void write_lines(const std::vector<Generated>& all) {
    std::ofstream file;
    if (!a_.output.empty()) {
      file.open(a_.output, std::ios::trunc);
      TESSERA_ENSURE(IoError, file, "cannot write ", a_.output, ", the file of --output");
    }
    std::ostream& out = a_.output.empty() ? std::cout : file;
    for (std::size_t i = 0; i < all.size(); ++i) {
      Json texts = Json::array();
      for (const GeneratedText& text : all[i]) texts.push_back(tokenizer_->decode(ends_.shown(text.tokens)));
      Json line = lines_[i];
      if (texts.size() == 1) {
        line["text"] = texts[0];
      } else {
        line["texts"] = texts;
      }
      // Bytes that are no text, of a model that is young, become the sign for such.
      out << line.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
    }
    out.flush();
    TESSERA_ENSURE(IoError, out, "cannot write ", a_.output.empty() ? "the lines" : a_.output);
  }

  static void tell_rate(const std::vector<Generated>& all, double seconds) {
    std::size_t tokens = 0;
    for (const Generated& texts : all) {
      for (const GeneratedText& text : texts) tokens += text.tokens.size();
    }
    std::cerr << all.size() << " prompts, " << tokens << " new tokens, "
              << static_cast<std::int64_t>(static_cast<double>(tokens) / std::max(seconds, 1e-9) + 0.5)
              << " tokens/s" << std::endl;
  }

  const GenerateArguments& a_;
  std::shared_ptr<Communicator> world_;
  bool first_;
  TextEnds ends_;
  LoadedModel loaded_;
  std::shared_ptr<Tokenizer> tokenizer_;
  std::vector<Json> lines_;
};

void run_generate(const GenerateArguments& a, Program& program) {
  GenerationOptions checked = a.sampling;
  checked.num_return = checked.num_beams > 1 ? a.samples : 1;
  check(checked);
  TESSERA_ENSURE(ConfigError, a.samples >= 1, "--num-samples must be 1 or more, not ", a.samples);
  TESSERA_ENSURE(ConfigError, a.output.empty() || !a.input.empty(),
                 "--output is for the texts of --input; without it they are printed");
  on_layout(a, program, [&](const std::shared_ptr<Communicator>& world) { Writer(a, program, world).run(); });
}

}  // namespace

void add_generate(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("generate", "Write text with a trained model");
  auto a = std::make_shared<GenerateArguments>();
  GenerationOptions& s = a->sampling;
  s.batch_size = 8;
  add_model(*command, *a);
  auto* prompt = command->add_option("--prompt", a->prompt, "the text to continue, or what T5 is to read");
  command->add_option("--input", a->input, R"(file of prompts, one {"prompt": "..."} a line)")
      ->excludes(prompt);
  command->add_option("--output", a->output,
                      R"(file for its lines with "text" added; by default they are printed)");
  const auto add = [command](const char* name, auto& value, const char* help) {
    command->add_option(name, value, help)->capture_default_str();
  };
  add("--max-new-tokens", s.max_new_tokens, "tokens to add at most");
  add("--min-new-tokens", s.min_new_tokens, "tokens to add before the text may end");
  add("--temperature", s.temperature, "0 = always the likeliest token");
  add("--top-k", s.top_k, "draw among the k likeliest tokens; 0 = all");
  add("--top-p", s.top_p, "of these, draw among the likeliest up to this probability; 0 = all");
  add("--repetition-penalty", s.repetition_penalty, "above 1: less likely what the text has already");
  add("--seed", s.seed, "the same seed writes the same text");
  add("--num-samples", a->samples, "texts to write for each prompt");
  add("--beams", s.num_beams,
      "above 1: search for the likeliest text with so many beams, instead of drawing");
  add("--length-penalty", s.length_penalty, "of --beams: above 0 longer texts are better");
  command->add_option("--stop", a->stop, "a text ends where it has this; may be given several times");
  add("--batch-size", s.batch_size, "texts computed at once; 0 = all");
  command->callback([a, command, &program] {
    TESSERA_ENSURE(ConfigError, command->count("--prompt") + command->count("--input") > 0,
                   "tessera generate needs a --prompt, or prompts by --input FILE.jsonl");
    run_generate(*a, program);
  });
}

}  // namespace tessera::cli
