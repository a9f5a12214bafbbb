"""Scripts of the shape that public tutorials have, each beside plain PyTorch on the same text. Arguments: output, and layouts
"name,tp,pp,micro-batches". Rank 0 writes {what: relative difference} of each.

The text are sources of Python's standard library, a line a sample, by bytes (256: end of the line). No size divides by another:
the last batch of every epoch is short."""

import copy
import math
import sys
import tempfile

from results import fresh_states, write_results
import torch
import transformers
from torch.nn.functional import log_softmax, logsigmoid

from tessera import Accelerator
from tessera.state import PartialState
from tessera.utils import MegatronLMPlugin
from tessera.utils.operations import broadcast_object_list

END, VOCAB, LONGEST = 256, 257, 40


def lines_of(module) -> list:
    with open(module.__file__, "rb") as file:
        lines = [line.strip()[: LONGEST - 1] for line in file]
    return [torch.tensor([*line, END]) for line in lines if len(line) > 3]


def collate(lines: list) -> dict:
    """Padded to the longest line of the batch."""
    width = max(map(len, lines), default=1)
    ids = torch.full((len(lines), width), END)
    mask = torch.zeros((len(lines), width), dtype=torch.long)
    for row, line in enumerate(lines):
        ids[row, : len(line)], mask[row, : len(line)] = line, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gpt2(**sizes) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        **{"n_layer": 2, "n_embd": 32, "n_head": 4, **sizes}, vocab_size=VOCAB, n_positions=LONGEST, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0))


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=VOCAB,
        max_position_embeddings=LONGEST, tie_word_embeddings=False))


def apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-6)


def weights_apart(model, reference) -> float:
    state = model.state_dict()  # collective
    if not PartialState().is_main_process:
        return 0.0
    return max((state[name] - p).abs().max().item() / p.abs().max().item() for name, p in reference.named_parameters())


class Differences(dict):
    """The largest of each name."""

    def note(self, name: str, one: float, other: float) -> None:
        self[name] = max(self.get(name, 0.0), apart(torch.as_tensor(one).item(), torch.as_tensor(other).item()))


def plugin_of(tp: int, pp: int, micro_batches: int, **fields):
    return MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=micro_batches, **fields)


def everyones(accelerator, batch: dict) -> dict:
    """The step's samples of all data ranks, as the plain model gets them."""
    whole = {}
    for name, pad in (("input_ids", END), ("attention_mask", 0), ("labels", -100)):
        whole[name] = accelerator.gather_for_metrics(accelerator.pad_across_processes(batch[name], dim=1, pad_index=pad))
    return whole


def documented(tp: int, pp: int, micro_batches: int) -> dict:
    """The Megatron guide's full training script: no seed, gradient accumulation, clipping, a checkpoint at the end."""
    import bisect as source

    num_epochs = 2
    megatron_plugin = plugin_of(tp, pp, micro_batches, gradient_clipping=1.0)
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=8, megatron_lm_plugin=megatron_plugin)
    torch.seed()  # as no seed does in a fresh process: another one on every rank
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    train_loader = torch.utils.data.DataLoader(lines_of(source), batch_size=2, shuffle=True, collate_fn=collate)

    found = Differences()
    reference = copy.deepcopy(model)
    plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=6e-4)

    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    for epoch in range(num_epochs):
        for batch in train_loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            whole = everyones(accelerator, batch)
            if accelerator.is_main_process:
                plain = reference(**whole).loss
                (plain / 8).backward()
                found.note("loss", loss, plain)
                if accelerator.sync_gradients:
                    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
                    plain_optimizer.step()
                    plain_optimizer.zero_grad()
        accelerator.wait_for_everyone()
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(f"{broadcast_object_list([folder])[0]}/checkpoint-epoch-{epoch}")
            accelerator.wait_for_everyone()
    return found


def evaluate(accelerator, model, loader, batch_size: int) -> tuple:
    """Loss and accuracy as fine-tuning scripts compute them."""
    model.eval()
    losses, hits = [], []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(batch_size)))
        predictions = accelerator.pad_across_processes(outputs.logits.argmax(dim=-1), dim=1, pad_index=0)
        labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        wanted = labels[:, 1:]
        hits.append((predictions[:, :-1] == wanted)[wanted != -100])
    model.train()
    losses = torch.cat(losses)
    return losses.mean().item(), torch.cat(hits).float().mean().item(), len(losses)


def plain_evaluation(reference, lines: list, whole_batch: int) -> tuple:
    losses, hits = [], []
    for at in range(0, len(lines), whole_batch):
        batch = collate(lines[at: at + whole_batch])
        with torch.no_grad():
            outputs = reference(**batch)
        losses += [outputs.loss] * len(batch["labels"])
        wanted = batch["labels"][:, 1:]
        hits.append((outputs.logits.argmax(dim=-1)[:, :-1] == wanted)[wanted != -100])
    return torch.stack(losses).mean().item(), torch.cat(hits).float().mean().item(), len(losses)


