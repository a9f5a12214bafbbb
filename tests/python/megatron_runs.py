"""Runs as Megatron-LM saved them: weights, Adam's moments and main weights, in each of its optimizers' forms.

Made from what is known of Megatron's formats, not from Tessera's reader or writer. Weights, first and second moments are three
models of Transformers, which go to ranks in the same way."""

import copy
import pickle
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from megatron_writer import rank_states, save

SETTINGS = {"global_batch_size": 4, "micro_batch_size": 2, "seq_length": 12, "train_iters": 20, "lr": 2e-3, "min_lr": 2e-4,
            "lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 5, "lr_warmup_fraction": None, "weight_decay": 0.1,
            "start_weight_decay": 0.1, "end_weight_decay": 0.1, "weight_decay_incr_style": "constant", "adam_beta1": 0.9,
            "adam_beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0, "optimizer": "adam", "seed": 77, "rampup_batch_size": None,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "eval_interval": 1000, "eval_iters": 0, "save_interval": 1000,
            "split": "100,0,0", "train_samples": None, "bf16": False, "fp16": False, "overlap_grad_reduce": False}


def lr_at(updates: int) -> float:
    """By what SETTINGS say."""
    import math
    if updates <= 5:
        return 2e-3 * updates / 5
    return 2e-4 + 0.5 * (1 + math.cos(math.pi * (updates - 5) / 15)) * (2e-3 - 2e-4)


