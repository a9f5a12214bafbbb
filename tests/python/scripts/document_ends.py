"""Ends of documents within samples, against PyTorch with the masks and positions that Megatron's get_ltor_masks_and_position_ids
makes. Arguments: family, output, layouts "tp,pp". Rank 0 writes, for each layout, the error of each case: of losses, and of gradients
relative to the largest element."""

import copy
import sys

from results import fresh_states, write_results
import torch
from torch.nn.functional import cross_entropy, pad

from tessera import Accelerator
from tessera.utils import GPTTrainStep, MegatronLMPlugin, full_gradients
from train_like_torch import make_model

SEQ, END, MICRO_BATCHES = 12, 7, 2
RULES = {"loss": {"eod_mask_loss": True}, "positions": {"reset_position_ids": True}, "attention": {"reset_attention_mask": True},
         "all": {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}}
CASES = [("model", name) for name in RULES] + [("logits", "all"), ("step", "all")]


def batch_of(seed: int, rank: int, rows: int) -> dict:
    """Samples with ends at the first place, the last, side by side, and nowhere; the last sample ends in padding."""
    ids = torch.randint(8, 101, (rows, SEQ), generator=torch.Generator().manual_seed(100 * seed + rank))
    for row in range(rows):
        for place in ((0, 5), (3, 4), (SEQ - 1,), (), (2, 6, 9))[(row + seed + rank) % 5]:
            ids[row, place] = END
    mask = torch.ones_like(ids)
    mask[-1, SEQ - 3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def left_to_right(ids, eod_mask_loss=False, reset_position_ids=False, reset_attention_mask=False):
    """(seen [batch, seq, seq], loss mask, positions), by loops."""
    rows, size = ids.shape
    seen = torch.ones(rows, size, size).tril()
    loss_mask, positions = torch.ones(rows, size), torch.arange(size).repeat(rows, 1)
    for row in range(rows):
        begin = 0
        for place in range(size):
            if ids[row, place] != END:
                continue
            if eod_mask_loss:
                loss_mask[row, place] = 0.0
            if reset_attention_mask:
                seen[row, place + 1:, : place + 1] = 0
            if reset_position_ids:
                positions[row, place + 1:] -= place + 1 - begin
            begin = place + 1
    return seen, loss_mask, positions


def reference_losses(model, batch: dict, rules: dict):
    """Losses [batch, seq] and which of them count."""
    seen, loss_mask, positions = left_to_right(batch["input_ids"], **rules)
    seen = seen * batch["attention_mask"][:, None, :]
    seen = torch.maximum(seen, torch.eye(SEQ))  # a padded position sees itself: PyTorch has no softmax over nothing
    hidden = torch.zeros_like(seen).masked_fill(seen == 0, torch.finfo(torch.float32).min)[:, None]
    logits = model(input_ids=batch["input_ids"], attention_mask=hidden, position_ids=positions).logits
    targets = pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return losses, loss_mask * (targets != -100)


def rows_of(seed: int, rank: int) -> int:
    return 4 if seed % 2 == 0 else 3 - rank  # the second of two calls is a short last one


def run(family: str, tp: int, pp: int, kind: str, rules: dict) -> float:
    model = make_model(family)
    model.config.eos_token_id = END
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    arguments = {name: value for name, value in rules.items() if name != "eod_mask_loss"}
    accelerator = Accelerator(gradient_accumulation_steps=2, megatron_lm_plugin=MegatronLMPlugin(
        tp_degree=tp, pp_degree=pp, num_micro_batches=MICRO_BATCHES, gradient_clipping=0.0, return_logits=kind == "logits",
        eod_mask_loss=rules.get("eod_mask_loss", False), other_megatron_args=arguments,
        custom_train_step_class=GPTTrainStep if kind == "step" else None))
    mesh = accelerator.state.mesh
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for seed in (4, 5):
        with accelerator.accumulate(model):
            outputs = model(**batch_of(seed, mesh.coordinates["dp"], rows_of(seed, mesh.coordinates["dp"])))
            accelerator.backward(outputs.loss)
            losses.append(outputs.loss.item())
    gradients = full_gradients(model)
    worst = 0.0
    if accelerator.is_main_process:
        expected = []
        for seed in (4, 5):
            batches = [batch_of(seed, rank, rows_of(seed, rank)) for rank in range(mesh.dp)]
            if kind == "step":  # the mean over micro-batches, each by its samples
                parts = [{name: value[rows] for name, value in batch.items()} for batch in batches
                         for rows in torch.arange(len(batch["input_ids"])).tensor_split(MICRO_BATCHES)]
                found = [(len(part["input_ids"]), reference_losses(reference, part, rules)) for part in parts]
                samples = sum(count for count, _ in found)
                loss = sum(count / samples * (value * mask).sum() / mask.sum() for count, (value, mask) in found)
            else:
                found = [reference_losses(reference, batch, rules) for batch in batches]
                loss = sum((value * mask).sum() for value, mask in found) / sum(mask.sum() for _, mask in found)
            (loss / 2).backward()
            expected.append(loss.item())
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
        largest = max(p.grad.abs().max().item() for p in reference.parameters())
        worst = max([worst] + [(gradients[n] - p.grad).abs().max().item() / largest for n, p in reference.named_parameters()])
    optimizer.step()
    accelerator.free_memory()
    fresh_states()
    return worst


def main() -> None:
    family, output, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        tp, pp = map(int, layout.split(","))
        for kind, name in CASES:
            results[f"{layout} {kind} {name}"] = run(family, tp, pp, kind, RULES[name])
    write_results(output, results)


if __name__ == "__main__":
    main()
