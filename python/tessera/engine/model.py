"""The model that prepare() returns: a torch module whose parameters live in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple

import torch

from tessera.engine import call_arguments
from tessera.engine.encoder_call import encoder_forward
from tessera.engine.export import save_pretrained
from tessera.engine.generation import GenerationMembers
from tessera.engine.megatron_engine import MegatronEngineMembers
from tessera.engine.model_check import refused_loss
from tessera.engine.outputs import EngineValue, SummedOverDataRanks, output_class
from tessera.engine.session import Session
from tessera.engine.whole_weights import overview
from tessera.errors import ConfigError
from tessera.utils.objects import array_of


class TesseraModel(MegatronEngineMembers, GenerationMembers, torch.nn.Module):
    """Called like the Hugging Face model it was made from; it begins in training mode. In training mode with labels it
    runs forward and backward of the whole batch through the pipeline; `loss.backward()` adds the gradient. Without
    labels, or with `return_logits=True` of the plugin, it returns logits whose backward runs the engine's. In eval mode,
    or under torch.no_grad(), it runs forward only.

    `named_parameters()` gives the whole model's names, shapes and requires_grad; the values are in the engine."""

    def __init__(self, session: Session, model: torch.nn.Module):
        super().__init__()
        self.config = model.config
        self.generation_config = getattr(model, "generation_config", None)
        self._session = session
        # The caller's objects, as far as the model keeps its parameters; prepare() ends with taking them over.
        own = dict(model.named_parameters())
        self._parameters_of_model = {each.name: own[each.name] if each.name in own else
                                     torch.nn.Parameter(torch.empty(each.shape, dtype=self.dtype, device="meta"))
                                     for each in session.parameters}
        session.freezing.live = self._parameters_of_model
        session.freezing.reading = torch._C.DisableTorchFunctionSubclass
        self._anchor = torch.zeros((), requires_grad=True)
        self._train_step: Any = None
        self._places = call_arguments.positional_names(type(model))
        self.output_class = output_class(session.heads, type(model))

    @property
    def session(self) -> Session:
        """The engine's, which is made now if it was not yet. Collective the first time."""
        if self._session.engine is None:
            self.build(trainable=self._session.training.optimizer is not None or (self.training and torch.is_grad_enabled()))
        return self._session

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("loss_function", "loss_type"):  # what Transformers' forward would use
            raise refused_loss(getattr(value, "__qualname__", repr(value)))
        super().__setattr__(name, value)

    def build(self, trainable: bool = True) -> None:
        self._session.build(trainable)

    def train(self, mode: bool = True) -> "TesseraModel":
        """Training mode; what was evaluated before is reported, see log_eval_results()."""
        super().train(mode)
        if mode:
            self.log_eval_results()
        return self

    @property
    def device(self) -> torch.device:
        return torch.device(self._session.state.device)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._session.plan.dtype)

    @property
    def module(self) -> "TesseraModel":
        return self

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
                         ) -> Iterator[Tuple[str, torch.nn.Parameter]]:
        for name, parameter in self._parameters_of_model.items():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from self._parameters_of_model.values()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return sum(parameter.numel() for name, parameter in self._parameters_of_model.items()
                   if (parameter.requires_grad or not only_trainable)
                   and not (exclude_embeddings and name.endswith(("wte.weight", "wpe.weight", "embed_tokens.weight"))))

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        if target not in self._parameters_of_model:
            raise AttributeError(f"the model has no parameter '{target}'")
        return self._parameters_of_model[target]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._session.zero_grad()

    def state_dict(self, *args: Any, **kwargs: Any) -> Dict[str, torch.Tensor]:
        """All weights under Hugging Face's names in the model's dtype on rank 0, {} elsewhere. Collective."""
        return {name: torch.from_numpy(array).to(self.dtype) for name, array in self.session.collect().items()}

    def load_state_dict(self, state_dict: Dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Rank 0's values become the model's on every rank, exact in fp32; returns the missing and the unexpected names, which
        only strict=False lets pass. Collective. Errors: InvalidArgument on every rank, before anything is changed."""
        if assign:
            raise ConfigError("load_state_dict(assign=True) is not supported: the weights are the engine's; leave it out")
        return torch.nn.modules.module._IncompatibleKeys(*self.session.load(state_dict, strict, unknown=not strict))

    def __deepcopy__(self, memo: dict) -> Any:
        raise ConfigError("copy.deepcopy(model): the engine cannot be copied. For an average over steps, average the values of "
                          "tessera.utils.full_parameters(model), and evaluate them after tessera.utils.load_parameters(model, average)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError("a prepared model cannot be pickled: model.save_pretrained() or torch.save(model.state_dict()) saves its "
                          "weights, accelerator.save_state() the training")

    def to(self, *args: Any, **kwargs: Any) -> "TesseraModel":
        """Nothing to do for a device: the engine's weights are where they belong. Errors: ConfigError for another dtype."""
        for each in (*args, *kwargs.values()):
            dtype = getattr(each, "dtype", each)
            if isinstance(dtype, torch.dtype) and dtype != self.dtype:
                raise ConfigError(f"the model cannot become {dtype} after prepare(): its weights are fp32 in the engine and are saved "
                                  f"as {self.dtype}. Convert it before prepare(), compute in another type by Accelerator("
                                  "mixed_precision=...), save in one by save_pretrained(folder, torch_dtype=...)")
        return self

    def cuda(self, device: Any = None) -> "TesseraModel":
        return self

    cpu = cuda

    def float(self) -> "TesseraModel":
        return self.to(torch.float32)

    def half(self) -> "TesseraModel":
        return self.to(torch.float16)

    def bfloat16(self) -> "TesseraModel":
        return self.to(torch.bfloat16)

    def double(self) -> "TesseraModel":
        return self.to(torch.float64)

    def type(self, dst_type: Any) -> "TesseraModel":
        return self.to(dst_type)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"the prepared model has no '{name}': its layers and weights are in the engine, in parts over the "
                                 "ranks. Change modules before prepare(), read weights by tessera.utils.full_parameters(model), "
                                 "outputs by calling the model") from None

    def __repr__(self) -> str:
        """Of this rank; not collective."""
        with torch._C.DisableTorchFunctionSubclass():
            return overview(self._session, self._parameters_of_model)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("gradient_checkpointing_enable() must be called before prepare(); or give MegatronLMPlugin("
                          "recompute_activations=True) or recompute_granularity='full'")

    activation_checkpointing_enable = gradient_checkpointing_enable

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("resize_token_embeddings() must be called before prepare()")

    def forward(self, input_ids: Any = None, *positional: Any, attention_mask: Any = None, position_ids: Any = None,
                labels: Any = None, token_type_ids: Any = None, **others: Any) -> Any:
        given = dict(attention_mask=attention_mask, labels=labels, position_ids=position_ids, token_type_ids=token_type_ids,
                     **others)
        if positional:
            return self.forward(input_ids, **call_arguments.named(self._places[1:], positional, given))
        session = self.session
        peers = session.begin_call(self.call_name(), dict(input_ids=input_ids, **given))
        if peers is not None:
            return self.forward(**peers)
        if self._train_step is not None:
            return self._train_step.run(self, dict(input_ids=input_ids, **given))
        if not session.heads.looks_back:
            return encoder_forward(self, dict(input_ids=input_ids, **given))
        text = others.pop("text", None)
        if text is not None:  # samples of indexed data: [batch, seq + 1]
            input_ids, text_labels = text[:, :-1], others.pop("labels", labels)
            labels = text[:, 1:] if text_labels is None else text_labels
        documents = others.pop("document_ids", None)
        call_arguments.check_call(self.config.model_type, input_ids, labels, token_type_ids, others)
        batch = session.batch(*map(array_of, (input_ids, attention_mask, labels, position_ids)), shifted=text is not None,
                              document_ids=array_of(documents))
        items, kept = others.get("num_items_in_batch"), others.get("logits_to_keep")
        per_item = 1.0 if items is None or labels is None else call_arguments.per_item(session, batch, items)
        training = self.training and torch.is_grad_enabled()
        plugin = session.plugin
        wants_logits = labels is None or (plugin is not None and (plugin.return_logits or plugin.require_logits))
        loss = logits = None
        if wants_logits:
            logits = self.logits_of(batch, training)
            if labels is not None:
                loss = self.loss_of(logits, session.targets, batch, batch.global_targets)
        elif training:
            value, call = session.train(batch)
            loss = EngineValue.apply(self._anchor, torch.tensor(value, device=self.device), call)
        else:
            loss = torch.tensor(session.evaluate(batch), device=self.device)
        if loss is not None and items is not None:
            loss = loss * per_item
        if loss is not None and not training:
            self.note_eval(loss)
        if kept is not None and logits is not None:
            logits = call_arguments.kept(logits, kept)
        if others.get("return_dict") is False:
            return tuple(value for value in (loss, logits) if value is not None)
        if loss is not None and self.returns_loss_alone:
            return loss
        return self.output_class(loss=loss, logits=logits)

    @property
    def returns_loss_alone(self) -> bool:
        """Megatron's model_return_dict=False: a call returns its loss, not an object that has one."""
        plugin = self._session.plugin
        return plugin is not None and plugin.given_arguments.get("model_return_dict", True) is False

    def call_name(self) -> str:
        """How a call now is told to other ranks."""
        if not torch.is_grad_enabled():
            return "model(...) without gradient"
        return "model(...) in training mode" if self.training else "model(...) in eval mode"

    def logits_of(self, batch: Any, training: bool, output: str = "logits") -> torch.Tensor:
        """Logits of the engine under its name for them, which backward() goes through in training."""
        value, forward = self._session.forward(batch, output, record=training)
        if value is None:  # no samples on this data rank
            import numpy as np

            value = np.zeros(self._session.engine.output_shape(batch, output), dtype=np.float32)
        logits = torch.from_dlpack(value).to(self.device)
        return EngineValue.apply(self._anchor, logits, forward) if training else logits

    def loss_of(self, logits: torch.Tensor, labels: Any, batch: Any, targets: int) -> torch.Tensor:
        """The model's own loss from logits that the caller asked for: the mean over the `targets` of all data ranks."""
        wanted = torch.from_numpy(labels).to(logits.device).flatten()
        return self.mean_over_ranks(torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted, reduction="sum"), batch, targets)

    def mean_over_ranks(self, total: torch.Tensor, batch: Any, targets: int) -> torch.Tensor:
        """The mean over the `targets` of all data ranks of a loss whose sum over this rank's is `total`."""
        mesh = self._session.mesh
        if targets == 0:  # PyTorch's mean over nothing: nan, without a gradient
            return total + float("nan")
        if mesh.dp > 1:
            return SummedOverDataRanks.apply(total / targets, mesh.data, batch.batch / batch.global_batch)
        return total / targets

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, state_dict: Optional[dict] = None,
                        save_function: Any = None, push_to_hub: bool = False, max_shard_size: Any = "5GB",
                        safe_serialization: bool = True, **kwargs: Any) -> None:
        """Writes a folder that Transformers' from_pretrained loads, in the model's dtype (`torch_dtype` says another).
        Collective: every rank calls it, rank 0 writes, whatever `is_main_process` and `save_function` say."""
        if push_to_hub:
            raise ConfigError("push_to_hub is not supported: save the folder and upload it with huggingface_hub")
        if not safe_serialization:
            raise ConfigError("safe_serialization=False would write a pickle, which Tessera never does; leave it out")
        save_pretrained(self, Path(save_directory), state_dict, max_shard_size, kwargs.pop("torch_dtype", None))
