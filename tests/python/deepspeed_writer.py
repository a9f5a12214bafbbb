"""Checkpoints as DeepSpeed lays them out (utils/zero_to_fp32.py and ds_to_universal.py say how they are read), without it."""

import math
from collections import OrderedDict
from pathlib import Path

import torch


def _state(model, names, **more) -> dict:
    parameters = dict(model.named_parameters())
    shared = {name: source for name in model.state_dict(keep_vars=True) for source, value in parameters.items()
              if name != source and model.state_dict(keep_vars=True)[name] is value}
    return {"module": OrderedDict((name, value.detach().bfloat16()) for name, value in model.state_dict().items()),
            "buffer_names": [name for name, _ in model.named_buffers()], "optimizer": None,
            "param_shapes": [OrderedDict((name, parameters[name].shape) for name in group) for group in names],
            "frozen_param_shapes": OrderedDict(), "frozen_param_fragments": OrderedDict(), "shared_params": shared,
            "dp_world_size": 1, "mp_world_size": 1, "ds_version": "0.19.8", **more}


def _optimizer(stage: int, ranks: int, groups_name: str, groups: list, **more) -> dict:
    return {"optimizer_state_dict": {"zero_stage": stage, "partition_count": ranks, groups_name: groups, **more},
            "ds_config": {"zero_optimization": {"stage": stage}}, "ds_version": "0.19.8"}


def _groups(model) -> list:
    """Those with weight decay and those without, as scripts have them."""
    decayed = [name for name, value in model.named_parameters() if value.dim() > 1]
    return [decayed, [name for name, value in model.named_parameters() if value.dim() <= 1]]


def _begin(folder: Path) -> Path:
    (folder / "global_step7").mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    return folder / "global_step7"


def _values(model, moments) -> dict:
    """fp32 weights and moments by parameter, as DeepSpeed's base optimizer calls them."""
    models = {"fp32": model} | (dict(zip(("exp_avg", "exp_avg_sq"), moments)) if moments else {})
    return {kind: {name: value.detach().float().flatten() for name, value in each.named_parameters()} for kind, each in models.items()}


def _state_of(parts: dict, updates: int) -> dict:
    """What Adam keeps of groups, if anything: parts[kind][group]."""
    kinds = [kind for kind in parts if kind != "fp32"]
    count = len(parts["fp32"]) if kinds else 0
    return {"state": {group: {"step": torch.tensor(float(updates))} | {kind: parts[kind][group] for kind in kinds}
                      for group in range(count)}, "param_groups": [{"lr": 1e-3}] * count}


def write_stage2(model, folder: Path, ranks: int, padded: bool = False, moments=None, updates: int = 3) -> Path:
    """Each group in a row, padded to a multiple of twice the ranks and cut in equal parts; `padded`: each parameter to 4 elements,
    as later versions can."""
    tag, names, values = _begin(folder), _groups(model), _values(model, moments)
    pads = [[-values["fp32"][name].numel() % 4 if padded else 0 for name in group] for group in names]

    def cut(kind: str, group: int):
        row = torch.cat([torch.cat([values[kind][name], torch.full((pad,), 9e9)]) for name, pad in zip(names[group], pads[group])])
        return torch.cat([row, torch.full((-row.numel() % (2 * ranks),), 7e7)]).chunk(ranks)

    torch.save(_state(model, names, global_steps=updates, global_samples=4 * updates), tag / "mp_rank_00_model_states.pt")
    cuts = {kind: [cut(kind, group) for group in range(len(names))] for kind in values}
    for rank in range(ranks):
        parts = {kind: [part[rank].clone() for part in of_groups] for kind, of_groups in cuts.items()}
        more = {"param_alignment_paddings": pads} if padded else {}
        torch.save(_optimizer(2, ranks, "single_partition_of_fp32_groups", parts["fp32"], base_optimizer_state=_state_of(parts, updates),
                              **more), tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_stage3(model, folder: Path, ranks: int, frozen: tuple = (), moments=None, updates: int = 3) -> Path:
    """Each parameter in parts of ceil(elements / ranks), those of a rank in a row that is cut into groups."""
    tag, values = _begin(folder), _values(model, moments)
    names = [[name for name in group if name not in frozen] for group in _groups(model)]
    shapes = {name: value.shape for name, value in model.named_parameters()}

    def part(kind, name, rank):
        flat = values[kind][name]
        share = math.ceil(flat.numel() / ranks)
        return torch.cat([flat, torch.full((share * ranks - flat.numel(),), 5e5)])[rank * share:(rank + 1) * share].clone()

    for rank in range(ranks):
        state = _state(model, names, frozen_param_shapes=OrderedDict((name, shapes[name]) for name in frozen),
                       frozen_param_fragments=OrderedDict((name, part("fp32", name, rank)) for name in frozen),
                       global_steps=updates, global_samples=4 * updates)
        state["module"] = OrderedDict((name, torch.empty(0)) for name in state["module"])
        torch.save(state, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        rows = {kind: torch.cat([part(kind, name, rank) for group in names for name in group]) for kind in values}
        parts = {kind: [row[:101].clone(), row[101:].clone()] for kind, row in rows.items()}  # a parameter goes on in the next one
        torch.save(_optimizer(3, ranks, "fp32_flat_groups", parts["fp32"], optimizer_state_dict=_state_of(parts, updates)),
                   tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_universal(model, folder: Path, moments=None, updates: int = 3) -> Path:
    """A tied weight's second name has the weight, and no moments."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    state = _state(model, _groups(model), global_steps=updates, global_samples=4 * updates)
    for kind, values in _values(model, moments).items():
        second = {name: values[source] for name, source in state["shared_params"].items()} if kind == "fp32" else {}
        for name, value in (values | second).items():
            place = folder / "zero" / name
            place.mkdir(parents=True, exist_ok=True)
            torch.save({"param": value.view(shapes[state["shared_params"].get(name, name)]), "cat_dim": 0}, place / f"{kind}.pt")
            if kind == "exp_avg":
                torch.save(torch.tensor(float(updates)), place / "step.pt")
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return folder
