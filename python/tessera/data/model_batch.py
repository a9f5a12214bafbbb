"""One call's arrays, as a Hugging Face model takes them, and the engine's batch that they become. No torch."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from tessera.data.documents import IGNORED, DocumentRules, packed_documents
from tessera.data.encoder_batch import token_types_of
from tessera.data.ids import ids_of
from tessera.errors import InvalidArgument


def model_batch(input_ids: Any, attention_mask: Any = None, labels: Any = None, position_ids: Any = None,
                shifted: bool = False, document_ids: Any = None, rules: Optional[DocumentRules] = None, token_types: Any = None,
                sample_labels: Any = None, encoder_tokens: Any = None, encoder_mask: Any = None) -> Tuple[Any, Any]:
    """Arrays [batch, seq] as a _C.Batch, and the labels it has: those of the next position, -100 where there is no loss. `labels`
    are those of the same positions unless `shifted`, as an encoder's always are; attention stays within equal `document_ids`;
    `sample_labels` are [batch]. `encoder_tokens` and their mask [batch, length] are what an encoder reads besides. Errors: InvalidArgument for shapes that do not fit, and for a mask with holes."""
    import numpy as np

    from tessera import _C

    own, mask_name = ("input_ids", "attention_mask") if encoder_tokens is None else ("decoder_input_ids", "decoder_attention_mask")
    tokens, labels, position_ids = map(ids_of, (own, "labels", "position_ids"), (input_ids, labels, position_ids))
    if tokens.ndim != 2:
        raise InvalidArgument(f"{own} have the shape {tuple(tokens.shape)}; they must be [batch, sequence]")
    for name, array in ((mask_name, attention_mask), ("labels", labels)):
        _check_shape(name, array, own, tokens.shape)
    encoder = _encoder(encoder_tokens, encoder_mask, len(tokens))
    begin, end = _key_ranges(mask_name, attention_mask)
    documents = document_ids
    if position_ids is not None:
        position_ids = np.broadcast_to(position_ids, tokens.shape)
        if attention_mask is None and documents is None and not shifted:
            documents = packed_documents(position_ids)
    if labels is not None and not shifted:
        labels = np.concatenate([labels[:, 1:], np.full((len(labels), 1), IGNORED, labels.dtype)], axis=1)
    if rules is not None:
        labels, position_ids, documents = rules.apply(tokens, labels, position_ids, documents)
    types = token_types_of(token_types, tokens.shape)
    return _C.Batch(tokens, labels, position_ids, begin, end, documents, types, sample_labels, *encoder), labels


def _check_shape(name: str, array: Any, tokens: str, shape: Tuple[int, ...]) -> None:
    import numpy as np

    if array is not None and tuple(np.shape(array)) != shape:
        raise InvalidArgument(f"{name} has the shape {tuple(np.shape(array))}, {tokens} {tuple(shape)}; they must be the same "
                              "[batch, sequence]")


def _encoder(encoder_tokens: Any, mask: Any, samples: int) -> Tuple[Any, Any, Any]:
    """What an encoder reads, and its first and one past its last key of each sample."""
    import numpy as np

    if encoder_tokens is None:
        return None, None, None
    tokens = ids_of("input_ids", encoder_tokens)
    if tokens.ndim != 2 or len(tokens) != samples:
        raise InvalidArgument(f"input_ids have the shape {tuple(tokens.shape)}; they must be [batch, sequence], for each of the "
                              f"{samples} samples of the decoder")
    _check_shape("attention_mask", mask, "input_ids", tokens.shape)
    return (tokens, *_key_ranges("attention_mask", mask))


def _key_ranges(name: str, attention_mask: Any) -> Tuple[Any, Any]:
    """First and one past the last key of each sample; (None, None) where all keys count."""
    import numpy as np

    if attention_mask is None:
        return None, None
    mask = np.asarray(attention_mask) != 0
    if mask.all():
        return None, None
    length = mask.shape[1]
    begin = np.where(mask.any(axis=1), mask.argmax(axis=1), 0)
    end = np.where(mask.any(axis=1), length - mask[:, ::-1].argmax(axis=1), 0)
    holes = np.flatnonzero(mask.sum(axis=1) != end - begin)
    if len(holes):
        raise InvalidArgument(f"{name} of sample {int(holes[0])} has zeros between ones; only padding at the ends can "
                              "be masked. For packed samples give position_ids that restart, and no mask")
    return begin, end
