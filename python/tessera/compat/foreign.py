"""Plugins of engines that Tessera does not run. The names exist, so that scripts which import them can be imported;
making one says what to use instead. TorchDynamoPlugin(backend='no') is the exception: it asks for nothing."""

import os
from dataclasses import dataclass
from typing import Any, Optional

from tessera.compat.enums import DynamoBackend
from tessera.compat.kwargs_handlers import KwargsHandler
from tessera.compat.refusals import LAYOUT, not_ours
from tessera.errors import ConfigError

_FP8 = "give mixed_precision='bf16' until fp8 is in the build"


class _Foreign:
    _what = ""
    _instead = ""

    def __init__(self, *args, **kwargs):
        raise not_ours(type(self).__name__, self._what, self._instead)


class TorchTensorParallelPlugin(_Foreign):
    """Settings of PyTorch's DTensor parallelism. Errors: NotImplementedError, always."""

    _what, _instead = "PyTorch's tensor parallelism", LAYOUT


class TorchTensorParallelConfig(_Foreign):
    """Settings of PyTorch's DTensor parallelism. Errors: NotImplementedError, always."""

    _what, _instead = "PyTorch's tensor parallelism", LAYOUT


class TorchContextParallelConfig(_Foreign):
    """Settings of PyTorch's context parallelism. Errors: NotImplementedError, always."""

    _what, _instead = "PyTorch's context parallelism", "give context_parallel_size in a MegatronLMPlugin"


class DeepSpeedSequenceParallelConfig(_Foreign):
    """Settings of DeepSpeed's sequence parallelism. Errors: NotImplementedError, always."""

    _what, _instead = "DeepSpeed", "shard long sequences with sequence_parallelism=True"


class ParallelismConfig(_Foreign):
    """Accelerate's own layout of PyTorch's parallelisms. Errors: NotImplementedError, always."""

    _what, _instead = "PyTorch's parallelisms (FSDP2, DTensor)", LAYOUT


class BnbQuantizationConfig(_Foreign):
    """Settings of bitsandbytes. Errors: NotImplementedError, always."""

    _what, _instead = "bitsandbytes' quantization", "load the model in its own precision"


class TERecipeKwargs(_Foreign, KwargsHandler):
    """An fp8 recipe of TransformerEngine. Errors: NotImplementedError, always."""

    _what, _instead = "TransformerEngine's fp8", _FP8


class MSAMPRecipeKwargs(_Foreign, KwargsHandler):
    """An fp8 recipe of MS-AMP. Errors: NotImplementedError, always."""

    _what, _instead = "MS-AMP's fp8", _FP8


class AORecipeKwargs(_Foreign, KwargsHandler):
    """An fp8 recipe of torchao. Errors: NotImplementedError, always."""

    _what, _instead = "torchao's fp8", _FP8


class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older name of both recipes. Errors: NotImplementedError, always."""

    _what, _instead = "the fp8 of TransformerEngine and MS-AMP", _FP8


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """torch.compile's settings; read from ACCELERATE_DYNAMO_* where None, as Accelerate does. Only the backend "no"
    is accepted. Errors: NotImplementedError for any other backend, tessera.ConfigError for an unknown one."""

    backend: Optional[DynamoBackend] = None
    mode: Optional[str] = None
    fullgraph: Optional[bool] = None
    dynamic: Optional[bool] = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: Optional[bool] = None

    def __post_init__(self):
        name = str(self.backend if self.backend is not None else os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no"))
        if name.upper() not in DynamoBackend:
            raise ConfigError(f"TorchDynamoPlugin.backend '{name}' is unknown; Tessera takes 'no'")
        self.backend = DynamoBackend(name.upper())
        if self.backend is not DynamoBackend.NO and not self.disable:
            raise not_ours(f"TorchDynamoPlugin(backend='{name}')", "torch.compile",
                           "its own kernels need no compiler, so give the backend 'no'")

    def to_dict(self):
        return {**super().to_dict(), "backend": self.backend.value.lower()}
