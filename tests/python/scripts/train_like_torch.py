"""Trains a tiny model twice from the same weights: by PyTorch on all samples, and by Tessera on this layout. Rank 0 writes what
both got as JSON. Arguments: family, tp, pp, micro-batches, output, and key=value options."""

import copy
import sys

from results import fresh_states, write_results
import torch
import transformers

from tessera import Accelerator
from tessera.utils import BertTrainStep, MegatronLMPlugin, T5TrainStep, full_gradients

STEPS, SEQ = 20, 12
STEPS_OF = {"bert": BertTrainStep, "t5": T5TrainStep}


# What may be left of a model to train, by name; the rest is frozen.
TRAINED = {
    "all": lambda name: True,
    "biases": lambda name: name.endswith(".bias"),
    "matrices": lambda name: not name.endswith(".bias") and "wte" not in name and "wpe" not in name,
    "upper": lambda name: any(part in name for part in (".h.2.", ".h.3.", "ln_f", ".layers.2.", ".layers.3.", "lm_head")),
}


def make_model(family: str, trained: str = "all") -> torch.nn.Module:
    model = whole_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[trained](name))
    return model


def whole_model(family: str) -> torch.nn.Module:
    torch.manual_seed(3)
    if "T5" in family:
        return encoder_and_decoder(family)
    if "Bert" in family:
        family, _, problem = family.partition(":")
        kind = transformers.MegatronBertConfig if family.startswith("Megatron") else transformers.BertConfig
        config = kind(num_hidden_layers=4, hidden_size=24, num_attention_heads=4, intermediate_size=40, vocab_size=101,
                      max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                      num_labels=1 if problem == "regression" else 3, problem_type=problem or None, initializer_range=0.1)
        return getattr(transformers, family)(config)
    if family == "gpt2":
        config = transformers.GPT2Config(n_layer=4, n_embd=24, n_head=4, vocab_size=101, n_positions=16, resid_pdrop=0.0,
                                         embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(config)
    sizes = dict(num_hidden_layers=4, hidden_size=24, num_attention_heads=6, num_key_value_heads=2, intermediate_size=40, vocab_size=101,
                 max_position_embeddings=16, tie_word_embeddings=False)
    if family == "Mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    if family == "Qwen3Moe":  # every other layer is dense
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
            **sizes, head_dim=6, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, decoder_sparse_step=2, norm_topk_prob=True))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def encoder_and_decoder(family: str) -> torch.nn.Module:
    """T5: version 1.0; MT5: as weights of version 1.1 are read, with a head of its own."""
    settings, kind = ((transformers.T5Config, transformers.T5ForConditionalGeneration) if family == "T5" else
                      (transformers.MT5Config, transformers.MT5ForConditionalGeneration))
    model = kind(settings(num_layers=2, num_decoder_layers=2 if family == "T5" else 3, d_model=24, num_heads=4, d_kv=5, d_ff=40, vocab_size=101, dropout_rate=0.0,
                          relative_attention_num_buckets=8, relative_attention_max_distance=10, initializer_factor=0.5,
                          decoder_start_token_id=0))
    if family == "MT5":
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(101, 24))
    return model


def two_sequences(family: str, i: int, row: dict, generator: torch.Generator) -> dict:
    """The encoder's padded at either side, the decoder's shorter; MT5's has a mask and tokens of its own besides."""
    mask = row["attention_mask"].clone()
    if i % 3 == 2:
        mask[: i % 4] = 0
    labels = torch.randint(1, 101, (8,), generator=generator)
    labels[8 - i % 5:] = -100
    row = {"input_ids": row["input_ids"], "attention_mask": mask, "labels": labels}
    if family == "MT5":
        row["decoder_input_ids"] = torch.randint(0, 101, (8,), generator=generator)
        row["decoder_attention_mask"] = (torch.arange(8) >= i % 3).long()
        row["labels"][: i % 3] = -100
    return row


def make_dataset(family: str = "gpt2", rest: int = 5) -> list:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i in range(STEPS * 8 + rest):  # the last batch is short
        ids = torch.randint(0, 101, (SEQ,), generator=generator)
        mask, labels = torch.ones(SEQ, dtype=torch.long), ids.clone()
        if i % 3 == 1:  # padding on the right
            mask[SEQ - 1 - i % 4:] = 0
            labels[SEQ - 1 - i % 4:] = -100
        labels[: i % 5] = -100
        row = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        rows.append(two_sequences(family, i, row, generator) if "T5" in family else row)
        if "Bert" not in family:
            continue
        if i % 3 == 2:  # padding on the left
            mask[: i % 4] = 0
        row["token_type_ids"] = (torch.arange(SEQ) > i % 7).long()
        masked = (torch.rand(SEQ, generator=generator) < 0.4) & (mask > 0)
        row["labels"] = torch.where(masked, labels, -100)
        kind = torch.tensor(-100 if i % 6 == 4 else i % 3 if "Sequence" in family else i % 2)
        if "Sequence" in family:
            row["labels"] = kind if ":" not in family else torch.rand((), generator=generator) if "regression" in family else (
                torch.rand(3, generator=generator) < 0.4).float()
        elif "PreTraining" in family:
            row["next_sentence_label"] = kind
    return rows


