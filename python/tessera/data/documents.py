"""What the ends of documents within a sample change: the loss, the positions and the attention, as Megatron's
get_ltor_masks_and_position_ids has it. An end still belongs to its document. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy as np

from tessera.comm.warnings import warn_once
from tessera.errors import ConfigError, InvalidArgument

IGNORED = -100  # the label of a position without a loss
RULES = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
_END = "<|endoftext|>"  # as GPT-2's vocabularies write it


def rules_asked_for(plugin: Any) -> List[str]:
    """Which of RULES the plugin's fields and arguments switch on."""
    if plugin is None:
        return []
    arguments = plugin.megatron_lm_default_args
    return [name for name in RULES if arguments.get(name)]


def eod_id(arguments: dict, config: dict) -> Optional[int]:
    """The id that ends documents: `eos_token_id` of Megatron's arguments, <|endoftext|> of their `vocab_file`, else the model
    config's. None where nobody says it. Errors: ConfigError for several ids, and for a vocabulary that has no end."""
    given = arguments.get("eos_token_id")
    if given is None and arguments.get("vocab_file") is not None:
        return _end_in(Path(str(arguments["vocab_file"])))
    if given is None:
        given = config.get("eos_token_id")
    if isinstance(given, (list, tuple)) and len(given) == 1:
        given = given[0]
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    raise ConfigError(f"eos_token_id is {given!r}, and a document has one end: give "
                      "MegatronLMPlugin(other_megatron_args={'eos_token_id': N})")


def _end_in(path: Path) -> int:
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"other_megatron_args: vocab_file {path} cannot be read as a vocabulary (JSON: token -> id): {error}") from error
    found = vocabulary.get(_END) if isinstance(vocabulary, dict) else None
    if isinstance(found, bool) or not isinstance(found, int):
        raise ConfigError(f"other_megatron_args: vocab_file {path} has no {_END}; give eos_token_id, the id that ends documents")
    return found


@dataclass(frozen=True)
class DocumentRules:
    """What applies to every batch of ids [batch, seq]."""

    eod: int
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False

    @classmethod
    def of(cls, plugin: Any, config: dict) -> Optional["DocumentRules"]:
        """Those of a plugin for a model of this config; None where it asks for none. Errors: ConfigError without an id that ends
        documents, or with one that the model does not have."""
        asked = rules_asked_for(plugin)
        if not asked:
            return None
        eod = eod_id(plugin.given_arguments, config)
        if eod is None:
            raise ConfigError(f"{', '.join(asked)} needs the id that ends a document: give "
                              "MegatronLMPlugin(other_megatron_args={'eos_token_id': N}), or a model whose config has eos_token_id")
        if eod >= int(config.get("vocab_size", eod + 1)):
            raise ConfigError(f"{', '.join(asked)}: the id that ends a document is {eod}, and the model has {config['vocab_size']} "
                              "tokens; give other_megatron_args={'eos_token_id': N}, or eos_token_id in the model's config")
        return cls(eod, *(name in asked for name in RULES))

    def apply(self, tokens: Any, labels: Any = None, position_ids: Any = None, documents: Any = None) -> Tuple[Any, Any, Any]:
        """(labels, position_ids, documents) of int arrays [batch, seq]; `labels` are those of the next position. What a batch
        brings counts: position_ids stay, with a warning where they are not what the rule says, and documents are cut further."""
        if self.mask_loss and labels is not None:
            labels = np.where(tokens == self.eod, IGNORED, labels)
        if self.reset_positions:
            ruled = positions_within(tokens == self.eod)
            if position_ids is None:
                position_ids = ruled
            elif not np.array_equal(position_ids, ruled):
                warn_once("reset_position_ids: batches bring position_ids of their own, which count")
        if self.reset_attention:
            documents = _cut_further(document_numbers(tokens == self.eod), documents)
        return labels, position_ids, documents


