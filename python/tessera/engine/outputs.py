"""What a call of a prepared model returns, with the engine behind its gradients."""

from __future__ import annotations

import sys
from typing import Any, Tuple, Union

import torch

from tessera.plugin.heads import DECODER, Heads
from tessera.engine.open_calls import OpenCall, OpenForward
from tessera.engine.parameters import check_has_optimizer


class EngineValue(torch.autograd.Function):
    """The engine's loss, whose gradient was computed with it, or its logits, whose backward runs the engine's."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, opened: Union[OpenCall, OpenForward]) -> torch.Tensor:
        ctx.opened = opened
        return value

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Tuple[None, None, None]:
        check_has_optimizer(ctx.opened.session)
        if isinstance(ctx.opened, OpenCall):
            ctx.opened.add(float(upstream))
        else:
            ctx.opened.backward(upstream.detach().to(torch.float32).contiguous())
        return None, None, None


class SummedOverDataRanks(torch.autograd.Function):
    """The sum over data ranks of this rank's part of a number. The engine weighs a rank's gradient by `share`, its part of
    the samples, which the gradient of a sum is not."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any, share: float) -> torch.Tensor:
        import numpy as np

        ctx.share = share
        total = np.array([float(part)], dtype=np.float64)
        group.all_reduce(total)
        return torch.tensor(total[0], dtype=part.dtype, device=part.device)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        return upstream / (ctx.share or 1.0), None, None


def output_class(heads: Heads = DECODER, own: Any = None) -> Any:
    """Of a model with these heads; `own`: the class of the caller's model, whose module may have one for it."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return Output
    from transformers import modeling_outputs

    beside = [vars(sys.modules[each.__module__]).get(each.__name__ + "Output") for each in (own or Output).__mro__]
    return getattr(modeling_outputs, heads.output, None) or next((each for each in beside if each is not None), Output)


class Output(dict):
    """What a model returns where transformers is not loaded: `.loss` and `.logits`, also by key and by place."""

    def __init__(self, **values: Any):
        super().__init__((key, value) for key, value in values.items() if value is not None)
        self.loss = self.logits = None
        vars(self).update(values)

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)
