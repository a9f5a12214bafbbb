"""What models are by their heads: which labels they are trained on, and what their outputs are called. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple


@dataclass(frozen=True)
class Heads:
    """Of a class of Transformers whose name has one of these endings."""

    endings: Tuple[str, ...]
    output: str  # its output's class, in transformers.modeling_outputs or beside the model
    looks_back: bool = True  # a decoder: labels are those of the next position, and batches may be packed
    labels: Optional[str] = "labels"  # the argument with labels of tokens
    sample_labels: Optional[str] = None  # and that with labels of samples
    logits: Tuple[str, ...] = ("logits",)  # as outputs name them: of tokens, then of samples
    loader: str = "AutoModelForCausalLM"
    encodes: bool = False  # a decoder that reads an encoder's sequence besides

    @property
    def of_samples(self) -> bool:
        """Whether it has no head for tokens."""
        return self.labels is None

    @property
    def label_names(self) -> List[str]:
        return [name for name in (self.labels, self.sample_labels) if name is not None]

    @property
    def engine_outputs(self) -> Tuple[str, ...]:
        """The engine's names of `logits`, in the order in which it is asked for them: those of samples first."""
        return ("sample_logits", "logits") if len(self.logits) > 1 else ("logits",)


DECODER = Heads(("LMHeadModel", "ForCausalLM"), "CausalLMOutputWithCrossAttentions")
_ENCODERS = (
    Heads(("ForPreTraining",), "ForPreTrainingOutput", False, sample_labels="next_sentence_label",
          logits=("prediction_logits", "seq_relationship_logits"), loader="AutoModelForPreTraining"),
    Heads(("ForMaskedLM",), "MaskedLMOutput", False, loader="AutoModelForMaskedLM"),
    Heads(("ForSequenceClassification",), "SequenceClassifierOutput", False, labels=None, sample_labels="labels",
          loader="AutoModelForSequenceClassification"))
_ENCODER_DECODER = Heads(("ForConditionalGeneration",), "Seq2SeqLMOutput", False, loader="AutoModelForSeq2SeqLM", encodes=True)
ENCODERS = ("bert", "megatron-bert")
ENCODER_DECODERS = ("t5", "mt5")


def heads_for(kind: Optional[str]) -> Tuple[Heads, ...]:
    """Those that models of a type may have."""
    if kind in ENCODER_DECODERS:
        return (_ENCODER_DECODER,)
    return _ENCODERS if kind in ENCODERS else (DECODER,)


def heads_of(config: Dict[str, Any]) -> Heads:
    """Those of the model that a config describes; without architectures the first."""
    known = heads_for(config.get("model_type"))
    name = (config.get("architectures") or [""])[0]
    return next((each for each in known if name.endswith(each.endings)), known[0])


def own_name(model: Any, kind: str) -> Optional[str]:
    """The name of the class with a head that an object of Transformers is of; None if there is none."""
    endings = tuple(ending for each in heads_for(kind) for ending in each.endings)
    return next((each.__name__ for each in type(model).__mro__ if each.__name__.endswith(endings)), None)


def config_of(model: Any) -> Dict[str, Any]:
    """The config of an object of Transformers, with what an encoder's class says of its head."""
    config = model.config.to_dict()
    own = own_name(model, config.get("model_type")) if config.get("model_type") in ENCODERS else None
    return config if own is None else {**config, "architectures": [own]}
