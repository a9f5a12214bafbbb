"""Masks of an encoder and a decoder as Megatron has them, [batch, positions, keys], as the keys that they leave. No torch."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from tessera.errors import InvalidArgument

_REMEDY = ("Tessera's encoder sees all tokens of a sample but padding, its decoder those up to its own position, and both all of the "
           "encoder's but padding; pad samples at their ends")


def keys_of(encoder: Tuple[int, ...], decoder: Tuple[int, ...], enc_mask: Any, dec_mask: Any, enc_dec_mask: Any
            ) -> Tuple[Optional[Any], Optional[Any]]:
    """int64 [batch, keys] of the encoder's and of the decoder's own keys, 1 where there is one, of masks with 1 where a position sees a
    key: [batch or 1, positions, keys] or [batch, keys]; `encoder`, `decoder`: [batch, sequence] of the tokens. None for None. Errors:
    InvalidArgument for a mask that the models do not have."""
    samples, length = encoder
    own = _keys("enc_mask", enc_mask, samples, length, length)
    read = _keys("enc_dec_mask", enc_dec_mask, samples, decoder[1], length)
    if own is not None and read is not None and (own != read).any():
        sample = int((own != read).any(axis=1).argmax())
        raise InvalidArgument(f"enc_mask and enc_dec_mask leave other tokens of the encoder to sample {sample}. {_REMEDY}")
    said = _keys("dec_mask", dec_mask, samples, decoder[1], decoder[1], causal=True)
    return (read if own is None else own), said


def _keys(name: str, mask: Any, samples: int, positions: int, keys: int, causal: bool = False) -> Optional[Any]:
    import numpy as np

    if mask is None:
        return None
    seen = np.asarray(mask) != 0
    if seen.shape == (samples, keys):
        return seen.astype(np.int64)
    if seen.ndim == 4 and seen.shape[1] == 1:  # one for all heads
        seen = seen[:, 0]
    if seen.ndim != 3 or seen.shape[0] not in (1, samples) or seen.shape[1:] != (positions, keys):
        raise InvalidArgument(f"{name} has the shape {list(np.shape(mask))}; it must be [{samples}, {positions}, {keys}] or "
                              f"[{samples}, {keys}]")
    before = np.tril(np.ones((positions, keys), dtype=bool)) if causal else np.ones((positions, keys), dtype=bool)
    there = seen.any(axis=1)
    # A position of padding may see nothing, or what the others do.
    fits = (seen == (there[:, None, :] & before)).all(axis=2) | ~seen.any(axis=2)
    if not fits.all():
        sample, position = (int(each[0]) for each in np.nonzero(~fits))
        raise InvalidArgument(f"{name}: what position {position} of sample {sample} sees is not what the model computes. {_REMEDY}")
    return np.broadcast_to(there, (samples, keys)).astype(np.int64)
