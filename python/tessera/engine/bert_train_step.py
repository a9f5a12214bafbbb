"""Accelerate's train step of BERT: of pre-training, and of fine-tuning to classes of samples."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Optional, Tuple

from tessera.data.encoder_batch import counted_labels
from tessera.engine.train_steps import AbstractTrainStep, avg_losses_across_data_parallel_group, call_fitting
from tessera.errors import InvalidArgument


class BertTrainStep(AbstractTrainStep):
    """The step of an encoder. `BertTrainStep(args)` or `BertTrainStep(accelerator, args)`; args has Megatron's names.

    get_batch(data_iterator) -> (tokens, types, sentence_order, loss_mask, lm_labels, padding_mask), of Hugging Face's columns or
    Megatron's; without pretraining_flag lm_labels are the samples' classes, [batch]. forward_step(data_iterator, model) -> (output,
    loss_func): of pre-training ((per-token losses [batch, seq], logits of pairs [batch, 2] or None), loss_func(output) -> (loss,
    {"lm loss", "sop loss"})), otherwise (logits [batch, num_labels], loss_func(logits) -> (loss, {"loss"}))."""

    def __init__(self, *arguments: Any):
        super().__init__("BertTrainStep")
        if len(arguments) not in (1, 2):
            raise TypeError(f"BertTrainStep takes (args) or (accelerator, args), not {len(arguments)} arguments")
        args = arguments[-1]
        accelerator = arguments[0] if len(arguments) == 2 else getattr(args, "accelerator", None)
        self.args = args
        self.pretraining_flag = bool(getattr(args, "pretraining_flag", True))
        self.num_labels = getattr(args, "num_labels", None)
        self.bert_binary_head = bool(getattr(args, "bert_binary_head", True))
        flag = getattr(args, "megatron_dataset_flag", False)
        self.get_batch = call_fitting(self.get_batch_func, (accelerator, flag), (flag,), ())
        self.loss_func = call_fitting(self.get_loss_func, (accelerator, self.pretraining_flag, self.num_labels),
                                      (self.pretraining_flag, self.num_labels), (accelerator,), ())
        self.forward_step = call_fitting(self.get_forward_step_func, (self.pretraining_flag, self.bert_binary_head), ())
        self.model_output_class = _output_class(args)

    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: Any = None) -> Callable:
        custom = getattr(self.args, "custom_get_batch_function", None)
        if custom is not None:
            return custom
        return lambda data_iterator: encoder_columns(next(data_iterator))

    def get_loss_func(self, accelerator: Any = None, pretraining_flag: Any = None, num_labels: Optional[int] = None) -> Callable:
        custom = getattr(self.args, "custom_loss_function", None)
        if custom is not None:
            return custom
        pretrains = self.pretraining_flag if pretraining_flag is None else pretraining_flag
        return _pretraining_loss if pretrains else partial(_class_loss, self.num_labels if num_labels is None else num_labels)

    def get_forward_step_func(self, pretraining_flag: Any = None, bert_binary_head: Any = None) -> Callable:
        pretrains = self.pretraining_flag if pretraining_flag is None else pretraining_flag

        def forward_step(data_iterator: Any, model: Any) -> Tuple:
            tokens, types, sentence_order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            if not pretrains:
                return model(tokens, padding_mask, tokentype_ids=types), partial(self.loss_func, labels)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, sentence_order)

        return forward_step


def _output_class(args: Any) -> Any:
    if getattr(args, "model_return_dict", True) is False:
        return None
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput


def encoder_columns(batch: dict) -> Tuple:
    """(tokens, types, sentence_order, loss_mask, lm_labels, padding_mask) of a batch with Hugging Face's columns, or Megatron's."""
    import torch

    if "text" in batch:
        labels = torch.as_tensor(counted_labels(batch["labels"], batch.get("loss_mask")))
        columns = (batch["text"], batch.get("types"), batch.get("is_random"), None, labels, batch.get("padding_mask"))
    else:
        columns = (batch["input_ids"], batch.get("token_type_ids"), batch.get("next_sentence_label"), None, batch.get("labels"),
                   batch.get("attention_mask"))
    tokens, types, order, mask, labels, padding = (None if each is None else torch.as_tensor(each) for each in columns)
    if labels is not None and not labels.is_floating_point():
        labels, mask = labels.long(), (labels != -100).float()
    whole = (None if each is None else each.long() for each in (tokens, types, order, padding))
    tokens, types, order, padding = whole
    return tokens, types, order, mask, labels, padding


def _pretraining_loss(loss_mask: Any, sentence_order: Any, output_tensor: Any) -> Tuple:
    """The mean over the masked tokens, and over the pairs whose label is not -100 (Megatron's -1 neither)."""
    from torch.nn import functional

    losses, logits = output_tensor if isinstance(output_tensor, tuple) else (output_tensor, None)
    mask = loss_mask.reshape(-1).float()
    lm_loss = (losses.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1)
    if logits is None:
        return lm_loss, {"lm loss": avg_losses_across_data_parallel_group([lm_loss])[0]}
    if sentence_order is None:
        raise InvalidArgument("the model has a head for pairs of segments, and the batch has no next_sentence_label (Megatron's is_random)")
    order = sentence_order.reshape(-1)
    counted = order.clamp(min=-1)
    sums = functional.cross_entropy(logits.reshape(-1, 2).float(), counted, ignore_index=-1, reduction="sum")
    sop_loss = sums / (counted != -1).sum().clamp(min=1)
    averaged = avg_losses_across_data_parallel_group([lm_loss, sop_loss])
    return lm_loss + sop_loss, {"lm loss": averaged[0], "sop loss": averaged[1]}


def _class_loss(num_labels: Optional[int], labels: Any, logits: Any) -> Tuple:
    """The mean loss of samples, by Accelerate's rule: of one number, of one class, or of any number of classes."""
    from torch.nn import functional

    if labels is None:
        raise InvalidArgument("a BertTrainStep without pretraining_flag needs labels of samples, and the batch has none")
    count = num_labels or logits.shape[-1]
    if count == 1:
        loss = functional.mse_loss(logits.reshape(-1).float(), labels.reshape(-1).float())
    elif labels.is_floating_point():
        loss = functional.binary_cross_entropy_with_logits(logits.float(), labels.float())
    else:
        loss = functional.cross_entropy(logits.reshape(-1, count).float(), labels.reshape(-1))
    return loss, {"loss": avg_losses_across_data_parallel_group([loss])[0]}
