"""Accelerate's pipelined inference under the module path that scripts import it from."""

from typing import Any

from tessera.compat.refusals import not_ours

__all__ = ["prepare_pippy"]


def prepare_pippy(model: Any, split_points: Any = "auto", no_split_module_classes: Any = None, example_args: Any = (),
                  example_kwargs: Any = None, num_chunks: Any = None, gather_output: Any = False) -> Any:
    """Errors: NotImplementedError, always."""
    raise not_ours("prepare_pippy", "PyTorch's pipelined inference", "give pp_degree in a MegatronLMPlugin and call the prepared "
                   "model under torch.no_grad()")
