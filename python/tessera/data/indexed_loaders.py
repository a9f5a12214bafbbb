"""From MegatronLMDummyDataLoaders and the plugin to the loaders over .idx/.bin: which argument comes from where."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import nearest
from tessera.data.documents import RULES, eod_id, rules_asked_for
from tessera.data.indexed import Iterators, build_iterators, open_samples
from tessera.data.sentence_samples import (T5_MASKING, bert_options, check_kind, open_bert_samples, open_t5_samples,
                                           t5_options)
from tessera.errors import ConfigError
from tessera.plugin import megatron_args
from tessera.plugin.fields import FIELDS
from tessera.plugin.heads import ENCODER_DECODERS, ENCODERS

# What a loader may be given, beside arguments that have no effect or are refused wherever they stand.
DATA_ARGUMENTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path", "split", "data_cache_path", "seq_length",
                  "micro_batch_size", "seed", "train_iters", "eval_iters", "eval_interval", "consumed_samples", "eos_token_id",
                  "vocab_file", "encoder_seq_length", "decoder_seq_length", "sentinel_ids", *RULES, *T5_MASKING)
_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_LISTS = ("data_args_path", "per_split_data_args_path")
_SPLIT, _SEED = "969, 30, 1", 1234  # Megatron's
_LATER = ("retriever_seq_length", "sample_rate", "max_seq_length_dec")
_UNREAD = {"data_impl": "files of either layout are read as they are, and tokens where they lie",
           "merge_file": "data are read as ids", "tokenizer_type": "data are read as ids", "tokenizer_model": "data are read as ids",
           "num_dataset_builder_threads": "rank 0 builds the index files",
           "vocab_size": "the model says it"}


def admit(given: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments of a MegatronLMDummyDataLoader under their own names; None is not given. Errors: ConfigError for a name that
    is no argument of the data, with the nearest one, and for what is not in this build."""
    arguments = megatron_args.normalised(given)
    if arguments.get("splits_string") is not None and arguments.get("split") is None:
        arguments["split"] = arguments["splits_string"]
    arguments.pop("splits_string", None)
    arguments.pop("megatron_dataset_flag", None)  # says that this is a Megatron loader
    kept: Dict[str, Any] = {}
    for name, value in arguments.items():
        if name in DATA_ARGUMENTS:
            if value is not None:
                kept[name] = value
            continue
        kind, why = _effect_of(name)
        if kind == "refuses" and value is not None and value is not False:
            raise ConfigError(f"MegatronLMDummyDataLoader: '{name}' is refused: {why}")
        if kind == "warns" and value is not None:
            warn_once(f"MegatronLMDummyDataLoader: '{name}' has no effect: {why}")
    if "encoder_seq_length" in kept:  # what Megatron's BERT and T5 call it
        length = kept.pop("encoder_seq_length")
        if kept.setdefault("seq_length", length) != length:
            raise ConfigError(f"MegatronLMDummyDataLoader: seq_length is {kept['seq_length']} and encoder_seq_length {length}; they are the "
                              "same thing, so give one")
    missing = [name for name in ("seq_length", "micro_batch_size") if name not in kept]
    if missing:
        raise ConfigError(f"MegatronLMDummyDataLoader needs {', '.join(missing)}")
    if any(name in kept for name in _LISTS):
        kept = _with_lists(kept)
    if "data_path" in kept and any(name in kept for name in _PER_SPLIT):
        raise ConfigError("MegatronLMDummyDataLoader: data_path is cut by `split`; give it, or train_data_path, valid_data_path and "
                          "test_data_path")
    return kept


def _with_lists(kept: Dict[str, Any]) -> Dict[str, Any]:
    """With the lists of data that a file holds in place of its name. Errors: ConfigError."""
    ways = [name for name in ("data_path", *_LISTS) if name in kept] + [name for name in _PER_SPLIT if name in kept][:1]
    if len(ways) > 1:
        raise ConfigError(f"MegatronLMDummyDataLoader: {' and '.join(ways)} each say which data are read; give one of them")
    kept = dict(kept)
    name = ways[0]
    path = os.fspath(kept.pop(name))
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if name == "data_args_path":
            return {**kept, "data_path": text.split()}
        lists = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"MegatronLMDummyDataLoader: {name}: {path} cannot be read: {error}") from error
    if not isinstance(lists, dict) or sorted(lists) != ["test", "train", "valid"]:
        raise ConfigError(f"MegatronLMDummyDataLoader: {name}: {path} must be a JSON object with train, valid and test, null for one "
                          "without data")
    paths = {f"{split}_data_path": words.split() if isinstance(words, str) else words for split, words in lists.items() if words}
    if "train_data_path" not in paths:
        raise ConfigError(f"MegatronLMDummyDataLoader: {name}: {path} names no data for training")
    return {**kept, **paths}


def _effect_of(name: str) -> Tuple[str, str]:
    if name in _LATER:
        return "refuses", "such samples are not in this build"
    if name in _UNREAD:
        return "warns", _UNREAD[name]
    kind, why = megatron_args.ARGUMENTS.get(name, ("", ""))[:2]
    if name in ("mock_data", "dataloader_type"):
        return "refuses", "samples come from the .idx/.bin of data_path, in Megatron's order"
    if kind == "warns":
        return kind, why
    raise ConfigError(f"MegatronLMDummyDataLoader knows no {name}{nearest(name, DATA_ARGUMENTS)}; it takes {', '.join(DATA_ARGUMENTS)}")


