"""Samples of sentences from .idx/.bin, as encoders are trained on them: which arguments they take, and what opens them."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional, Sequence

from tessera.comm.warnings import warn_once
from tessera.data.documents import RULES
from tessera.data.indexed import DataPath, data_words, of_splits
from tessera.errors import ConfigError
from tessera.plugin.heads import ENCODERS, heads_of

# Arguments of masking, named as in YAML's section `data`. What is not given is as it is there.
MASKING = {"mask_prob": float, "short_seq_prob": float, "masking_max_ngram": int, "masking_do_full_word": bool,
           "masking_use_longer_ngrams": bool, "masking_use_geometric_distribution": bool, "cls_id": int, "sep_id": int, "mask_id": int,
           "pad_id": int}


def masking_options(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments of masking among others. Errors: ConfigError for one of a wrong type."""
    found: Dict[str, Any] = {}
    for name, kind in MASKING.items():
        value = arguments.get(name)
        if value is None:
            continue
        number = not isinstance(value, bool) and isinstance(value, (int, float) if kind is float else kind)
        if not (isinstance(value, bool) if kind is bool else number):
            raise ConfigError(f"{name} is {value!r}; it must be {'True or False' if kind is bool else f'a number ({kind.__name__})'}")
        if kind is int and not 0 <= value < 2**31:
            raise ConfigError(f"{name} is {value}; it must be in [0, 2^31)")
        found[name] = kind(value)
    return found


def open_bert_samples(data_path: Optional[DataPath], counts: Sequence[Optional[int]], seq_length: int, *, binary_head: bool = True,
                      split: str = "969,30,1", seed: int = 1234, cache_dir: Optional[DataPath] = None, vocab_size: int = 0,
                      vocab_file: Optional[DataPath] = None, split_paths: Optional[Sequence[Optional[DataPath]]] = None,
                      **masking: Any) -> Sequence[Any]:
    """(train, valid, test) samples of Megatron's BERT over sentences, None for a split without a share: int64 arrays `text`,
    `labels` (-1 where nothing is to be guessed), `loss_mask`, `padding_mask`, [n, seq_length], and with `binary_head` `types` and
    `is_random` [n]. Their special tokens are those of the data's record, or of `vocab_file`, a vocab.txt or tokenizer.json.
    `masking`: MASKING; the rest as of tessera.data.indexed.open_samples. Errors: ConfigError, DataError."""
    from tessera import _C

    options = {**masking_options(masking), "vocab_size": vocab_size, "seed": seed,
               "vocab_file": "" if vocab_file is None else os.fspath(vocab_file), "cache_dir": "" if cache_dir is None else os.fspath(cache_dir)}

    def opened(path: DataPath, parts: str) -> Any:
        return _C.open_bert_samples(seq_length, binary_head, data_path=data_words(path), split=parts, num_samples=tuple(counts), **options)

    return of_splits(opened, data_path, split, split_paths)


def check_kind(arguments: Dict[str, Any], kind: Optional[str]) -> None:
    """Of the arguments those that are of another kind of samples: warned of where they are masking's, refused where they say what
    ends documents. Errors: ConfigError."""
    if kind not in ENCODERS:
        for name in MASKING:
            if arguments.get(name) is not None:
                warn_once(f"MegatronLMDummyDataLoader: '{name}' has no effect: {kind or 'this model'} learns the next token, not masked ones")
        return
    for name in RULES:
        if arguments.get(name):
            raise ConfigError(f"MegatronLMDummyDataLoader: '{name}' is for samples of next tokens, and {kind} is trained on sentences")


def bert_options(arguments: Dict[str, Any], config: Dict[str, Any]) -> Dict[str, Any]:
    """What open_bert_samples is given for the model of a config. Errors: ConfigError for a model without a head for masked tokens."""
    heads = heads_of(config)
    if heads.of_samples:
        raise ConfigError("MegatronLMDummyDataLoader makes samples with masked tokens, and this model is a classifier: prepare() a "
                          "DataLoader of your labels")
    return {**masking_options(arguments), "binary_head": heads.sample_labels is not None, "vocab_file": arguments.get("vocab_file")}
