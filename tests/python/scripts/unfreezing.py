"""Freezes and unfreezes parameters between steps, saves in the middle of an accumulation and goes on, and compares with plain
PyTorch, whose frozen parameters have no gradient. Rank 0 writes what differs most as JSON. Arguments: output, then layouts tp,pp,options."""

import copy
import sys
import tempfile

from results import fresh_states, write_results
import torch
import transformers

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin

# What is trained in each step, by name: gradual unfreezing, back again, single biases, all.
PHASES = [lambda n: "ln_f" in n or ".h.1." in n] * 2 + [lambda n: ".h." in n] * 2 + [lambda n: True] * 2 + [
    lambda n: n.endswith(("mlp.c_fc.bias", "ln_1.bias"))] * 2 + [lambda n: "wte" not in n] + [lambda n: True] * 2


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=4, vocab_size=101, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def make_optimizer(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-3}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=5e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95), eps=1e-5)


def choose(model: torch.nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(PHASES[step](name))


def train(tp: int, pp: int, options: dict, folder: str) -> dict:
    kind = options.get("kind", "adamw")
    reference = make_model()
    model = copy.deepcopy(reference)
    plain, optimizer = make_optimizer(reference, kind), make_optimizer(model, kind)
    plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=1, gradient_clipping=0.0,
                              use_distributed_optimizer=options.get("zero") == "1")
    accelerator = Accelerator(megatron_lm_plugin=plugin, gradient_accumulation_steps=2,
                              mixed_precision=options.get("precision", "no"))
    choose(model, 0)
    model, optimizer = accelerator.prepare(model, optimizer)
    dp, rank = accelerator.state.mesh.dp, accelerator.state.mesh.coordinates["dp"]
    generator = torch.Generator().manual_seed(5)
    losses, norms = [], []
    for step in range(len(PHASES)):
        choose(model, step)
        choose(reference, step)
        for half in range(2):
            ids = torch.randint(0, 101, (4, 12), generator=generator)
            own = ids[rank * 4 // dp: (rank + 1) * 4 // dp]
            with accelerator.accumulate(model):
                loss = model(input_ids=own, labels=own).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.7)
                optimizer.step()
                optimizer.zero_grad()
            expected = reference(input_ids=ids, labels=ids).loss
            (expected / 2).backward()
            losses.append(abs(loss.item() - expected.item()) / expected.item())
            if step in (4, 8) and half == 0:  # between two calls of an accumulation, and spoiled after that
                accelerator.save_state(folder)
                accelerator.backward(model(input_ids=own, labels=own).loss)
                for parameter in model.parameters():
                    parameter.requires_grad_(True)
                accelerator.load_state(folder)
        expected_norm = torch.nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.grad is not None], 0.7)
        norms.append(abs(float(norm) - float(expected_norm)) / float(expected_norm))
        plain.step()
        plain.zero_grad()
    state = model.state_dict()
    result = {}
    if accelerator.is_main_process:
        result = {"loss": max(losses), "norm": max(norms),
                  "weight": max((state[n] - p).abs().max().item() for n, p in reference.named_parameters())}
    result["refusal"] = refusal(accelerator, model, optimizer, ids[:2])
    accelerator.free_memory()
    fresh_states()
    return result


def refusal(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> str:
    """What a change on one rank alone gives on this one; afterwards training goes on."""
    optimizer.zero_grad()
    bias = model.get_parameter("transformer.h.0.ln_1.bias")
    if accelerator.process_index == 1:
        bias.requires_grad_(False)
    try:
        model(input_ids=ids, labels=ids)
        text = ""
    except ValueError as error:
        text = str(error)
    bias.requires_grad_(True)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    return text


def main() -> None:
    output, *layouts = sys.argv[1:]
    results = []
    for number, layout in enumerate(layouts):
        tp, pp, *options = layout.split(",")
        results.append(train(int(tp), int(pp), dict(text.split("=") for text in options), f"{output}.state{number}"))
    write_results(output, results)


if __name__ == "__main__":
    main()
