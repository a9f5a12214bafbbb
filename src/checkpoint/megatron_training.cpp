#include "checkpoint/megatron_training.hpp"

#include <charconv>
#include <cmath>

#include "base/config_names.hpp"
#include "checkpoint/megatron_values.hpp"
#include "tessera/base/error.hpp"

namespace tessera::checkpoint_detail {
namespace {

using Kind = PickleValue::Kind;

constexpr std::int64_t kMostCount = std::int64_t{1} << 50;

/// Megatron's word for the one style that the YAML spells otherwise.
constexpr const char* kWsd = "WSD";

template <typename E>
E word(const MegatronValues& in, const char* name, const char* absent, E none) {
  std::string text = in.text(name, absent);
  if (text == kWsd) text = "wsd";
  if (text.empty()) return none;
  for (const EnumName<E>& each : names_of(E{}).values) {
    if (text == each.name) return each.value;
  }
  in.refuse(name, "'" + text + "' is not read");
}

/// Training that Tessera would go on with in another way.
void refuse_others(const MegatronValues& args) {
  for (const char* name : {"rampup_batch_size", "step_batch_size_schedule"}) {
    if (args.holds(name)) args.refuse(name, "is set: a batch that grows (ramp-up) is not read");
  }
  if (args.holds("decoupled_lr")) args.refuse("decoupled_lr", "is set: the embedding has a rate of its own");
  if (args.holds("fp8")) args.refuse("fp8", "is set: training in 8 bits is not taken over");
  if (args.flag("use_precision_aware_optimizer").value_or(false))
    args.refuse("use_precision_aware_optimizer", "is true: its state is not float32");
  const std::string optimizer = args.text("optimizer", "adam");
  if (optimizer != "adam") args.refuse("optimizer", "'" + optimizer + "' is not read; adam is");
  if (args.real({"head_lr_mult"}, 1) != 1) args.refuse("head_lr_mult", "is not 1");
}

/// Steps that so many samples make.
std::int64_t steps_of(const MegatronValues& in, const char* name, double samples, std::int64_t batch) {
  const double steps = samples / static_cast<double>(batch);
  if (!(steps >= 0) || steps > static_cast<double>(kMostCount) || steps != std::floor(steps))
    in.refuse(name, detail::concat("of ", samples, " samples is no whole number of batches of ", batch));
  return static_cast<std::int64_t>(steps);
}

/// A length that the arguments give in iterations or in samples.
std::int64_t steps_given(const MegatronValues& args, const char* iterations, const char* samples,
                         std::int64_t batch, std::int64_t absent) {
  if (args.holds(samples) && args.integer({samples}, 0, kMostCount) > 0)
    return steps_of(args, samples, static_cast<double>(args.integer({samples}, 0, kMostCount)), batch);
  return args.integer({iterations}, absent, kMostCount);
}

void read_precision(const MegatronValues& args, TrainingConfig& t) {
  const bool bf16 = args.flag("bf16").value_or(false), fp16 = args.flag("fp16").value_or(false);
  t.precision = bf16 ? Precision::bf16 : fp16 ? Precision::fp16 : Precision::fp32;
  if (args.holds("loss_scale")) t.loss_scale = args.real({"loss_scale"}, 1);
  t.initial_loss_scale = args.real({"initial_loss_scale"}, t.initial_loss_scale);
  t.min_loss_scale = args.real({"min_loss_scale"}, t.min_loss_scale);
  const double window = args.real({"loss_scale_window"}, 1000);
  if (!(window >= 1) || window > 1e15) args.refuse("loss_scale_window", "is no number of steps");
  t.loss_scale_window = static_cast<std::int64_t>(window);
  t.hysteresis = args.integer({"hysteresis"}, t.hysteresis);
}

/// The schedule as its own state says it, else as the arguments do: the state is what the run went by.
void read_schedule(const MegatronValues& args, const MegatronValues* state, Settings& config) {
  const std::int64_t batch = config.training.global_batch_size;
  LrScheduleConfig& s = config.lr_schedule;
  s.style = word(args, "lr_decay_style", "linear", LrStyle::linear);
  s.init_lr = args.real({"lr_warmup_init"}, 0);
  s.min_lr = args.real({"min_lr"}, 0);
  s.decay_steps = steps_given(args, "lr_decay_iters", "lr_decay_samples", batch, config.training.steps);
  s.warmup_steps = steps_given(args, "lr_warmup_iters", "lr_warmup_samples", batch, 0);
  if (args.holds("lr_warmup_fraction"))
    s.warmup_steps = steps_of(args, "lr_warmup_fraction",
                              args.real({"lr_warmup_fraction"}, 0) * static_cast<double>(s.decay_steps) *
                                  static_cast<double>(batch),
                              batch);
  s.wsd_style = word(args, "lr_wsd_decay_style", "exponential", WsdStyle::exponential);
  s.wsd_decay_steps = steps_given(args, "lr_wsd_decay_iters", "lr_wsd_decay_samples", batch, 0);
  s.weight_decay_style = word(args, "weight_decay_incr_style", "constant", WeightDecayStyle::constant);
  OptimizerConfig& o = config.optimizer;
  o.lr = args.real({"lr"}, 0);
  o.weight_decay = args.real({"start_weight_decay", "weight_decay"}, 0.01);
  double end = args.real({"end_weight_decay"}, o.weight_decay);
  if (state) {
    o.lr = state->real({"max_lr", "start_lr"}, o.lr);
    s.min_lr = state->real({"min_lr"}, s.min_lr);
    const auto steps = [&](std::initializer_list<const char*> names, std::int64_t& out) {
      const double samples = state->real(names, -1);
      if (samples >= 0) out = steps_of(*state, *names.begin(), samples, batch);
    };
    steps({"lr_warmup_steps", "warmup_steps"}, s.warmup_steps);
    steps({"lr_decay_steps", "decay_steps"}, s.decay_steps);
    const char* style = state->holds("lr_decay_style") ? "lr_decay_style" : "decay_style";
    s.style = word(*state, style, "", s.style);
    o.weight_decay = state->real({"start_wd"}, o.weight_decay);
    end = state->real({"end_wd"}, end);
    s.weight_decay_style = word(*state, "wd_incr_style", "", s.weight_decay_style);
    std::int64_t growth = config.training.steps;
    steps({"wd_incr_steps"}, growth);
    if (s.weight_decay_style != WeightDecayStyle::constant && growth != config.training.steps)
      state->refuse("wd_incr_steps", detail::concat("weight decay grows over ", growth,
                                                    " steps, the run has ", config.training.steps));
  }
  if (end != o.weight_decay) s.end_weight_decay = end;
}

std::vector<std::pair<double, std::string>> data_path(const PickleValue& list) {
  std::vector<std::string> words;
  for (const PickleValue* each : list.items) words.push_back(each->is(Kind::text) ? each->text : "");
  std::vector<std::pair<double, std::string>> paths;
  if (words.size() == 1) return {{1.0, words[0]}};
  for (std::size_t i = 0; i + 1 < words.size(); i += 2) {
    double weight = 0;
    const auto [end, error] = std::from_chars(words[i].data(), words[i].data() + words[i].size(), weight);
    if (error != std::errc() || end != words[i].data() + words[i].size() || words.size() % 2 != 0) {
      paths.clear();
      for (const std::string& word : words) paths.emplace_back(kWeightBySize, word);
      return paths;
    }
    paths.emplace_back(weight, words[i + 1]);
  }
  return paths;
}

void read_data(const MegatronValues& args, Settings& config, std::vector<std::string>& notes) {
  DataConfig& data = config.data;
  data.split = args.text("split", "969,30,1");
  data.reset_position_ids = args.flag("reset_position_ids").value_or(false);
  data.reset_attention_mask = args.flag("reset_attention_mask").value_or(false);
  data.eod_mask_loss = args.flag("eod_mask_loss").value_or(false);
  data.mask_prob = args.real({"mask_prob"}, data.mask_prob);
  data.short_seq_prob = args.real({"short_seq_prob"}, data.short_seq_prob);
  data.vocab_extra_ids = args.integer({"vocab_extra_ids"}, 0, kMostCount);
  const PickleValue* paths = args.find({"data_path"});
  if (paths && paths->is(Kind::list) && !paths->items.empty()) {
    data.path = data_path(*paths);
    notes.push_back("data.path is " + data.path.front().second + (data.path.size() > 1 ? " and more" : "") +
                    ", as the arguments say: give data.path=PREFIX to tessera train where it lies elsewhere");
  } else {
    notes.push_back("the arguments name no data_path: give data.path=PREFIX to tessera train");
  }
}

const PickleValue* schedule_of(const PickleValue& root) {
  const PickleValue* state = root.find("opt_param_scheduler");
  if (!state) state = root.find("lr_scheduler");
  return state && state->is(Kind::dict) ? state : nullptr;
}

}  // namespace

MegatronTraining read_megatron_training(const PickleValue& root, const std::filesystem::path& file,
                                        std::vector<std::string>& notes) {
  const MegatronValues args(*root.find("args"), file);
  refuse_others(args);
  MegatronTraining out;
  TrainingConfig& t = out.settings.training;
  t.global_batch_size = args.size("global_batch_size");
  t.micro_batch_size = args.size("micro_batch_size");
  t.seq_length = args.size("seq_length");
  if (args.holds("decoder_seq_length")) t.decoder_seq_length = args.size("decoder_seq_length");
  t.steps = steps_given(args, "train_iters", "train_samples", t.global_batch_size, 0);
  if (t.steps < 1) args.refuse("train_iters", "is missing: how long the run was to be is not known");
  if (t.steps > kMostCount / t.global_batch_size)
    args.refuse("train_iters", detail::concat("is ", t.steps, ", no length of a run"));
  t.seed = args.integer({"seed"}, 1234, kMostCount);
  t.eval_interval = args.integer({"eval_interval"}, 0, kMostCount);
  t.eval_iters = std::max<std::int64_t>(1, args.integer({"eval_iters"}, 10, kMostCount));
  if (args.integer({"eval_iters"}, 10, kMostCount) == 0) t.eval_interval = 0;
  read_precision(args, t);
  OptimizerConfig& o = out.settings.optimizer;
  o.name = args.flag("decoupled_weight_decay").value_or(true) ? OptimizerName::adamw : OptimizerName::adam;
  o.betas = {args.real({"adam_beta1"}, 0.9), args.real({"adam_beta2"}, 0.999)};
  o.eps = args.real({"adam_eps"}, 1e-8);
  o.clip_grad = args.real({"clip_grad"}, 1.0);
  const PickleValue* state = schedule_of(root);
  std::optional<MegatronValues> schedule;
  if (state) schedule.emplace(*state, file, "opt_param_scheduler");
  read_schedule(args, schedule ? &*schedule : nullptr, out.settings);
  read_data(args, out.settings, notes);
  out.settings.checkpoint.every = args.integer({"save_interval"}, 0, kMostCount);

  const PickleValue* number = root.find("iteration");
  if (!number) number = root.find("total_iters");
  RunCounters& c = out.counters;
  c.step = number && number->is(Kind::integer) ? number->integer : 0;
  if (c.step < 1) args.refuse("iteration", "of the checkpoint is 0: there is no run to go on with");
  if (c.step > t.steps)
    args.refuse("iteration", detail::concat("of the checkpoint is ", c.step,
                                            "; the arguments say that the run has ", t.steps));
  c.consumed_samples = args.integer({"consumed_train_samples"}, c.step * t.global_batch_size, kMostCount);
  if (c.consumed_samples > INT64_MAX / t.seq_length) args.refuse("consumed_train_samples", "is too large");
  c.tokens = c.consumed_samples * t.seq_length;
  return out;
}

void check_schedule(const PickleValue& root, const std::filesystem::path& file, const Config& config,
                    const RunCounters& counters) {
  const PickleValue* state = schedule_of(root);
  if (!state) return;
  const MegatronValues schedule(*state, file, "opt_param_scheduler");
  if (!schedule.holds("num_steps")) return;
  const std::int64_t samples = schedule.integer({"num_steps"}, 0, kMostCount);
  if (samples != counters.updates * config.training.global_batch_size)
    schedule.refuse("num_steps", detail::concat("the schedule has come ", samples, " samples far; ",
                                                counters.updates, " updates of batches of ",
                                                config.training.global_batch_size, " are another number"));
}

namespace {

/// As Megatron writes it.
std::string style_word(LrStyle style) { return style == LrStyle::wsd ? kWsd : std::string(name_of(style)); }

void write_data_args(TorchPickle& pickle, const DataConfig& data) {
  const auto flag = [&](const char* name, bool value) { pickle.text(name).boolean(value); };
  pickle.text("split").text(data.split);
  flag("reset_position_ids", data.reset_position_ids);
  flag("reset_attention_mask", data.reset_attention_mask);
  flag("eod_mask_loss", data.eod_mask_loss);
  pickle.text("mask_prob").real(data.mask_prob).text("short_seq_prob").real(data.short_seq_prob);
  pickle.text("vocab_extra_ids").integer(data.vocab_extra_ids);
  pickle.text("data_path");
  if (data.path.empty()) {
    pickle.none();
  } else {
    pickle.begin_list();
    for (const auto& [weight, prefix] : data.path) {
      if (data.path.size() > 1 && weight != kWeightBySize) pickle.text(detail::concat(weight));
      pickle.text(prefix);
    }
    pickle.end_list();
  }
}

}  // namespace

void write_training_args(TorchPickle& pickle, const Config& config, const RunCounters& counters) {
  const TrainingConfig& t = config.training;
  const OptimizerConfig& o = config.optimizer;
  const LrScheduleConfig& s = config.lr_schedule;
  const auto integer = [&](const char* name, std::int64_t value) { pickle.text(name).integer(value); };
  const auto flag = [&](const char* name, bool value) { pickle.text(name).boolean(value); };
  const auto real = [&](const char* name, double value) { pickle.text(name).real(value); };
  const auto text = [&](const char* name, std::string_view value) { pickle.text(name).text(value); };
  integer("iteration", counters.step);
  integer("consumed_train_samples", counters.consumed_samples);
  integer("consumed_valid_samples", 0);
  integer("skipped_train_samples", 0);
  integer("global_batch_size", t.global_batch_size);
  integer("micro_batch_size", t.micro_batch_size);
  integer("seq_length", t.seq_length);
  if (t.decoder_seq_length) integer("decoder_seq_length", *t.decoder_seq_length);
  integer("train_iters", t.steps);
  pickle.text("train_samples").none();
  pickle.text("rampup_batch_size").none();
  integer("seed", t.seed);
  integer("eval_interval", t.eval_interval);
  integer("eval_iters", t.eval_iters);
  integer("save_interval", config.checkpoint.every);
  flag("bf16", t.precision == Precision::bf16);
  flag("fp16", t.precision == Precision::fp16);
  pickle.text("loss_scale");
  t.loss_scale ? pickle.real(*t.loss_scale) : pickle.none();
  real("initial_loss_scale", t.initial_loss_scale);
  real("min_loss_scale", t.min_loss_scale);
  real("loss_scale_window", static_cast<double>(t.loss_scale_window));
  integer("hysteresis", t.hysteresis);
  text("optimizer", "adam");
  flag("decoupled_weight_decay", o.name == OptimizerName::adamw);
  real("lr", o.lr);
  real("min_lr", s.min_lr);
  real("lr_warmup_init", s.init_lr);
  text("lr_decay_style", style_word(s.style));
  integer("lr_decay_iters", s.decay_steps);
  integer("lr_warmup_iters", s.warmup_steps);
  text("lr_wsd_decay_style", name_of(s.wsd_style));
  integer("lr_wsd_decay_iters", s.wsd_decay_steps);
  real("weight_decay", o.weight_decay);
  real("start_weight_decay", o.weight_decay);
  real("end_weight_decay", *s.end_weight_decay);
  text("weight_decay_incr_style", name_of(s.weight_decay_style));
  real("adam_beta1", o.betas[0]);
  real("adam_beta2", o.betas[1]);
  real("adam_eps", o.eps);
  real("clip_grad", o.clip_grad);
  write_data_args(pickle, config.data);
}

void write_schedule(TorchPickle& pickle, const Config& config, const RunCounters& counters) {
  const std::int64_t batch = config.training.global_batch_size;
  const LrScheduleConfig& s = config.lr_schedule;
  pickle.begin_dict();
  const auto integer = [&](const char* name, std::int64_t value) { pickle.text(name).integer(value); };
  const auto real = [&](const char* name, double value) { pickle.text(name).real(value); };
  real("max_lr", config.optimizer.lr);
  integer("lr_warmup_steps", s.warmup_steps * batch);
  integer("num_steps", counters.updates * batch);
  pickle.text("lr_decay_style").text(style_word(s.style));
  integer("lr_decay_steps", s.decay_steps * batch);
  real("min_lr", s.min_lr);
  real("start_wd", config.optimizer.weight_decay);
  real("end_wd", *s.end_weight_decay);
  pickle.text("wd_incr_style").text(name_of(s.weight_decay_style));
  integer("wd_incr_steps", config.training.steps * batch);
  pickle.end_dict();
}

}  // namespace tessera::checkpoint_detail
