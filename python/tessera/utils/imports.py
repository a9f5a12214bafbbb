"""Which packages and devices are there. Nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import sys
from functools import lru_cache, wraps
from typing import Any, Callable, Optional, Union

from tessera.compat.refusals import not_ours
from tessera.utils.environment import parse_flag_from_env

_OPERATIONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


@lru_cache(None)
def _is_package_available(package: str, distribution: Optional[str] = None) -> bool:
    """Whether it can be imported and is installed, so that a folder of that name is not taken for it."""
    try:
        if importlib.util.find_spec(package) is None:
            return False
        importlib.metadata.metadata(distribution or package)
    except (ImportError, ValueError, importlib.metadata.PackageNotFoundError):
        return False
    return True


def _numbers(version: str) -> tuple:
    """(2, 1, 0, 1) for 2.1: release numbers, then 1; the last is 0 for a version before the release (2.1rc1)."""
    release, final = [], 1
    for part in version.split("+")[0].split("."):
        digits = "".join(char for char in part[: len(part) - len(part.lstrip("0123456789"))])
        if digits:
            release.append(int(digits))
        if digits != part:
            final = 0 if not part.startswith("post") else 1
            break
    return tuple((release + [0, 0, 0])[:3]) + (final,)


def compare_versions(library_or_version: Union[str, Any], operation: str, requirement_version: str) -> bool:
    """compare_versions("numpy", ">=", "1.26"): of an installed package, or of a version object. Errors: ValueError;
    importlib.metadata.PackageNotFoundError."""
    if operation not in _OPERATIONS:
        raise ValueError(f"operation '{operation}' must be one of {', '.join(_OPERATIONS)}")
    have = (
        importlib.metadata.version(library_or_version)
        if isinstance(library_or_version, str)
        else str(library_or_version)
    )
    return _OPERATIONS[operation](_numbers(have), _numbers(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compares the installed PyTorch; False without one."""
    return is_torch_available() and compare_versions("torch", operation, version)


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    return compare_versions("numpy", ">=", min_version)


def is_megatron_lm_available() -> bool:
    """True: scripts ask before they use the Megatron-LM integration, and here that is Tessera itself, always there."""
    return True


def is_cuda_available() -> bool:
    """Whether PyTorch can use a GPU."""
    if not is_torch_available():
        return False
    import torch

    return torch.cuda.is_available()


def is_torch_distributed_available() -> bool:
    """Whether PyTorch has torch.distributed. Tessera does not use it."""
    if not is_torch_available():
        return False
    import torch

    return torch.distributed.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """True: on CPUs bf16 is computed in fp32 where the processor lacks it."""
    return True


def is_fp16_available() -> bool:
    return True


def is_fp8_available() -> bool:
    """False until fp8 is in the build."""
    return False


def is_rich_available() -> bool:
    return _is_package_available("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_aim_available() -> bool:
    return _is_package_available("aim") and compare_versions("aim", "<", "4.0.0")


def is_tensorboard_available() -> bool:
    return _is_package_available("tensorboard") or _is_package_available("tensorboardX")


def is_mlflow_available() -> bool:
    return _is_package_available("mlflow") or _is_package_available("mlflow", "mlflow-skinny")


def is_pynvml_available() -> bool:
    return _is_package_available("pynvml") or _is_package_available("pynvml", "nvidia-ml-py")


def is_bnb_available(min_version: Optional[str] = None) -> bool:
    return _is_package_available("bitsandbytes") and (
        min_version is None or compare_versions("bitsandbytes", ">=", min_version)
    )


def is_4bit_bnb_available() -> bool:
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    return is_bnb_available("0.37.2")


def is_trackio_available() -> bool:
    return sys.version_info >= (3, 10) and _is_package_available("trackio")


def is_torchao_available() -> bool:
    return _is_package_available("torchao") and compare_versions("torchao", ">=", "0.6.1")


def is_torchdata_stateful_dataloader_available() -> bool:
    return _is_package_available("torchdata") and compare_versions("torchdata", ">=", "0.8.0")


def is_triton_available() -> bool:
    return _is_package_available("triton")


def is_weights_only_available() -> bool:
    return is_torch_version(">=", "2.4.0")


def _package(name: str, distribution: Optional[str] = None) -> Callable[[], bool]:
    def available() -> bool:
        return _is_package_available(name, distribution)

    available.__doc__ = f"Whether the package {distribution or name} is installed."
    return available


def _other_engine(what: str) -> Callable[..., bool]:
    def available(*args, **kwargs) -> bool:
        return False

    available.__doc__ = f"False: Tessera does not run on {what}."
    return available


is_torch_available = _package("torch")
is_transformers_available = _package("transformers")
is_datasets_available = _package("datasets")
is_peft_available = _package("peft")
is_timm_available = _package("timm")
is_torchvision_available = _package("torchvision")
is_torchdata_available = _package("torchdata")
is_pandas_available = _package("pandas")
is_matplotlib_available = _package("matplotlib")
is_pytest_available = _package("pytest")
is_tqdm_available = _package("tqdm")
is_boto3_available = _package("boto3")
is_sagemaker_available = _package("sagemaker")
is_import_timer_available = _package("import_timer")
is_schedulefree_available = _package("schedulefree")
is_lomo_available = _package("lomo_optim")
is_amdsmi_available = _package("amdsmi")
is_wandb_available = _package("wandb")
is_comet_ml_available = _package("comet_ml")
is_clearml_available = _package("clearml")
is_dvclive_available = _package("dvclive")
is_swanlab_available = _package("swanlab")

is_deepspeed_available = _other_engine("DeepSpeed")
is_msamp_available = _other_engine("MS-AMP")
is_transformer_engine_available = _other_engine("Transformer Engine")
is_transformer_engine_mxfp8_available = _other_engine("Transformer Engine")
is_pippy_available = _other_engine("PyTorch's pipelining")
is_bitsandbytes_multi_backend_available = _other_engine("bitsandbytes")
is_torch_xla_available = _other_engine("TPUs")
is_tpu_available = _other_engine("TPUs")
is_rocm_available = _other_engine("AMD GPUs")
is_mps_available = _other_engine("Apple GPUs")
is_mlu_available = _other_engine("MLU devices")
is_musa_available = _other_engine("MUSA devices")
is_npu_available = _other_engine("NPU devices")
is_sdaa_available = _other_engine("SDAA devices")
is_hpu_available = _other_engine("HPU devices")
is_habana_gaudi1 = _other_engine("HPU devices")
is_xpu_available = _other_engine("XPU devices")
is_xccl_available = _other_engine("XPU devices")
is_neuron_available = _other_engine("Neuron devices")


def _refusing(name: str, what: str) -> Callable[[Callable], Callable]:
    def decorate(func: Callable) -> Callable:
        @wraps(func)
        def wrapper(*args, **kwargs):
            raise not_ours(f"{func.__name__} ({name})", what, "leave it out")

        return wrapper

    return decorate


torchao_required = _refusing("torchao_required", "torchao's fp8")
deepspeed_required = _refusing("deepspeed_required", "DeepSpeed")
