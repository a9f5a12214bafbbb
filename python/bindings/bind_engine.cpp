#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "arrays.hpp"
#include "bindings.hpp"
#include "dlpack.hpp"
#include "generation.hpp"
#include "mesh.hpp"
#include "tessera/base/config.hpp"
#include "tessera/base/env.hpp"
#include "tessera/base/families.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/engine/agreement.hpp"
#include "tessera/engine/background_save.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/engine/collect.hpp"
#include "tessera/engine/metrics.hpp"
#include "tessera/engine/moments.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/run_facts.hpp"
#include "tessera/engine/shared_weights.hpp"
#include "tessera/engine/state.hpp"
#include "tessera/engine/tune.hpp"

namespace py = pybind11;

namespace tessera::bindings {
namespace {

using Released = py::call_guard<py::gil_scoped_release>;
using Optional = std::optional<py::array>;

/// The [batch, seq] arrays of one data rank as a Batch. An empty batch has no samples.
Batch make_batch(const py::array& tokens, const Optional& labels, const Optional& position_ids,
                 const Optional& key_begin, const Optional& key_end, const Optional& document_ids,
                 const Optional& token_types, const Optional& sample_labels, const Optional& encoder_tokens,
                 const Optional& encoder_key_begin, const Optional& encoder_key_end) {
  TESSERA_CHECK(tokens.ndim() == 2, "tokens have the shape [batch, seq], not ", shape_of(tokens));
  Batch batch;
  batch.batch = tokens.shape(0);
  batch.seq_length = tokens.shape(1);
  if (encoder_tokens) {
    TESSERA_CHECK(encoder_tokens->ndim() == 2, "encoder_tokens have the shape [batch, seq], not ",
                  shape_of(*encoder_tokens));
    batch.encoder_seq_length = encoder_tokens->shape(1);
  }
  const auto read = [&](const Optional& array, const char* name, std::vector<std::int32_t>& out, int rank,
                        bool of_encoder = false) {
    if (!array) return;
    const Shape shape = shape_of(*array);
    const std::int64_t length = of_encoder ? batch.encoder_seq_length : batch.seq_length;
    TESSERA_CHECK(shape.rank() == rank && shape[0] == batch.batch && (rank < 2 || shape[1] == length), name,
                  " have the shape ", shape, ", the tokens ", shape_of(tokens));
    out = integers_of(*array, name);
  };
  read(tokens, "tokens", batch.tokens, 2);
  read(labels, "labels", batch.labels, 2);
  read(position_ids, "position_ids", batch.position_ids, 2);
  read(document_ids, "document_ids", batch.document_ids, 2);
  read(token_types, "token_types", batch.token_types, 2);
  read(sample_labels, "sample_labels", batch.sample_labels, 1);
  read(key_begin, "key_begin", batch.key_begin, 1);
  read(key_end, "key_end", batch.key_end, 1);
  read(encoder_tokens, "encoder_tokens", batch.encoder_tokens, 2, true);
  read(encoder_key_begin, "encoder_key_begin", batch.encoder_key_begin, 1);
  read(encoder_key_end, "encoder_key_end", batch.encoder_key_end, 1);
  batch.global_batch = Batch::kUnknown;
  return batch;
}

/// {"lr_factor": ..., "frozen": true, ...}
ParamGroup group_of(const py::dict& values) {
  ParamGroup group;
  for (const auto& [key, value] : values) {
    const auto name = key.cast<std::string>();
    if (name == "beta1") {
      group.beta1 = value.cast<double>();
    } else if (name == "beta2") {
      group.beta2 = value.cast<double>();
    } else if (name == "eps") {
      group.eps = value.cast<double>();
    } else if (name == "momentum") {
      group.momentum = value.cast<double>();
    } else if (name == "frozen") {
      group.frozen = value.cast<bool>();
    } else {
      TESSERA_CHECK(false, "a parameter group has no '", name, "'");
    }
  }
  return group;
}

Engine::Output output_of(const std::string& name) {
  TESSERA_CHECK(name == "logits" || name == "token_losses" || name == "sample_logits",
                "an output is \"logits\", \"token_losses\" or \"sample_logits\", not \"", name, "\"");
  return name == "logits"         ? Engine::Output::logits
         : name == "token_losses" ? Engine::Output::token_losses
                                  : Engine::Output::sample_logits;
}

std::map<std::string, double> by_name(const std::vector<LossTerm>& terms) {
  std::map<std::string, double> losses;
  for (const LossTerm& term : terms) losses[term.name] = term.mean();
  return losses;
}

/// The engine and what Python gives it over and over.
class PyEngine {
 public:
  PyEngine(const Config& config, const std::shared_ptr<ScriptMesh>& mesh, bool trainable,
           const std::vector<ParamGroup>& groups, std::map<std::string, std::size_t> group_of)
      : config_(config) {
    ParamGroups param_groups;
    if (!groups.empty()) {
      param_groups.groups = groups;
      param_groups.group_of = [names = std::move(group_of)](const Parameter& parameter) {
        const auto it = names.find(parameter.name());
        TESSERA_CHECK(it != names.end(), "parameter ", parameter.name(), " is in no group");
        return it->second;
      };
    }
    if (mesh->world().size() > 1) world_ = {mesh, &mesh->world()};
    engine_ = build_engine(config_, trainable, world_, std::move(param_groups),
                           gemm_tables(read_environment()), mesh);
    engine_->ctx().stream->set_flight(mesh->world().flight());
    find_head();
  }

