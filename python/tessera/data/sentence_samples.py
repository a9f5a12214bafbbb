"""Samples of sentences from .idx/.bin, as encoders are trained on them: which arguments they take, and what opens them."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Optional, Sequence

from tessera.comm.warnings import warn_once
from tessera.compat.refusals import nearest
from tessera.data.documents import RULES
from tessera.data.indexed import DataPath, data_words, of_splits
from tessera.errors import ConfigError
from tessera.plugin.heads import ENCODER_DECODERS, ENCODERS, heads_of

# Arguments of masking, named as in YAML's section `data`. What is not given is as it is there.
MASKING = {"mask_prob": float, "short_seq_prob": float, "masking_max_ngram": int, "masking_do_full_word": bool,
           "masking_use_longer_ngrams": bool, "masking_use_geometric_distribution": bool, "cls_id": int, "sep_id": int, "mask_id": int,
           "pad_id": int}
# And of T5's.
T5_MASKING = {**MASKING, "bos_id": int, "eos_id": int, "vocab_extra_ids": int}


def masking_options(arguments: Dict[str, Any], names: Dict[str, type] = MASKING) -> Dict[str, Any]:
    """The arguments of masking among others. Errors: ConfigError for one of a wrong type."""
    found: Dict[str, Any] = {}
    for name, kind in names.items():
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

    return _opened(lambda **options: _C.open_bert_samples(seq_length, binary_head, **options), MASKING, masking, data_path, counts, split, seed,
                   cache_dir, vocab_size, vocab_file, split_paths)


def open_t5_samples(data_path: Optional[DataPath], counts: Sequence[Optional[int]], encoder_seq_length: int, decoder_seq_length: int, *,
                    split: str = "969,30,1", seed: int = 1234, cache_dir: Optional[DataPath] = None, vocab_size: int = 0,
                    vocab_file: Optional[DataPath] = None, split_paths: Optional[Sequence[Optional[DataPath]]] = None,
                    sentinel_ids: Sequence[int] = (), **masking: Any) -> Sequence[Any]:
    """The same of Megatron's T5: int64 arrays `text_enc` [n, encoder_seq_length], `text_dec`, `labels` (-1 behind their end), `loss_mask`
    [n, decoder_seq_length], and uint8 masks `enc_mask`, `dec_mask` and `enc_dec_mask` [n, positions, keys], 1 where a position sees a
    key. Sentinels are those of the data's vocabulary, `vocab_extra_ids` behind it, or the ids
    from the first to the last of `sentinel_ids`. `masking`: T5_MASKING. Errors: ConfigError, DataError."""
    from tessera import _C

    def opened(**options: Any) -> Any:
        return _C.open_t5_samples(encoder_seq_length, decoder_seq_length, sentinel_ids=list(sentinel_ids), **options)

    return _opened(opened, T5_MASKING, masking, data_path, counts, split, seed, cache_dir, vocab_size, vocab_file, split_paths)


def _opened(opened: Callable, names: Dict[str, type], masking: Dict[str, Any], data_path: Optional[DataPath],
            counts: Sequence[Optional[int]], split: str, seed: int, cache_dir: Optional[DataPath], vocab_size: int,
            vocab_file: Optional[DataPath], split_paths: Optional[Sequence[Optional[DataPath]]]) -> Sequence[Any]:
    """What `opened` gives for options in C++'s types. Errors: ConfigError for an option that there is not."""
    unknown = [name for name in masking if name not in names]
    if unknown:
        raise ConfigError(f"samples of sentences have no option {unknown[0]}{nearest(unknown[0], names)}")
    options = {**masking_options(masking, names), "vocab_size": vocab_size, "seed": seed, "num_samples": tuple(counts),
               "vocab_file": "" if vocab_file is None else os.fspath(vocab_file), "cache_dir": "" if cache_dir is None else os.fspath(cache_dir)}
    return of_splits(lambda path, parts: opened(data_path=data_words(path), split=parts, **options), data_path, split, split_paths)


def check_kind(arguments: Dict[str, Any], own: Dict[str, Any], kind: Optional[str]) -> None:
    """Of the arguments those that are of another kind of samples: warned of where they are masking's, refused where they say what
    ends documents, or how long a decoder is that the model has not. `own`: those that only the loader's own count of. Errors:
    ConfigError."""
    if kind not in ENCODER_DECODERS:
        if own.get("vocab_extra_ids"):
            warn_once("MegatronLMDummyDataLoader: 'vocab_extra_ids' has no effect: only samples of T5 have sentinels")
        for name in ("bos_id", "eos_id", "sentinel_ids", "decoder_seq_length"):
            if own.get(name) is not None:
                raise ConfigError(f"MegatronLMDummyDataLoader: '{name}' is of samples of T5, and the model is a {kind or 'model of another kind'}")
    if kind not in (*ENCODERS, *ENCODER_DECODERS):
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


def t5_options(arguments: Dict[str, Any], plugin: Any) -> Dict[str, Any]:
    """What open_t5_samples is given. Errors: ConfigError without a length of the decoder's sequences."""
    length = arguments.get("decoder_seq_length") or plugin.decoder_seq_length
    if length is None:
        raise ConfigError("MegatronLMDummyDataLoader: samples of T5 need decoder_seq_length beside encoder_seq_length")
    return {**masking_options(arguments, T5_MASKING), "decoder_seq_length": length, "vocab_file": arguments.get("vocab_file"),
            "sentinel_ids": arguments.get("sentinel_ids") or ()}
