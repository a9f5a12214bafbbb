"""Whether a module tree is the one that Transformers builds from its config: a twin on the meta device is compared with it."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple

import torch

from tessera.comm.warnings import warn_once
from tessera.plugin.heads import heads_for
from tessera.errors import ConfigError

OWN_LOSS = ("Compute it from logits (call the model without labels, or with MegatronLMPlugin(return_logits=True)), or give "
            "MegatronLMPlugin a custom_train_step_class")
# What a subclass may define without changing what training computes.
_FREE = {"__module__", "__doc__", "__init__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
         "__qualname__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__dict__",
         "__weakref__", "__slots__", "__repr__", "extra_repr", "config", "config_class", "base_model_prefix", "_auto_class",
         "_init_weights", "_tied_weights_keys", "_no_split_modules", "from_pretrained", "from_config", "generate",
         "prepare_inputs_for_generation"}
# Attributes of modules that no forward reads, or that are compared elsewhere.
_UNREAD = {"training", "config", "generation_config", "name_or_path", "kernel_config", "warnings_issued", "layer_idx",
           "vocab_size", "max_seq_len_cached", "original_max_seq_len", "gradient_checkpointing", "loss_type", "p", "inplace",
           "attention_dropout", "attn_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "dropout"}
_UNREAD_BUFFERS = {"GPTBigCodeModel": ("bias",)}
_HOOKS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook", "_backward_hooks": "backward hook",
          "_backward_pre_hooks": "backward pre-hook", "_state_dict_hooks": "state_dict hook",
          "_state_dict_pre_hooks": "state_dict pre-hook"}
# Methods that run a module, of classes which are not a family's own.
_RUN = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "loss_function")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def own_class(model: torch.nn.Module, kind: str) -> type:
    """Transformers' class of this family that `model` is of. Errors: ConfigError for another class, an adapter around one or
    a subclass that changes what it computes."""
    folder = kind.replace("-", "_").removesuffix("_text")  # a text model stands beside those with images
    home, heads = f"transformers.models.{folder}.modeling_{folder}", heads_for(kind)
    endings = tuple(ending for each in heads for ending in each.endings)
    own = next((each for each in type(model).__mro__ if each.__module__ == home and each.__name__.endswith(endings)), None)
    if own is None:
        raise ConfigError(f"{_name(type(model))} is not Transformers' {kind} language model, and Tessera computes that one. For "
                          "a model with adapters merge them first (merge_and_unload()); otherwise build it with "
                          f"{' or '.join(each.loader for each in heads)}, or write your own in C++ (docs/guides/own_model_in_cpp.md)")
    return own


def twin_of(own: type, config: Any) -> torch.nn.Module:
    """The model that `own` builds from `config`, without memory for weights. Errors: ConfigError where it cannot."""
    try:
        with torch.device("meta"):
            return own(copy.deepcopy(config))
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ConfigError(f"Transformers cannot build a {own.__name__} from the config that the model has now ({type(error).__name__}: "
                          f"{error}), so a field of it was changed after the model was made; set it back") from error


def check_layers(model: torch.nn.Module) -> None:
    """Errors: ConfigError for another number of layers than config says."""
    name, layers = next(((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)),
                        ("layers", ()))
    if len(layers) != model.config.num_hidden_layers:
        raise ConfigError(f"config says {model.config.num_hidden_layers} layers, the model has {len(layers)} ('{name}'); set "
                          f"config.num_hidden_layers = {len(layers)} (and config.layer_types, where it has them), or keep all layers")


def compare(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Errors: ConfigError naming the first module, parameter or attribute that Tessera, which knows the config alone, would
    compute otherwise than `model`."""
    for name, module, other in _pairs("", model, twin):
        _check_class(name, module, other)
        _check_hooks(name, module)
        _check_attributes(name, module, other, model)
        _check_parameters(name, module, other)
        _check_buffers(name, module, other)
    _check_shared(model, twin)
    _check_code(model)


