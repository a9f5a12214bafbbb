"""Models and optimizers for scripts without PyTorch: numpy in, numpy and floats out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from tessera.plugin.heads import ENCODER_DECODERS, ENCODERS
from tessera.engine.export import save_pretrained
from tessera.engine.open_calls import OpenCall
from tessera.engine.optimizer_groups import Group, OptimizerDescription
from tessera.engine.plan import ModelParameter, ModelPlan
from tessera.engine.session import Session
from tessera.engine.weights import Source
from tessera.errors import ConfigError, InvalidArgument

__all__ = ["AdamW", "CausalLM", "Loss"]


class CausalLM:
    """A decoder described by a Hugging Face config (a dict, or a folder with config.json), or by a Tessera folder. prepare()
    makes it trainable.

    >>> model = CausalLM({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 257, "n_positions": 128})
    """

    def __init__(self, config: Union[dict, str, Path], folder: Optional[Path] = None, follow_symlinks: bool = False):
        if isinstance(config, (str, Path)):
            from tessera import _C

            name, text = _C.model_description(config, follow_symlinks)
            config = json.loads(text)["model"] if name == "tessera.json" else json.loads(text)
        self.config: dict = dict(config)
        self.folder = folder
        self.follow_symlinks = follow_symlinks

    @classmethod
    def from_pretrained(cls, folder: Union[str, Path], follow_symlinks: bool = False) -> "CausalLM":
        """With the weights of a Hugging Face folder (safetensors) or a Tessera folder, which are read by each rank in part.
        Files that are links out of the folder (Hugging Face's cache apart) are read with `follow_symlinks` only."""
        return cls(folder, Path(folder), follow_symlinks)

    def describe(self) -> ModelPlan:
        """What prepare() makes of it."""
        from tessera import _C

        kind = self.config.get("model_type") or self.config.get("family")  # the latter of a Tessera folder
        if kind in (*ENCODERS, *ENCODER_DECODERS, "megatron_t5"):
            remedy = ("train it by `tessera train`, or in C++ (docs/guides/train_t5.md)" if kind == "megatron_t5" else
                      "give prepare() the model that Transformers builds (docs/guides/encoders.md)")
            raise ConfigError(f"CausalLM is a decoder alone, and a {kind} has an encoder, which looks to both sides: {remedy}")
        text = json.dumps(self.config)
        parameters = tuple(ModelParameter(name, tuple(shape)) for _, parts in _C.hf_parameters(text) for name, shape, *_ in parts)
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        return ModelPlan(text, parameters, Source(folder=self.folder, follow_symlinks=self.follow_symlinks), dtype)


class AdamW:
    """torch.optim.AdamW's update with its defaults, for a CausalLM. `lr` and `weight_decay` may be changed between steps;
    biases and norms (`no_decay` False: all parameters alike) get no weight decay."""

    def __init__(self, lr: float = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, no_decay: bool = True):
        self.lr, self.betas, self.eps, self.weight_decay, self.no_decay = lr, betas, eps, weight_decay, no_decay


class Loss(float):
    """The mean loss over all data ranks. backward() adds its gradient; a product with, or a quotient by, a number is the
    loss of that many times the gradient."""

    _call: Optional[OpenCall]
    _factor: float

    def __new__(cls, value: float, call: Optional[OpenCall] = None, factor: float = 1.0):
        loss = super().__new__(cls, value)
        loss._call, loss._factor = call, factor
        return loss

    def item(self) -> float:
        return float(self)

    def __mul__(self, factor: Any) -> "Loss":
        return Loss(float(self) * float(factor), self._call, self._factor * float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Loss":
        return self * (1.0 / float(divisor))

    def backward(self) -> None:
        """Errors: RuntimeError the second time, or for a loss that was computed without gradient."""
        if self._call is None:
            raise RuntimeError("this loss was computed in eval mode and has no gradient")
        self._call.add(self._factor)


class PlainOutput:
    """`loss` (a Loss) and `logits` (fp32 array [batch, seq, vocab]), None where not computed."""

    def __init__(self, loss: Optional[Loss], logits: Any):
        self.loss, self.logits = loss, logits


class PlainModel:
    """What prepare() makes of a CausalLM. Called with arrays [batch, seq]: input_ids, labels (at their own positions),
    attention_mask, position_ids."""

    def __init__(self, session: Session, model: CausalLM):
        self._session = session
        self.config = model.config
        self.generation_config = None
        self.training = True
        self._train_step = None

    @property
    def session(self) -> Session:
        self._session.build()
        return self._session

    def build(self) -> None:
        self._session.build()

    def train(self, mode: bool = True) -> "PlainModel":
        self.training = mode
        return self

    def eval(self) -> "PlainModel":
        return self.train(False)

    def parameters(self) -> List[ModelParameter]:
        return list(self._session.parameters)

    def named_parameters(self, remove_duplicate: bool = True) -> List[Tuple[str, ModelParameter]]:
        return [(parameter.name, parameter) for parameter in self._session.parameters]

    def state_dict(self) -> Dict[str, Any]:
        """fp32 arrays by Hugging Face name on rank 0, {} elsewhere. Collective."""
        return self.session.collect()

    def __call__(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, labels: Any = None,
                 **others: Any) -> PlainOutput:
        session = self.session
        peers = session.begin_call("model(...) in training mode" if self.training else "model(...) in eval mode",
                                   dict(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                                        labels=labels))
        if peers is not None:
            return self(**peers)
        if input_ids is None or others:
            raise InvalidArgument("the model takes input_ids, attention_mask, position_ids and labels"
                                  + (f", not {', '.join(others)}" if others else "; input_ids are missing"))
        batch = session.batch(input_ids, attention_mask, labels, position_ids)
        if labels is None:
            logits, _ = session.forward(batch, record=False)
            return PlainOutput(None, logits.numpy() if hasattr(logits, "numpy") else logits)
        if not self.training:
            return PlainOutput(Loss(session.evaluate(batch)), None)
        value, call = session.train(batch)
        return PlainOutput(Loss(value, call), None)

    def save_pretrained(self, save_directory: Any, max_shard_size: Any = "5GB", torch_dtype: Any = None, **kwargs: Any) -> None:
        """Writes a Hugging Face folder. Collective."""
        save_pretrained(self, Path(save_directory), None, max_shard_size, torch_dtype)


class PlainOptimizer:
    """What prepare() makes of an AdamW of this module."""

    def __init__(self, optimizer: AdamW, session: Session, gradient_state: Any):
        self.optimizer = optimizer
        self._session = session
        self._gradient_state = gradient_state
        self.step_was_skipped = False
        self.last_step: dict = {}
        decayed = {parameter.name for parameter in session.parameters if len(parameter.shape) > 1 or not optimizer.no_decay}
        names = [parameter.name for parameter in session.parameters]
        options = {"betas": tuple(optimizer.betas), "eps": optimizer.eps}
        self.description = OptimizerDescription("adamw", False, [
            Group([name for name in names if name in decayed], origin=0, **options),
            Group([name for name in names if name not in decayed], origin=0, weight_decay=0.0, **options)])

    def zero_grad(self) -> None:
        if self._gradient_state.sync_gradients:
            self._session.zero_grad()

    def step(self) -> None:
        """One update of the weights on all ranks (collective)."""
        self._session.check_open()
        if not self._gradient_state.sync_gradients or not self._session.has_gradient():
            return
        own = self.optimizer
        self.last_step = self._session.update([(own.lr, own.weight_decay)], [{"betas": tuple(own.betas), "eps": own.eps}])
        self.step_was_skipped = self.last_step["skipped"]

    def state_dict(self) -> dict:
        own = self.optimizer
        return {"lr": own.lr, "betas": list(own.betas), "eps": own.eps, "weight_decay": own.weight_decay}

    def check_state_dict(self, state: dict) -> None:
        """Whether load_state_dict() would take it. Errors: ConfigError."""
        if not isinstance(state, dict) or not set(state) <= set(self.state_dict()):
            raise ConfigError(f"the optimizer's state has {', '.join(map(str, state))}, which AdamW here does not keep: it is another "
                              "optimizer's")

    def load_state_dict(self, state: dict) -> None:
        self.check_state_dict(state)
        for name, value in state.items():
            setattr(self.optimizer, name, tuple(value) if name == "betas" else value)
