"""Models without weights in memory: `init_empty_weights`. The members of Accelerate that spread a model for inference
exist and say what to use instead."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Optional

from tessera.compat.refusals import not_ours
from tessera.utils.environment import parse_flag_from_env

_INSTEAD = (
    "for training, `prepare` shards the model over tp_degree and pp_degree; for inference, use Transformers' "
    "device_map"
)


@contextmanager
def init_empty_weights(include_buffers: Optional[bool] = None):
    """Models of PyTorch made in the `with` block have parameters with shapes and no memory (on the meta device), and
    with `include_buffers` (or ACCELERATE_INIT_INCLUDE_BUFFERS) buffers too. `prepare` gives such a model its
    weights."""
    with init_on_device("meta", include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: Any, include_buffers: Optional[bool] = None):
    """Models of PyTorch made in the `with` block have their parameters (with `include_buffers`, everything) on that
    device. Parameters that are tied stay tied. Errors: ImportError without PyTorch."""
    try:
        import torch
    except ImportError:
        raise ImportError("init_on_device and init_empty_weights are for PyTorch's modules; install PyTorch") from None
    device = torch.device(device)
    if parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS") if include_buffers is None else include_buffers:
        with device:
            yield
        return
    register = torch.nn.Module.register_parameter

    def register_there(module: Any, name: str, param: Any) -> None:
        register(module, name, param)
        if param is not None and param.device != device:
            # A new parameter of the same class: `.data =` cannot change the device to meta.
            attributes = dict(param.__dict__)
            moved = type(param)(param.detach().to(device), requires_grad=param.requires_grad)
            moved.__dict__.update(attributes)
            module._parameters[name] = moved

    torch.nn.Module.register_parameter = register_there
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def cpu_offload(model, execution_device=None, offload_buffers=False, state_dict=None, preload_module_classes=None):
    """Errors: NotImplementedError, always."""
    raise not_ours("cpu_offload", "inference with weights kept on the host", _INSTEAD)


def cpu_offload_with_hook(model, execution_device=None, prev_module_hook=None):
    """Errors: NotImplementedError, always."""
    raise not_ours("cpu_offload_with_hook", "inference with weights kept on the host", _INSTEAD)


def disk_offload(model, offload_dir, execution_device=None, offload_buffers=False, preload_module_classes=None):
    """Errors: NotImplementedError, always."""
    raise not_ours("disk_offload", "inference with weights kept on disk", _INSTEAD)


def dispatch_model(
    model,
    device_map,
    main_device=None,
    state_dict=None,
    offload_dir=None,
    offload_index=None,
    offload_buffers=False,
    skip_keys=None,
    preload_module_classes=None,
    force_hooks=False,
):
    """Errors: NotImplementedError, always."""
    raise not_ours("dispatch_model", "inference with layers spread by hooks", _INSTEAD)


def load_checkpoint_and_dispatch(
    model,
    checkpoint,
    device_map=None,
    max_memory=None,
    no_split_module_classes=None,
    offload_folder=None,
    offload_buffers=False,
    dtype=None,
    offload_state_dict=None,
    skip_keys=None,
    preload_module_classes=None,
    force_hooks=False,
    strict=False,
    full_state_dict=True,
    broadcast_from_rank0=False,
):
    """Errors: NotImplementedError, always."""
    raise not_ours("load_checkpoint_and_dispatch", "inference with layers spread by hooks", _INSTEAD)


def load_checkpoint_in_model(
    model,
    checkpoint,
    device_map=None,
    offload_folder=None,
    dtype=None,
    offload_state_dict=False,
    offload_buffers=False,
    keep_in_fp32_modules=None,
    offload_8bit_bnb=False,
    strict=False,
    full_state_dict=True,
    broadcast_from_rank0=False,
):
    """Errors: NotImplementedError, always."""
    raise not_ours(
        "load_checkpoint_in_model",
        "inference with layers spread by hooks",
        "for training, give `prepare` a model from `from_pretrained`, or made under `init_empty_weights`",
    )


def infer_auto_device_map(
    model,
    max_memory=None,
    no_split_module_classes=None,
    dtype=None,
    special_dtypes=None,
    verbose=False,
    clean_result=True,
    offload_buffers=False,
    fallback_allocation=False,
):
    """Errors: NotImplementedError, always."""
    raise not_ours(
        "infer_auto_device_map",
        "inference with layers spread by hooks",
        "`tessera plan` says what a layout needs in memory",
    )


def attach_layerwise_casting_hooks(
    module, storage_dtype, compute_dtype, skip_modules_pattern=None, skip_modules_classes=None, non_blocking=False
):
    """Errors: NotImplementedError, always."""
    raise not_ours(
        "attach_layerwise_casting_hooks", "inference with weights stored in another type", "give mixed_precision='bf16'"
    )
