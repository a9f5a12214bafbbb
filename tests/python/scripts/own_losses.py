"""Gradients of losses that the script makes itself, against PyTorch's, on this layout. Arguments: family, tp, pp, micro-batches,
output. Rank 0 writes the largest error of each case, relative to the largest element of the gradient."""

import copy
import json
import sys
from functools import partial

import torch
from torch.nn.functional import cross_entropy, log_softmax, pad

from tessera import Accelerator
from tessera.utils import GPTTrainStep, MegatronLMPlugin, avg_losses_across_data_parallel_group, full_gradients
from train_like_torch import make_model

family, tp, pp, micro_batches, output = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
keyword_step = "keyword" in sys.argv[6:]
ROWS, SEQ = 4, 10  # of one data rank


class KeywordStep(GPTTrainStep):
    """The per-sample mean losses, weighted by how many of some tokens a sample has."""

    def __init__(self, megatron_args, **kwargs):
        super().__init__(megatron_args)
        self.kwargs = kwargs

    def get_loss_func(self):
        def loss_func(inputs, loss_mask, output_tensor):
            loss = weighted(inputs, loss_mask, output_tensor, **self.kwargs)
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self):
        def forward_step(data_iterator, model):
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
            return output_tensor, partial(self.loss_func, tokens, loss_mask)

        return forward_step


def weighted(inputs, loss_mask, losses, keytokens, alpha):
    per_sample = (losses.float() * loss_mask).sum(dim=1) / loss_mask.sum(dim=1)
    count = torch.stack([(inputs == token).float() for token in keytokens]).sum(dim=[0, 2])
    return (per_sample * (1.0 + alpha * count)).mean()


KEYWORDS = {"keytokens": [3, 17, 40], "alpha": 2.0}
model = make_model(family)
reference = copy.deepcopy(model)
plugin = None
if tp * pp > 1 or micro_batches > 1 or keyword_step:
    plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=micro_batches, gradient_clipping=0.0,
                              custom_train_step_class=KeywordStep if keyword_step else None,
                              custom_train_step_kwargs=KEYWORDS if keyword_step else None)
accelerator = Accelerator(megatron_lm_plugin=plugin, gradient_accumulation_steps=1)
dp, mine = accelerator.state.mesh.dp, accelerator.state.mesh.coordinates["dp"]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
model, optimizer = accelerator.prepare(model, optimizer)
errors = {}


def batch_of(seed: int, rank: int) -> dict:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.randint(0, 101, (ROWS, SEQ), generator=generator)
    labels = ids.clone()
    labels[:, : seed % 3] = -100
    return {"input_ids": ids, "labels": labels}


def compare(name: str, make_reference) -> None:
    """make_reference(): runs PyTorch's backward passes on what all data ranks have."""
    gradients = full_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    if not accelerator.is_main_process:
        return
    reference.zero_grad()
    make_reference()
    largest = max(p.grad.abs().max().item() for p in reference.parameters())
    errors[name] = max((gradients[n] - p.grad).abs().max().item() for n, p in reference.named_parameters()) / largest


def everyone(seed: int) -> dict:
    parts = [batch_of(seed, rank) for rank in range(dp)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def smoothed(logits, ids):
    """Cross-entropy with label smoothing, and a term that punishes large logits."""
    shifted, targets = logits[:, :-1], ids[:, 1:]
    return cross_entropy(shifted.flatten(0, 1), targets.flatten(), label_smoothing=0.1) + 1e-2 * (logits ** 2).mean()


if keyword_step:
    outputs = model(**batch_of(2, mine))
    accelerator.backward(outputs.loss * 0.5)

    def keyword_reference():
        losses = []
        for rank in range(dp):
            batch = batch_of(2, rank)
            for part in range(micro_batches):
                rows = slice(part * ROWS // micro_batches, (part + 1) * ROWS // micro_batches)
                ids = batch["input_ids"][rows]
                targets = pad(batch["labels"][rows], (0, 1), value=-100)[:, 1:]
                logits = reference(input_ids=ids).logits
                token_losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
                losses.append(weighted(ids, (targets != -100).float(), token_losses, **KEYWORDS))
        loss = torch.stack(losses).mean()
        (loss * 0.5).backward()
        errors["keyword loss"] = abs(loss.item() - outputs.loss.item()) / abs(loss.item())

    compare("keyword step", keyword_reference)
else:
    outputs = model(**batch_of(1, mine))
    accelerator.backward(outputs.loss * 0.5)
    compare("scaled", lambda: (reference(**everyone(1)).loss * 0.5).backward())

    first, second = model(**batch_of(2, mine)), model(**batch_of(3, mine))
    unused = model(**batch_of(4, mine))  # contributes nothing
    accelerator.backward(first.loss * 0.3 + second.loss)
    del unused
    compare("two forwards", lambda: (reference(**everyone(2)).loss * 0.3 + reference(**everyone(3)).loss).backward())
    try:
        first.loss.backward()
        errors["second backward"] = 1.0
    except RuntimeError as error:
        errors["second backward"] = 0.0 if "backwarded before" in str(error) or "after" in str(error) else 1.0

    accelerator.gradient_accumulation_steps = 4
    for seed in range(5, 9):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch_of(seed, mine)).loss)
            optimizer.step() if seed < 8 else None
            optimizer.zero_grad() if seed < 8 else None
    compare("accumulate", lambda: [(reference(**everyone(seed)).loss / 4).backward() for seed in range(5, 9)])
    accelerator.gradient_accumulation_steps = 1

    ids = batch_of(9, mine)["input_ids"]
    accelerator.backward(smoothed(model(input_ids=ids).logits, ids))

    def logits_reference():
        for rank in range(dp):
            ids = batch_of(9, rank)["input_ids"]
            (smoothed(reference(input_ids=ids).logits, ids) / dp).backward()

    compare("own loss on logits", logits_reference)

    a, b = batch_of(10, mine)["input_ids"], batch_of(11, mine)["input_ids"]
    distance = (log_softmax(model(input_ids=a).logits, -1) - log_softmax(model(input_ids=b).logits, -1)).pow(2).mean()
    accelerator.backward(distance)

    def pair_reference():
        for rank in range(dp):
            a, b = batch_of(10, rank)["input_ids"], batch_of(11, rank)["input_ids"]
            d = (log_softmax(reference(input_ids=a).logits, -1) - log_softmax(reference(input_ids=b).logits, -1)).pow(2).mean()
            (d / dp).backward()

    compare("two logits in one loss", pair_reference)

if accelerator.is_main_process:
    with open(output, "w") as file:
        json.dump(errors, file)
accelerator.end_training()
