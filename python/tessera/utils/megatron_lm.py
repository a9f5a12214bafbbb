"""What scripts import of Accelerate's Megatron-LM integration: train steps, dummies, and what averages over data ranks."""

from __future__ import annotations

import inspect
import sys
from abc import ABC
from argparse import Namespace
from typing import Any, Callable, Dict, List, Optional, Tuple

from tessera import _call_arguments
from tessera.errors import ConfigError, InvalidArgument
from tessera.utils.split import bounds

__all__ = ["AbstractTrainStep", "BertTrainStep", "GPTTrainStep", "MegatronEngine", "MegatronLMDummyDataLoader",
           "MegatronLMDummyScheduler", "MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper", "T5TrainStep",
           "avg_losses_across_data_parallel_group", "gather_across_data_parallel_groups", "full_gradients"]

_DATA_DEFAULTS = {"data_path": None, "seq_length": None, "micro_batch_size": None, "split": "969, 30, 1",
                  "data_cache_path": None}


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
    validation and test. Keywords: data_path (prefix, or "weight prefix weight prefix ..."), seq_length, micro_batch_size,
    split (also splits_string), data_cache_path. Batches are {"text": int64 [batch, seq_length + 1]}."""

    def __init__(self, **dataset_kwargs: Any):
        given = dict(dataset_kwargs)
        if "splits_string" in given:
            given.setdefault("split", given.pop("splits_string"))
        unknown = sorted(set(given) - set(_DATA_DEFAULTS))
        if unknown:
            raise ConfigError(f"MegatronLMDummyDataLoader knows no {', '.join(unknown)}; it takes {', '.join(_DATA_DEFAULTS)}")
        self.dataset_args = {**_DATA_DEFAULTS, **given}
        missing = [name for name in ("seq_length", "micro_batch_size") if self.dataset_args[name] is None]
        if missing:
            raise ConfigError(f"MegatronLMDummyDataLoader needs {', '.join(missing)}")


def indexed_loaders(accelerator: Any, dummies: list) -> list:
    """Loaders of training, validation and test, as many as there are dummies."""
    from tessera._indexed import build_iterators

    if any(dummy.dataset_args != dummies[0].dataset_args for dummy in dummies) or len(dummies) > 3:
        raise ConfigError("the MegatronLMDummyDataLoaders of one prepare() become training, validation and test of one dataset: "
                          "pass the same one, three times at most")
    plugin, mesh, given = accelerator.state.megatron_lm_plugin, accelerator.state.mesh, dummies[0].dataset_args
    if plugin is None:
        raise ConfigError("MegatronLMDummyDataLoader needs a MegatronLMPlugin")
    horizon = next((scheduler.scheduler.horizon for scheduler in accelerator._schedulers
                    if hasattr(scheduler.scheduler, "horizon")), None)
    steps = plugin.train_iters or (horizon and horizon.train_iters)
    if not steps:
        raise ConfigError("how much indexed data is read follows from the length of the training: give the plugin train_iters")
    extra = plugin.other_megatron_args or {}
    config = accelerator._models[0].config if accelerator._models else {"vocab_size": 0}
    vocab_size = config["vocab_size"] if isinstance(config, dict) else config.vocab_size
    return list(build_iterators(
        data_path=given["data_path"], split=given["split"], seq_length=given["seq_length"], seed=int(extra.get("seed", 1234)),
        micro_batch_size=given["micro_batch_size"], num_micro_batches=plugin.num_micro_batches,
        data_rank=mesh.coordinates["dp"], data_ranks=mesh.dp, train_iters=int(steps), eval_iters=plugin.eval_iters,
        eval_interval=plugin.eval_interval, consumed_samples=tuple(plugin.consumed_samples or (0, 0, 0)),
        eos_token_id=extra.get("eos_token_id"), reset_position_ids=bool(extra.get("reset_position_ids")),
        reset_attention_mask=bool(extra.get("reset_attention_mask")), eod_mask_loss=bool(plugin.eod_mask_loss),
        cache_dir=given["data_cache_path"], world=accelerator.state.world, vocab_size=vocab_size,
        datasets_provider=plugin.custom_megatron_datasets_provider_function))[: len(dummies)]


def avg_losses_across_data_parallel_group(losses: List[Any]) -> Any:
    """The mean over data ranks of each of these scalars, a tensor [len(losses)]. Within a train step it is taken when all
    micro-batches are through, where ranks need not have the same number of them."""
    import torch

    own = torch.stack([loss.detach().clone().reshape(()) for loss in losses]).float()
    return own if _Running.steps else gather_across_data_parallel_groups(own.unsqueeze(0)).mean(dim=0)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Tensors of all data ranks one after the other along dim 0, on every rank; scalars become length 1."""
    from tessera.utils.operations import gather

    return gather(tensor)


