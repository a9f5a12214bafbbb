"""Numbers that users compare with Accelerate's and PyTorch's, where the last batch is short. Arguments: output, and layouts
"kind,tp,pp,micro-batches". Rank 0 writes what each kind found (a dict for each layout)."""

import copy
import logging
import os
import sys

from results import fresh_states, write_results
import torch
import transformers
from torch.nn.functional import cross_entropy

from own_losses import KEYWORDS, KeywordStep, weighted
from tessera import Accelerator
from tessera.errors import TrainingError
from tessera.utils import MegatronLMPlugin

BATCH, SEQ, VOCAB, RARE = 4, 10, 97, 96  # no row has the last token but where a test puts it


def make_model() -> torch.nn.Module:
    torch.manual_seed(11)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, vocab_size=VOCAB,
        max_position_embeddings=16, tie_word_embeddings=False, initializer_range=0.3))


def make_rows(count: int) -> list:
    generator = torch.Generator().manual_seed(count)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, RARE, (count, SEQ), generator=generator)]


def loader_of(count: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(make_rows(count), batch_size=BATCH)


def whole(rows: list) -> dict:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def token_mean(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make_accelerator(tp: int, pp: int, micro_batches: int, **fields) -> Accelerator:
    if tp * pp * micro_batches == 1 and not fields:
        return Accelerator()
    return Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=micro_batches,
                                                           gradient_clipping=0.0, **fields))


def evaluated(accelerator, model, loader) -> dict:
    """What scripts gather in an evaluation, each as one list over all batches."""
    found = {name: [] for name in ("repeated", "own repeated", "scalar", "predictions", "objects", "mixed", "flat")}
    gather = accelerator.gather_for_metrics
    model.eval()
    for batch in loader:
        with torch.no_grad():
            loss, logits = model(**batch).loss, model(input_ids=batch["input_ids"]).logits
        predictions = logits.argmax(-1)
        found["repeated"].append(gather(loss.repeat(BATCH)))
        found["own repeated"].append(gather(token_mean(logits, batch["input_ids"]).repeat(BATCH)))
        found["scalar"].append(gather(loss).reshape(-1))
        found["predictions"].append(gather((predictions, batch["labels"]))[0])
        found["flat"].append(gather((predictions == batch["labels"]).flatten()))
        found["objects"] += gather([str(row.tolist()) for row in batch["input_ids"]])
        mixed = gather({"ids": batch["input_ids"], "words": ["word"] * len(batch["input_ids"])})
        found["mixed"] += [len(each["words"]) for each in (mixed if isinstance(mixed, list) else [mixed])]
    return {name: torch.cat(values).tolist() if torch.is_tensor(values[0]) else values for name, values in found.items()}


def by_accelerate(model, count: int) -> dict:
    """The same by Accelerate in this process alone."""
    import accelerate

    hidden = {name: os.environ.pop(name) for name in list(os.environ)
              if name.startswith(("ACCELERATE_", "MASTER_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        found = evaluated(accelerator, *accelerator.prepare(model, loader_of(count)))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return found
    finally:
        os.environ.update(hidden)


def metrics(tp: int, pp: int, micro_batches: int) -> dict:
    model = make_model()
    reference = copy.deepcopy(model)
    accelerator = make_accelerator(tp, pp, micro_batches)
    model, loader = accelerator.prepare(model, loader_of(17))
    found = evaluated(accelerator, model, loader)
    expected = by_accelerate(reference, 17) if accelerator.is_main_process else {}
    return {"found": found, "expected": expected, "same steps": accelerator.state.mesh.dp * micro_batches == 1}


def weights_apart(accelerator, model, reference) -> float:
    state = model.state_dict()
    if not accelerator.is_main_process:
        return 0.0
    return max((state[name] - p).abs().max().item() / p.abs().max().item() for name, p in reference.named_parameters())


def train_apart(tp: int, pp: int, micro_batches: int, loss_of, plain_loss_of, **fields) -> dict:
    """Steps of which the last ones leave data ranks with fewer samples than others, or with none."""
    model = make_model()
    reference = copy.deepcopy(model)
    accelerator = make_accelerator(tp, pp, micro_batches, **fields)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    whole_batch = BATCH * accelerator.state.mesh.dp * micro_batches
    apart, losses = {}, []
    for count in (whole_batch + 1, whole_batch + 3):
        for batch in accelerator.prepare(loader_of(count)):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        rows = make_rows(count)
        for at in range(0, count, whole_batch):
            plain_optimizer.zero_grad()
            plain = plain_loss_of(reference, whole(rows[at: at + whole_batch]))
            plain.backward()
            plain_optimizer.step()
            if loss_of is not own_loss:  # which is that of this rank alone
                apart[f"loss of {at} of {count}"] = abs(losses[at // whole_batch] - plain.item()) / plain.item()
        losses.clear()
        apart[f"weights after {count}"] = weights_apart(accelerator, model, reference)
    return apart


def own_loss(model, batch):
    return token_mean(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])


def models_loss(model, batch):
    return model(**batch).loss


def keyword_loss(reference, batch):
    ids = batch["input_ids"]
    losses = cross_entropy(reference(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    mask = torch.ones_like(ids, dtype=torch.float32)
    mask[:, -1] = 0
    return weighted(ids, mask, torch.nn.functional.pad(losses.view(len(ids), -1), (0, 1)), **KEYWORDS)


def logits(*layout: int) -> dict:
    return train_apart(*layout, own_loss, own_loss)


def returned(*layout: int) -> dict:
    return train_apart(*layout, models_loss, models_loss, return_logits=True)


def steps(*layout: int) -> dict:
    return train_apart(*layout, models_loss, keyword_loss, custom_train_step_class=KeywordStep, custom_train_step_kwargs=KEYWORDS)


class Kept(logging.Handler):
    """The warnings, one after the other."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def broken(tp: int, pp: int, micro_batches: int) -> dict:
    """A token whose embedding is not a number, in one sample of the batch."""
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[RARE] = float("nan")
    accelerator = make_accelerator(tp, pp, micro_batches)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kept = Kept()
    logging.getLogger("tessera").addHandler(kept)
    ids = torch.randint(0, RARE, (BATCH, SEQ))
    if accelerator.state.mesh.coordinates["dp"] == accelerator.state.mesh.dp - 1:
        ids[2, 5] = RARE
    good = 0
    try:
        while True:
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            good += 1
    except TrainingError as error:
        end = str(error)
    logging.getLogger("tessera").removeHandler(kept)
    return {"warnings": kept.lines, "end": end, "steps": good, "data rank": accelerator.state.mesh.dp - 1,
            "skipped": optimizer.step_was_skipped}


KINDS = {"metrics": metrics, "logits": logits, "returned": returned, "steps": steps, "broken": broken}


def main() -> None:
    output, *layouts = sys.argv[1:]
    results = []
    for layout in layouts:
        kind, *numbers = layout.split(",")
        results.append(KINDS[kind](*map(int, numbers)))
        fresh_states()
    write_results(output, results)


if __name__ == "__main__":
    main()
