"""Whole weights, read and written by Hugging Face name, and the optimizer's whole state."""

from typing import Any, Dict

__all__ = ["full_optimizer_state", "full_parameters", "load_parameters"]


def full_parameters(model: Any) -> Dict[str, Any]:
    """The weights as fp32 tensors of the caller's own by Hugging Face name on rank 0; {} on other ranks. Collective."""
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in model.session.collect().items()}


def load_parameters(model: Any, values: Dict[str, Any], strict: bool = True) -> None:
    """Rank 0's `values` (what full_parameters gave, or tensors and arrays like it) become the weights on every rank, exact in
    fp32. With strict=False those that are not named stay as they are. Collective. Errors: InvalidArgument on every rank for
    unknown or missing names and other shapes, before anything is changed."""
    model.session.load(values, strict)


def full_optimizer_state(optimizer: Any) -> dict:
    """The state_dict of a prepared optimizer with its moments, as torch.optim's load_state_dict takes it: all of it on rank 0,
    {} elsewhere. Collective."""
    from tessera.optimizer import AcceleratedOptimizer  # needs torch

    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(f"full_optimizer_state() takes the optimizer that prepare() returned, not a {type(optimizer).__name__}")
    return optimizer.full_state_dict()
