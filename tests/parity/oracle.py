"""PyTorch's and Transformers' side of a parity test."""

import math
from pathlib import Path

import mixtures
import models
import numpy as np
import torch
import transformers
from driver import TRAINING

torch.set_num_threads(2)


def load(folder: Path):
    kind = getattr(transformers, models.architecture_of(folder))
    attention = "sdpa" if kind._supports_sdpa else "eager"
    # Their other ways of multiplying experts take no widths like ours.
    experts = {"experts_implementation": "eager"} if mixtures.has(models.config_of(folder)) else {}
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention, **experts)
    if model.config.model_type == "bloom":  # its own reads a 2D mask; a shift of a row's positions changes nothing
        model.transformer.build_alibi_tensor = _alibi
    return model.train()  # every dropout probability is 0


def _alibi(mask, heads: int, dtype):
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    alibi = _get_alibi_slopes(heads, mask.device)[:, None, None] * torch.arange(mask.shape[-1])
    return alibi.repeat(mask.shape[0], 1, 1).to(dtype)


def _masks(model, seen: torch.Tensor, batch: int):
    """The mask as the model takes it: one, or one for each kind of layer."""
    def mask(seen):
        filled = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return filled[:, None].expand(batch, 1, -1, -1)

    window = getattr(model.config, "sliding_window", None)
    if window is None:
        return mask(seen)
    windowed = mask(seen & seen.new_ones(seen.shape[-2:]).triu(1 - window))
    if model.config.model_type in ("mistral", "mixtral", "starcoder2", "phi3"):
        return windowed
    return {"full_attention": mask(seen), "sliding_attention": windowed}


def forward(model, batch: dict):
    """Mean loss over the labels that count, of pairs too where the model has a head for them, and logits of tokens."""
    if "encoder_tokens" in batch:
        return forward_both(model, batch)
    both_sides = models.is_bert(model.config.to_dict())
    tokens = torch.from_numpy(batch["tokens"]).long()
    length = tokens.shape[1]
    seen = torch.ones(1, length, length, dtype=torch.bool)
    seen = seen if both_sides else seen.tril()
    if "key_begin" in batch:
        seen = seen & torch.from_numpy(models.real_tokens(batch))[:, None, :]
    if "document_ids" in batch:
        documents = torch.from_numpy(batch["document_ids"])
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    # A row that sees nothing would be NaN here: let it see itself, its output reaches no loss. To both sides each sees something.
    seen = seen if both_sides else seen | torch.eye(length, dtype=torch.bool)[None]
    mask = _masks(model, seen, tokens.shape[0])
    positions = torch.from_numpy(batch["position_ids"]).long() if "position_ids" in batch else None
    more = {"token_type_ids": torch.from_numpy(batch["token_types"]).long()} if both_sides else {"use_cache": False}
    output = model(input_ids=tokens, attention_mask=mask, position_ids=positions, **more)
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    labels = torch.from_numpy(batch["labels"] if "labels" in batch else batch["sample_labels"]).long()
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=-100)
    if "sample_labels" in batch and "labels" in batch:
        pairs = torch.from_numpy(batch["sample_labels"]).long()
        loss = loss + torch.nn.functional.cross_entropy(output.seq_relationship_logits.float(), pairs, ignore_index=-100)
    return loss, logits


def forward_both(model, batch: dict):
    """The same of an encoder with a decoder. Their own loss has the shift to the right, which must be the batch's."""
    whole = {name: torch.from_numpy(value).long() for name, value in batch.items()}
    masks = {}
    if "key_begin" in batch:
        real = models.real_tokens({name.removeprefix("encoder_"): value for name, value in batch.items() if name.startswith("encoder_")})
        masks = {"attention_mask": torch.from_numpy(real).long(),
                 "decoder_attention_mask": torch.from_numpy(models.real_tokens(batch)).long()}
    output = model(input_ids=whole["encoder_tokens"], labels=whole["labels"], use_cache=False, **masks)
    return output.loss, output.logits


def arrays(tensors) -> dict:
    return {name: tensor.detach().float().numpy() for name, tensor in tensors}


def first_step(folder: Path, config: dict, batch: dict, autocast: bool = False) -> dict:
    """loss, logits and `grad.NAME` under Tessera's names."""
    model = load(folder)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, logits = forward(model, batch)
    loss.backward()
    gradients = models.to_tessera_names(config, arrays((n, p.grad) for n, p in model.named_parameters()))
    return {"loss": float(loss), "logits": logits.detach().float().numpy()} | {f"grad.{n}": g for n, g in gradients.items()}


def learning_rate(step: int) -> float:
    """Megatron's rule: the rate of an update is that of the number of updates before it."""
    t = TRAINING
    if step <= t["warmup_steps"]:
        return t["lr"] * step / t["warmup_steps"]
    x = (step - t["warmup_steps"]) / (t["steps"] - t["warmup_steps"])
    return t["min_lr"] + 0.5 * (1 + math.cos(math.pi * x)) * (t["lr"] - t["min_lr"])


def train(folder: Path, config: dict, batches: list) -> dict:
    """losses, grad_norms and `weight.NAME` after the updates TRAINING describes."""
    model = load(folder)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": TRAINING["weight_decay"]},
                                   {"params": others, "weight_decay": 0.0}],
                                  lr=1.0, betas=TRAINING["betas"], eps=TRAINING["eps"])
    losses, norms = [], []
    for step in range(TRAINING["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss, _ = forward(model, batches[step % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINING["clip_grad"])))
        optimizer.step()
        losses.append(float(loss))
    weights = models.to_tessera_names(config, arrays(model.named_parameters()))
    return {"losses": np.array(losses), "grad_norms": np.array(norms)} | {f"weight.{n}": w for n, w in weights.items()}
