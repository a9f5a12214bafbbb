"""What prepare() was given, as the engine reads it: made once, whole, and never changed. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from tessera.engine.changed_model import ChangedModel
from tessera.engine.optimizer_groups import OptimizerDescription
from tessera.engine.weights import Source


@dataclass
class ModelParameter:
    """A parameter of the caller's model, under its Hugging Face name."""

    name: str
    shape: Tuple[int, ...]
    requires_grad: bool = True
    ours: Tuple[str, ...] = ()  # the Tessera parameter it is a part of, or those that it holds, as of all experts


@dataclass(frozen=True)
class ModelPlan:
    """Of a model: the text of its config.json, its parameters as the caller has them, where its weights are, their dtype."""

    config_json: str
    parameters: Tuple[ModelParameter, ...]
    source: Source
    dtype: str = "float32"
    values: Dict[str, Any] = field(default_factory=dict)  # what the caller's modules say over the config
    change: Optional[ChangedModel] = None  # what the plugin makes of it
    checkpointed: bool = False  # gradient_checkpointing_enable() was called on it
    grad_scaler: Any = None

    @property
    def architecture(self) -> str:
        """The config of the model that is trained."""
        return self.config_json if self.change is None else self.change.architecture

    @property
    def trained(self) -> Tuple[ModelParameter, ...]:
        """The parameters of that model, in the caller's order: without those that a change drops, the others in its shapes, and
        then those that it has besides."""
        change = self.change
        if change is None:
            return tuple(ModelParameter(each.name, each.shape, each.requires_grad) for each in self.parameters)
        kept = [ModelParameter(each.name, change.shapes.get(each.name, each.shape), each.requires_grad)
                for each in self.parameters if each.name not in change.dropped]
        return (*kept, *(ModelParameter(name, change.shapes[name]) for name in change.added))


@dataclass(frozen=True)
class TrainingPlan:
    """Of its training, which may come with later calls of prepare(): until then there is none."""

    optimizer: Optional[OptimizerDescription] = None
    micro_batch_size: int = 1  # samples, on a data rank
