"""What the engine is told of the model given to prepare(): its config, parameters, weights and dtype."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Optional

import torch

from tessera.plugin.heads import ENCODER_DECODERS, ENCODERS, heads_for, own_name
from tessera.engine.parameters import EngineParameter
from tessera.engine.plan import ModelParameter, ModelPlan
from tessera.engine.weights import Source
from tessera.errors import ConfigError

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _families() -> str:
    from tessera import _C

    *types, last = _C.hf_model_types()
    return f"{', '.join(types)} and {last}"


def describe_model(model: torch.nn.Module) -> ModelPlan:
    """What the model itself says. Errors: ConfigError for a model that Tessera cannot build."""
    from tessera import _C

    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise ConfigError(f"{type(model).__name__} has no Hugging Face config, and Tessera builds models from their config: it "
                          f"trains {_families()}. A model of your own is written in C++ (docs/guides/own_model_in_cpp.md)")
    if any(isinstance(parameter, EngineParameter) for parameter in model.parameters()):
        raise ConfigError("an earlier prepare() has taken this model's weights, and the object has none any more; use the model that "
                          "prepare() returned, or make it anew")
    kind = getattr(config, "model_type", None)
    if kind not in _C.hf_model_types():
        raise ConfigError(f"the model type '{kind}' is not supported; Tessera trains {_families()}. For another decoder whose "
                          "layers are those of one of these, make a config of that type; a model of your own is written in "
                          "C++ (docs/guides/own_model_in_cpp.md)")
    if any(".experts.0." in name for name, _ in model.named_parameters()):
        raise ConfigError(f"this {kind} holds each expert's weights apart, as Transformers' modules did before its version 5; upgrade "
                          "transformers, or train it with `tessera train`, from its folder (model.init_from)")
    own = own_name(model, kind)
    if own is None:
        loaders = " or ".join(each.loader for each in heads_for(kind))
        raise ConfigError(f"{type(model).__name__} is not a model with a head that Tessera computes; pass one made by {loaders}")
    named = list(model.named_parameters())
    dtypes = {parameter.dtype for _, parameter in named}
    if len(dtypes) != 1 or next(iter(dtypes)) not in _DTYPES:
        raise ConfigError(f"the model's parameters have the dtypes {sorted(map(str, dtypes))}; they must be all float32, "
                          "bfloat16 or float16")
    parameters = tuple(ModelParameter(name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in named)
    text = config.to_json_string(use_diff=False)
    if kind in ENCODERS:  # the config does not say what the object's class does
        text = json.dumps({**json.loads(text), "architectures": [own]})
    if kind in ENCODER_DECODERS:  # nor, of a head that is not scaled, whether it is tied
        tied = head_is_tied(model)
        text = json.dumps({**json.loads(text), "architectures": [own], "tie_word_embeddings": tied,
                           "scale_decoder_outputs": kind == "t5" and getattr(config, "scale_decoder_outputs", tied)})
    return ModelPlan(text, parameters, _source_of(model, named, text), _DTYPES[dtypes.pop()],
                     checkpointed=any(getattr(module, "gradient_checkpointing", False) for module in model.modules()))


def _source_of(model: Any, named: list, text: str) -> Source:
    meta = [name for name, parameter in named if parameter.device.type == "meta"]
    if meta and len(meta) < len(named):
        raise ConfigError(f"{len(meta)} of {len(named)} parameters are on the meta device (the first is {meta[0]}); a model "
                          "has either all its weights or none of them")
    if meta:
        folder = Path(str(getattr(model.config, "_name_or_path", "") or ""))
        has = folder.name and any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
        return Source(folder=folder, architecture=_with_other_head(folder, text)) if has else Source()
    head = "" if model.config.model_type in ENCODER_DECODERS else _tied_head(model.config)
    tensors, owner = [], []
    for name, parameter in named:
        if name == head:
            continue
        value = parameter.detach()
        value = (value if value.device.type == "cpu" else value.cpu()).contiguous()
        owner.append(value)
        tensors.append((name, _DTYPES[value.dtype], list(value.shape), value.data_ptr()))
    return Source(tensors=tensors, owner=owner, read=_was_read(model, named))


def head_is_tied(model: Any) -> bool:
    """Whether the head of a model is the table of its tokens."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _with_other_head(folder: Path, text: str) -> Optional[str]:
    """The config.json of a folder with another head than the model of config `text`; None where it has the same."""
    theirs, own = json.loads((folder / "config.json").read_text()), json.loads(text)
    if own["model_type"] not in ENCODERS or theirs.get("model_type") != own["model_type"]:
        return None
    first = heads_for(own["model_type"])[0].endings  # what a folder without a word on it has
    has = theirs.get("architectures") or (own["architectures"] if own["architectures"][0].endswith(first) else None)
    return None if has == own["architectures"] else json.dumps(theirs)


def _tied_head(config: Any) -> str:
    """The head's name where the config says that it is the embedding, else ""."""
    from tessera import _C

    return _C.hf_head(config.model_type) if getattr(config, "tie_word_embeddings", False) else ""


def _was_read(model: Any, named: list) -> bool:
    """Whether from_pretrained() made the model: Transformers marks the parameters that it has read, and leaves the model in
    eval mode, which before its version 5 is the one sign."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and int(transformers.__version__.partition(".")[0]) >= 5:
        return any(getattr(parameter, "_is_hf_initialized", False) for _, parameter in named)
    return not model.training and bool(getattr(model.config, "_name_or_path", ""))
