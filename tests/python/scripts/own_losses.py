"""Gradients of losses that the script makes itself, against PyTorch's. Arguments: family, output, and layouts
"tp,pp,micro-batches[,keyword]". Rank 0 writes, for each layout, the largest error of each case relative to the largest element
of the gradient."""

import copy
import sys
from functools import partial

from results import fresh_states, write_results
import torch
from torch.nn.functional import cross_entropy, log_softmax, pad

from tessera import Accelerator
from tessera.utils import GPTTrainStep, MegatronLMPlugin, avg_losses_across_data_parallel_group, full_gradients
from train_like_torch import make_model

ROWS, SEQ = 4, 10  # of one data rank
KEYWORDS = {"keytokens": [3, 17, 40], "alpha": 2.0}


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


def batch_of(seed: int, rank: int) -> dict:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = torch.randint(0, 101, (ROWS, SEQ), generator=generator)
    labels = ids.clone()
    labels[:, : seed % 3] = -100
    return {"input_ids": ids, "labels": labels}


def smoothed(logits, ids):
    """Cross-entropy with label smoothing, and a term that punishes large logits."""
    shifted, targets = logits[:, :-1], ids[:, 1:]
    return cross_entropy(shifted.flatten(0, 1), targets.flatten(), label_smoothing=0.1) + 1e-2 * (logits ** 2).mean()


def distance(one, other):
    return (log_softmax(one, -1) - log_softmax(other, -1)).pow(2).mean()


class Case:
    """A prepared model and the same one in PyTorch."""

    def __init__(self, family: str, tp: int, pp: int, micro_batches: int, keyword: bool):
        model = make_model(family)
        self.reference = copy.deepcopy(model)
        self.micro_batches = micro_batches
        plugin = None
        if tp * pp > 1 or micro_batches > 1 or keyword:
            plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=micro_batches, gradient_clipping=0.0,
                                      custom_train_step_class=KeywordStep if keyword else None,
                                      custom_train_step_kwargs=KEYWORDS if keyword else None)
        self.accelerator = Accelerator(megatron_lm_plugin=plugin)
        self.dp, self.mine = self.accelerator.state.mesh.dp, self.accelerator.state.mesh.coordinates["dp"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.errors: dict = {}

    def everyone(self, seed: int) -> dict:
        parts = [batch_of(seed, rank) for rank in range(self.dp)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def compare(self, name: str, make_reference) -> None:
        """make_reference(): runs PyTorch's backward passes on what all data ranks have."""
        gradients = full_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.accelerator.is_main_process:
            return
        self.reference.zero_grad()
        make_reference()
        largest = max(p.grad.abs().max().item() for p in self.reference.parameters())
        self.errors[name] = max((gradients[n] - p.grad).abs().max().item()
                                for n, p in self.reference.named_parameters()) / largest

    def keyword(self) -> None:
        outputs = self.model(**batch_of(2, self.mine))
        self.accelerator.backward(outputs.loss * 0.5)

        def by_torch():
            losses = []
            for rank in range(self.dp):
                batch = batch_of(2, rank)
                for part in range(self.micro_batches):
                    rows = slice(part * ROWS // self.micro_batches, (part + 1) * ROWS // self.micro_batches)
                    ids = batch["input_ids"][rows]
                    targets = pad(batch["labels"][rows], (0, 1), value=-100)[:, 1:]
                    logits = self.reference(input_ids=ids).logits
                    token_losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
                    losses.append(weighted(ids, (targets != -100).float(), token_losses, **KEYWORDS))
            loss = torch.stack(losses).mean()
            (loss * 0.5).backward()
            self.errors["keyword loss"] = abs(loss.item() - outputs.loss.item()) / abs(loss.item())

        self.compare("keyword step", by_torch)

    def factors(self) -> None:
        model, backward, reference = self.model, self.accelerator.backward, self.reference
        backward(model(**batch_of(1, self.mine)).loss * 0.5)
        self.compare("scaled", lambda: (reference(**self.everyone(1)).loss * 0.5).backward())

        first, second = model(**batch_of(2, self.mine)), model(**batch_of(3, self.mine))
        unused = model(**batch_of(4, self.mine))  # contributes nothing
        backward(first.loss * 0.3 + second.loss)
        del unused
        self.compare("two forwards", lambda: (reference(**self.everyone(2)).loss * 0.3
                                              + reference(**self.everyone(3)).loss).backward())
        try:
            first.loss.backward()
            self.errors["second backward"] = 1.0
        except RuntimeError:
            self.errors["second backward"] = 0.0

        self.accelerator.gradient_accumulation_steps = 4
        for seed in range(5, 9):
            with self.accelerator.accumulate(model):
                backward(model(**batch_of(seed, self.mine)).loss)
                if seed < 8:  # accumulating: these do nothing
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        self.compare("accumulate", lambda: [(reference(**self.everyone(seed)).loss / 4).backward() for seed in range(5, 9)])
        self.accelerator.gradient_accumulation_steps = 1

    def logits(self) -> None:
        model, backward, reference = self.model, self.accelerator.backward, self.reference
        ids = batch_of(9, self.mine)["input_ids"]
        backward(smoothed(model(input_ids=ids).logits, ids))

        def one():
            for rank in range(self.dp):
                ids = batch_of(9, rank)["input_ids"]
                (smoothed(reference(input_ids=ids).logits, ids) / self.dp).backward()

        self.compare("own loss on logits", one)
        a, b = batch_of(10, self.mine)["input_ids"], batch_of(11, self.mine)["input_ids"]
        backward(distance(model(input_ids=a).logits, model(input_ids=b).logits))

        def two():
            for rank in range(self.dp):
                a, b = batch_of(10, rank)["input_ids"], batch_of(11, rank)["input_ids"]
                (distance(reference(input_ids=a).logits, reference(input_ids=b).logits) / self.dp).backward()

        self.compare("two logits in one loss", two)

    def close(self) -> dict:
        self.accelerator.free_memory()
        fresh_states()
        return self.errors


def main() -> None:
    family, output, *layouts = sys.argv[1:]
    results = []
    for layout in layouts:
        tp, pp, micro_batches, *kind = layout.split(",")
        case = Case(family, int(tp), int(pp), int(micro_batches), bool(kind))
        if kind:
            case.keyword()
        else:
            case.factors()
            case.logits()
        results.append(case.close())
    write_results(output, results)


if __name__ == "__main__":
    main()
