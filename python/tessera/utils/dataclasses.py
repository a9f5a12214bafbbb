"""Accelerate's configuration classes under the module path that scripts import them from."""

from tessera.compat.enums import (
    BaseEnum,
    ComputeEnvironment,
    CustomDtype,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    EnumWithContains,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
)
from tessera.compat.foreign import (
    AORecipeKwargs,
    BnbQuantizationConfig,
    DeepSpeedSequenceParallelConfig,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from tessera.compat.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TensorInformation,
)
from tessera.compat.sharding import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from tessera.plugin.megatron_lm_plugin import MegatronLMPlugin
from tessera.plugin.parsers import MODEL_CONFIGS_TO_MEGATRON_PARSERS, add_model_config_to_megatron_parser

__all__ = [name for name in dir() if not name.startswith("_")]
