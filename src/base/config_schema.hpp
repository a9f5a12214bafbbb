#pragma once
/// The one description of every section: key, member, meaning, limits. Reading, checking, printing and
/// documenting are visitors that walk it; `Section` is a section's struct, const or not. A visitor has
///   field(name, member, meaning, limits)   group(name, struct, meaning)

#include <limits>

#include "tessera/base/config.hpp"

namespace tessera {

/// What a number may be.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above = false;  ///< min itself is excluded
  bool below = false;  ///< max itself is excluded
};

constexpr Limits at_least(double min) { return {.min = min}; }
constexpr Limits between(double min, double max) { return {.min = min, .max = max}; }
constexpr Limits positive() { return {.min = 0.0, .above = true}; }
/// In [0, 1).
constexpr Limits fraction() { return {.min = 0.0, .max = 1.0, .below = true}; }

constexpr double kMostTokens = 2147483647.0;  // positions and token ids are 32-bit numbers
constexpr double kMostWidth = 1 << 24;
constexpr double kMostLossScale = 1e18;  // scaled sums of squares stay far from what a float holds

template <typename T, typename Struct>
concept IsSection = std::same_as<std::remove_const_t<T>, Struct>;

/// Either form of the section `model`.
template <typename T>
concept IsModel = IsSection<T, ModelSettings> || IsSection<T, ModelConfig>;

template <typename Visitor, IsSection<RopeScaling> Section>
void describe(Visitor& visit, Section& c) {
  visit.field(
      "type", c.type,
      "the rule: linear (position interpolation), dynamic (a base that grows with sequences longer than "
      "`max_positions`), llama3, yarn, longrope");
  visit.field("factor", c.factor,
              "how many times longer than in pre-training; 1 = no scaling (longrope: by its lists alone)",
              at_least(1));
  visit.field("low_freq_factor", c.low_freq_factor,
              "llama3: wavelengths above original_max_positions / this are scaled in full", positive());
  visit.field("high_freq_factor", c.high_freq_factor,
              "llama3: wavelengths below original_max_positions / this are not scaled", positive());
  visit.field("original_max_positions", c.original_max_positions,
              "llama3, yarn, longrope: positions in pre-training", between(1, kMostTokens));
  visit.field("beta_fast", c.beta_fast,
              "yarn: features that turn more often than this within original_max_positions are not scaled",
              positive());
  visit.field("beta_slow", c.beta_slow, "yarn: those that turn less often than this are scaled in full",
              positive());
  visit.field("truncate", c.truncate, "yarn: whole features as bounds of what is scaled in part");
  visit.field("attention_factor", c.attention_factor,
              "yarn, longrope: factor on cos and sin; null = by the rule, from `factor`", positive());
  visit.field("short_factor", c.short_factor,
              "longrope: what each frequency is divided by in sequences up to original_max_positions",
              positive());
  visit.field("long_factor", c.long_factor, "longrope: the same in longer ones", positive());
}

template <typename Visitor, typename Section>
void describe_attention(Visitor& visit, Section& c) {
  visit.field("num_heads", c.num_heads,
              "attention heads; `hidden_size` is a multiple unless `head_dim` is given", between(1, 65536));
  visit.field("num_kv_heads", c.num_kv_heads,
              "key and value heads, a divisor of `num_heads`; 0 = `num_heads`", between(0, 65536));
  visit.field("head_dim", c.head_dim, "features per head; 0 = `hidden_size / num_heads`", between(0, 65536));
}

template <typename Visitor, typename Section>
void describe_windows(Visitor& visit, Section& c) {
  visit.field("sliding_window", c.sliding_window,
              "keys a position sees in attention, the last ones up to itself; null = all before it",
              between(1, kMostTokens));
  visit.field(
      "window_pattern", c.window_pattern,
      "layers with the window: S (sliding) or F (full) for each, such as SF, repeated over the layers; "
      "null = the family's, else all");
  visit.field("attention_scale", c.attention_scale, "factor on scores; null = 1 / sqrt(`head_dim`)",
              positive());
  visit.field("attention_softcap", c.attention_softcap,
              "scores become c tanh(score / c) of this c; 0 = none, null = the family's", at_least(0));
  visit.field("logit_softcap", c.logit_softcap, "the same of logits; 0 = none, null = the family's",
              at_least(0));
}

