// Text generation: its options, its results, and the draw of one token.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings.hpp"
#include "generation.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

using Setter = std::function<void(GenerationOptions&, const py::handle&)>;

template <typename T>
Setter field(T GenerationOptions::*member) {
  return [member](GenerationOptions& options, const py::handle& value) { options.*member = value.cast<T>(); };
}

/// What a Python function says, with the interpreter lock held only while it does.
void set_stop(GenerationOptions& options, const py::handle& value) {
  const auto function = std::make_shared<py::object>(py::reinterpret_borrow<py::object>(value));
  options.stop = [function](std::span<const std::int32_t> text) {
    const py::gil_scoped_acquire lock;
    return (*function)(std::vector<std::int32_t>(text.begin(), text.end())).cast<bool>();
  };
}

void set_on_token(GenerationOptions& options, const py::handle& value) {
  const auto function = std::make_shared<py::object>(py::reinterpret_borrow<py::object>(value));
  options.on_token = [function](std::int64_t prompt, std::int64_t sample, std::int32_t token) {
    const py::gil_scoped_acquire lock;
    (*function)(prompt, sample, token);
  };
}

EarlyStopping early_stopping_of(const std::string& word) {
  TESSERA_CHECK(word == "no" || word == "yes" || word == "never", "early_stopping is no, yes or never, not ",
                word);
  return word == "yes" ? EarlyStopping::yes : word == "never" ? EarlyStopping::never : EarlyStopping::no;
}

BeamRule beam_rule_of(const std::string& word) {
  TESSERA_CHECK(word == "transformers" || word == "megatron", "beam_rule is transformers or megatron, not ",
                word);
  return word == "megatron" ? BeamRule::megatron : BeamRule::transformers;
}

const std::map<std::string, Setter>& setters() {
  using O = GenerationOptions;
  static const std::map<std::string, Setter> all = {
      {"max_new_tokens", field(&O::max_new_tokens)},
      {"max_length", field(&O::max_length)},
      {"decoder_start", field(&O::decoder_start)},
      {"min_new_tokens", field(&O::min_new_tokens)},
      {"temperature", field(&O::temperature)},
      {"top_k", field(&O::top_k)},
      {"top_p", field(&O::top_p)},
      {"top_p_decay", field(&O::top_p_decay)},
      {"top_p_bound", field(&O::top_p_bound)},
      {"repetition_penalty", field(&O::repetition_penalty)},
      {"seed", field(&O::seed)},
      {"first_sample", field(&O::first_sample)},
      {"num_samples", field(&O::num_samples)},
      {"stop_tokens", field(&O::stop_tokens)},
      {"stop", set_stop},
      {"on_token", set_on_token},
      {"logprobs", field(&O::logprobs)},
      {"prompt_logprobs", field(&O::prompt_logprobs)},
      {"num_beams", field(&O::num_beams)},
      {"num_return", field(&O::num_return)},
      {"length_penalty", field(&O::length_penalty)},
      {"early_stopping",
       [](O& o, const py::handle& v) { o.early_stopping = early_stopping_of(v.cast<std::string>()); }},
      {"beam_rule", [](O& o, const py::handle& v) { o.beam_rule = beam_rule_of(v.cast<std::string>()); }},
      {"batch_size", field(&O::batch_size)},
      {"prefill_chunk", field(&O::prefill_chunk)},
  };
  return all;
}

GenerationOptions options_of(const py::dict& given) {
  GenerationOptions options;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    const auto known = setters().find(name);
    TESSERA_CHECK(known != setters().end(), "generation has no option '", name, "'");
    try {
      known->second(options, value);
    } catch (const py::cast_error&) {
      throw InvalidArgument(detail::concat(name, " cannot be ", py::repr(value).cast<std::string>()));
    }
  }
  return options;
}

}  // namespace

py::list score(Engine& engine, const std::vector<std::vector<std::int32_t>>& texts,
               const std::vector<std::int64_t>& firsts, bool likeliest) {
  TESSERA_CHECK_EQ(texts.size(), firsts.size(), "texts, first tokens to score");
  std::vector<TextScores> scores;
  {
    const py::gil_scoped_release release;
    std::vector<TextToScore> asked;
    for (std::size_t i = 0; i < texts.size(); ++i) asked.push_back({texts[i], firsts[i]});
    scores = score_texts(engine, asked, {.likeliest = likeliest});
  }
  py::list result;
  for (const TextScores& each : scores)
    result.append(py::make_tuple(py::cast(each.logprobs), each.likeliest));
  return result;
}

py::list generate(Generator& generator, const std::vector<std::vector<std::int32_t>>& prompts,
                  const py::dict& given) {
  std::vector<Generated> all;
  {
    const GenerationOptions options = options_of(given);
    const py::gil_scoped_release release;
    all = generator.run(prompts, options);
  }
  py::list result;
  for (const Generated& texts : all) {
    py::list own;
    for (const GeneratedText& text : texts)
      own.append(py::make_tuple(py::cast(text.tokens), py::cast(text.logprobs), text.score, text.stopped));
    result.append(own);
  }
  return result;
}

void bind_generation(py::module_& module) {
  module.def(
      "sample_token",
      [](const py::array_t<float, py::array::c_style | py::array::forcecast>& logits, const py::dict& options,
         double uniform) {
        return sample_token({logits.data(), static_cast<std::size_t>(logits.size())}, options_of(options),
                            uniform);
      },
      py::arg("logits"), py::arg("options"), py::arg("uniform"),
      "The token drawn from logits with a random number in [0, 1).");
  module.def("uniform_at", &uniform_at, py::arg("seed"), py::arg("sample"), py::arg("position"),
             "The random number of the token at a position of a text.");
}

}  // namespace tessera::bindings
