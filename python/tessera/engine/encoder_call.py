"""One call of a prepared encoder, or of an encoder with a decoder: what its heads are asked for, and the output object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Tuple

import torch

from tessera.data.encoder_batch import CLASS, CLASSES, counted_labels, problem_of, sample_labels_of, sample_targets_of
from tessera.engine import call_arguments
from tessera.engine.outputs import EngineValue
from tessera.engine.seq2seq_call import seq2seq_batch
from tessera.errors import InvalidArgument
from tessera.plugin.heads import Heads
from tessera.utils.objects import array_of

if TYPE_CHECKING:
    from tessera.engine.model import TesseraModel

_NOT_FOR_ENCODERS = {
    "num_items_in_batch": "each loss of this model is divided by its own targets; scale outputs.loss yourself",
    "logits_to_keep": "this model's logits are those of all positions; slice them yourself",
    "document_ids": "attention of an encoder goes over the whole sample; pad samples, and give an attention_mask"}
# What Megatron's samples for BERT are called here.
_MEGATRON = {"text": "input_ids", "types": "token_type_ids", "padding_mask": "attention_mask", "is_random": "next_sentence_label"}
_TAKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "next_sentence_label")


def given_to(heads: Heads, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments of a call under Hugging Face's names, Megatron's samples too. Errors: InvalidArgument for what a model with
    these heads does not take, and for labels of one of two heads."""
    named = _of_megatron(heads, arguments) if arguments.get("text") is not None else dict(arguments)
    for name, why in _NOT_FOR_ENCODERS.items():
        if named.get(name) is not None:
            raise InvalidArgument(f"{name}: {why}")
    if heads.sample_labels != "next_sentence_label" and named.get("next_sentence_label") is not None:
        raise InvalidArgument("next_sentence_label: this model has no head for pairs of segments; remove that column, or train a "
                              "...ForPreTraining model")
    has = [name for name in heads.label_names if named.get(name) is not None]
    if has and has != heads.label_names:
        lacking = next(name for name in heads.label_names if name not in has)
        raise InvalidArgument(f"the model was called with {has[0]} and without {lacking}: a ...ForPreTraining model is trained on both. "
                              "Give both, or train a ...ForMaskedLM model, which has no head for pairs of segments")
    return named


def _of_megatron(heads: Heads, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """A sample of Megatron's for BERT: labels of -1, and those that loss_mask leaves out, do not count; is_random is for the head
    that reads it."""
    unread = ("loss_mask", "truncated") + (() if heads.sample_labels else ("is_random",))
    named = {_MEGATRON.get(name, name): value for name, value in arguments.items() if name not in unread
             and not (name in _MEGATRON.values() and value is None)}
    named["labels"] = counted_labels(arguments.get("labels"), arguments.get("loss_mask"))
    return named


def encoder_batch(session: Any, arguments: Dict[str, Any]) -> Tuple[Any, Any, bool]:
    """The engine's batch of a call, its labels of samples, and whether it has labels. Those of a regression or of several classes a
    sample are floats, and not the engine's. Collective over data ranks."""
    heads = session.heads
    given = given_to(heads, arguments)
    call_arguments.check_has_ids(given.get("input_ids"))
    call_arguments.check({name: value for name, value in given.items() if name not in _TAKEN}, known=("return_dict",))
    arrays = {name: array_of(given.get(name)) for name in _TAKEN}
    tokens = arrays["input_ids"]
    of_samples = None if heads.sample_labels is None else _labels_of_samples(session, arrays[heads.sample_labels], len(tokens))
    classes = None if of_samples is None or of_samples.ndim > 1 else of_samples
    batch = session.batch(tokens, arrays["attention_mask"], None if heads.of_samples else arrays["labels"], arrays["position_ids"],
                          shifted=True, token_types=arrays["token_type_ids"], sample_labels=classes)
    return batch, of_samples, arrays[heads.label_names[0]] is not None


def _labels_of_samples(session: Any, labels: Any, samples: int) -> Any:
    """The first labels say what the head is trained on where its config does not, as in Transformers."""
    name = session.heads.sample_labels
    if labels is None or not session.heads.of_samples:
        return sample_labels_of(name, labels, samples)
    count = len(session.config["id2label"])
    problem = problem_of(session.config.get("problem_type"), count, labels)
    own = sample_labels_of(name, labels, samples) if problem == CLASS else sample_targets_of(name, labels, samples, count)
    session.config["problem_type"] = problem
    return own


def encoder_forward(model: TesseraModel, arguments: Dict[str, Any]) -> Any:
    """As Transformers' model of these heads returns it: logits where no labels are given, with the plugin's return_logits, and of
    a classification in eval mode."""
    session = model.session
    heads, plugin = session.heads, session.plugin
    batch, of_samples, labelled = (seq2seq_batch if heads.encodes else encoder_batch)(session, arguments)
    if heads.of_samples:
        model.config.problem_type = session.config.get("problem_type")
    training = model.training and torch.is_grad_enabled()
    asked = plugin is not None and (plugin.return_logits or plugin.require_logits)
    loss, logits = None, {}
    own_loss = of_samples is not None and of_samples.ndim > 1
    if not labelled or asked or own_loss or (heads.of_samples and not training):
        logits = dict(zip(reversed(heads.logits), (model.logits_of(batch, training, name) for name in heads.engine_outputs)))
        if labelled:
            loss = _loss_of_numbers(model, logits["logits"], of_samples, batch) if own_loss else _loss_of(model, logits, of_samples, batch)
            session.losses = {"loss": float(loss.detach())} if heads.of_samples else {}
    elif training:
        value, call = session.train(batch)
        loss = EngineValue.apply(model._anchor, torch.tensor(value, device=model.device), call)
    else:
        loss = torch.tensor(session.evaluate(batch), device=model.device)
    if loss is not None and not training:
        model.note_eval(loss)
    values = {"loss": loss, **{name: logits.get(name) for name in heads.logits}}
    if arguments.get("return_dict") is False:
        return tuple(value for value in values.values() if value is not None)
    if loss is not None and model.returns_loss_alone:
        return loss
    return model.output_class(**values)


def _loss_of(model: TesseraModel, logits: Dict[str, Any], of_samples: Any, batch: Any) -> Any:
    """Each loss by its own targets."""
    heads = model.session.heads
    loss = None
    if not heads.of_samples:
        loss = model.loss_of(logits[heads.logits[0]], model.session.targets, batch, batch.global_targets)
    if heads.sample_labels is None or (loss is not None and batch.global_sample_targets == 0):  # as the engine's own loss
        return loss
    own = model.loss_of(logits[heads.logits[-1]], of_samples, batch, batch.global_sample_targets)
    return own if loss is None else loss + own


def _loss_of_numbers(model: TesseraModel, logits: torch.Tensor, labels: Any, batch: Any) -> torch.Tensor:
    """Of a regression or of several classes a sample, as Transformers has them: the mean over all outputs of all samples."""
    functional = torch.nn.functional
    loss = functional.binary_cross_entropy_with_logits if model.config.problem_type == CLASSES else functional.mse_loss
    total = loss(logits.float(), torch.from_numpy(labels).to(logits.device), reduction="sum")
    return model.mean_over_ranks(total, batch, batch.global_batch * labels.shape[1])