template <typename Visitor, typename Section>
void describe_norms(Visitor& visit, Section& c) {
  visit.field("norm", c.norm, "null = the family's");
  visit.field("norm_eps", c.norm_eps, "added to the variance in norms",
              Limits{.min = 0, .max = 1, .above = true});
  visit.field(
      "norm_placement", c.norm_placement,
      "norms before each branch (pre), before and behind it (sandwich) or only behind (post); null = the "
      "family's");
  visit.field("shared_norm", c.shared_norm,
              "with `parallel_residual`: one norm feeds attention and MLP; null = the family's");
  visit.field("norm_zero_centered", c.norm_zero_centered,
              "norms multiply by 1 + weight, weights begin at 0; null = the family's");
  visit.field("norm_bias", c.norm_bias, "biases of LayerNorm; null = the family's");
  visit.field(
      "qk_norm", c.qk_norm,
      "RMSNorm of queries and keys before rotary positions: of each head (head), of all heads together "
      "(full), or none; null = the family's");
  visit.field("embedding_norm", c.embedding_norm, "a norm behind the token embedding; null = the family's");
  visit.field("embedding_scaled", c.embedding_scaled,
              "embeddings times the root of `hidden_size`; null = the family's");
}

template <typename Visitor, typename Section>
void describe_positions(Visitor& visit, Section& c) {
  visit.field("rope_theta", c.rope_theta, "base of the rotary wavelengths", positive());
  visit.field("rope_fraction", c.rope_fraction, "share of each head's features that is rotated",
              Limits{.min = 0.0, .max = 1.0, .above = true});
  visit.field("rope_interleaved", c.rope_interleaved, "rotate pairs (2i, 2i+1) instead of (i, i + d/2)");
  visit.group("rope_scaling", c.rope_scaling, "how rotary positions are stretched beyond pre-training");
  visit.field("rope_local_theta", c.rope_local_theta,
              "base in layers with a window, which are then not scaled; null = that of all layers",
              positive());
}

template <typename Visitor, typename Section>
void describe_heads(Visitor& visit, Section& c) {
  visit.field("token_types", c.token_types,
              "types of tokens that the embedding tells apart, as BERT's two segments; null = the family's",
              between(1, 65536));
  visit.field("binary_head", c.binary_head,
              "BERT's pooler and the head that says whether one segment follows the other; null = the "
              "family's");
  visit.field("num_labels", c.num_labels,
              "classes of samples that BERT's head tells apart, or numbers that it gives, in place of its "
              "other heads; "
              "null = none",
              between(1, kMostTokens));
  visit.field("problem_type", c.problem_type,
              "what the head for `num_labels` is trained on; null = `regression` for one label, "
              "`single_label_classification` for more");
}

template <typename Visitor, typename Section>
void describe_experts(Visitor& visit, Section& c) {
  visit.field("num_experts", c.num_experts,
              "decoders: MLPs of a layer, of which a router chooses `router_topk` for each token; null = one "
              "MLP for all",
              between(1, 4096));
  visit.field("router_topk", c.router_topk, "experts that a token goes to", between(1, 4096));
  visit.field("router_normalized", c.router_normalized,
              "whether the weights of a token's experts add up to 1; otherwise they are their probabilities "
              "among all experts; null = true");
  visit.field("moe_ffn_hidden_size", c.moe_ffn_hidden_size,
              "width inside an expert; null = `ffn_hidden_size`", between(1, 4 * kMostWidth));
  visit.field("moe_layers", c.moe_layers,
              "layers with experts: E (experts) or D (dense) for each, such as DE, repeated over the layers; "
              "null = all");
  visit.field("router_aux_loss", c.router_aux_loss,
              "weight of the loss that spreads tokens evenly over experts, made for each sample and layer, "
              "so that it is the same on every layout (Megatron's seq_aux_loss); 0 = none",
              at_least(0));
  visit.field("router_z_loss", c.router_z_loss,
              "weight of the mean square of the log-sum-exp of a router's logits, in each layer; 0 = none",
              at_least(0));
}