def no_rules(plugin: Any, kind: str) -> None:
    """Errors: ConfigError for rules about documents, which the samples of a model with an encoder do not follow."""
    asked = rules_asked_for(plugin)
    if asked:
        raise ConfigError(f"{', '.join(asked)}: a {kind} looks to both sides and over its whole sample, and has no rules about ends of "
                          "documents; remove it")


def document_numbers(ends: Any) -> Any:
    """int32 [batch, seq]: how many of `ends` (bool [batch, seq]) come before each position of its sample."""
    return (np.cumsum(ends, axis=1) - ends).astype(np.int32)


def positions_within(ends: Any) -> Any:
    """int64 [batch, seq]: the place of each position in its document."""
    place = np.broadcast_to(np.arange(ends.shape[1]), ends.shape)
    begins = np.concatenate([np.zeros((len(ends), 1), dtype=bool), ends[:, :-1]], axis=1)
    return place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)


def packed_documents(position_ids: Any) -> Optional[Any]:
    """Of packed samples: a position that does not follow the one before begins another document. None where there is one."""
    steps = np.diff(position_ids, axis=1, prepend=position_ids[:, :1] - 1) != 1
    return np.cumsum(steps, axis=1) if steps.any() else None


def _cut_further(documents: Any, others: Any) -> Any:
    if others is None:
        return documents
    changes = (np.diff(documents, axis=1) != 0) | (np.diff(np.asarray(others), axis=1) != 0)
    return np.concatenate([np.zeros((len(documents), 1), dtype=np.int32), np.cumsum(changes, axis=1, dtype=np.int32)], axis=1)


def hidden_keys(documents: Any, keys: Any = None) -> Any:
    """Megatron's attention mask, bool [batch, 1, seq, seq], True where a position (row) does not see a key (column): later ones,
    those of other documents, and padding (`keys` [batch, seq] zero)."""
    size = documents.shape[1]
    seen = np.tri(size, dtype=bool)[None] & (documents[:, :, None] == documents[:, None, :])
    if keys is not None:
        seen = seen & (np.asarray(keys) != 0)[:, None, :]
    return ~seen[:, None]


def documents_of_mask(mask: Any, batch: int) -> Tuple[Optional[Any], Optional[Any]]:
    """(documents, keys), int [batch, seq] each or None, of an attention mask [1 or batch, 1, seq, seq], which may hide keys (True)
    or show them. Errors: InvalidArgument for a mask that is more than causal attention within documents and padding."""
    mask = np.asarray(mask).astype(bool)
    size = mask.shape[-1]
    if mask.ndim != 4 or mask.shape[0] not in (1, batch) or mask.shape[1] != 1 or mask.shape[2] != size:
        raise InvalidArgument(f"attention_mask has the shape {list(mask.shape)}; a train step gives [batch, seq], or "
                              "[1 or batch, 1, seq, seq]")
    mask = mask[:, 0]
    later = ~np.tri(size, dtype=bool)
    # A key that comes later is hidden, whichever way round the mask is written.
    seen = ~mask if size == 1 or mask[0, 0, -1] else mask
    if size == 1:
        seen = np.ones_like(mask)
    keys = seen.any(axis=1)
    place = np.broadcast_to(np.arange(size), keys.shape)
    first = np.where(seen.any(axis=2), seen.argmax(axis=2), place)
    documents = np.concatenate([np.zeros((len(first), 1), dtype=np.int32),
                                np.cumsum(np.diff(first, axis=1) != 0, axis=1, dtype=np.int32)], axis=1)
    if not seen.any() or (seen & later).any() or not np.array_equal(hidden_keys(documents, keys)[:, 0], ~seen):
        raise InvalidArgument(f"attention_mask of shape {list(mask[:, None].shape)} is more than causal attention within documents; give "
                              "one [batch, seq] for padding, and reset_attention_mask, or position_ids that restart, for packed samples")
    documents = documents if documents.any() else None
    keys = None if keys.all() else keys

    def whole(array: Any) -> Any:
        return None if array is None else np.broadcast_to(array, (batch, size))

    return whole(documents), whole(keys)