def finetune(tp: int, pp: int, micro_batches: int) -> dict:
    """Fine-tuning with an evaluation after each epoch: perplexity, accuracy, the best weights kept."""
    import heapq as source
    import keyword as held_out

    torch.manual_seed(5)
    model = llama()
    reference = copy.deepcopy(model)

    def make_optimizer(of) -> tuple:
        decayed = [p for n, p in of.named_parameters() if not n.endswith(("bias", "norm.weight", "layernorm.weight"))]
        others = [p for n, p in of.named_parameters() if n.endswith(("bias", "norm.weight", "layernorm.weight"))]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=2e-3,
                                      eps=1e-6)
        return optimizer, transformers.get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=60)

    plugin = plugin_of(tp, pp, micro_batches, return_logits=True, gradient_clipping=0.0)
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    train_lines, held_lines = lines_of(source)[:150], lines_of(held_out)[:29]
    batch_size = 8 // micro_batches
    whole_batch = 8 * accelerator.state.mesh.dp
    train_loader = torch.utils.data.DataLoader(train_lines, batch_size=batch_size, collate_fn=collate)
    eval_loader = torch.utils.data.DataLoader(held_lines, batch_size=batch_size, collate_fn=collate)
    optimizer, scheduler = make_optimizer(model)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, eval_loader,
                                                                                 scheduler)
    plain_optimizer, plain_scheduler = make_optimizer(reference)
    found = Differences()
    for _ in range(2):
        for step, batch in enumerate(train_loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not accelerator.is_main_process:
                continue
            plain = reference(**collate(train_lines[step * whole_batch: (step + 1) * whole_batch])).loss
            plain.backward()
            plain_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            plain_optimizer.step()
            plain_scheduler.step()
            plain_optimizer.zero_grad()
            found.note("loss", loss, plain)
            found.note("norm", norm, plain_norm)
        mean, accuracy, entries = evaluate(accelerator, model, eval_loader, batch_size)
        if accelerator.is_main_process:
            plain_mean, plain_accuracy, plain_entries = plain_evaluation(reference, held_lines, whole_batch)
            found.note("perplexity", math.exp(mean), math.exp(plain_mean))
            found.note("accuracy", accuracy, plain_accuracy)
            found.note("samples", entries, plain_entries)
    return found


def dpo(tp: int, pp: int, micro_batches: int) -> dict:
    """Direct preference optimisation: the policy is prepared, the model it is compared with is PyTorch's."""
    import stat as rejected_source
    import token as chosen_source

    torch.manual_seed(6)
    model = gpt2()
    start = copy.deepcopy(model).eval().requires_grad_(False)
    reference = copy.deepcopy(model)

    def pairs(items: list) -> dict:
        """The chosen lines, then the rejected ones, as one batch of pairs [n, 2, width]."""
        both = collate([line for pair in items for line in pair])
        return {name: value.view(len(items), 2, -1) for name, value in both.items()}

    def log_likelihood(logits, labels):
        labels = labels[:, 1:]
        chosen = log_softmax(logits[:, :-1], -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return (chosen * (labels != -100)).sum(-1)

    def loss_of(policy, batch):
        flat = {name: value.flatten(0, 1) for name, value in batch.items()}
        inputs = {"input_ids": flat["input_ids"], "attention_mask": flat["attention_mask"]}
        with torch.no_grad():
            before = log_likelihood(start(**inputs).logits, flat["labels"]) if len(flat["labels"]) else torch.zeros(0)
        change = (log_likelihood(policy(**inputs).logits, flat["labels"]) - before).view(-1, 2)
        return -logsigmoid(0.1 * (change[:, 0] - change[:, 1])).mean()

    accelerator = Accelerator(megatron_lm_plugin=plugin_of(tp, pp, micro_batches, gradient_clipping=0.0))
    items = list(zip(lines_of(chosen_source), lines_of(rejected_source)))[:43]
    batch_size = 6 // micro_batches
    whole_batch = 6 * accelerator.state.mesh.dp
    loader = torch.utils.data.DataLoader(items, batch_size=batch_size, collate_fn=pairs)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    found = Differences()
    for step, batch in enumerate(loader):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.gather_for_metrics(loss.detach().repeat(len(batch["labels"]))).mean()
        if accelerator.is_main_process:
            plain = loss_of(reference, pairs(items[step * whole_batch: (step + 1) * whole_batch]))
            plain.backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            found.note("loss", mean, plain)
    found["weights"] = weights_apart(model, reference)
    return found


def run(scripts: dict) -> None:
    output, *layouts = sys.argv[1:]
    results = []
    for layout in layouts:
        name, *numbers = layout.split(",")
        results.append(scripts[name](*map(int, numbers)))
        fresh_states()
    write_results(output, results)


if __name__ == "__main__":
    run({"documented": documented, "finetune": finetune, "dpo": dpo})