  Engine& engine() { return *engine_; }
  /// Collective the first time.
  Generator& generator() {
    if (!generator_) generator_.emplace(*engine_);
    return *generator_;
  }
  const Config& config() const { return config_; }
  /// Where the one save that may be under way in the background has its copy.
  StagingMemory& staging() { return staging_; }
  /// Whether this rank has the model's head: where outputs are.
  bool holds_head() { return engine_->model().is_last(engine_->model().num_pieces() - 1); }
  /// All ranks, in host memory; null for one rank.
  Communicator* world() const { return world_.get(); }

  /// Outputs of the model's last stage, on every rank of the pipeline; finished.
  Tensor everywhere(Tensor output, const Batch& batch, Engine::Output kind) {
    const ExecCtx& ctx = engine_->ctx();
    Communicator& pipeline = engine_->mesh()[Axis::pp];
    if (pipeline.size() > 1 && batch.batch > 0) {
      if (!output)
        output = Tensor::empty(ctx, output_shape(engine_->model(), kind, batch.batch, batch.seq_length),
                               DType::f32);
      pipeline.broadcast(ctx, output, head_stage_).wait(ctx);
    }
    ctx.stream->synchronize();
    return output;
  }

 private:
  void find_head() {
    Communicator& pipeline = engine_->mesh()[Axis::pp];
    const std::int64_t own = holds_head() ? pipeline.rank() : 0;
    const Tensor stage = Tensor::from(host_, std::vector<std::int64_t>{own}, {1});
    pipeline.all_reduce(host_, stage).wait(host_);
    head_stage_ = static_cast<int>(stage.to_vector<std::int64_t>()[0]);
  }

