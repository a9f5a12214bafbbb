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


def write_stage2(model, folder: Path, ranks: int, padded: bool = False) -> Path:
    """Each group in a row, padded to a multiple of twice the ranks and cut in equal parts; `padded`: each parameter to 4 elements,
    as later versions can."""
    tag, names = _begin(folder), _groups(model)
    parameters = {name: value.detach().float().flatten() for name, value in model.named_parameters()}
    parts, paddings = [], []
    for group in names:
        pads = [-parameters[name].numel() % 4 if padded else 0 for name in group]
        row = torch.cat([torch.cat([parameters[name], torch.full((pad,), 9e9)]) for name, pad in zip(group, pads)])
        row = torch.cat([row, torch.full((-row.numel() % (2 * ranks),), 7e7)])
        parts.append(row.chunk(ranks))
        paddings.append(pads)
    torch.save(_state(model, names), tag / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        more = {"param_alignment_paddings": paddings} if padded else {}
        torch.save(_optimizer(2, ranks, "single_partition_of_fp32_groups", [part[rank].clone() for part in parts], **more),
                   tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_stage3(model, folder: Path, ranks: int, frozen: tuple = ()) -> Path:
    """Each parameter in parts of ceil(elements / ranks), those of a rank in a row that is cut into groups."""
    tag = _begin(folder)
    names = [[name for name in group if name not in frozen] for group in _groups(model)]
    parameters = {name: value.detach().float() for name, value in model.named_parameters()}

    def part(name, rank):
        flat = parameters[name].flatten()
        share = math.ceil(flat.numel() / ranks)
        return torch.cat([flat, torch.full((share * ranks - flat.numel(),), 5e5)])[rank * share:(rank + 1) * share].clone()

    for rank in range(ranks):
        state = _state(model, names, frozen_param_shapes=OrderedDict((name, parameters[name].shape) for name in frozen),
                       frozen_param_fragments=OrderedDict((name, part(name, rank)) for name in frozen))
        state["module"] = OrderedDict((name, torch.empty(0)) for name in state["module"])
        torch.save(state, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        row = torch.cat([part(name, rank) for group in names for name in group])
        groups = [row[:101].clone(), row[101:].clone()]  # a parameter goes on in the next one
        torch.save(_optimizer(3, ranks, "fp32_flat_groups", groups), tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_universal(model, folder: Path) -> Path:
    for name, value in model.named_parameters():
        place = folder / "zero" / name
        place.mkdir(parents=True)
        torch.save({"param": value.detach().float(), "cat_dim": 0}, place / "fp32.pt")
    return folder
