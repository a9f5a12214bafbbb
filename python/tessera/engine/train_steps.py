"""How a batch becomes a loss: Accelerate's train steps, and what averages over data ranks."""

from __future__ import annotations

import inspect
from abc import ABC
from typing import Any, Callable, List, Optional, Tuple

from tessera.data.documents import RULES, DocumentRules, hidden_keys, packed_documents
from tessera.engine import call_arguments
from tessera.errors import ConfigError, InvalidArgument
from tessera.utils.objects import array_of
from tessera.utils.operations import gather


class Running:
    """Whether a micro-batch's loss is being computed, deep inside the pipeline's schedule."""

    steps = 0


def avg_losses_across_data_parallel_group(losses: List[Any]) -> Any:
    """The mean over data ranks of each of these scalars, a tensor [len(losses)]. Within a train step it is taken when all
    micro-batches are through, where ranks need not have the same number of them."""
    import torch

    own = torch.stack([loss.detach().clone().reshape(()) for loss in losses]).float()
    return own if Running.steps > 0 else gather_across_data_parallel_groups(own.unsqueeze(0)).mean(dim=0)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Tensors of all data ranks one after the other along dim 0, on every rank; scalars become length 1."""
    return gather(tensor)


def call_fitting(function: Callable, *choices: tuple) -> Any:
    """Calls with the first of these argument lists that the function takes: signatures differ between versions."""
    signature = inspect.signature(function)
    for arguments in choices:
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return function(*arguments)
    raise ConfigError(f"{getattr(function, '__qualname__', function)} takes {signature}; none of the signatures of a train step "
                      "fits it")


class AbstractTrainStep(ABC):
    """How a batch becomes a loss. Subclasses give get_batch_func, get_forward_step_func and get_loss_func; the signatures of
    all versions are understood: with and without `accelerator`."""

    def __init__(self, name: str):
        self.name = name

    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: Any = None) -> Callable:
        raise NotImplementedError(f"{type(self).__name__} has no get_batch_func")

    def get_forward_step_func(self) -> Callable:
        raise NotImplementedError(f"{type(self).__name__} has no get_forward_step_func")

    def get_loss_func(self, accelerator: Any = None) -> Callable:
        raise NotImplementedError(f"{type(self).__name__} has no get_loss_func")


class GPTTrainStep(AbstractTrainStep):
    """The step of a decoder. `GPTTrainStep(args)` or `GPTTrainStep(accelerator, args)`; args has Megatron's names.

    get_batch(data_iterator) -> (tokens, labels, loss_mask, attention_mask, position_ids), [batch, seq] each, labels shifted;
    labels of -100 and attention_mask of the batch are honoured, and args' eod_mask_loss, reset_position_ids and
    reset_attention_mask (then attention_mask is Megatron's, [batch, 1, seq, seq]) with args.eos_token_id. forward_step(data_iterator, model) -> (per-token losses
    [batch, seq], loss_func); loss_func(losses) -> (loss, {"lm loss": mean over data ranks})."""

    def __init__(self, *arguments: Any):
        super().__init__("GPTTrainStep")
        if len(arguments) not in (1, 2):
            raise TypeError(f"GPTTrainStep takes (args) or (accelerator, args), not {len(arguments)} arguments")
        args = arguments[-1]
        accelerator = arguments[0] if len(arguments) == 2 else getattr(args, "accelerator", None)
        self.args = args
        self.eod_token = getattr(args, "eos_token_id", None)
        self.reset_position_ids = getattr(args, "reset_position_ids", False)
        self.reset_attention_mask = getattr(args, "reset_attention_mask", False)
        self.eod_mask_loss = getattr(args, "eod_mask_loss", False)
        flag = getattr(args, "megatron_dataset_flag", False)
        self.get_batch = call_fitting(self.get_batch_func, (accelerator, flag), ())
        self.loss_func = call_fitting(self.get_loss_func, (accelerator,), ())
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = None

    def get_batch_func(self, accelerator: Any = None, megatron_dataset_flag: Any = None) -> Callable:
        custom = getattr(self.args, "custom_get_batch_function", None)
        if custom is not None:
            return custom

        def get_batch(data_iterator: Any) -> Tuple:
            return tokens_and_labels(next(data_iterator), self._rules())

        return get_batch

    def _rules(self) -> Optional[DocumentRules]:
        asked = [name for name in RULES if getattr(self, name)]
        if asked and self.eod_token is None:
            raise ConfigError(f"{', '.join(asked)} needs the id that ends a document: give the train step's args eos_token_id")
        return DocumentRules(self.eod_token, *(name in asked for name in RULES)) if asked else None

    def get_loss_func(self, accelerator: Any = None) -> Callable:
        custom = getattr(self.args, "custom_loss_function", None)
        if custom is not None:
            return custom

        return masked_mean

    def get_forward_step_func(self) -> Callable:
        def forward_step(data_iterator: Any, model: Any) -> Tuple:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
            return output_tensor, lambda output: self.loss_func(loss_mask, output)

        return forward_step


def masked_mean(loss_mask: Any, output_tensor: Any) -> Tuple:
    """The mean of tokens' losses where `loss_mask` counts them, and what is reported: its mean over data ranks."""
    mask = loss_mask.reshape(-1).float()
    loss = (output_tensor.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}


def tokens_and_labels(batch: dict, rules: Optional[DocumentRules] = None) -> Tuple:
    """(tokens, labels, loss_mask, attention_mask, position_ids) of a Hugging Face batch (labels at their own positions) or an
    indexed one ({"text": [batch, seq + 1]}), under rules about documents. Where attention ends with documents its mask is Megatron's:
    bool [batch, 1, seq, seq], True where a position does not see a key."""
    import torch

    call_arguments.check(batch, known=None)
    for name in ("num_items_in_batch", "logits_to_keep", "token_type_ids"):
        if batch.get(name) is not None:
            raise InvalidArgument(f"{name}: a train step does not use it; normalise the loss in its loss function, or train without "
                                  "a train step")
    mask, positions, documents = (batch.get(name) for name in ("attention_mask", "position_ids", "document_ids"))
    if "text" in batch:
        text = torch.as_tensor(batch["text"]).long()
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        counted = torch.as_tensor(batch.get("labels", labels)) != -100  # what the data's rules about documents leave of them
    else:
        tokens = batch["input_ids"]
        labels = batch.get("labels")
        labels = tokens if labels is None else labels
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        if mask is not None and batch.get("labels") is None:
            labels = labels.masked_fill(torch.nn.functional.pad(mask, (0, 1))[:, 1:] == 0, -100)
        counted = labels != -100
        if positions is not None and mask is None and documents is None:
            documents = packed_documents(array_of(positions.expand(tokens.shape)))
    if rules is not None:
        ruled, positions, documents = rules.apply(array_of(tokens), array_of(labels), array_of(positions), array_of(documents))
        counted = counted & torch.from_numpy(ruled != -100).to(counted.device)
        positions = None if positions is None else torch.as_tensor(positions).to(tokens.device)
    if documents is not None:
        mask = torch.from_numpy(hidden_keys(array_of(documents), array_of(mask))).to(tokens.device)
    return tokens, labels, counted.float(), mask, positions