  Config config_;
  std::shared_ptr<Communicator> world_;
  ExecCtx host_ = ExecCtx::cpu(1);
  std::unique_ptr<Engine> engine_;
  StagingMemory staging_;
  std::optional<Generator> generator_;
  int head_stage_ = 0;
};

/// What a save by a script says of its run.
RunState run_of(PyEngine& self, const std::optional<std::string>& tokenizer) {
  const Engine& engine = self.engine();
  RunState run{
      .step = engine.progress().steps, .skipped = engine.progress().skipped, .config = self.config()};
  if (tokenizer) run.tokenizer = tokenizer_record_from_json(*tokenizer, "the data");
  return run;
}

/// "" if saves in the background fit into memory, else what they would need. Collective.
std::string background_obstacle(PyEngine& self, bool optimizer) {
  const BackgroundRoom room = background_room(self.engine(), {.optimizer = optimizer});
  if (room.fits) return "";
  return detail::concat("a copy of what is saved needs ", room.needed_bytes, " bytes of memory on ",
                        room.host, ", of ", room.free_bytes, " that are free");
}

/// `give`: what peers without a batch get, as bytes.
void agree_on(PyEngine& self, Batch& batch, const std::string& call, const py::object& place,
              const py::function& give) {
  const std::function<std::string()> bytes = [&give] {
    const py::gil_scoped_acquire gil;
    return give().cast<std::string>();
  };
  BatchCall about{.name = call, .place = place_of_call(place), .give = bytes};
  const py::gil_scoped_release release;
  agree(self.engine().mesh(), batch, self.engine().about(std::move(about), &batch));
}

/// What a peer gave, and a batch that has its place and nothing else.
py::tuple take_from_peer(PyEngine& self, const std::string& call, const py::object& place) {
  const BatchCall about = self.engine().about({.name = call, .place = place_of_call(place)});
  Batch batch;
  std::string bytes;
  {
    const py::gil_scoped_release release;
    bytes = take_batch(self.engine().mesh(), batch, about);
  }
  return py::make_tuple(py::bytes(bytes), batch);
}

OpenCall open_call_with_loss(PyEngine& self, const Batch& batch, const std::string& output,
                             const py::function& loss) {
  const auto gradient = [&](int micro_batch, const Part& samples, const Tensor& value) {
    self.engine().ctx().stream->synchronize();
    Tensor result;
    {
      const py::gil_scoped_acquire gil;
      const ExecCtx& ctx = self.engine().ctx();
      result = tensor_from(ctx, loss(micro_batch, samples.begin, samples.count, shared_of(ctx, value)));
    }
    return result;
  };
  const py::gil_scoped_release release;
  return self.engine().open_call(batch, output_of(output), gradient);
}

/// What stays open of a forward pass, and its output.
py::tuple forward(PyEngine& self, const Batch& batch, const std::string& output, bool record) {
  OpenForward open;
  {
    const py::gil_scoped_release release;
    const Engine::Output kind = output_of(output);
    open = self.engine().forward(batch, kind, record);
    open.output = self.everywhere(std::exchange(open.output, {}), batch, kind);
  }
  const py::object value = shared_of(self.engine().ctx(), std::exchange(open.output, {}));
  return py::make_tuple(open, value);
}

void backward(PyEngine& self, OpenForward& open, const py::object& upstream) {
  Tensor gradient;
  if (!upstream.is_none() && self.holds_head()) gradient = tensor_from(self.engine().ctx(), upstream);
  const py::gil_scoped_release release;
  open.backward(gradient);
}

py::dict update(PyEngine& self, const std::vector<std::pair<double, double>>& rates) {
  UpdateResult result;
  {
    const py::gil_scoped_release release;
    std::vector<UpdateRates> list;
    for (const auto& [lr, weight_decay] : rates) list.push_back({lr, weight_decay});
    result = self.engine().update(list, true);
  }
  py::dict dict;
  dict["grad_norm"] = result.grad_norm;
  dict["skipped"] = result.skipped;
  dict["loss_scale"] = result.loss_scale;
  return dict;
}

/// Calls on_rank_0(name, array) for each parameter.
void collect_as_arrays(PyEngine& self, Collected what, const py::function& on_rank_0) {
  const py::gil_scoped_release release;
  collect(self.engine(), what, [&](const WeightSource& source) {
    const ExecCtx host = ExecCtx::cpu(1);
    for (const TensorSpec& spec : source.tensors()) {
      const Tensor whole = Tensor::empty(host, spec.shape, DType::f32);
      source.read(spec.name, {static_cast<std::byte*>(whole.raw()), whole.nbytes()});
      const py::gil_scoped_acquire gil;
      on_rank_0(spec.name, array_of(whole));
    }
  });
}

void collect_arrays(PyEngine& self, bool gradients, const py::function& on_rank_0) {
  collect_as_arrays(self, gradients ? Collected::gradients : Collected::weights, on_rank_0);
}

void collect_moments(PyEngine& self, const std::string& kind, const py::function& on_rank_0) {
  collect_as_arrays(self,
                    kind == "adam_m"   ? Collected::adam_m
                    : kind == "adam_v" ? Collected::adam_v
                                       : Collected::momentum,
                    on_rank_0);
}

DType float_dtype(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  TESSERA_CHECK(name == "float16", "weights are saved as float32, bfloat16 or float16, not as ", name);
  return DType::f16;
}

/// Writes the files of a Hugging Face folder. `base`: what of its config.json the architecture does not say.
void save_hf(PyEngine& self, const std::filesystem::path& out, const std::string& architecture,
             const std::string& base, const std::string& dtype, std::uint64_t max_shard_bytes) {
  collect(self.engine(), Collected::weights, [&](const WeightSource& weights) {
    Architecture hf = parse_architecture(architecture, kOrigin);
    hf.type = hf_model_type_of(hf).value_or("");
    const std::string embedding = hf_mappings(hf).front().parts.front().name;
    HfSource source;
    source.config_json = base;
    source.prefix = find_spec(hf.type)->names.prefix;
    source.embedding_names = {embedding};
    ExportOptions options;
    options.dtype = float_dtype(dtype);
    options.max_shard_bytes = max_shard_bytes;
    options.source = &source;
    write_hf(out, hf, weights, options);
  });
}

/// Writes the files of a Tessera folder.
void save_tessera(PyEngine& self, const std::filesystem::path& out, const std::string& architecture,
                  const std::string& dtype) {
  collect(self.engine(), Collected::weights, [&](const WeightSource& weights) {
    Architecture hf = parse_architecture(architecture, kOrigin);
    hf.type = hf_model_type_of(hf).value_or("");
    ExportOptions options;
    options.dtype = float_dtype(dtype);
    write_tessera(out, hf, weights, options);
  });
}

/// Tensors in memory by Hugging Face's names: (name, dtype, shape, address).
using Views = std::vector<std::tuple<std::string, std::string, std::vector<std::int64_t>, std::uintptr_t>>;

HfModel model_of(const std::string& architecture, const Views& tensors) {
  std::vector<TensorView> views;
  for (const auto& [name, dtype, shape, address] : tensors)
    views.push_back({name, float_dtype(dtype), Shape(std::span<const std::int64_t>(shape)),
                     reinterpret_cast<const std::byte*>(address)});
  return hf_in_memory(architecture, std::move(views));
}

/// `tensors`: on rank 0, of every parameter.
void load_moments_of(PyEngine& self, const std::string& kind, const std::string& architecture,
                     const Views& tensors) {
  if (tensors.empty()) return load_moments(self.engine(), kind, nullptr);
  const HfModel model = model_of(architecture, tensors);
  load_moments(self.engine(), kind, &model);
}

HfModel opened(const ModelConfig& wanted, const std::string& architecture,
               const std::optional<Views>& tensors, const std::optional<std::filesystem::path>& folder,
               SymbolicLinks links) {
  HfModel model = folder ? open_model(*folder, links) : model_of(architecture, *tensors);
  check_same_model(wanted, model.config().model, folder ? folder->string() : "the model's state_dict");
  return model;
}

/// What fits of the weights of the world's rank 0, a model of this architecture; returns (rank, number of
/// tensors, first name) where others' were different. `changed`: the engine's model may be another one.
std::vector<std::tuple<int, std::int64_t, std::string>> load_weights_of(
    PyEngine& self, const std::string& architecture, const std::optional<Views>& tensors,
    const std::optional<std::filesystem::path>& folder, bool changed, bool follow_symlinks) {
  const SymbolicLinks links = follow_symlinks ? SymbolicLinks::follow : SymbolicLinks::within_folder;
  const Architecture from = parse_architecture(architecture, kOrigin),
                     own = architecture_of(self.config().model);
  const ModelConfig wanted = changed ? from.model : own.model;
  const WeightFit fit = weight_fit(from, own);
  Communicator* world = self.world();
  if (world == nullptr) {
    load_weights(opened(wanted, architecture, tensors, folder, links), fit, self.engine());
    return {};
  }
  const auto open = [&]() -> std::optional<HfModel> {
    if (!tensors && !folder) return std::nullopt;
    return opened(wanted, architecture, tensors, folder, links);
  };
  std::vector<std::tuple<int, std::int64_t, std::string>> list;
  for (const WeightDifference& each : load_weights_of_rank_0(open, from, fit, *world, self.engine()))
    list.emplace_back(each.rank, each.tensors, each.first);
  return list;
}

/// Writes fp32 values of one whole parameter into what this rank holds of it.
void load_one(PyEngine& self, const std::string& name, const py::array& values) {
  const Tensor whole = tensor_of(values);
  const py::gil_scoped_release release;
  load_parameter(self.engine(), name, whole);
}

/// Elements of the model's parameters on this rank.
std::int64_t elements_held(PyEngine& self) {
  std::int64_t sum = 0;
  for (const Parameter* parameter : self.engine().params().parameters()) sum += parameter->shape().numel();
  return sum;
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<Batch>(module, "Batch", "Samples of one data rank.")
      .def(py::init(&make_batch), py::arg("tokens"), py::arg("labels") = py::none(),
           py::arg("position_ids") = py::none(), py::arg("key_begin") = py::none(),
           py::arg("key_end") = py::none(), py::arg("document_ids") = py::none(),
           py::arg("token_types") = py::none(), py::arg("sample_labels") = py::none(),
           py::arg("encoder_tokens") = py::none(), py::arg("encoder_key_begin") = py::none(),
           py::arg("encoder_key_end") = py::none())
      .def(
          "take_place",
          [](Batch& self, const Batch& other) {
            self.sample0 = other.sample0;
            self.global_batch = other.global_batch;
            self.most_samples = other.most_samples;
            self.global_targets = other.global_targets;
            self.global_positions = other.global_positions;
            self.global_sample_targets = other.global_sample_targets;
          },
          "Its place in the global batch is that of `other`.")
      .def_readonly("global_batch", &Batch::global_batch, "Samples of all data ranks, once they have agreed.")
      .def_readonly("global_targets", &Batch::global_targets)
      .def_readonly("global_sample_targets", &Batch::global_sample_targets)
      .def_readonly("batch", &Batch::batch)
      .def_readonly("seq_length", &Batch::seq_length)
      .def_readonly("encoder_seq_length", &Batch::encoder_seq_length)
      .def_readonly("global_batch", &Batch::global_batch)
      .def("targets", &count_targets);

  py::class_<OpenCall>(module, "OpenCall", "A gradient that waits for its factor; gone with this object.")
      .def_property_readonly("loss", &OpenCall::loss)
      .def("add", &OpenCall::add, py::arg("factor"), Released());
  py::class_<OpenForward>(module, "OpenForward", "Tapes that wait for a gradient; gone with this object.");

  py::class_<BackgroundSave>(module, "BackgroundSave", "A checkpoint that a thread writes.")
      .def("settled", &BackgroundSave::settled)
      .def("wait_here", &BackgroundSave::wait_here, Released(),
           "Until rank 0's checkpoint is in place, or another rank's part is written.");
  py::class_<PyEngine>(module, "Engine", "One rank's part of training.")
      .def(py::init([](const Config& config, const std::shared_ptr<ScriptMesh>& mesh, bool trainable,
                       const py::list& groups, std::map<std::string, std::size_t> names) {
             std::vector<ParamGroup> list;
             for (const auto& group : groups) list.push_back(group_of(group.cast<py::dict>()));
             const py::gil_scoped_release release;
             return std::make_unique<PyEngine>(config, mesh, trainable, list, std::move(names));
           }),
           py::arg("config"), py::arg("mesh"), py::arg("trainable") = true, py::arg("groups") = py::list(),
           py::arg("group_of") = std::map<std::string, std::size_t>())
      .def("agree", &agree_on, py::arg("batch"), py::arg("call"), py::arg("place"), py::arg("give"))
      .def("take_batch", &take_from_peer, py::arg("call"), py::arg("place"))
      .def("load_weights", &load_weights_of, py::arg("architecture"), py::arg("tensors"), py::arg("folder"),
           py::arg("changed"), py::arg("follow_symlinks"), Released())
      .def("load_parameter", &load_one, py::arg("name"), py::arg("values"))
      .def(
          "gather_weights", [](PyEngine& self) { self.engine().params().weights().gather(); }, Released())
      .def_property_readonly("elements_held", &elements_held)
      .def_property_readonly(
          "peak_bytes", [](PyEngine& self) { return self.engine().ctx().allocator->stats().peak_used_bytes; },
          "The most bytes of tensors that this rank held at a time.")
      .def(
          "open_call", [](PyEngine& self, const Batch& batch) { return self.engine().open_call(batch); },
          Released())
      .def("open_call_with_loss", &open_call_with_loss, py::arg("batch"), py::arg("output"), py::arg("loss"))
      .def("forward", &forward, py::arg("batch"), py::arg("output"), py::arg("record"))
      .def(
          "output_shape",
          [](PyEngine& self, const Batch& batch, const std::string& output) {
            const Shape shape =
                output_shape(self.engine().model(), output_of(output), batch.batch, batch.seq_length);
            return py::tuple(py::cast(std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end())));
          },
          py::arg("batch"), py::arg("output"))
      .def("backward", &backward, py::arg("open"), py::arg("upstream"))
      .def(
          "generate",
          [](PyEngine& self, const std::vector<std::vector<std::int32_t>>& prompts, const py::dict& options) {
            Generator* const generator = unlocked([&] { return &self.generator(); });
            return generate(*generator, prompts, options);
          },
          py::arg("prompts"), py::arg("options"))
      .def(
          "score",
          [](PyEngine& self, const std::vector<std::vector<std::int32_t>>& texts,
             const std::vector<std::int64_t>& firsts,
             bool likeliest) { return score(self.engine(), texts, firsts, likeliest); },
          py::arg("texts"), py::arg("firsts"), py::arg("likeliest") = false)
      .def_property_readonly("max_positions",
                             [](PyEngine& self) { return self.engine().model().max_positions(); })
      .def(
          "evaluate",
          [](PyEngine& self, const Batch& batch) {
            const std::vector<LossTerm> terms = self.engine().evaluate_terms(batch);
            return std::pair(terms[0].count > 0 ? total_of(terms) : std::nan(""), by_name(terms));
          },
          Released(), "The loss of the batch, not a number where no label counts, and what it is made of.")
      .def_property_readonly(
          "losses", [](PyEngine& self) { return by_name(self.engine().terms()); },
          "What the last loss is made of, by name, before weights.")
      .def("update", &update, py::arg("rates"))
      .def("set_group",
           [](PyEngine& self, std::size_t place, const py::dict& values) {
             self.engine().optimizer().set_group(place, group_of(values));
           })
      .def("set_frozen",
           [](PyEngine& self, std::map<std::string, std::string> names) {
             self.engine().set_frozen(std::move(names));
           })
      .def("load_moments", &load_moments_of, py::arg("kind"), py::arg("architecture"), py::arg("tensors"),
           Released())
      .def("collect_moments", &collect_moments, py::arg("kind"), py::arg("on_rank_0"))
      .def(
          "update_counts", [](PyEngine& self) { return update_counts(self.engine()); }, Released())
      .def(
          "set_update_counts",
          [](PyEngine& self, const std::map<std::string, std::int64_t>& counts) {
            set_update_counts(self.engine(), counts);
          },
          Released())
      .def("set_micro_batches", [](PyEngine& self, std::int64_t n) { self.engine().set_micro_batches(n); })
      .def("zero_grad", [](PyEngine& self) { self.engine().params().gradient().forget(); })
      .def("set_clip_grad",
           [](PyEngine& self, double norm) { self.engine().optimizer().set_clip_grad(norm); })
      .def(
          "grad_norm", [](PyEngine& self) { return self.engine().grad_norm(); }, Released())
      .def_property_readonly(
          "finished_calls", [](PyEngine& self) { return self.engine().params().gradient().finished_calls(); })
      .def("model_lines", [](PyEngine& self) { return model_lines(self.config()); })
      .def(
          "take_notes",
          [](PyEngine& self) {
            std::vector<std::pair<bool, std::string>> notes;
            for (EngineNote& note : self.engine().take_notes())
              notes.emplace_back(note.warning, std::move(note.text));
            return notes;
          },
          "(whether it is a warning, text) of what a log should say since the last call.")
      .def_property_readonly("peak_memory_bytes",
                             [](PyEngine& self) { return peak_memory_bytes(self.engine().ctx()); })
      .def_property_readonly("steps_done", [](PyEngine& self) { return self.engine().progress().steps; })
      .def("collect", &collect_arrays, py::arg("gradients"), py::arg("on_rank_0"))
      .def("save_hf", &save_hf, py::arg("out"), py::arg("architecture"), py::arg("base"), py::arg("dtype"),
           py::arg("max_shard_bytes"), Released())
      .def("save_tessera", &save_tessera, py::arg("out"), py::arg("architecture"), py::arg("dtype"),
           Released())
      .def(
          "save",
          [](PyEngine& self, const std::filesystem::path& root, bool optimizer,
             const std::optional<std::string>& tokenizer) {
            return save_engine(root, self.engine(), run_of(self, tokenizer), {}, {.optimizer = optimizer});
          },
          py::arg("root"), py::arg("optimizer") = true, py::arg("tokenizer") = py::none(), Released())
      .def(
          "begin_save",
          [](PyEngine& self, const std::filesystem::path& root, bool optimizer,
             const std::optional<std::string>& tokenizer) {
            return std::make_unique<BackgroundSave>(root, self.engine(), run_of(self, tokenizer),
                                                    SaveOptions{}, StateParts{.optimizer = optimizer},
                                                    self.staging());
          },
          py::arg("root"), py::arg("optimizer") = true, py::arg("tokenizer") = py::none(), Released(),
          py::keep_alive<0, 1>(), "save() that returns when there is a copy in host memory; one at a time.")
      .def("background_obstacle", &background_obstacle, py::arg("optimizer") = true, Released())
      .def(
          "check",
          [](PyEngine& self, const std::filesystem::path& folder, bool optimizer) {
            Engine& engine = self.engine();
            Communicator& world = engine.mesh().world();
            const CheckpointReader reader(folder, [&world] { heartbeat(world); });
            return check_engine(reader, engine, {.optimizer = optimizer});
          },
          py::arg("folder"), py::arg("optimizer") = true, Released())
      .def(
          "load",
          [](PyEngine& self, const std::filesystem::path& folder, bool optimizer) {
            resume_engine(folder, self.engine(), {.optimizer = optimizer});
          },
          py::arg("folder"), py::arg("optimizer") = true, Released());
}

}  // namespace tessera::bindings
