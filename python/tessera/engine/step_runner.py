"""A custom train step around the engine. In torch, because train steps are."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch

from tessera.data.documents import documents_of_mask
from tessera.data.split import bounds
from tessera.engine import call_arguments
from tessera.engine.outputs import EngineValue
from tessera.engine.train_steps import Running
from tessera.errors import ConfigError
from tessera.utils.objects import decode, encode


class StepRunner:
    """Runs a train step's functions around the engine: its forward_step sees a model that returns per-token losses, its
    loss runs in torch where the head is, and the gradient by those losses drives the engine's backward."""

    def __init__(self, step: Any):
        self.step = step
        self.logged: Dict[str, float] = {}  # of the last run, what its loss function named: means over all data ranks

    def run(self, model: Any, batch: Dict[str, Any]) -> Any:
        session = model.session
        batch = {name: value for name, value in batch.items() if value is not None}
        cuts, micro = self.micro_batches(batch, session)
        asked = [self.recorder() for _ in micro]
        results = [self.step.forward_step(iter([part]), recorder) for part, recorder in zip(micro, asked)]
        whole = self.joined(asked, batch, session)
        values: List[Tuple[int, dict]] = []  # samples and numbers of each micro-batch

        def loss_of(number: int, losses: Any) -> Any:
            leaf = losses.requires_grad_(torch.is_grad_enabled())
            output, function = results[number]
            if output is asked[number].returned:
                output = leaf
            else:  # forward_step does something with the losses itself: once more, with the real ones
                output, function = self.step.forward_step(iter([micro[number]]), self.recorder(leaf))
            Running.steps += 1
            try:
                loss, logged = function(output)
            finally:
                Running.steps -= 1
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
        logged = mean_over_ranks(values, session)
        own = logged.pop("loss", float("nan"))
        self.logged = logged
        loss = torch.tensor(sum(logged.values()) if logged else own, device=model.device)
        if call is not None:
            session.note_loss(float(loss), whole)
            loss = EngineValue.apply(model._anchor, loss, call)
        else:
            model.note_eval(loss)
        if model.returns_loss_alone and self.step.model_output_class is None:
            return loss
        return (self.step.model_output_class or model.output_class)(loss=loss)

    def recorder(self, losses: Any = None) -> Any:
        """What forward_step gets for a model."""
        return Recorder(losses)

    @staticmethod
    def micro_batches(batch: Dict[str, Any], session: Any) -> Tuple[List[Tuple[int, int]], List[dict]]:
        """The micro-batches of this data rank's batch as the engine cuts it, and where."""
        rows = next(len(value) for value in batch.values() if hasattr(value, "shape"))
        parts = min(rows, session.num_micro_batches) if rows else 0
        cuts = [bounds(rows, i, parts) for i in range(parts)]
        return cuts, [{name: value[a:b] if hasattr(value, "shape") and value.ndim else value for name, value in batch.items()}
                      for a, b in cuts]

    @staticmethod
    def joined(asked: list, batch: dict, session: Any) -> Any:
        """The batch of all micro-batches, as forward_step called the model with them."""
        if not asked:
            width = next(value.shape[1] for value in batch.values() if getattr(value, "ndim", 0) == 2)
            empty = np.zeros((0, width), dtype=np.int64)
            return session.batch(empty, labels=empty, shifted=True, ruled=True)
        tokens, labels = whole([each.tokens for each in asked]), whole([each.labels for each in asked])
        positions = None
        if asked[0].position_ids is not None:  # [1, seq] for all samples, or [batch, seq]
            positions = np.concatenate([np.broadcast_to(array(each.position_ids), tuple(each.tokens.shape)) for each in asked])
        masks = [_seen(each.attention_mask, len(each.tokens)) for each in asked]
        rows = [len(each.tokens) for each in asked]
        documents, keys = (_filled([mask[i] for mask in masks], rows, tokens.shape[1], value) for i, value in ((0, 0), (1, 1)))
        return session.batch(tokens, keys, labels, positions, shifted=True, document_ids=documents, ruled=True)


class Recorder:
    """What forward_step gets for a model: notes what it is called with, and returns losses to compute with."""

    def __init__(self, losses: Any = None):
        self.losses = losses
        self.tokens = self.position_ids = self.attention_mask = self.labels = self.returned = None

    def __call__(self, tokens: Any, position_ids: Any = None, attention_mask: Any = None, labels: Any = None,
                 **others: Any) -> Any:
        if labels is None:
            raise ConfigError("a train step's forward_step must give the model labels: it returns per-token losses")
        call_arguments.check({name: value for name, value in others.items() if value is not None}, known=())
        self.tokens, self.position_ids, self.attention_mask, self.labels = tokens, position_ids, attention_mask, labels
        self.returned = self.losses
        if self.returned is None:
            self.returned = torch.zeros(labels.shape, requires_grad=True)
        return self.returned


def whole(values: list) -> Any:
    return np.concatenate([array(value) for value in values])


def array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _seen(mask: Any, rows: int) -> Tuple[Optional[Any], Optional[Any]]:
    """(documents, keys), [rows, seq] each or None, of what forward_step gave the model for a mask."""
    if mask is None:
        return None, None
    mask = array(mask)
    return (None, mask) if mask.ndim == 2 else documents_of_mask(mask, rows)


def _filled(parts: list, rows: List[int], size: int, value: int) -> Optional[Any]:
    """Parts of micro-batches as one array; `value` everywhere in those that have none."""
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.full((count, size), value, dtype=np.int64) if part is None else part for part, count in zip(parts, rows)])


def mean_over_ranks(values: List[Tuple[int, dict]], session: Any) -> Dict[str, float]:
    """The mean over all micro-batches of all data ranks, each by its number of samples, on every rank."""
    samples = sum(count for count, _ in values)
    sums = {name: sum(count * numbers[name] for count, numbers in values) for name in values[0][1]} if values else {}
    world = session.state.world
    own = [samples, sums]
    everyone = [own] if world.size == 1 else [decode(each) for each in world.all_gather_bytes(encode(own))]
    told = [sums for _, sums in everyone if sums]
    whole = sum(count for count, _ in everyone)
    return {name: sum(each[name] for each in told) / whole for name in told[0]} if told else {}