template <typename Visitor, typename Section>
void describe_encoder(Visitor& visit, Section& c) {
  visit.field(
      "encoder_layers", c.encoder_layers,
      "T5: layers of the encoder, the first of `num_layers`; the others are the decoder's; null = half",
      between(1, 100000));
  visit.field(
      "relative_buckets", c.relative_buckets,
      "relative positions: distances that a bias tells apart, long ones in groups; null = the family's",
      between(4, 65536));
  visit.field("relative_max_distance", c.relative_max_distance,
              "relative positions: longer distances share the last bucket; null = the family's",
              between(2, kMostTokens));
  visit.field("scaled_head", c.scaled_head,
              "T5: what the head reads is divided by the root of `hidden_size`; null = `tied_head`");
}

template <typename Visitor, IsModel Section>
void describe(Visitor& visit, Section& c) {
  visit.field("family", c.family, "supplies what is left open below");
  visit.field("num_layers", c.num_layers, "transformer blocks, T5's of encoder and decoder together",
              between(1, 100000));
  visit.field("hidden_size", c.hidden_size, "width of the residual stream", between(1, kMostWidth));
  describe_attention(visit, c);
  visit.field("ffn_hidden_size", c.ffn_hidden_size,
              "width inside the MLP; 0 = the family's rule: 4 `hidden_size`, for llama 8/3 `hidden_size` "
              "rounded up to 256",
              between(0, 4 * kMostWidth));
  visit.field("vocab_size", c.vocab_size, "tokens of the vocabulary; 257 for the byte tokenizer",
              between(1, kMostTokens));
  visit.field(
      "max_positions", c.max_positions,
      "positions the model is made for, at least `training.seq_length` where they are learned; beyond "
      "them rotary and ALiBi models run on, with a warning",
      between(1, kMostTokens));
  describe_windows(visit, c);
  visit.field("dropout", c.dropout, "dropout on embeddings and residual branches", fraction());
  visit.field("attention_dropout", c.attention_dropout, "dropout on attention probabilities", fraction());
  visit.field("embedding_dropout", c.embedding_dropout, "dropout on embeddings; null = `dropout`",
              fraction());
  visit.field("position_embedding", c.position_embedding, "null = the family's");
  describe_norms(visit, c);
  visit.field("activation", c.activation, "of the MLP; null = the family's");
  visit.field("tied_head", c.tied_head, "output layer = token embedding; null = the family's");
  visit.field("linear_bias", c.linear_bias, "biases of attention output and MLP; null = the family's");
  visit.field("proj_bias", c.proj_bias, "bias of attention output alone; null = `linear_bias`");
  visit.field("qkv_bias", c.qkv_bias, "biases of query, key, value; null = the family's");
  visit.field("parallel_residual", c.parallel_residual,
              "attention and MLP both read the residual stream as it enters the layer; null = the family's");
  describe_heads(visit, c);
  describe_encoder(visit, c);
  describe_experts(visit, c);
  describe_positions(visit, c);
  visit.field(
      "padding_id", c.padding_id,
      "token whose embedding gets no gradient where it is an input (a tied head's still counts); null "
      "= none",
      between(0, kMostTokens));
  visit.field(
      "init_std", c.init_std,
      "standard deviation of initial weights; output projections: divided by sqrt(2 `num_layers`); T5: "
      "its own rule, times this / 0.02",
      positive());
  visit.field("init_from", c.init_from,
              "Hugging Face or converted folder whose weights training starts from");
  visit.field("reinitialize", c.reinitialize,
              "the weights may be of a model that other keys of this section change: tensors that still fit "
              "are kept, the others are drawn anew from `training.seed`; false = such a model is refused");
}