def make_optimizer(model: torch.nn.Module) -> tuple:
    # Frozen parameters may be handed to the optimizer or not: the matrices are, the others are not.
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
    others = [p for n, p in model.named_parameters() if p.ndim <= 1 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}],
                                  lr=5e-3, betas=(0.9, 0.95), eps=1e-5)
    return optimizer, transformers.get_scheduler("cosine", optimizer, num_warmup_steps=4, num_training_steps=STEPS + 1)


def train(family: str, tp: int, pp: int, micro_batches: int, output: str, options: dict) -> dict:
    model = make_model(family, options.get("train", "all"))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    reference = copy.deepcopy(model)
    optimizer, scheduler = make_optimizer(model)
    plugin = None
    if tp * pp > 1 or "plugin" in options or "ep" in options:
        plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=micro_batches, gradient_clipping=0.7,
                                  expert_model_parallel_size=int(options.get("ep", 1)),
                                  use_custom_fsdp=options.get("zero") == "3",
                                  use_distributed_optimizer=options.get("zero") == "1",
                                  sequence_parallelism=options.get("sp") == "1",
                                  num_layers_per_virtual_pipeline_stage=int(options["virtual"]) if "virtual" in options else None,
                                  recompute_activations=options.get("recompute") == "1",
                                  return_logits="logits" in options,
                                  pipeline_model_parallel_split_rank=int(options["split"]) if "split" in options else None,
                                  custom_train_step_class=STEPS_OF.get(options.get("step")))
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    dp = accelerator.state.mesh.dp
    dataset = make_dataset(family, int(options.get("rest", 5)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8 // (dp * micro_batches))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    plain_optimizer, plain_scheduler = make_optimizer(reference)
    losses, expected, norms, expected_norms, gradient_error = [], [], [], [], 0.0
    for step, batch in enumerate(loader):
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        gradients = full_gradients(model) if step < 2 else {}
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.7)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
        if not accelerator.is_main_process:
            continue
        rows = dataset[step * 8: step * 8 + 8]
        plain = reference(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]})
        plain.loss.backward()
        if gradients:  # later ones differ by what rounding has made of the weights
            trained = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
            largest = max(grad.abs().max().item() for grad in trained.values())
            gradient_error = max(gradient_error, *((gradients[n] - grad).abs().max().item() / largest
                                                   for n, grad in trained.items()))
        expected_norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.7)))
        plain_optimizer.step()
        plain_scheduler.step()
        plain_optimizer.zero_grad()
        expected.append(plain.loss.item())
    state = model.state_dict()
    folder = f"{output}.{family.replace(':', '-')}.{tp}{pp}{micro_batches}"
    model.save_pretrained(folder)
    result = {}
    if accelerator.is_main_process:
        weights = max((state[n] - p).abs().max().item() for n, p in reference.named_parameters())
        reloaded = type(reference).from_pretrained(folder)
        frozen = [n for n, p in reference.named_parameters() if not p.requires_grad]
        again = max((p - state[n]).abs().max().item() for n, p in reloaded.named_parameters())
        result = {"losses": losses, "expected": expected, "norms": norms, "expected_norms": expected_norms,
                  "gradient_error": gradient_error, "weight_error": weights, "reload_error": again, "steps": len(losses),
                  "frozen": len(frozen), "frozen_error": max([(state[n] - start[n]).abs().max().item() for n in frozen], default=0.0),
                  "lr": scheduler.get_last_lr()[0], "kind": str(accelerator.distributed_type)}
    accelerator.free_memory()
    fresh_states()
    return result


def main() -> None:
    family, output, *layouts = sys.argv[1:]
    results = []
    for layout in layouts:
        tp, pp, micro_batches, *given = layout.split(",")
        options = dict(text.split("=") for text in given)
        results.append(train(options.get("family", family), int(tp), int(pp), int(micro_batches), output, options))
    write_results(output, results)


if __name__ == "__main__":
    main()