def _pairs(name: str, module: torch.nn.Module, twin: torch.nn.Module) -> Iterator[Tuple[str, Any, Any]]:
    yield name, module, twin
    ours, theirs = dict(module._modules), dict(twin._modules)
    for child in ours:
        if ours[child] is not None and child not in theirs:
            raise ConfigError(f"the model has a module '{_join(name, child)}' ({_name(type(ours[child]))}) that Transformers "
                              f"does not build from this config, and Tessera would leave it out; {_WITHOUT}")
    for child, other in theirs.items():
        off = isinstance(other, torch.nn.Dropout) and isinstance(ours.get(child), torch.nn.Identity)
        if other is None or off and child != "attn_dropout":  # of that one attention reads p
            continue
        if ours.get(child) is None:
            raise ConfigError(f"the model has no module '{_join(name, child)}', and its config describes one; {_REBUILD}")
        yield from _pairs(_join(name, child), ours[child], other)


_WITHOUT = "remove it before prepare() (adapters: merge_and_unload())"
_REBUILD = "change the config and build the model from it"


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _label(name: str) -> str:
    return f"'{name}'" if name else "the model"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# Classes, and the code behind them.

def _check_class(name: str, module: torch.nn.Module, other: torch.nn.Module) -> None:
    kind, wanted = type(module), type(other)
    if not issubclass(kind, wanted):
        raise ConfigError(f"{_label(name)} is a {_name(kind)}, and Transformers builds a {_name(wanted)} from this config; Tessera "
                          f"computes the latter. {_REBUILD.capitalize()}; adapters and quantised layers: merge or convert them "
                          "before prepare()")
    own = [each for each in kind.__mro__ if each not in wanted.__mro__]
    changed = [key for each in own for key, value in vars(each).items()
               if key not in _FREE and hasattr(other, key) and not _wraps(value, getattr(wanted, key, None))]
    changed += [key for key, value in vars(module).items() if key not in _UNREAD | _FREE
                and callable(getattr(wanted, key, None)) and not _same_function(value, getattr(wanted, key), module)]
    if changed:
        raise ConfigError(f"{_label(name)} ({_name(kind)}) has its own {', '.join(sorted(set(changed)))}, which Tessera's engine "
                          f"would not run. A loss of your own: {OWN_LOSS[0].lower()}{OWN_LOSS[1:]}. Other changes need a model "
                          "in C++ (docs/guides/own_model_in_cpp.md)")


def _wraps(value: Any, wanted: Any) -> bool:
    """Whether Transformers itself has wrapped a method again for a subclass, as for checkpointed layers."""
    return isinstance(value, types.FunctionType) and foreign(value) is None and inspect.unwrap(value) is inspect.unwrap(wanted)


def _same_function(value: Any, wanted: Any, module: torch.nn.Module) -> bool:
    """Whether an attribute of `module` is its class's own method in other clothes: compiled, or moved by Accelerate's hooks."""
    if getattr(getattr(module, "_hf_hook", None), "__module__", "") == "accelerate.hooks":
        value = getattr(module, "_old_forward", value)
    value = getattr(value, "_torchdynamo_orig_callable", value)
    return getattr(value, "__func__", value) is wanted and getattr(value, "__self__", module) is module


@functools.lru_cache(maxsize=None)
def _is_home(place: str) -> bool:
    """Whether a source file is PyTorch's, Transformers' or Python's own."""
    parents = Path(place).resolve().parents
    packages = (torch, sys.modules["transformers"])
    own = Path(functools.__file__).resolve().parent in parents and "site-packages" not in place
    return own or any(Path(package.__file__).resolve().parent in parents for package in packages)


def foreign(function: Any) -> Optional[str]:
    """Where a function comes from, if it or what it wraps is not PyTorch's or Transformers' own."""
    function = getattr(function, "__func__", function)
    while isinstance(function, types.FunctionType):
        place = function.__code__.co_filename
        generated = place.startswith("<") and (function.__module__ or "").startswith(("torch.", "transformers."))
        if not generated and not _is_home(place):
            return f"{function.__module__}.{function.__qualname__} ({place})"
        function = getattr(function, "__wrapped__", None)
    return None