template <typename Visitor, IsSection<ParallelConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("tensor", c.tensor, "tensor-parallel ranks", between(1, 4096));
  visit.field("sequence", c.sequence,
              "sequence parallelism over the tensor ranks; over one rank it changes nothing");
  visit.field(
      "tensor_chunks", c.tensor_chunks,
      "pieces in which a product's sum over tensor ranks travels, each while the next is multiplied; 1 = "
      "the product first, then the sum, 0 = automatic: 1 on the CPU, up to 4 on a GPU",
      between(0, 64));
  visit.field("pipeline", c.pipeline, "pipeline stages", between(1, 4096));
  visit.field("virtual_stages", c.virtual_stages,
              "model chunks per pipeline stage; interleaved needs more than 1, zb-v has 2 (1 is read as 2)",
              between(1, 4096));
  visit.field("schedule", c.schedule, "order of forward and backward passes in the pipeline");
  visit.field(
      "pipeline_layout", c.pipeline_layout,
      "layers of each piece (stage x chunk) in the order the model runs, such as \"3,4,4,1\"; null = even "
      "by cost, embedding and head counted");
  visit.field(
      "pipeline_split_rank", c.pipeline_split_rank,
      "T5: stages before this one hold the encoder's layers, it and later ones the decoder's, each even "
      "by cost; null = cut wherever it is even",
      at_least(1));
  visit.field(
      "context", c.context,
      "context-parallel ranks, which share out the positions of each sample: decoders' training on long "
      "sequences, `training.seq_length` a multiple of twice as many",
      between(1, 4096));
  visit.field(
      "context_method", c.context_method,
      "how attention sees the positions of other context ranks; all_gather: their keys and values are "
      "gathered, ulysses: ranks exchange positions for heads and back, for which `context` divides the "
      "key-value heads of a tensor rank; auto: what sends less");
  visit.field("expert", c.expert,
              "data and context ranks that share out the experts of each layer and send each other tokens; "
              "`data` x `context` is a multiple of it, and so is `model.num_experts`",
              between(1, 4096));
  visit.field("data", c.data, "data-parallel ranks; null = what is left of the processes there are",
              between(1, 1e6));
  visit.field("zero_stage", c.zero_stage,
              "what data ranks share out: 0 nothing, 1 optimizer state and fp32 main weights, 2 also "
              "gradients, 3 also the weights themselves",
              between(0, 3));
  visit.field(
      "zero_group", c.zero_group,
      "neighbouring data ranks that share out among themselves what `zero_stage` says, with copies across "
      "these groups; divides the data ranks; null = all of them",
      between(1, 1e6));
  visit.field(
      "zero_reshard", c.zero_reshard,
      "stage 3: when a layer's gathered weights are freed; always: after each pass, never: only after "
      "the backward pass, auto: never in a pipeline, else always");
  visit.field("gradient_dtype", c.gradient_dtype,
              "in what gradients travel among data ranks; each is rounded to it before, and their "
              "sum, made in fp32, once");
  visit.field("timeout_s", c.timeout_s, "seconds after which a wait for other ranks is an error",
              Limits{.min = 0, .max = 1e7, .above = true});
}

template <typename Visitor, IsSection<OptimizerConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("name", c.name,
              "adamw: decoupled weight decay; adam: decay added to the gradient; sgd: with momentum");
  visit.field("lr", c.lr, "highest learning rate", positive());
  visit.field("betas", c.betas, "decay of the two moments (adam, adamw), each in [0, 1)", fraction());
  visit.field("eps", c.eps, "added to the root of the second moment", positive());
  visit.field("weight_decay", c.weight_decay, "not applied to biases and norms", at_least(0));
  visit.field("momentum", c.momentum, "sgd only", fraction());
  visit.field("nesterov", c.nesterov, "sgd only");
  visit.field("clip_grad", c.clip_grad, "largest global gradient norm; 0 = no clipping", at_least(0));
  visit.field("no_decay", c.no_decay,
              "globs of parameter names that get no weight decay either; one that matches none is refused");
  visit.field(
      "split_main_weights", c.split_main_weights,
      "bf16: keep the fp32 main weights of matrices as the bf16 weights and their low 16 bits, 16 bytes "
      "per parameter instead of 18");
}

template <typename Visitor, IsSection<OffloadConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("optimizer", c.optimizer,
              "where the optimizer's state and main weights that only it reads lie between updates: `none` "
              "(on the device), `cpu` (host memory; nothing changes where that is the device) or `nvme` (a "
              "file in `path`)");
  visit.field(
      "gradients", c.gradients,
      "where this rank's share of the gradient lies, `none` or `cpu`; from `parallel.zero_stage` 2 on");
  visit.field("parameters", c.parameters,
              "where this rank's share of the weights lies while no layer reads them, `none` or `cpu`; with "
              "`parallel.zero_stage` 3");
  visit.field("activations", c.activations,
              "where inputs of recomputed layers lie between forward and backward, `none` or `cpu`; with "
              "`training.recompute` full");
  visit.field("path", c.path, "folder on the disk that holds offloaded state; no file is seen in it");
  visit.field("ratio", c.ratio,
              "share of the optimizer's state, main weights, gradients and parameters that is offloaded; the "
              "rest stays on the device",
              Limits{.min = 0.0, .max = 1.0, .above = true});
  visit.field("pin_memory", c.pin_memory,
              "host memory that GPUs read and write by themselves; without, the host waits for each copy");
  visit.field("tile", c.tile, "elements that travel together, a multiple of 1024", between(1024, 1 << 28));
  visit.field("buffers", c.buffers, "of `nvme`: tiles in host memory at once: read ahead, updated, written",
              between(2, 64));
}

