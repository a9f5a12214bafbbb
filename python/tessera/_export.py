"""save_pretrained: whole weights from every rank into one Hugging Face folder, or into one of Tessera's where Transformers has
no such model."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Optional

from tessera._changed_model import saved_as
from tessera.errors import ConfigError
from tessera.logging import get_logger

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
    session = model.session
    main = session.state.is_main_process
    name = dtype_name(dtype, session.dtype)
    session.meet("model.save_pretrained()")
    if state_dict is not None:
        if session.change is not None:
            raise ConfigError("save_pretrained(state_dict=...) writes the config of the model given to prepare(), and the plugin has made "
                              "another one of it; leave state_dict out: the weights are gathered anyway")
        if main:
            _save_given(model, folder, state_dict)
        session.state.wait_for_everyone()
        return
    staging = folder / f".saving-{os.getpid()}"
    kind, base = saved_as(session.architecture, session.config_json)
    if main:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        target = staging if main else folder
        if kind is None:
            session.engine.save_tessera(target, session.architecture, name)
        else:
            session.engine.save_hf(target, session.architecture, base, name, shard_bytes(max_shard_size))
        if main:
            _publish(staging, folder)
    finally:
        if main:
            shutil.rmtree(staging, ignore_errors=True)
    if kind is None:
        what = f" ({', '.join(session.change.changes)})" if session.change else ""
        logger.warning(f"save_pretrained() wrote a Tessera folder to {folder}, as Transformers has no such model{what}: tessera.causal_lm.CausalLM.from_pretrained(), model.init_from and `tessera "
                       "generate` read it")
    elif main and model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))
    if session.change is not None and kind not in (None, session.kind):
        logger.warning(f"save_pretrained() wrote a model of the type {kind} to {folder}, which is what the plugin has made of the "
                       f"{session.kind}: from_pretrained() of AutoModelForCausalLM loads it")
    session.state.wait_for_everyone()


def _publish(staging: Path, folder: Path) -> None:
    """Moves the new files into place; weights and descriptions of an earlier save that are not among them go."""
    new = sorted(staging.iterdir())
    for path in new:
        os.replace(path, folder / path.name)
    names = {path.name for path in new}
    for old in (*folder.glob("model*.safetensors*"), folder / "config.json", folder / "tessera.json"):
        if old.name not in names:
            old.unlink(missing_ok=True)


def _save_given(model: Any, folder: Path, state_dict: dict) -> None:
    """A state dict that the caller has changed."""
    from tessera.utils.other import save

    folder.mkdir(parents=True, exist_ok=True)
    save(state_dict, folder / "model.safetensors", safe_serialization=True)
    model.config.save_pretrained(str(folder))
