"""A train step of an encoder with a decoder around the engine. In torch, because train steps are."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import numpy as np
import torch

from tessera.data.key_masks import keys_of
from tessera.engine import call_arguments
from tessera.engine.step_runner import StepRunner, array, whole
from tessera.errors import ConfigError


class Seq2SeqStepRunner(StepRunner):
    """Runs a train step's functions around the engine: its forward_step sees a model that takes two sequences and returns per-token
    losses."""

    def recorder(self, losses: Any = None) -> Any:
        return Seq2SeqRecorder(losses)

    @staticmethod
    def joined(asked: list, batch: dict, session: Any) -> Any:
        if not asked:
            empty = {name: np.zeros((0, value.shape[1]), dtype=np.int64) for name, value in batch.items() if getattr(value, "ndim", 0) == 2}
            read = next(value for name, value in empty.items() if name in ("input_ids", "text_enc"))
            said = next(value for name, value in empty.items() if name in ("decoder_input_ids", "text_dec", "labels"))
            return session.batch(said, labels=said, shifted=True, ruled=True, encoder_tokens=read)
        keys = [each.keys() for each in asked]
        encoders, decoders = ([getattr(each, name) for each in asked] for name in ("tokens_enc", "tokens_dec"))
        return session.batch(whole(decoders), _filled([own for _, own in keys], decoders), whole([each.labels for each in asked]),
                             shifted=True, ruled=True, encoder_tokens=whole(encoders),
                             encoder_mask=_filled([own for own, _ in keys], encoders))


class Seq2SeqRecorder:
    """What forward_step gets for a model: notes what it is called with, and returns losses to compute with."""

    def __init__(self, losses: Any = None):
        self.losses = losses
        self.tokens_enc = self.tokens_dec = self.labels = self.returned = None
        self.masks: Tuple[Any, Any, Any] = (None, None, None)

    def __call__(self, encoder_input_ids: Any, decoder_input_ids: Any = None, encoder_attn_mask: Any = None, decoder_attn_mask: Any = None,
                 encoder_decoder_attn_mask: Any = None, tokentype_ids: Any = None, lm_labels: Any = None, **others: Any) -> Any:
        if lm_labels is None or decoder_input_ids is None:
            raise ConfigError("a train step's forward_step must give this model decoder_input_ids and lm_labels: it returns per-token losses")
        call_arguments.check({name: value for name, value in {**others, "tokentype_ids": tokentype_ids}.items() if value is not None}, known=())
        self.tokens_enc, self.tokens_dec, self.labels = encoder_input_ids, decoder_input_ids, lm_labels
        self.masks = (encoder_attn_mask, decoder_attn_mask, encoder_decoder_attn_mask)
        self.returned = torch.zeros(lm_labels.shape, requires_grad=True) if self.losses is None else self.losses
        return self.returned

    def keys(self) -> Tuple[Optional[Any], Optional[Any]]:
        """1 for each key of the encoder, and of the decoder."""
        names = ("enc_mask", "dec_mask", "enc_dec_mask")
        enc, dec, read = (_seen(name, mask) for name, mask in zip(names, self.masks))
        return keys_of(tuple(self.tokens_enc.shape), tuple(self.tokens_dec.shape), enc, dec, read)


def _seen(name: str, mask: Any) -> Optional[Any]:
    """1 where a key is seen, of Megatron's bool, True where it is not, or of numbers [batch, keys], 1 where it is."""
    if mask is None:
        return None
    mask = array(mask)
    if (mask.dtype == bool) != (mask.ndim > 2):
        raise ConfigError(f"{name} that forward_step gives the model is {mask.dtype} of the shape {list(mask.shape)}; it must be bool [batch, "
                          "positions, keys], True where a position does not see a key, or integers [batch, keys], 1 where there is one")
    return ~mask if mask.dtype == bool else mask


def _filled(parts: List[Any], tokens: List[Any]) -> Optional[Any]:
    """Parts of micro-batches as one array; 1 everywhere in those that have none."""
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.ones(tuple(each.shape), dtype=np.int64) if part is None else part for part, each in zip(parts, tokens)])
