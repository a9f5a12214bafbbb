"""Steps torch's optimizer, prepares it and goes on, loads its state into a prepared one, and takes the state back to torch; rank 0
writes what differs most from plain PyTorch as JSON. Arguments: output, then layouts tp,pp,zero,kind."""

import copy
import sys

from results import fresh_states, write_results
import torch
import transformers

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin, full_optimizer_state

KINDS = {"adamw": lambda groups: torch.optim.AdamW(groups, lr=5e-3, eps=1e-5),
         "adam": lambda groups: torch.optim.Adam(groups, lr=5e-3, eps=1e-5),
         "sgd": lambda groups: torch.optim.SGD(groups, lr=5e-2, momentum=0.9)}


def make(kind: str) -> tuple:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, vocab_size=101,
        max_position_embeddings=16))
    return model, grouped(model, kind)


def grouped(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    return KINDS[kind]([{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
                        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-3}])


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def refusals(optimizer: torch.optim.Optimizer, whole: dict, main: bool) -> list:
    """What broken states give, on this rank; the others' is never looked at."""
    def shape(state: dict) -> None:
        state["state"][0][next(iter(set(state["state"][0]) - {"step"}))] = torch.zeros(3)

    def kind(state: dict) -> None:
        state["state"][0]["square_avg"] = torch.zeros(1)

    def size(state: dict) -> None:
        state["param_groups"][0]["params"].pop()

    def groups(state: dict) -> None:
        state["param_groups"].pop()

    texts = []
    for spoil in (shape, kind, size, groups):
        state = copy.deepcopy(whole)
        if main:
            spoil(state)
        try:
            optimizer.load_state_dict(state)
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def go(tp: int, pp: int, zero: bool, kind: str) -> dict:
    reference, plain = make(kind)
    batches = torch.randint(0, 101, (6, 4, 12), generator=torch.Generator().manual_seed(5))
    for number in range(2):
        for layer in (p for n, p in reference.named_parameters() if "layers.1." in n):
            layer.requires_grad_(number > 0)  # fewer steps than the others
        step(reference, plain, batches[number])
    model = copy.deepcopy(reference)
    optimizer = grouped(model, kind)
    optimizer.load_state_dict(plain.state_dict())
    plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=1, gradient_clipping=0.0,
                              use_distributed_optimizer=zero)
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer)
    dp, rank, main = accelerator.state.mesh.dp, accelerator.state.mesh.coordinates["dp"], accelerator.is_main_process
    losses = []

    def both(number: int) -> None:
        own = batches[number][rank * 4 // dp: (rank + 1) * 4 // dp]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(abs(loss.item() - step(reference, plain, batches[number])))

    both(2)
    taken = full_optimizer_state(optimizer)
    assert bool(taken) == main
    optimizer.load_state_dict({"state": {}, "param_groups": plain.state_dict()["param_groups"]})  # forgets everything
    emptied = full_optimizer_state(optimizer)
    optimizer.load_state_dict(taken)
    texts = refusals(optimizer, taken, main)
    optimizer.load_state_dict(optimizer.state_dict())  # options alone: moments stay
    both(3)
    weights, state = model.state_dict(), full_optimizer_state(optimizer)
    result = {"refusals": texts}
    if main:
        again = copy.deepcopy(reference)
        again.load_state_dict(weights)
        torch_again = grouped(again, kind)
        torch_again.load_state_dict(state)
        for number in (4, 5):
            losses.append(abs(step(again, torch_again, batches[number]) - step(reference, plain, batches[number])))
        result.update(loss=max(losses), emptied=len(emptied["state"]), weight=max(
            (p - q).abs().max().item() for p, q in zip(again.parameters(), reference.parameters())))
    accelerator.free_memory()
    fresh_states()
    return result


def main() -> None:
    output, *layouts = sys.argv[1:]
    results = []
    for layout in layouts:
        tp, pp, zero, kind = layout.split(",")
        results.append(go(int(tp), int(pp), zero == "1", kind))
    write_results(output, results)


if __name__ == "__main__":
    main()
