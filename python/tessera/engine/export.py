"""save_pretrained: whole weights from every rank into one Hugging Face folder, or into one of Tessera's where Transformers has
no such model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Optional

from tessera.checkpoint.saving import StagedFolder, on_main_rank
from tessera.engine.changed_model import saved_as
from tessera.errors import ConfigError
from tessera.logging import get_logger
from tessera.utils.other import save

logger = get_logger(__name__)

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shard_bytes(size: Any) -> int:
    """Bytes of "5GB", "200MB" or a number. Errors: ConfigError."""
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?B)\s*", str(size).upper())
    if not match:
        raise ConfigError(f"max_shard_size is {size!r}; give bytes, or text such as '5GB'")
    return int(float(match[1]) * _UNITS[match[2]])


def dtype_name(dtype: Any, default: str) -> str:
    name = str(dtype).replace("torch.", "") if dtype is not None else default
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"weights are saved as float32, bfloat16 or float16, not as {name}")
    return name


def save_pretrained(model: Any, folder: Path, state_dict: Optional[dict], max_shard_size: Any, dtype: Any) -> None:
    """The folder then holds this model and whatever was in it that is no model's; killed at any moment, the one before."""
    session, plan = model.session, model.session.plan
    name = dtype_name(dtype, plan.dtype)
    session.meet("model.save_pretrained()")
    if state_dict is not None and plan.change is not None:
        raise ConfigError("save_pretrained(state_dict=...) writes the config of the model given to prepare(), and the plugin has made "
                          "another one of it; leave state_dict out: the weights are gathered anyway")
    kind, base = saved_as(plan.architecture, plan.config_json)
    if session.heads.of_samples:  # what the first labels have said
        base = json.dumps({**json.loads(base), "problem_type": session.config.get("problem_type")})
    with StagedFolder(session.state.world, folder, "update") as staged:
        if state_dict is not None:
            on_main_rank(session.state.world, lambda: _write_given(model, staged.path, state_dict))
        elif kind is None:
            session.engine.save_tessera(staged.path, plan.architecture, name)
        else:
            session.engine.save_hf(staged.path, plan.architecture, base, name, shard_bytes(max_shard_size))
            if model.generation_config is not None:
                on_main_rank(session.state.world, lambda: _write_generation_config(model, staged.path))
        staged.publish()
    if state_dict is None:
        _tell(session, kind, folder)


def _write_generation_config(model: Any, folder: Path) -> None:
    model.generation_config.save_pretrained(str(folder))


def _write_given(model: Any, folder: Path, state_dict: dict) -> None:
    """A state dict that the caller has changed."""
    save(state_dict, folder / "model.safetensors", safe_serialization=True)
    model.config.save_pretrained(str(folder))


def _tell(session: Any, kind: Optional[str], folder: Path) -> None:
    change = session.plan.change
    if kind is None:
        what = f" ({', '.join(change.changes)})" if change else ""
        logger.warning(f"save_pretrained() wrote a Tessera folder to {folder}, as Transformers has no such model{what}: "
                       "tessera.causal_lm.CausalLM.from_pretrained(), model.init_from and `tessera generate` read it")
    elif change is not None and kind != session.kind:
        logger.warning(f"save_pretrained() wrote a model of the type {kind} to {folder}, which is what the plugin has made of the "
                       f"{session.kind}: from_pretrained() of AutoModelForCausalLM loads it")
