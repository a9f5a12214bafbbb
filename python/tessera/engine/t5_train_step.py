"""Accelerate's train step of T5."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Tuple

from tessera.data.encoder_batch import counted_labels
from tessera.engine.seq2seq_call import shifted_right
from tessera.engine.train_steps import AbstractTrainStep, call_fitting, masked_mean
from tessera.errors import InvalidArgument
from tessera.utils.objects import array_of


class T5TrainStep(AbstractTrainStep):
    """The step of an encoder with a decoder. `T5TrainStep(args)` or `T5TrainStep(accelerator, args)`; args has Megatron's names.

    get_batch(data_iterator) -> (tokens_enc, tokens_dec, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask), of Hugging Face's columns
    or Megatron's; masks are bool [batch or 1, positions, keys], True where a position does not see a key. forward_step(data_iterator,
    model) -> (per-token losses [batch, seq], loss_func); loss_func(losses) -> (loss, {"lm loss": mean over data ranks})."""

    def __init__(self, *arguments: Any):
        super().__init__("T5TrainStep")
        if len(arguments) not in (1, 2):
            raise TypeError(f"T5TrainStep takes (args) or (accelerator, args), not {len(arguments)} arguments")
        args = arguments[-1]
        accelerator = arguments[0] if len(arguments) == 2 else getattr(args, "accelerator", None)
        self.args = args
        flag = getattr(args, "megatron_dataset_flag", False)
        self.get_batch = call_fitting(self.get_batch_func, (accelerator, flag), (flag,), ())
        self.loss_func = call_fitting(self.get_loss_func, (accelerator,), ())
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = _output_class(args)

    @staticmethod
    def attn_mask_postprocess(attention_mask: Any) -> Any:
        """bool [batch, seq, seq], False where both positions have a 1 in `attention_mask` [batch, seq]."""
        return attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: Any) -> Any:
        """bool [1, seq, seq], True where the key comes after the position."""
        import torch

        return torch.tril(torch.ones((1, seq_length, seq_length), device=device)) < 0.5

    @staticmethod
    def get_enc_dec_mask(attention_mask: Any, dec_seq_length: int, device: Any) -> Any:
        """bool [batch, dec_seq_length, seq], True where `attention_mask` [batch, seq] of the encoder's tokens has a 0."""
        import torch

        return torch.ones((len(attention_mask), dec_seq_length, 1), device=device) * attention_mask.unsqueeze(1) < 0.5

    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: Any = None) -> Callable:
        custom = getattr(self.args, "custom_get_batch_function", None)
        if custom is not None:
            return custom
        config = {name: getattr(self.args, name, None) or 0 for name in ("decoder_start_token_id", "pad_token_id")}
        return lambda data_iterator: two_sequences(next(data_iterator), config)

    def get_loss_func(self, accelerator: Any = None) -> Callable:
        custom = getattr(self.args, "custom_loss_function", None)
        if custom is not None:
            return custom

        return masked_mean

    def get_forward_step_func(self) -> Callable:
        def forward_step(data_iterator: Any, model: Any) -> Tuple:
            tokens_enc, tokens_dec, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask = self.get_batch(data_iterator)
            output_tensor = model(tokens_enc, tokens_dec, enc_mask, dec_mask, enc_dec_mask, tokentype_ids=None, lm_labels=labels)
            return output_tensor, partial(self.loss_func, loss_mask)

        return forward_step


def _output_class(args: Any) -> Any:
    if getattr(args, "model_return_dict", True) is False:
        return None
    from transformers.modeling_outputs import Seq2SeqLMOutput

    return Seq2SeqLMOutput


def two_sequences(batch: dict, config: dict) -> Tuple:
    """(tokens_enc, tokens_dec, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask) of a batch with Hugging Face's columns, or
    Megatron's; `config` has what the decoder reads first, and for padding."""
    import torch

    if "text_enc" in batch:
        tokens_enc, tokens_dec = (torch.as_tensor(batch[name]).long() for name in ("text_enc", "text_dec"))
        labels = torch.as_tensor(counted_labels(batch["labels"], batch.get("loss_mask")))
        return (tokens_enc, tokens_dec, (labels != -100).float(), labels, *_megatron_masks(batch, tokens_dec))
    if batch.get("labels") is None:
        raise InvalidArgument("a T5TrainStep trains on labels, and the batch has none")
    tokens_enc, labels = (torch.as_tensor(batch[name]).long() for name in ("input_ids", "labels"))
    tokens_dec = batch.get("decoder_input_ids")
    if tokens_dec is None:
        tokens_dec = torch.from_numpy(shifted_right(array_of(labels), config)).to(labels.device)
    tokens_dec = torch.as_tensor(tokens_dec).long()
    mask = batch.get("attention_mask")
    mask = torch.ones_like(tokens_enc) if mask is None else torch.as_tensor(mask).long()
    return (tokens_enc, tokens_dec, (labels != -100).float(), labels, T5TrainStep.attn_mask_postprocess(mask),
            _decoder_mask(tokens_dec, batch.get("decoder_attention_mask")),
            T5TrainStep.get_enc_dec_mask(mask, tokens_dec.shape[1], mask.device))


def _decoder_mask(tokens_dec: Any, mask: Any) -> Any:
    """Of what comes after a position, and where `mask` [batch, seq] has a 0."""
    import torch

    after = T5TrainStep.get_decoder_mask(tokens_dec.shape[1], tokens_dec.device)
    return after if mask is None else after | T5TrainStep.attn_mask_postprocess(torch.as_tensor(mask).long())


def _megatron_masks(batch: dict, tokens_dec: Any) -> Tuple:
    """Of two dimensions a sample, as older versions of Megatron have them; later ones have one, and no enc_dec_mask."""
    import torch

    enc, dec, read = (None if batch.get(name) is None else torch.as_tensor(batch[name]) for name in ("enc_mask", "dec_mask", "enc_dec_mask"))
    if read is not None:
        read = read < 0.5
    elif enc is not None and enc.ndim == 2:
        read = T5TrainStep.get_enc_dec_mask(enc, tokens_dec.shape[1], enc.device)
    if enc is not None:
        enc = T5TrainStep.attn_mask_postprocess(enc) if enc.ndim == 2 else enc < 0.5
    dec = dec < 0.5 if dec is not None and dec.ndim > 2 else _decoder_mask(tokens_dec, dec)
    return enc, dec, read