def optimizer_of(model: Any) -> torch.optim.AdamW:
    """Biases and norms have no weight decay."""
    values = list(model.parameters())
    return torch.optim.AdamW([{"params": [v for v in values if v.dim() > 1], "weight_decay": 0.1},
                              {"params": [v for v in values if v.dim() == 1], "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)


def train(model: Any, optimizer: torch.optim.AdamW, tokens: torch.Tensor, first: int, steps: int, loss: Any = None) -> None:
    """Updates first, first + 1, ... of a run, each on a batch of the one sample `tokens` [seq + 1]."""
    model.train()
    for update in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(update)
        logits = model(tokens[None, :-1]).logits[0]
        torch.nn.functional.cross_entropy(logits, tokens[1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def moments(model: Any, optimizer: torch.optim.AdamW) -> Tuple[Any, Any]:
    """The optimizer's two as models."""
    found = []
    for kind in ("exp_avg", "exp_avg_sq"):
        each = copy.deepcopy(model)
        with torch.no_grad():
            for to, parameter in zip(each.parameters(), model.parameters()):
                to.copy_(optimizer.state[parameter][kind])
        found.append(each)
    return found[0], found[1]


def flat(value: Any, prefix: str = "") -> Dict[str, torch.Tensor]:
    """Tensors by their paths, in the order in which a model registers its parameters."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    out: Dict[str, torch.Tensor] = {}
    for key, each in value.items() if isinstance(value, dict) else ():
        out |= flat(each, f"{prefix}.{key}" if prefix else key)
    names = list(out)
    if not prefix and "word_embeddings_for_head.weight" in names and any(name.startswith("lm_head.") for name in names):
        names.remove("word_embeddings_for_head.weight")
        names.insert(next(i for i, name in enumerate(names) if name.startswith("lm_head.")), "word_embeddings_for_head.weight")
    return {name: out[name] for name in names}


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    return {key: cast(each, dtype) for key, each in value.items()} if isinstance(value, dict) else value


def group_settings(decay: float, updates: Optional[int]) -> Dict[str, Any]:
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1 * decay, "bias_correction": True, "wd_mult": decay,
                "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return settings if updates is None else settings | {"step": updates}


def plain(parameters: Dict[str, List[torch.Tensor]], updates: int, torch_step: bool) -> Tuple[Dict[str, Any], List[List[torch.Tensor]]]:
    """param_groups and state of torch's kind, and main weights by group."""
    groups, state, masters, number = [], {}, [], 0
    for decay in (1.0, 0.0):
        names = [name for name, (main, _, _) in parameters.items() if (main.dim() > 1 and not name.endswith(".bias")) == (decay == 1)]
        groups.append(group_settings(decay, None if torch_step else updates) | {"params": list(range(number, number + len(names)))})
        masters.append([parameters[name][0] for name in names])
        for name in names:
            _, average, squares = parameters[name]
            state[number] = {"exp_avg": average, "exp_avg_sq": squares}
            if torch_step:
                state[number]["step"] = torch.tensor(float(updates))
            number += 1
    return {"state": state, "param_groups": groups}, masters


def buffer(parameters: List[Tuple[bool, List[torch.Tensor]]], bucket_size: Optional[int]) -> Dict[str, Any]:
    """The three long tensors: parameters from the last to the first, in buckets. First as the buffer is in memory, with the
    ends of its buckets at multiples of 128 elements, then without what pads these ends."""
    def up(value: int, multiple: int) -> int:
        return -(-value // multiple) * multiple
    places, buckets, at, begin = [], [], 0, 0
    open_bucket = False
    def end(where: int) -> int:
        nonlocal begin, open_bucket
        buckets.append((begin, where))
        begin, open_bucket = up(where, 128), False
        return begin
    for shared, values in reversed(parameters):
        at = up(at, 64)
        if shared and open_bucket:
            at = end(at)
        places.append((at, values))
        at += values[0].numel()
        open_bucket = True
        if shared or (bucket_size is not None and at - begin >= bucket_size):
            at = end(at)
    if open_bucket:
        end(at)
    out: Dict[str, Any] = {}
    for kind, name in enumerate(("param", "exp_avg", "exp_avg_sq")):
        whole = torch.zeros(begin)
        for place, values in places:
            whole[place:place + values[kind].numel()] = values[kind].flatten()
        out[name] = torch.cat([whole[first:last] for first, last in buckets])
    return out | {"numel_unpadded": out["param"].numel()}


def schedule_state(updates: int) -> Dict[str, Any]:
    return {"max_lr": 2e-3, "lr_warmup_steps": 20, "num_steps": 4 * updates, "lr_decay_style": "cosine", "lr_decay_steps": 80, "min_lr": 2e-4,
            "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 80}


def write_run(folder: Path, model: Any, averages: Any, squares: Any, *, updates: int, kind: str = "fp32", iteration: Optional[int] = None,
              torch_step: bool = False, bucket_size: Optional[int] = None, tp: int = 1, pp: int = 1, vpp: int = 1, tied: bool = True,
              change: Any = None, distributed: Any = None, **options: Any) -> Path:
    """A checkpoint that goes on. `kind`: fp32, bf16, fp16, or "distributed bf16"; `distributed(whole)` may change what
    distrib_optim.pt holds, `change(state, tp, pp)` a rank's dictionary."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind.split()[-1], torch.float32)
    iteration = updates if iteration is None else iteration
    settings = SETTINGS | {"consumed_train_samples": 4 * iteration, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    if bucket_size is not None:  # the optimizer's own, whatever the arguments then say
        settings |= {"overlap_grad_reduce": True, "ddp_bucket_size": bucket_size}
    options = settings | {"tp": tp, "pp": pp, "vpp": vpp, "iteration": iteration} | options
    kinds = [rank_states(each, **options) for each in (model, averages, squares)]
    states, others = kinds[0], {}
    for (r, p), state in states.items():
        keys = ["model"] if vpp == 1 else [f"model{v}" for v in range(vpp)]
        chunks = []
        for key in keys:
            parts = [flat(each[r, p][key]) for each in kinds]
            chunks.append({name: [part[name].clone() for part in parts] for name in parts[0]})
            state[key] = cast(state[key], dtype)
        everything = {f"{v}.{name}": values for v, chunk in enumerate(chunks) for name, values in chunk.items()}
        if kind.startswith("distributed"):
            state["optimizer"] = {"optimizer": {"param_groups": [group_settings(1.0, updates), group_settings(0.0, updates)]}}
            whole: Dict[Any, Any] = {"buckets_coalesced": True}
            for v, chunk in enumerate(chunks):
                shared = [(tied and pp > 1 and ("word_embeddings" in name or "output_layer.weight" in name), values) for name, values in chunk.items()]
                whole[v] = {(dtype, torch.float32): buffer(shared, bucket_size if p == 0 and v == 0 else None)}
            others[r, p] = distributed(whole) if distributed else whole
        else:
            inner, masters = plain(everything, updates, torch_step)
            state["optimizer"] = inner if kind == "fp32" else {"optimizer": inner, "fp32_from_fp16_params": masters}
        if kind.endswith("fp16"):
            state["optimizer"]["grad_scaler"] = {"scale": torch.tensor([1024.0]), "growth_tracker": 17, "hysteresis_tracker": 1}
        state["opt_param_scheduler"] = schedule_state(updates)
        if change:
            change(state, r, p)
    save(folder, states, iteration)
    for (r, p), whole in others.items():
        rank = f"mp_rank_{r:02d}" + (f"_{p:03d}" if pp > 1 else "")
        torch.save(whole, folder / f"iter_{iteration:07d}" / rank / "distrib_optim.pt")
    return folder


def stacked(tensors: Dict[str, torch.Tensor], layers: int) -> Dict[str, torch.Tensor]:
    """Those of equal layers as one, as torch_dist has them."""
    out = dict(tensors)
    for name in [name for name in tensors if ".layers.0." in name]:
        each = [out.pop(name.replace(".layers.0.", f".layers.{i}.")) for i in range(layers)]
        out[name.replace(".layers.0.", ".layers.")] = torch.stack(each)
    return out


def flat_pieces(name: str, value: torch.Tensor, layers: int) -> Dict[str, torch.Tensor]:
    """Two data ranks' parts of each layer, under NAME@OFFSETS."""
    out = {}
    for layer, block in enumerate(value.reshape(layers, -1)):
        for first, last in ((0, min(100, block.numel() // 2)), (min(100, block.numel() // 2), block.numel())):
            offsets = [layer if layers > 1 else 0] + [0] * (value.dim() - 1) + [first]
            out[f"{name}@{','.join(map(str, offsets))}"] = block[first:last].reshape([1] * value.dim() + [-1]).clone()
    return out


def join_pieces(path: Path, shapes: Dict[str, Any]) -> None:
    """Makes, in `.metadata`, one tensor of what flat_pieces made of each."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
    with open(path, "rb") as file:
        metadata = pickle.load(file)
    found: Dict[str, Any] = {}
    for full in [name for name in metadata.state_dict_metadata if "@" in name]:
        name, offsets = full.split("@")
        offset = torch.Size(map(int, offsets.split(",")))
        facts = metadata.state_dict_metadata.pop(full)
        found.setdefault(name, []).append((offset, facts))
        index = next(index for index in metadata.storage_data if index.fqn == full)
        metadata.storage_data[MetadataIndex(name, offset)] = metadata.storage_data.pop(index)
    for name, chunks in found.items():
        size = torch.Size(max(offset[d] + facts.size[d] for offset, facts in chunks) for d in range(len(chunks[0][0])))
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            chunks[0][1].properties, size, [ChunkStorageMetadata(offset, facts.size) for offset, facts in chunks])
    metadata.mcore_data = shapes
    path.write_bytes(pickle.dumps(metadata))


def write_dist_run(folder: Path, model: Any, averages: Any, squares: Any, *, updates: int, kind: str = "fp32", iteration: Optional[int] = None,
                   layers_apart: bool = False, torch_step: bool = False, change: Any = None, **options: Any) -> Path:
    """The same of the format torch_dist, by torch.distributed.checkpoint. `kind`: fp32, bf16, fp16 of the plain optimizer; before that
    "reshardable" or "flat", the distributed one's fully_reshardable and fully_sharded_model_space, whose tensors Megatron Core stored flat
    until 0.15. `change(state, tensors)` may change what common.pt holds, and the tensors and blobs."""
    import torch.distributed.checkpoint as dcp
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind.split()[-1], torch.float32)
    iteration = updates if iteration is None else iteration
    settings = SETTINGS | {"consumed_train_samples": 4 * iteration, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    states = [rank_states(each, **(settings | {"era": "core te", "iteration": iteration} | options))[0, 0] for each in (model, averages, squares)]
    common = states[0]
    parts = [{name: value.clone() for name, value in flat(state.pop("model")).items()} for state in states]
    if not layers_apart:
        parts = [stacked(part, model.config.num_hidden_layers) for part in parts]
    tensors: Dict[str, Any] = {name: value.to(dtype) for name, value in parts[0].items()}
    moved = kind.endswith("fp16")
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 17, "hysteresis_tracker": 1}
    groups = [group_settings(decay, None if torch_step else updates) for decay in (1.0, 0.0)]
    inner: Dict[str, Any] = {"param_groups": groups}
    if torch_step:
        inner["state"] = {"common_step": torch.tensor(float(updates))}
    shapes: Dict[str, Any] = {}
    names = ["param" if "reshardable" in kind else "fp32_param", "exp_avg", "exp_avg_sq"]
    for name, values in zip(names, parts):
        for key, value in values.items() if name != "fp32_param" or kind != "fp32" else ():
            own = f"optimizer.state.{name}.{key}"
            if "flat" in kind:
                shapes[own] = {"nd_reformulated_orig_global_shape": tuple(value.shape)}
                tensors |= flat_pieces(own, value, value.shape[0] if ".layers." in key and not layers_apart else 1)
            else:
                tensors[own] = value
    if "flat" in kind:
        common["optimizer"] = {"param_state_sharding_type": "fully_sharded_model_space"}
        tensors["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"] = [inner]
        if moved:
            tensors["optimizer.distributed.dp_group_idx_0.grad_scaler/shard_0_1"] = [scaler]
    elif kind == "fp32":
        common["optimizer"] = inner
    else:
        common["optimizer"] = {"optimizer": inner} | ({"grad_scaler": scaler} if moved else {})
        if "reshardable" in kind:
            common["optimizer"]["param_state_sharding_type"] = "fully_reshardable"
    common["opt_param_scheduler"] = schedule_state(updates)
    if change:
        change(common, tensors)
    place = folder / f"iter_{iteration:07d}"
    dcp.save(tensors, checkpoint_id=place, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    if shapes:
        join_pieces(place / ".metadata", shapes)
    torch.save(common, place / "common.pt")
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder
