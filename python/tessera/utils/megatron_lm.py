"""What scripts import of Accelerate's Megatron-LM integration: train steps, dummies, and what averages over data ranks."""

from __future__ import annotations

import inspect
import sys
from abc import ABC
from argparse import Namespace
from typing import Any, Callable, Dict, List, Optional, Tuple

from tessera import _call_arguments
from tessera._documents import RULES, DocumentRules, hidden_keys, packed_documents
from tessera.errors import ConfigError, InvalidArgument

__all__ = ["AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "MegatronEngine", "MegatronLMDummyDataLoader",
           "MegatronLMDummyScheduler", "MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper", "T5TrainStep",
           "avg_losses_across_data_parallel_group", "gather_across_data_parallel_groups", "full_gradients"]


def __getattr__(name: str) -> Any:
    """The wrappers, whose modules need torch or this one."""
    if name == "MegatronLMOptimizerWrapper":
        from tessera.optimizer import AcceleratedOptimizer

        return AcceleratedOptimizer
    if name == "MegatronLMSchedulerWrapper":
        from tessera.scheduler import AcceleratedScheduler

        return AcceleratedScheduler
    if name == "MegatronEngine":
        from tessera._model import TesseraModel

        return TesseraModel
    from tessera.utils.foreign_functions import find

    refused = find(name)
    if refused is not None:
        return refused
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def is_model(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.nn.Module) and not is_prepared(obj)


def is_prepared(obj: Any) -> bool:
    """Whether prepare() made it."""
    names = {"tessera._model": "TesseraModel", "tessera.optimizer": "AcceleratedOptimizer",
             "tessera.scheduler": "AcceleratedScheduler", "tessera.data_loader": "DataLoaderBase"}
    return any(module in sys.modules and issubclass(type(obj), getattr(sys.modules[module], name))
               for module, name in names.items())


class MegatronLMDummyScheduler:
    """Asks prepare() for Megatron's learning-rate schedule, see the plugin's lr_* fields. What `total_num_steps` counts is
    explained in docs/guides/coming_from_accelerate.md; the resolved horizon is logged."""

    def __init__(self, optimizer: Any, total_num_steps: Optional[int] = None, warmup_num_steps: int = 0, **kwargs: Any):
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """Megatron's indexed data (.idx/.bin): passed three times to one prepare() it becomes the loaders of training,
    validation and test. Keywords are Megatron's arguments of data and validation: data_path (prefix, or "weight prefix weight
    prefix ...") with split (also splits_string), or train_data_path, valid_data_path and test_data_path; seq_length,
    micro_batch_size, data_cache_path, seed, eval_iters, eval_interval, eod_mask_loss and the like (docs/guides/data_in_python.md).
    What is not given is the plugin's. Batches are {"text": int64 [batch, seq_length + 1]}. Errors: ConfigError."""

    def __init__(self, **dataset_kwargs: Any):
        from tessera._indexed_loaders import admit

        self.dataset_args = admit(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """The plugin takes these arguments over, as prepare() has it; one line names each that it said otherwise."""
        from tessera._indexed_loaders import set_plugin_arguments
        from tessera.state import AcceleratorState

        plugin = AcceleratorState().megatron_lm_plugin
        if plugin is None:
            raise ConfigError("MegatronLMDummyDataLoader needs a MegatronLMPlugin")
        set_plugin_arguments(self.dataset_args, plugin)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable:
        """function(numbers of samples of training, validation and test) -> their data sets, as far as they have samples."""
        from tessera._indexed_loaders import samples_provider

        return samples_provider(accelerator, self.dataset_args)

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Tuple:
        """The three iterators, None for a part without a share. Collective; after the scheduler's or the plugin's train_iters is
        known."""
        from tessera._indexed_loaders import build_loaders

        return build_loaders(accelerator, self.dataset_args)


def avg_losses_across_data_parallel_group(losses: List[Any]) -> Any:
    """The mean over data ranks of each of these scalars, a tensor [len(losses)]. Within a train step it is taken when all
    micro-batches are through, where ranks need not have the same number of them."""
    import torch

    own = torch.stack([loss.detach().clone().reshape(()) for loss in losses]).float()
    return own if _averaged_later() else gather_across_data_parallel_groups(own.unsqueeze(0)).mean(dim=0)


def _averaged_later() -> bool:
    """Whether a train step's loss is being computed now."""
    runner = sys.modules.get("tessera._step_runner")
    return runner is not None and runner.Running.steps > 0


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Tensors of all data ranks one after the other along dim 0, on every rank; scalars become length 1."""
    from tessera.utils.operations import gather

    return gather(tensor)


def full_gradients(model: Any) -> Dict[str, Any]:
    """The whole gradient that the next step would take, unclipped, as fp32 tensors by Hugging Face name on rank 0; {} on
    other ranks. Collective."""
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in model.session.collect(gradients=True).items()}


def _call(function: Callable, *choices: tuple) -> Any:
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
        self.get_batch = _call(self.get_batch_func, (accelerator, flag), ())
        self.loss_func = _call(self.get_loss_func, (accelerator,), ())
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

        def loss_func(loss_mask: Any, output_tensor: Any) -> Tuple:
            mask = loss_mask.reshape(-1).float()
            loss = (output_tensor.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1)
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self) -> Callable:
        def forward_step(data_iterator: Any, model: Any) -> Tuple:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output_tensor = model(tokens, position_ids, attention_mask, labels=labels)
            return output_tensor, lambda output: self.loss_func(loss_mask, output)

        return forward_step


class _Later(AbstractTrainStep):
    _what = ""

    def __init__(self, *arguments: Any):
        raise NotImplementedError(f"{type(self).__name__}: {self._what} comes next; today Tessera trains decoders (GPTTrainStep)")


class BertTrainStep(_Later):
    """Not there yet: raises."""

    _what = "BERT"


class T5TrainStep(_Later):
    """Not there yet: raises."""

    _what = "T5"


def tokens_and_labels(batch: dict, rules: Optional[DocumentRules] = None) -> Tuple:
    """(tokens, labels, loss_mask, attention_mask, position_ids) of a Hugging Face batch (labels at their own positions) or an
    indexed one ({"text": [batch, seq + 1]}), under rules about documents. Where attention ends with documents its mask is Megatron's:
    bool [batch, 1, seq, seq], True where a position does not see a key."""
    import torch

    _call_arguments.check(batch, known=None)
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
            documents = packed_documents(_array(positions.expand(tokens.shape)))
    if rules is not None:
        ruled, positions, documents = rules.apply(_array(tokens), _array(labels), _array(positions), _array(documents))
        counted = counted & torch.from_numpy(ruled != -100).to(counted.device)
        positions = None if positions is None else torch.as_tensor(positions).to(tokens.device)
    if documents is not None:
        mask = torch.from_numpy(hidden_keys(_array(documents), _array(mask))).to(tokens.device)
    return tokens, labels, counted.float(), mask, positions


def _array(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor


def train_step_for(accelerator: Any, plugin: Any, session: Any) -> Optional[Any]:
    """The runner of the plugin's own step, or None where the model's loss does."""
    kind = plugin.custom_train_step_class
    if kind is None and plugin.custom_get_batch_function is None and plugin.custom_loss_function is None:
        return None
    from tessera._step_runner import StepRunner

    return StepRunner(make_train_step(accelerator, plugin, session))


def make_train_step(accelerator: Any, plugin: Any, session: Any) -> AbstractTrainStep:
    """The plugin's custom_train_step_class, or a GPTTrainStep, with the plugin's arguments."""
    kind = plugin.custom_train_step_class
    args = Namespace(**plugin.megatron_lm_default_args)
    args.padded_vocab_size = plugin.megatron_lm_default_args.get("orig_vocab_size")
    args.accelerator = accelerator
    args.custom_get_batch_function = plugin.custom_get_batch_function
    args.custom_loss_function = plugin.custom_loss_function
    if session.rules is not None:
        args.eos_token_id = session.rules.eod
    kwargs = plugin.custom_train_step_kwargs or {}
    if kind is None:
        return GPTTrainStep(accelerator, args)
    try:
        inspect.signature(kind).bind(accelerator, args, **kwargs)
        return kind(accelerator, args, **kwargs)
    except TypeError:
        return kind(args, **kwargs)
