"""One call of a prepared model with an encoder and a decoder, as its batch: Transformers' columns or Megatron's."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from tessera.data.documents import IGNORED
from tessera.data.encoder_batch import counted_labels
from tessera.data.ids import ids_of
from tessera.data.key_masks import keys_of
from tessera.engine import call_arguments
from tessera.errors import InvalidArgument
from tessera.utils.objects import array_of

_REFUSED = {
    "num_items_in_batch": "the loss of this model is divided by its targets; scale outputs.loss yourself",
    "logits_to_keep": "this model's logits are those of all positions; slice them yourself",
    "document_ids": "the encoder attends to the whole sample; pad samples, and give an attention_mask",
    "position_ids": "T5 knows distances alone; pad samples, and give an attention_mask",
    "token_type_ids": "T5 has no types of tokens; remove that column"}
# What Megatron's samples for T5 are called here.
_MEGATRON = {"text_enc": "input_ids", "text_dec": "decoder_input_ids", "enc_mask": "attention_mask", "dec_mask": "decoder_attention_mask"}
_TAKEN = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "labels")


def seq2seq_batch(session: Any, arguments: Dict[str, Any]) -> Tuple[Any, None, bool]:
    """The engine's batch of a call, and whether it has labels (None: it has no labels of samples). Collective over data ranks. Errors:
    InvalidArgument."""
    given = _of_megatron(arguments) if arguments.get("text_enc") is not None else arguments
    for name, why in _REFUSED.items():
        if given.get(name) is not None:
            raise InvalidArgument(f"{name}: {why}")
    call_arguments.check({name: value for name, value in given.items() if name not in _TAKEN and name not in _REFUSED},
                         known=("return_dict",), takes=_TAKEN)
    call_arguments.check_has_ids(given.get("input_ids"))
    arrays = {name: array_of(given.get(name)) for name in _TAKEN}
    labels, decoder = ids_of("labels", arrays["labels"]), arrays["decoder_input_ids"]
    if decoder is None:
        decoder = shifted_right(labels, session.config)
    batch = session.batch(decoder, arrays["decoder_attention_mask"], labels, shifted=True, encoder_tokens=arrays["input_ids"],
                          encoder_mask=arrays["attention_mask"])
    return batch, None, labels is not None


def shifted_right(labels: Optional[Any], config: Dict[str, Any]) -> Any:
    """What a decoder reads to say `labels` [batch, sequence]: the start token of its config and all but the last of them, padding for
    -100. Errors: InvalidArgument without labels, or without these tokens."""
    import numpy as np

    if labels is None:
        raise InvalidArgument("the model was called with neither labels nor decoder_input_ids: give labels, and the decoder reads them "
                              "shifted right, or decoder_input_ids")
    if labels.ndim != 2:
        raise InvalidArgument(f"labels have the shape {tuple(labels.shape)}; they must be [batch, sequence]")
    for name in ("decoder_start_token_id", "pad_token_id"):
        if config.get(name) is None:
            raise InvalidArgument(f"config.{name} is not set, so labels cannot be shifted right; set it before prepare() (T5's is 0), or "
                                  "give decoder_input_ids")
    start = np.full((len(labels), 1), config["decoder_start_token_id"], labels.dtype)
    read = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(read == IGNORED, config["pad_token_id"], read)


def _of_megatron(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """A sample of Megatron's for T5: labels of -1, and those that loss_mask leaves out, do not count; its masks are of two
    dimensions a sample, 1 where a position sees another, or of one."""
    named = {_MEGATRON.get(name, name): array_of(value) for name, value in arguments.items()
             if name not in ("loss_mask", "truncated", "enc_dec_mask") and not (name in _MEGATRON.values() and value is None)}
    named["labels"] = counted_labels(named.get("labels"), array_of(arguments.get("loss_mask")))
    encoder, decoder = (ids_of(name, arguments.get(name)) for name in ("text_enc", "text_dec"))
    if decoder is None:
        raise InvalidArgument("a sample of Megatron's for T5 has text_dec beside text_enc, and the model was called without it")
    masks = keys_of(encoder.shape, decoder.shape, named.get("attention_mask"), named.get("decoder_attention_mask"),
                    array_of(arguments.get("enc_dec_mask")))
    named["attention_mask"], named["decoder_attention_mask"] = masks
    return named
