"""Fields and arguments of the plugin that only some scripts use: what is given and has no effect in this one, and why."""

from __future__ import annotations

from typing import Any, Dict, List

from tessera.comm.warnings import warn_once
from tessera.plugin.fields import FIELDS
from tessera.plugin.megatron_args import ARGUMENTS, IN_ITS_ARGS, OF_HEADS

# Read by the loaders over .idx/.bin.
OF_INDEXED_DATA = [name for name, effect in ARGUMENTS.items()
                   if "data loader" in (effect.kind, FIELDS[name].effect if name in FIELDS else "")] + ["megatron_dataset_flag"]
# Handed to a custom train step as its args, with the rest; nothing else reads them.
OF_TRAIN_STEPS = [name for name, effect in ARGUMENTS.items() if effect.detail in (IN_ITS_ARGS, OF_HEADS)]
# Of an encoder they say what its model is, and are checked.
_CHECKED = [name for name, effect in ARGUMENTS.items() if effect.detail == OF_HEADS]
# The id that ends documents follows from them.
OF_DOCUMENTS = ["vocab_file", "eos_token_id"]

_DATA = "MegatronLMDummyDataLoader reads it, and the loaders given to prepare() are of another kind"
_STEP = ("the tokenizer is the script's, and the model's kind that of its config; only a custom_train_step_class sees it in its args")
_DOCUMENTS = ("it says which id ends a document, and the samples of a model with an encoder are no documents; a "
              "custom_train_step_class sees it in its args")


def _given(plugin: Any, names: List[str]) -> List[str]:
    """Those that are not at their defaults."""
    found: List[str] = []
    for name in names:
        value = getattr(plugin, name) if name in FIELDS else plugin.given_arguments.get(name)
        usual = FIELDS[name].default if name in FIELDS else None
        if value is not None and value is not False and value != usual:
            found.append(name)
    return found


def unused_by_model(plugin: Any, encoder: bool = False, indexed: bool = False) -> Dict[str, str]:
    """Name: why, of what neither the model nor its train step reads. `indexed`: loaders over .idx/.bin are there, which read an
    encoder's vocabulary. A decoder's texts end with a document (megatron_generate), whatever its samples do."""
    if plugin is None or plugin.custom_train_step_class is not None:
        return {}
    found = {name: _STEP for name in _given(plugin, OF_TRAIN_STEPS) if not (encoder and name in _CHECKED)}
    if encoder:
        found.update({name: _DOCUMENTS for name in _given(plugin, OF_DOCUMENTS) if not (indexed and name == "vocab_file")})
    return found


def unused_by_loaders(plugin: Any) -> Dict[str, str]:
    """Name: why, of what only loaders over .idx/.bin read, where there are others."""
    return {} if plugin is None else {name: _DATA for name in _given(plugin, OF_INDEXED_DATA)}


def warn_of(unused: Dict[str, str]) -> None:
    """One warning for each, once in a process."""
    for name, why in unused.items():
        place = f"MegatronLMPlugin.{name}" if name in FIELDS else f"other_megatron_args: '{name}'"
        warn_once(f"{place} has no effect here: {why}")
