"""A train step of an encoder around the engine. In torch, because train steps are."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch

from tessera.engine import call_arguments
from tessera.plugin.heads import Heads
from tessera.engine.step_runner import StepRunner, array, mean_over_ranks, whole
from tessera.engine.train_steps import Running
from tessera.errors import ConfigError


class EncoderStepRunner(StepRunner):
    """Runs a train step's functions around the engine: its forward_step sees a model that returns what its heads do. All
    micro-batches are computed before the first loss, and what backward needs of them is kept; a model with two heads is
    computed once for each."""

    def run(self, model: Any, batch: Dict[str, Any]) -> Any:
        session, heads = model.session, model.session.heads
        batch = {name: value for name, value in batch.items() if value is not None}
        cuts, micro = self.micro_batches(batch, session)
        asked = [EncoderRecorder(heads) for _ in micro]
        results = [self.step.forward_step(iter([part]), recorder) for part, recorder in zip(micro, asked)]
        training = model.training and torch.is_grad_enabled()
        given = _joined(asked, batch, session)
        outputs = {name: model.logits_of(given, training, name) for name in _asked(heads)}
        parts: List[torch.Tensor] = []
        values: List[Tuple[int, dict]] = []  # samples and numbers of each micro-batch
        for number, (a, b) in enumerate(cuts):
            own = _as_model({name: value[a:b] for name, value in outputs.items()})
            loss, numbers = self._loss_of(results[number], micro[number], asked[number], own, heads)
            parts.append(loss * (b - a))
            values.append((b - a, {"": float(loss.detach()), **numbers}))
        logged = mean_over_ranks(values, session)
        own_loss = logged.pop("", float("nan"))
        self.logged = session.losses = logged
        loss = torch.tensor(sum(logged.values()) if logged else own_loss, device=model.device)
        if training:
            # On a data rank without samples a sum of nothing, which takes part in backward.
            local = sum(parts) / given.batch if parts else sum(value.sum() for value in outputs.values())
            session.note_loss(float(loss), given)
            loss = local + (loss - local.detach())
        else:
            model.note_eval(loss)
        if model.returns_loss_alone:
            return loss
        return (self.step.model_output_class or model.output_class)(loss=loss)

    def _loss_of(self, result: Tuple, micro: dict, asked: EncoderRecorder, own: Any, heads: Heads) -> Tuple[torch.Tensor, dict]:
        """A micro-batch's loss and the numbers that its loss function names."""
        output, function = result
        if output is asked.returned:
            output = own
        else:  # forward_step does something with the output itself: once more, with the real one
            output, function = self.step.forward_step(iter([micro]), EncoderRecorder(heads, own))
        Running.steps += 1
        try:
            loss, logged = function(output)
        finally:
            Running.steps -= 1
        return loss, {name: float(getattr(value, "detach", lambda: value)()) for name, value in logged.items()
                      if getattr(value, "numel", lambda: 1)() == 1}


def _asked(heads: Heads) -> Tuple[str, ...]:
    """The engine's outputs that a model of a train step returns, those of samples first: they are computed first."""
    if heads.of_samples:
        return ("logits",)
    return ("sample_logits", "token_losses") if heads.sample_labels else ("token_losses",)


def _as_model(outputs: Dict[str, Any]) -> Any:
    """What Megatron's model returns: (losses of tokens, logits of pairs or None), or logits of samples."""
    return outputs["logits"] if "logits" in outputs else (outputs["token_losses"], outputs.get("sample_logits"))


class EncoderRecorder:
    """What forward_step gets for a model: notes what it is called with, and returns outputs to compute with."""

    def __init__(self, heads: Heads, outputs: Any = None):
        self.heads, self.outputs = heads, outputs
        self.tokens = self.types = self.padding_mask = self.labels = self.returned = None

    def __call__(self, tokens: Any, padding_mask: Any = None, tokentype_ids: Any = None, lm_labels: Any = None, **others: Any) -> Any:
        call_arguments.check({name: value for name, value in others.items() if value is not None}, known=())
        if (lm_labels is None) != self.heads.of_samples:
            what = "no lm_labels: it returns logits of samples" if self.heads.of_samples else "lm_labels: it returns per-token losses"
            raise ConfigError(f"a train step's forward_step must give this model {what}")
        self.tokens, self.padding_mask, self.types, self.labels = tokens, padding_mask, tokentype_ids, lm_labels
        self.returned = self.outputs
        if self.returned is None:
            zeros = {name: torch.zeros(self._shape(name), requires_grad=True) for name in _asked(self.heads)}
            self.returned = _as_model(zeros)
        return self.returned

    def _shape(self, name: str) -> Tuple[int, ...]:
        return tuple(self.tokens.shape) if name == "token_losses" else (len(self.tokens), 2)


def _joined(asked: List[EncoderRecorder], batch: dict, session: Any) -> Any:
    """The batch of all micro-batches, as forward_step called the model with them."""
    of_samples = session.heads.of_samples
    if not asked:
        width = next(value.shape[1] for value in batch.values() if getattr(value, "ndim", 0) == 2)
        empty = np.zeros((0, width), dtype=np.int64)
        return session.batch(empty, labels=None if of_samples else empty, shifted=True)
    tokens = whole([each.tokens for each in asked])
    return session.batch(tokens, _filled([each.padding_mask for each in asked], asked, 1),
                         None if of_samples else whole([each.labels for each in asked]), shifted=True,
                         token_types=_filled([each.types for each in asked], asked, 0))


def _filled(parts: list, asked: List[EncoderRecorder], value: int) -> Optional[Any]:
    """Parts of micro-batches as one array; `value` everywhere in those that have none."""
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.full(tuple(each.tokens.shape), value, dtype=np.int64) if part is None else array(part)
                           for part, each in zip(parts, asked)])