template <typename Visitor, IsSection<LrScheduleConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("style", c.style, "decay from `optimizer.lr` to `min_lr`");
  visit.field("warmup_steps", c.warmup_steps, "steps of linear rise, at most `decay_steps`",
              between(0, 1e12));
  visit.field("decay_steps", c.decay_steps,
              "step at which the decay ends, warm-up included; 0 = `training.steps`", between(0, 1e12));
  visit.field("min_lr", c.min_lr, "learning rate after the decay, at most `optimizer.lr`", at_least(0));
  visit.field("init_lr", c.init_lr, "learning rate where the warm-up begins, at most `optimizer.lr`",
              at_least(0));
  visit.field("wsd_style", c.wsd_style, "shape of the final decay of style wsd");
  visit.field("wsd_decay_steps", c.wsd_decay_steps, "length of the final decay of style wsd, which needs it",
              between(0, 1e12));
  visit.field("weight_decay_style", c.weight_decay_style,
              "way of the weight decay from `optimizer.weight_decay` to `end_weight_decay`");
  visit.field("end_weight_decay", c.end_weight_decay, "null = `optimizer.weight_decay`", at_least(0));
}

template <typename Visitor, typename Section>
void describe_loss_scale(Visitor& visit, Section& c) {
  visit.field("loss_scale", c.loss_scale,
              "fp16: factor on the loss that never changes; null = dynamic, by the four keys below",
              Limits{.min = 0.0, .max = kMostLossScale, .above = true});
  visit.field("initial_loss_scale", c.initial_loss_scale,
              "fp16: dynamic factor on the loss at the first step",
              Limits{.min = 0.0, .max = kMostLossScale, .above = true});
  visit.field("min_loss_scale", c.min_loss_scale,
              "fp16: smallest dynamic factor, at most `initial_loss_scale`",
              Limits{.min = 0.0, .max = kMostLossScale, .above = true});
  visit.field("loss_scale_window", c.loss_scale_window,
              "fp16: steps with a finite gradient, one after the other, before the factor doubles",
              between(1, 2147483647));
  visit.field("hysteresis", c.hysteresis,
              "fp16: steps with a non-finite gradient since the factor last grew, from which on each one "
              "halves it",
              between(1, 2147483647));
}

template <typename Visitor, IsSection<TrainingConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("steps", c.steps, "optimizer steps", between(1, 1e12));
  visit.field("seq_length", c.seq_length,
              "tokens per sample; of a model with encoder and decoder the encoder's",
              between(1, kMostTokens));
  visit.field("decoder_seq_length", c.decoder_seq_length,
              "tokens per sample of the decoder beside an encoder; null = `seq_length`",
              between(1, kMostTokens));
  visit.field("micro_batch_size", c.micro_batch_size, "samples per forward pass", between(1, kMostWidth));
  visit.field("global_batch_size", c.global_batch_size,
              "samples per optimizer step over all ranks, a multiple of `micro_batch_size` x data ranks",
              between(1, kMostTokens));
  visit.field("precision", c.precision, "of activations and matrix products; main weights are fp32 always");
  visit.field("fp32_residual", c.fp32_residual, "bf16, fp16: keep the residual stream in fp32");
  describe_loss_scale(visit, c);
  visit.field("recompute", c.recompute,
              "what the backward pass computes again instead of keeping it; auto = the least that fits into "
              "`device.memory_gb`");
  visit.field("recompute_method", c.recompute_method,
              "recompute full: every `recompute_layers` layers are one segment (uniform), or only the first "
              "`recompute_layers` of each piece are computed again (block)");
  visit.field("recompute_layers", c.recompute_layers, "see `recompute_method`", between(1, 100000));
  visit.field("recompute_partition", c.recompute_partition,
              "recompute full: each tensor rank keeps its share of a segment's input; not with "
              "`parallel.sequence`, which does so anyway");
  visit.field("seed", c.seed, "of initial weights, dropout and data order", at_least(0));
  visit.field("eval_interval", c.eval_interval, "steps between evaluations; 0 = none", between(0, 1e12));
  visit.field("eval_iters", c.eval_iters, "global batches per evaluation", between(1, 1e12));
  visit.field("max_skipped_steps", c.max_skipped_steps,
              "consecutive steps with a non-finite loss or gradient after which training stops",
              between(1, 1e12));
}

