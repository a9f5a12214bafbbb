"""A model that the plugin's arguments change: what it becomes, what of its weights stays, and how it is saved. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from tessera.comm.warnings import warn_once
from tessera.errors import ConfigError
from tessera.plugin.model_shape import asked_structure, described, section_with

# Of a config.json, what stays true of a model of another type.
_TOKENS = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class ChangedModel:
    """`architecture`: as the object `model` of a tessera.json, its tensors under the names that the caller's model gives
    them; `changes`: "num_kv_heads 1 instead of 4", ...; `fit`: the sentence on its weights."""

    architecture: str
    changes: List[str]
    dropped: List[str]
    fit: str
    shapes: Dict[str, Tuple[int, ...]]
    added: Sequence[str]  # names of parameters that the caller's model does not have

    def note(self, kind: str, weights: bool) -> str:
        """The line on what becomes of the model given to prepare()."""
        fate = f". {self.fit[0].upper()}{self.fit[1:]}" if weights else ""
        return f"the plugin makes another model of the {kind} given to prepare(): {', '.join(self.changes)}{fate}"


def change_of(plugin: Any, architecture: str, from_files: bool, names: Iterable[str]) -> Optional[ChangedModel]:
    """What the plugin's arguments make of a model with parameters of these names; None where it stays what it is. `from_files`:
    its weights were read, and must be kept. Errors: ConfigError for values that no model has, and for a change of weights that were read."""
    from tessera import _C

    if plugin is None:
        return None
    config = json.loads(architecture)
    own = described(config)
    asked = {key: value for key, value in asked_structure(plugin, config, from_files).items() if own.get(key) != value}
    changed = architecture
    if asked:
        changed = _C.changed_model(architecture, _C.Config({"training": {"seq_length": 1}, "model": section_with(own, asked)}))
    now = described(json.loads(changed))
    changes = [f"{key} {_word(now[key])} instead of {_word(own[key])}" for key in now if now[key] != own[key]]
    if not changes:
        if plugin.given_arguments.get("reinitialize"):
            warn_once("other_megatron_args: 'reinitialize' has no effect here: nothing makes another model of the one given to prepare()")
        return None
    _, dropped, fit = _C.weight_fit(architecture, changed)
    shapes = {name: tuple(shape) for _, parts in _C.hf_parameters(changed) for name, shape, *_ in parts}
    own_names = set(names)
    return ChangedModel(changed, changes, dropped, fit, shapes, [name for name in shapes if name not in own_names])


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def saved_as(architecture: str, config_json: str) -> Tuple[Optional[str], str]:
    """The Hugging Face type that a model is saved as, None where there is none, and what its config.json begins with: that of
    the model given to prepare(), or what of it stays true of another type."""
    from tessera import _C

    own = json.loads(config_json)
    kind = _C.hf_model_type(architecture)
    return kind, config_json if kind == own.get("model_type") else json.dumps({key: own[key] for key in _TOKENS if key in own})


def check_optimizer(optimizer: Any) -> None:
    """Errors: ConfigError for an optimizer that has updated a model which the plugin changes."""
    if optimizer.state:
        raise ConfigError("the optimizer has made steps with a model that the plugin changes, so its state is of other tensors; make it "
                          "anew before prepare()")