def full_gradients(model: Any) -> Dict[str, Any]:
    """The whole gradient that the next step would take, unclipped, as fp32 tensors by Hugging Face name on rank 0; {} on
    other ranks. Collective."""
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in model.session.collect(gradients=True).items()}


class _Running:
    """Whether a micro-batch's loss is being computed, deep inside the pipeline's schedule."""

    steps = 0


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
    labels of -100 and attention_mask of the batch are honoured. forward_step(data_iterator, model) -> (per-token losses
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
            return tokens_and_labels(next(data_iterator), self.args)

        return get_batch

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


def tokens_and_labels(batch: dict, args: Any = None) -> Tuple:
    """(tokens, labels, loss_mask, attention_mask, position_ids) of a Hugging Face batch (labels at their own positions) or an
    indexed one ({"text": [batch, seq + 1]})."""
    import torch

    _call_arguments.check(batch, known=None)
    for name in ("num_items_in_batch", "logits_to_keep", "token_type_ids"):
        if batch.get(name) is not None:
            raise InvalidArgument(f"{name}: a train step does not use it; normalise the loss in its loss function, or train without "
                                  "a train step")
    if "text" in batch:
        text = torch.as_tensor(batch["text"]).long()
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if "labels" in batch:  # what the data's rules about documents leave of them
            labels = torch.as_tensor(batch["labels"]).long()
        return tokens, labels, (labels != -100).float(), batch.get("attention_mask"), batch.get("position_ids")
    tokens = batch["input_ids"]
    labels = batch.get("labels")
    labels = tokens if labels is None else labels
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    mask = batch.get("attention_mask")
    if mask is not None and batch.get("labels") is None:
        labels = labels.masked_fill(torch.nn.functional.pad(mask, (0, 1))[:, 1:] == 0, -100)
    return tokens, labels, (labels != -100).float(), mask, batch.get("position_ids")


def train_step_for(accelerator: Any, plugin: Any) -> Optional["StepRunner"]:
    """The plugin's own step, or None where the model's loss does."""
    kind = plugin.custom_train_step_class
    if kind is None and plugin.custom_get_batch_function is None and plugin.custom_loss_function is None:
        return None
    args = Namespace(**plugin.megatron_lm_default_args)
    args.padded_vocab_size = plugin.megatron_lm_default_args.get("orig_vocab_size")
    args.accelerator = accelerator
    args.custom_get_batch_function = plugin.custom_get_batch_function
    args.custom_loss_function = plugin.custom_loss_function
    kwargs = plugin.custom_train_step_kwargs or {}
    if kind is None:
        return StepRunner(GPTTrainStep(accelerator, args))
    try:
        inspect.signature(kind).bind(accelerator, args, **kwargs)
        step = kind(accelerator, args, **kwargs)
    except TypeError:
        step = kind(args, **kwargs)
    return StepRunner(step)


class StepRunner:
    """Runs a train step's functions around the engine: its forward_step sees a model that returns per-token losses, its
    loss runs in torch where the head is, and the gradient by those losses drives the engine's backward."""

    def __init__(self, step: AbstractTrainStep):
        self.step = step

    def run(self, model: Any, batch: Dict[str, Any]) -> Any:
        import torch

        session = model.session
        batch = {name: value for name, value in batch.items() if value is not None}
        rows = next(len(value) for value in batch.values() if hasattr(value, "shape"))
        parts = min(rows, session.num_micro_batches) if rows else 0
        cuts = [bounds(rows, i, parts) for i in range(parts)]  # as the engine cuts a batch
        micro = [{name: value[a:b] if hasattr(value, "shape") and value.ndim else value for name, value in batch.items()}
                 for a, b in cuts]
        asked = [_Recorder() for _ in micro]
        results = [self.step.forward_step(iter([part]), recorder) for part, recorder in zip(micro, asked)]
        whole = self._joined(asked, batch, session)
        values: List[Tuple[int, dict]] = []  # samples and numbers of each micro-batch

        def loss_of(number: int, losses: Any) -> Any:
            leaf = losses.requires_grad_(torch.is_grad_enabled())
            output, function = results[number]
            if output is asked[number].returned:
                output = leaf
            else:  # forward_step does something with the losses itself: once more, with the real ones
                output, function = self.step.forward_step(iter([micro[number]]), _Recorder(leaf))
            _Running.steps += 1
            try:
                loss, logged = function(output)
            finally:
                _Running.steps -= 1
            numbers = {name: float(getattr(value, "detach", lambda: value)()) for name, value in logged.items()
                       if getattr(value, "numel", lambda: 1)() == 1}
            values.append((len(losses), {"loss": float(loss.detach()), **numbers}))
            return loss

        training = model.training and torch.is_grad_enabled()
        call = None
        if training:
            def gradient(number: int, begin: int, count: int, losses: Any) -> Any:
                with torch.enable_grad():
                    leaf = torch.from_dlpack(losses).clone().to(model.device)
                    loss_of(number, leaf).backward()
                return leaf.grad.to(torch.float32).contiguous()

            call = session.train_with(whole, "token_losses", gradient)
        else:
            output, _ = session.forward(whole, "token_losses", record=False)
            losses = None if output is None else torch.from_dlpack(output).to(model.device)
            for number, (a, b) in enumerate(cuts):
                loss_of(number, losses[a:b])
        logged = _mean_over_ranks(values, session)
        own = logged.pop("loss", float("nan"))
        loss = torch.tensor(sum(logged.values()) if logged else own, device=model.device)
        if call is not None:
            session.note_loss(float(loss), whole)
            from tessera._outputs import EngineLoss

            loss = EngineLoss.apply(model._anchor, loss, call)
        from tessera._outputs import output_class

        return (self.step.model_output_class or output_class())(loss=loss)

    @staticmethod
    def _joined(asked: list, batch: dict, session: Any) -> Any:
        import torch

        def join(name: str) -> Any:
            values = [getattr(each, name) for each in asked]
            if not values or values[0] is None or values[0].ndim != 2:
                return None  # a mask [1, 1, seq, seq] says "causal", which a decoder is
            return torch.cat(values).detach().cpu().numpy()

        if not asked:
            width = next(value.shape[1] for value in batch.values() if getattr(value, "ndim", 0) == 2)
            empty = torch.zeros((0, width), dtype=torch.int64).numpy()
            return session.batch(empty, labels=empty, shifted=True)
        return session.batch(join("tokens"), join("attention_mask"), join("labels"), join("position_ids"), shifted=True)


class _Recorder:
    """What forward_step gets for a model: notes what it is called with, and returns losses to compute with."""

    def __init__(self, losses: Any = None):
        self.losses = losses
        self.tokens = self.position_ids = self.attention_mask = self.labels = self.returned = None

    def __call__(self, tokens: Any, position_ids: Any = None, attention_mask: Any = None, labels: Any = None,
                 **others: Any) -> Any:
        import torch

        if labels is None:
            raise ConfigError("a train step's forward_step must give the model labels: it returns per-token losses")
        _call_arguments.check({name: value for name, value in others.items() if value is not None}, known=())
        if getattr(attention_mask, "ndim", 2) != 2:
            _check_causal(attention_mask)
        self.tokens, self.position_ids, self.attention_mask, self.labels = tokens, position_ids, attention_mask, labels
        self.returned = self.losses
        if self.returned is None:
            self.returned = torch.zeros(labels.shape, requires_grad=True)
        return self.returned


def _check_causal(mask: Any) -> None:
    """A mask that is not [batch, seq] must say what a decoder does anyway. Errors: InvalidArgument."""
    import torch

    size = mask.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    seen = mask.to(torch.bool)
    if tuple(mask.shape[-2:]) != (size, size) or not (bool((seen == causal).all()) or bool((seen != causal).all())):
        raise InvalidArgument(f"attention_mask of shape {tuple(mask.shape)} is not a causal mask; give one [batch, sequence] for "
                              "padding, and position_ids that restart for packed samples")


def _mean_over_ranks(values: List[Tuple[int, dict]], session: Any) -> Dict[str, float]:
    """The mean over all micro-batches of all data ranks, each by its number of samples, on every rank."""
    from tessera.utils.objects import decode, encode

    samples = sum(count for count, _ in values)
    sums = {name: sum(count * numbers[name] for count, numbers in values) for name in values[0][1]} if values else {}
    world = session.state.world
    own = [samples, sums]
    everyone = [own] if world.size == 1 else [decode(each) for each in world.all_gather_bytes(encode(own))]
    told = [sums for _, sums in everyone if sums]
    whole = sum(count for count, _ in everyone)
    return {name: sum(each[name] for each in told) / whole for name in told[0]} if told else {}