template <typename Visitor, typename Section>
void describe_masking(Visitor& visit, Section& c) {
  visit.field("mask_prob", c.mask_prob, "BERT, T5: share of a sample's tokens that are to be guessed",
              Limits{.min = 0.0, .max = 1.0, .above = true, .below = true});
  visit.field("short_seq_prob", c.short_seq_prob,
              "BERT, T5: share of the samples that are made shorter than `training.seq_length`",
              between(0, 1));
  visit.field("masking_max_ngram", c.masking_max_ngram,
              "BERT, T5: most words in a row that are masked together; null = 3, of T5 10", between(1, 1024));
  visit.field("masking_do_full_word", c.masking_do_full_word,
              "BERT, T5: mask all pieces of a word (\"##\" goes on with the word before it) or none");
  visit.field("masking_use_longer_ngrams", c.masking_use_longer_ngrams,
              "BERT, T5: long rows of words are the likely ones, not the short ones");
  visit.field("masking_use_geometric_distribution", c.masking_use_geometric_distribution,
              "BERT, T5: lengths of rows of words are geometric, as SpanBERT's; null = false, of T5 true");
  visit.field("cls_id", c.cls_id, "BERT: the token before a sample; null = [CLS] of the data's tokenizer",
              between(0, kMostTokens));
  visit.field("sep_id", c.sep_id, "BERT: the token after each segment; null = [SEP]",
              between(0, kMostTokens));
  visit.field("mask_id", c.mask_id, "BERT: the token in place of masked ones; null = [MASK]",
              between(0, kMostTokens));
  visit.field("pad_id", c.pad_id, "BERT, T5: the token behind a short sample's end; null = [PAD] or <pad>",
              between(0, kMostTokens));
  visit.field("bos_id", c.bos_id,
              "T5: the token that the decoder begins with; null = [BOS], without one [PAD] or <pad>",
              between(0, kMostTokens));
  visit.field("eos_id", c.eos_id, "T5: the token that ends what the decoder says; null = [EOS] or </s>",
              between(0, kMostTokens));
  visit.field(
      "vocab_extra_ids", c.vocab_extra_ids,
      "T5: how many sentinels stand for what is left out; of a tokenizer without them they follow its ids, "
      "after [BOS] and [EOS]; 0 = the tokenizer's, all of them",
      between(0, kMostTokens));
  visit.field(
      "sentinel_ids", c.sentinel_ids,
      "T5: [FIRST, LAST] of the sentinels in the order of use, which may fall; empty = the tokenizer's",
      between(0, kMostTokens));
}

template <typename Visitor, IsSection<DataConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field(
      "path", c.path,
      "prefix of an .idx/.bin pair, a list of [weight, prefix], or a list of prefixes, mixed by their "
      "sizes; training needs it, or one of the next");
  visit.field("split", c.split, "shares of training, validation and test");
  visit.field("train_path", c.train_path,
              "as path, for training alone and whole; path and split then have none");
  visit.field("valid_path", c.valid_path, "the same for validation");
  visit.field("test_path", c.test_path, "the same for test: looked through, not read by `tessera train`");
  visit.field("args_path", c.args_path, "a text file that holds path, as words: `0.3 A 0.7 B`, or `A B`");
  visit.field("per_split_args_path", c.per_split_args_path,
              "a JSON file with such words, or null, under `train`, `valid` and `test`");
  visit.field("loader", c.loader,
              "`mmap`: tokens are read where they lie, in the system's page cache; `cached`: all are kept in "
              "memory, by each process; `lazy`: as mmap, and the index too");
  visit.field("tokenizer", c.tokenizer, "`bytes` or the path of a tokenizer.json or vocab.txt");
  visit.field("cache_dir", c.cache_dir, "where sample indices are kept; null = beside the data");
  visit.field("reset_position_ids", c.reset_position_ids, "count positions from 0 again in every document");
  visit.field("reset_attention_mask", c.reset_attention_mask, "no attention across documents");
  visit.field("eod_mask_loss", c.eod_mask_loss, "no loss on end-of-document tokens");
  describe_masking(visit, c);
}