def set_plugin_arguments(arguments: Dict[str, Any], plugin: Any) -> None:
    """The loader's arguments become the plugin's: they count, and one line names each that the plugin said otherwise."""
    own = plugin.megatron_lm_default_args
    for name, value in {**arguments, "megatron_dataset_flag": True}.items():
        before = own.get(name)
        usual = FIELDS[name].default if name in FIELDS else None
        if before not in (None, False, usual) and before != value:
            warn_once(f"MegatronLMDummyDataLoader: {name} is {value!r}, which counts over the plugin's {before!r}")
        own[name] = value
    plugin.given_arguments.update(arguments)


def data_arguments(arguments: Dict[str, Any], plugin: Any) -> Dict[str, Any]:
    """All arguments of the data: the loader's own, else the plugin's."""
    found = {name: value for name, value in plugin.given_arguments.items() if name in DATA_ARGUMENTS and value is not None}
    found.update({name: value for name in ("train_iters", "eval_iters", "eval_interval", "consumed_samples")
                  if (value := getattr(plugin, name)) is not None})
    found.update({name: True for name in rules_asked_for(plugin)})
    if any(name in arguments for name in _PER_SPLIT):
        found.pop("data_path", None)
    return {**found, **arguments}


def horizon_steps(accelerator: Any, arguments: Dict[str, Any]) -> int:
    """Optimizer steps of the run. Errors: ConfigError where nobody says it."""
    horizon = next((scheduler.scheduler.horizon for scheduler in accelerator._schedulers
                    if hasattr(scheduler.scheduler, "horizon")), None)
    steps = arguments.get("train_iters") or (horizon and horizon.train_iters)
    if not steps:
        raise ConfigError("how much indexed data is read follows from the length of the training: give the plugin train_iters")
    return int(steps)


def samples_provider(accelerator: Any, own: Dict[str, Any]) -> Callable[[Sequence[int]], Sequence[Any]]:
    """function(numbers of samples) -> the data sets of training, validation and test: the plugin's
    custom_megatron_datasets_provider_function, or Megatron's over .idx/.bin."""
    plugin = accelerator.state.megatron_lm_plugin
    if plugin.custom_megatron_datasets_provider_function is not None:
        return plugin.custom_megatron_datasets_provider_function
    config = accelerator._models[0]._session.config if accelerator._models else {}
    arguments = data_arguments(own, plugin)
    paths = [arguments.get(name) for name in _PER_SPLIT]
    common = dict(split=arguments.get("split", _SPLIT), seed=int(arguments.get("seed", _SEED)), cache_dir=arguments.get("data_cache_path"),
                  vocab_size=int(config.get("vocab_size", 0)), split_paths=paths if any(path is not None for path in paths) else None)
    check_kind(arguments, own, config.get("model_type"))
    if config.get("model_type") in ENCODERS:
        open_them: Callable = open_bert_samples
        common.update(bert_options(arguments, config))
    elif config.get("model_type") in ENCODER_DECODERS:
        open_them = open_t5_samples
        common.update(t5_options(arguments, plugin))
    else:
        open_them = open_samples
        on = {name: bool(arguments.get(name)) for name in RULES}
        common.update(on, eos_token_id=eod_id(arguments, config) if any(on.values()) else arguments.get("eos_token_id"))

    def provide(counts: Sequence[int]) -> Sequence[Any]:
        return open_them(arguments.get("data_path"), counts, arguments["seq_length"], **common)

    return provide


def build_loaders(accelerator: Any, own: Dict[str, Any]) -> Iterators:
    """Loaders of training, validation and test. Collective."""
    plugin, mesh = accelerator.state.megatron_lm_plugin, accelerator.state.mesh
    if plugin is None:
        raise ConfigError("MegatronLMDummyDataLoader needs a MegatronLMPlugin")
    arguments = data_arguments(own, plugin)
    return build_iterators(
        data_path=arguments.get("data_path"), seq_length=arguments["seq_length"], micro_batch_size=arguments["micro_batch_size"],
        num_micro_batches=plugin.num_micro_batches, data_rank=mesh.coordinates["dp"], data_ranks=mesh.dp,
        train_iters=horizon_steps(accelerator, arguments), eval_iters=arguments["eval_iters"],
        eval_interval=arguments["eval_interval"], consumed_samples=tuple(arguments.get("consumed_samples") or (0, 0, 0)),
        world=accelerator.state.world, datasets_provider=samples_provider(accelerator, own))


def indexed_loaders(accelerator: Any, dummies: list) -> List[Optional[Any]]:
    """As many of them as there are dummies in one prepare()."""
    if any(dummy.dataset_args != dummies[0].dataset_args for dummy in dummies) or len(dummies) > 3:
        raise ConfigError("the MegatronLMDummyDataLoaders of one prepare() become training, validation and test of one dataset: "
                          "pass the same one, three times at most")
    return list(dummies[0].build_train_valid_test_data_iterators(accelerator))[: len(dummies)]