def _check_code(model: torch.nn.Module) -> None:
    """Classes and functions of Transformers that somebody has replaced, for all models at once."""
    kinds = sorted({kind for module in model.modules() for kind in type(module).__mro__}, key=_name)
    homes = sorted({kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")})
    owners = [(_name(kind), vars(kind)) for kind in kinds if kind.__module__.startswith(("torch.", "transformers."))]
    for label, members in owners + [(home, vars(sys.modules[home])) for home in homes]:
        for key, value in members.items():
            if not label.startswith("transformers.models.") and key not in _RUN:
                continue
            if isinstance(value, type) and issubclass(value, torch.nn.Module):
                place = None if value.__module__.startswith(("torch.", "transformers.")) else _name(value)
            else:
                place = foreign(value.fget if isinstance(value, property) else value)
            if place:
                raise ConfigError(f"{label}.{key} was replaced by {place}, which Tessera's engine would not run; train without "
                                  "this patch: Tessera has fused kernels of its own")


def check_attention(config: Any) -> None:
    """Errors: ConfigError for an attention function that is not Transformers' own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(config, "_attn_implementation", None)
    if name is None or "/" in name:  # a kernel of the hub computes the same
        return
    function = ALL_ATTENTION_FUNCTIONS.get(name, None)
    if name not in _ATTENTION or foreign(function):
        raise ConfigError(f"attn_implementation '{name}' is an attention of your own, which Tessera's engine would not run; build "
                          "the model with attn_implementation='sdpa'")


# Hooks, attributes, tensors.

def _check_hooks(name: str, module: torch.nn.Module) -> None:
    for table, what in _HOOKS.items():
        for hook in getattr(module, table, {}).values():
            function = getattr(hook, "hook", hook)  # a state_dict hook may be wrapped
            if not _of_transformers(function):
                raise ConfigError(f"{_label(name)} has a {what} ({_describe(function)}), which Tessera's engine would not call: "
                                  "the modules are not run. Remove it before prepare() (handle.remove()); for values within the "
                                  "model ask for logits and compute from those")


def _of_transformers(function: Any) -> bool:
    function = inspect.unwrap(getattr(function, "func", function))
    return (getattr(function, "__module__", None) or "").startswith("transformers.") and foreign(function) is None


def _describe(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _check_attributes(name: str, module: torch.nn.Module, other: torch.nn.Module, model: Any) -> None:
    own = getattr(module, "config", None)
    if own is not None and own is not model.config:
        # Encoder and decoder have configs of their own, which follow from the model's.
        theirs = (other.config if model.config.is_encoder_decoder else model.config).to_dict()
        unread = [key for key in theirs if model.config.is_encoder_decoder and key.endswith("_token_id")]
        differs = next((key for key in {**own.to_dict(), **theirs} if own.to_dict().get(key) != theirs.get(key) and key not in unread), None)
        if differs is not None:
            raise ConfigError(f"the config of {_label(name)} says {differs} = {own.to_dict().get(differs)!r}, the model's "
                              f"{theirs.get(differs)!r}; give all modules one config")
    for key, wanted in vars(other).items():
        if key in _UNREAD or key == "padding_idx" and not isinstance(module, torch.nn.Embedding):
            continue
        if key.startswith("_") and key != "_attn_implementation":
            continue
        if not callable(wanted) and not isinstance(wanted, (type(None), int, float, str, tuple, list)):
            continue
        value = vars(module).get(key, _ABSENT)
        if key == "padding_idx" and module is model.get_input_embeddings():
            continue  # honoured
        if not _equal(value, wanted):
            raise ConfigError(f"'{_join(name, key)}' is {value!r}, and Transformers makes it {wanted!r} from this config; Tessera "
                              f"computes the latter. {_REBUILD.capitalize()}")


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, functools.partial):
        same = isinstance(value, functools.partial) and value.func is wanted.func
        return same and value.args == wanted.args and value.keywords == wanted.keywords
    if callable(wanted):
        return getattr(value, "__func__", value) is getattr(wanted, "__func__", wanted)
    return type(value) in (type(wanted), int, float) and value == wanted


def _check_parameters(name: str, module: torch.nn.Module, other: torch.nn.Module) -> None:
    theirs = other._parameters
    for key, value in module._parameters.items():
        full = _join(name, key)
        wanted = theirs.get(key)
        if (value is None) != (wanted is None):
            raise ConfigError(f"the model has {'no' if value is None else 'a'} parameter '{full}', and its config describes "
                              f"{'none' if wanted is None else 'one'}; {_REBUILD if value is None else _WITHOUT}")
        if value is None:
            continue
        if value.shape != wanted.shape:
            raise ConfigError(f"'{full}' has the shape {list(value.shape)}, the config describes {list(wanted.shape)}; "
                              f"{_REBUILD} (resize_token_embeddings() changes both)")
        if type(value.data) is not torch.Tensor or value.layout != torch.strided:
            raise ConfigError(f"'{full}' is a {_name(type(value.data))} of layout {value.layout}; Tessera shards weights itself "
                              "and takes plain dense tensors only: give prepare() the model before it is quantised or sharded")
        for table, what in (("_backward_hooks", "gradient hook"), ("_post_accumulate_grad_hooks", "post-accumulate-grad hook")):
            for hook in (getattr(value, table, None) or {}).values():
                raise ConfigError(f"'{full}' has a {what} ({_describe(hook)}), which Tessera would not call: gradients are in the "
                                  "engine. Remove it before prepare(); read gradients with tessera.utils.full_gradients(model)")
    for key, wanted in theirs.items():
        if wanted is not None and key not in module._parameters:
            raise ConfigError(f"the model has no parameter '{_join(name, key)}' of its own, and its config describes one; remove "
                              "weight_norm, pruning and other parametrisations before prepare()")


def _check_buffers(name: str, module: torch.nn.Module, other: torch.nn.Module) -> None:
    extra = [key for key, value in module._buffers.items() if value is not None and key not in other._buffers]
    if extra:
        raise ConfigError(f"the model has a buffer '{_join(name, extra[0])}' that Transformers does not build from this config, "
                          "and Tessera would neither use nor save it; remove it before prepare()")
    read = [value for key, value in module._buffers.items() if key not in _UNREAD_BUFFERS.get(type(other).__name__, ())]
    if not any(value is not None and value.device.type != "meta" for value in read):
        return
    for key, value in _fresh_buffers(other).items():
        mine = module._buffers.get(key)
        if mine is None or not torch.equal(mine.cpu(), value.to(mine.dtype)):
            raise ConfigError(f"'{_join(name, key)}' does not hold what Transformers makes it from this config, and Tessera computes "
                              "the latter; " + ("give position_ids and token_type_ids with the batches" if key in _COUNTED else
                                                "change config.rope_parameters instead"))
        if mine.dtype != value.dtype:
            warn_once(f"'{_join(name, key)}' was rounded to {mine.dtype} by .to(); Tessera uses {value.dtype}, as from_pretrained(dtype="
                      "...) would")


# Of an encoder's embedding, on whichever device: what a call without these arguments reads.
_COUNTED = {"position_ids": lambda shape: torch.arange(shape[-1]).expand(shape), "token_type_ids": lambda shape: torch.zeros(shape, dtype=torch.long)}


def _fresh_buffers(other: Any) -> Dict[str, Any]:
    """On the CPU, with values: of these families rotary embeddings have buffers, encoders' embeddings, and scaled ones."""
    if hasattr(other, "scalar_embed_scale"):
        return {"embed_scale": torch.tensor(other.scalar_embed_scale)}
    if set(other._buffers) <= set(_COUNTED):
        return {key: _COUNTED[key](value.shape) for key, value in other._buffers.items()}
    return dict(type(other)(other.config)._buffers)


def _check_shared(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Tensors that are one under two names must be so in both; on the meta device nothing is lost either way."""
    ours, theirs = _firsts(model), _firsts(twin)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.device.type == "meta" or ours[name] == theirs[name]:
            continue
        if name == "lm_head.weight":
            tied = ours[name] != name
            raise ConfigError(f"the head is {'one with' if tied else 'not'} the embedding{'' if tied else 's weight'}, and "
                              f"config.tie_word_embeddings is {not tied}; set model.config.tie_word_embeddings = {tied}, or "
                              f"{'give the head weights of its own' if tied else 'call model.tie_weights()'}")
        raise ConfigError(f"'{name}' is the same parameter as '{ours[name]}'; Tessera's layers have weights of their own. Give it a "
                          "copy")
    places: Dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" and parameter.numel():
            other = places.setdefault(parameter.data_ptr(), name)
            if other != name:
                raise ConfigError(f"'{name}' and '{other}' are two parameters in one memory; give each its own tensor")


def _firsts(model: torch.nn.Module) -> Dict[str, str]:
    """The first name of every parameter."""
    first: Dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name)
            for name, parameter in model.named_parameters(remove_duplicate=False)}


def check_global_hooks() -> None:
    """Hooks that torch runs for every module."""
    module = torch.nn.modules.module
    kinds = [kind for kind in ("forward", "forward_pre", "backward", "backward_pre")
             if getattr(module, f"_global_{kind}_hooks", None)]
    if kinds:
        raise ConfigError(f"torch has a global {kinds[0].replace('_', ' ')} hook (register_module_{kinds[0]}_hook), which "
                          "Tessera's engine would not call: the modules are not run. Remove it before prepare()")
