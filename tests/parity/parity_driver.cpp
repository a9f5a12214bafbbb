// What the parity tests run: a model folder and batches in, loss, logits, every gradient and trained weights
// out, all as safetensors. Usage: parity_driver MODEL_DIR BATCHES.safetensors OUT.safetensors
// [section.key=value ...] Batch i is tokens_i, labels_i [b, s] int32 and, where present, position_ids_i,
// document_ids_i, token_types_i [b, s], key_begin_i, key_end_i, sample_labels_i [b], encoder_tokens_i [b, e],
// encoder_key_begin_i, encoder_key_end_i [b]. Batch 0 gives `loss`, `logits` and `grad.NAME`; then
// training.steps updates over the batches in turn give `losses`, `grad_norms` and `weight.NAME`.

#include <iostream>

#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/tessera.hpp"

using namespace tessera;

namespace {

std::vector<std::int32_t> read_ints(const SafetensorsReader& file, const std::string& name) {
  const SafetensorsEntry* entry = file.find(name);
  if (entry == nullptr) return {};
  std::vector<std::int32_t> values(static_cast<std::size_t>(entry->shape.numel()));
  file.read(name, std::as_writable_bytes(std::span(values)));
  return values;
}

std::vector<Batch> read_batches(const std::string& path) {
  const SafetensorsReader file(path);
  std::vector<Batch> batches;
  for (int i = 0; file.find("tokens_" + std::to_string(i)) != nullptr; ++i) {
    const std::string n = "_" + std::to_string(i);
    Batch batch;
    batch.batch = file.at("tokens" + n).shape[0];
    batch.seq_length = file.at("tokens" + n).shape[1];
    batch.tokens = read_ints(file, "tokens" + n);
    batch.labels = read_ints(file, "labels" + n);
    batch.position_ids = read_ints(file, "position_ids" + n);
    batch.document_ids = read_ints(file, "document_ids" + n);
    batch.token_types = read_ints(file, "token_types" + n);
    batch.sample_labels = read_ints(file, "sample_labels" + n);
    batch.key_begin = read_ints(file, "key_begin" + n);
    batch.key_end = read_ints(file, "key_end" + n);
    if (const SafetensorsEntry* encoded = file.find("encoder_tokens" + n))
      batch.encoder_seq_length = encoded->shape[1];
    batch.encoder_tokens = read_ints(file, "encoder_tokens" + n);
    batch.encoder_key_begin = read_ints(file, "encoder_key_begin" + n);
    batch.encoder_key_end = read_ints(file, "encoder_key_end" + n);
    batches.push_back(std::move(batch));
  }
  return batches;
}

/// Tensors to write, with memory of their own.
class Output {
 public:
  void add(const std::string& name, Shape shape, std::vector<float> values) {
    specs_.push_back({name, DType::f32, shape});
    values_.push_back(std::move(values));
  }
  void add(const std::string& name, const Tensor& tensor) { add(name, tensor.shape(), tensor.to_floats()); }
  void write(const std::string& path) const {
    SafetensorsWriter writer(path, specs_);
    for (std::size_t i = 0; i < specs_.size(); ++i)
      writer.append(specs_[i].name, std::as_bytes(std::span(values_[i])));
    writer.finish();
  }

 private:
  std::vector<TensorSpec> specs_;
  std::vector<std::vector<float>> values_;
};

void run(const std::vector<std::string>& args) {
  const ModelConfig model = open_model(args[0]).config().model;
  const std::vector<Batch> batches = read_batches(args[1]);
  Config config = parse_config("data: {path: none}", "defaults", {args.begin() + 3, args.end()});
  config.model = model;
  const auto engine = build_engine(config);
  load_pretrained(args[0], model, *engine);

  Output out;
  out.add("logits", engine->forward(batches[0], Engine::Output::logits).output);
  engine->discard();
  out.add("loss", {1}, {static_cast<float>(engine->forward_backward(batches[0]))});
  for (const Parameter* parameter : engine->params().parameters()) {
    out.add("grad." + parameter->name(),
            engine->params().view(engine->params().gradient().latest_call().on_device(), *parameter));
  }
  engine->discard();

  std::vector<float> losses, norms;
  for (std::int64_t step = 0; step < config.training.steps; ++step) {
    const StepReport report = engine->step(batches[static_cast<std::size_t>(step) % batches.size()]);
    losses.push_back(static_cast<float>(report.loss));
    norms.push_back(static_cast<float>(report.update.grad_norm));
  }
  out.add("losses", {config.training.steps}, losses);
  out.add("grad_norms", {config.training.steps}, norms);
  for (const Parameter* parameter : engine->params().parameters()) {
    out.add("weight." + parameter->name(), engine->params().weights().main(*parameter));
  }
  out.write(args[2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr
        << "usage: parity_driver MODEL_DIR BATCHES.safetensors OUT.safetensors [section.key=value ...]\n";
    return 2;
  }
  try {
    run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