template <typename Visitor, IsSection<CheckpointConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("dir", c.dir, "null = `<logging.dir>/checkpoints`");
  visit.field("every", c.every, "steps between checkpoints; 0 = only at the end", between(0, 1e12));
  visit.field("keep", c.keep, "how many of the newest are kept", between(1, 1e12));
  visit.field("resume", c.resume, "`auto` (go on from the newest, if there is one), `none`, or a path");
  visit.field("on_interrupt", c.on_interrupt, "save when SIGINT or SIGTERM arrives");
  visit.field("async", c.async,
              "write checkpoints while training goes on, from a copy in host memory; auto = where a rank "
              "writes 64 MB or more and the hosts have room for the copies");
}

template <typename Visitor, IsSection<LoggingConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("dir", c.dir, "the run's folder: metrics.jsonl, config.yaml, loss.png");
  visit.field("every", c.every, "steps between lines on the terminal", between(1, 1e12));
  visit.field("trackers", c.trackers, "further places for metrics; jsonl is always on");
  visit.field(
      "peak_tflops", c.peak_tflops,
      "TFLOP/s of one rank's device that `mfu` is relative to; null = the GPU's data sheet by its name, on "
      "a CPU the measured rate",
      positive());
  visit.field(
      "profile", c.profile,
      "[START, STOP]: steps START to STOP - 1 are recorded, see [profile a run](guides/profile_a_run.md)",
      between(1, 1e12));
}

template <typename Visitor, IsSection<DeviceConfig> Section>
void describe(Visitor& visit, Section& c) {
  visit.field("type", c.type, "auto = cuda if there is a device, else cpu");
  visit.field("index", c.index,
              "CUDA device of this process; null = LOCAL_RANK, so each process of a host has its own",
              between(0, 1023));
  visit.field("threads", c.threads, "CPU threads per process; 0 = all cores", between(0, 4096));
  visit.field(
      "cuda_graph", c.cuda_graph,
      "CUDA: launch the passes of a step as one graph, so that the GPU need not wait for the host; auto = if "
      "a trial in the third step gives the same numbers in no more time");
  visit.field("tune_gemm", c.tune_gemm,
              "CUDA: time the algorithms of each new matrix product and keep the fastest");
  visit.field("gemm_cache", c.gemm_cache,
              "CUDA: file that keeps the choice of algorithms between runs, by GPU and cuBLASLt version");
  visit.field("require_fast_attention", c.require_fast_attention,
              "CUDA: attention that no fast kernel computes is an error that says why, not a slower way");
  visit.field(
      "deterministic", c.deterministic,
      "the same run gives the same bits, resumed or not; false = on CUDA attention's backward adds in any "
      "order, which is faster and needs less memory");
  visit.field(
      "memory_gb", c.memory_gb,
      "what `recompute: auto` and `tessera plan` may fill on one rank, GB of 10^9 bytes; null = what the "
      "device has, less a reserve",
      Limits{.min = 0, .max = 1e9, .above = true});
}

template <typename Visitor, IsSection<Settings> Section>
void describe(Visitor& visit, Section& c) {
  visit.group("model", c.model, "The decoder.");
  visit.group("parallel", c.parallel, "The layout: how the work is divided among processes.");
  visit.group("optimizer", c.optimizer, "How weights are updated.");
  visit.group("offload", c.offload, "What lies outside the device's memory while it is not used.");
  visit.group("lr_schedule", c.lr_schedule,
              "How the learning rate (and the weight decay) changes over the steps.");
  visit.group("training", c.training, "Length, batch, precision, evaluation.");
  visit.group("data", c.data, "What is read.");
  visit.group("checkpoint", c.checkpoint, "When the state is saved and where training goes on from.");
  visit.group("logging", c.logging, "The run's folder and what is reported.");
  visit.group("device", c.device, "What it runs on.");
}

}  // namespace tessera
