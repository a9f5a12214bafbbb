"""Accelerate's configuration classes under the module path that scripts import them from."""

from tessera.utils.enums import (
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
from tessera.utils.foreign import (
    AORecipeKwargs,
    BnbQuantizationConfig,
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from tessera.utils.kwargs_handlers import (
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
from tessera.utils.megatron_parsers import MODEL_CONFIGS_TO_MEGATRON_PARSERS, add_model_config_to_megatron_parser
from tessera.utils.megatron_plugin import MegatronLMPlugin

__all__ = [name for name in dir() if not name.startswith("_")]
