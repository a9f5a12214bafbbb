"""What stands between Python and one C++ engine: a model's description, its batches, gradients and updates. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tessera._agreement import agreed
from tessera._freezing import Freezing
from tessera._ids import ids_of
from tessera._not_finite import NotFinite
from tessera._process_group import bits_of, close_at_exit, float_of, meet, script_place
from tessera._weights import Source, Start, engine_facts, load_weights
from tessera.errors import ConfigError, InvalidArgument
from tessera.logging import get_logger
from tessera.utils.config_map import native_config
from tessera.utils.refusals import warn_once

_IGNORED = -100
_FROZEN = "frozen"
logger = get_logger(__name__)


@dataclass
class ModelParameter:
    """A parameter of the caller's model, under its Hugging Face name."""

    name: str
    shape: Tuple[int, ...]
    requires_grad: bool = True
    ours: str = ""  # the Tessera parameter it is a part of


@dataclass
class Group:
    """How some parameters are updated: the values of one of the caller's parameter groups."""

    names: List[str]
    betas: Tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    origin: int = 0  # the caller's group it is a part of
    lr_mult: float = 1.0
    weight_decay: Optional[float] = None  # instead of that group's
    begins: Tuple[float, float] = (0.0, 0.0)  # learning rate and weight decay at prepare()

    def rates(self, origins: Sequence[Tuple[float, float]]) -> Tuple[float, float]:
        """Learning rate and weight decay, where those of the caller's groups are `origins`."""
        lr, weight_decay = origins[self.origin]
        return lr * self.lr_mult, weight_decay if self.weight_decay is None else self.weight_decay


@dataclass
class OptimizerDescription:
    kind: str = "adamw"  # adamw, adam or sgd
    nesterov: bool = False
    groups: List[Group] = field(default_factory=list)


class OpenCall:
    """A gradient that was computed and waits for its factor. Whoever drops it drops the gradient."""

    def __init__(self, session: "Session", number: int):
        self._session = weakref.ref(session)
        self.number = number
        self.used = False
        self._trained = session.freezing.applied

    @property
    def session(self) -> Optional["Session"]:
        return self._session()

    def add(self, factor: float) -> None:
        """Errors: RuntimeError the second time; InvalidArgument after an optimizer step."""
        if self.used:
            raise RuntimeError("this loss was backwarded before: its gradient is a part of the accumulated one already. "
                               "Call the model again for another one")
        self.used = True
        session = self._session()
        session.check_factor(factor, session.freezing.changed_since(self._trained))
        session.engine.add_call(self.number, factor)

    def __del__(self):
        session = self._session()
        if not self.used and session is not None:
            session.unwanted_calls.append(self.number)


class OpenForward:
    """Tapes of a forward pass that wait for the gradient of what it returned."""

    def __init__(self, session: "Session", number: int):
        self._session = weakref.ref(session)
        self.number = number
        self.used = False
        self._trained = session.freezing.applied

    @property
    def session(self) -> Optional["Session"]:
        return self._session()

    def backward(self, upstream: Any) -> None:
        if self.used:
            raise RuntimeError("backward ran through these logits before, and their activations are gone; call the model again")
        self.used = True
        session = self._session()
        session.meet_unchanged("backward() of a loss of logits", session.freezing.changed_since(self._trained))
        session.engine.backward(self.number, upstream)

    def __del__(self):
        session = self._session()
        if not self.used and session is not None:
            session.unwanted_forwards.append(self.number)


class Session:
    """One model in training. `config_json`: the text of its config.json.

    The engine comes into being with build(): before that nothing is allocated and parameters can be put into groups."""

    def __init__(self, config_json: str, parameters: Sequence[ModelParameter], source: Source, state: Any,
                 dtype: str = "float32"):
        from tessera import _C

        self.config_json = config_json
        self.config: dict = json.loads(config_json)
        self.source = source
        self.dtype = dtype
        self.state = state
        self.engine: Any = None
        self.optimizer: Optional[OptimizerDescription] = None
        self.clip_grad = 0.0  # the plugin's
        self.seq_length: Optional[int] = None
        self.micro_batch_size = 1
        self.closed = False
        self.checkpointed = False  # gradient_checkpointing_enable() was called on the model
        self.told_of_no_optimizer = False
        self.last_loss: Optional[float] = None
        self._tokens = self._batch_tokens = 0  # of the global batches since the last step, of the last one
        self.calling = "the model"  # what batches are for, as ranks tell each other
        self.arguments: dict = {}  # of that call
        self._peers_place: Any = None  # in the global batch, of a batch that came from a peer
        self._log: Any = None
        self._not_finite = NotFinite()
        self.grad_scaler: Any = None
        self._clip_once: Optional[float] = None
        # Python may collect garbage in any thread, also while the engine computes: it is told at the next call.
        self.unwanted_calls: List[int] = []
        self.unwanted_forwards: List[int] = []
        self._group_values: List[dict] = []
        self._joint: Dict[Tuple[int, int], str] = {}  # groups that share a parameter of the engine's, and its parts
        self._items: Dict[str, str] = dict(_C.hf_model_items(config_json))
        self.model_values: Dict[str, Any] = {}  # what the caller's modules say over the config
        self._told_length = False
        self.mappings = dict(_C.hf_parameters(config_json))
        self._parts = {part[0]: ours for ours, parts in self.mappings.items() for part in parts}
        self.parameters = [self._placed(parameter) for parameter in parameters]
        self.freezing = Freezing(self)

    def _placed(self, parameter: ModelParameter) -> ModelParameter:
        ours = self._parts.get(parameter.name)
        if ours is None and parameter.name == "lm_head.weight":  # tied: the table's other name
            ours = "embedding.word_embeddings.weight"
        if ours is None:
            raise ConfigError(f"the model has a parameter '{parameter.name}' that a {self.config.get('model_type')} of this "
                              "config has not; Tessera builds models from their config alone and cannot train it")
        parameter.ours = ours
        return parameter

    @property
    def plugin(self) -> Any:
        return self.state.megatron_lm_plugin

    @property
    def mesh(self) -> Any:
        return self.state.mesh

    @property
    def num_micro_batches(self) -> int:
        return 1 if self.plugin is None else self.plugin.num_micro_batches

    # The engine.

    def check_open(self) -> None:
        """Errors: ConfigError after free_memory()."""
        if self.closed:
            raise ConfigError("free_memory() has let go of this model and its weights; give prepare() a new one, with an optimizer "
                              "of its own")

    def build(self, trainable: bool = True) -> None:
        """Makes the engine and gives it its weights: those of rank 0. Collective. Errors: ConfigError where ranks differ."""
        if self.engine is not None:
            return
        self.check_open()
        close_at_exit(self)
        from tessera import _C

        start = Start.of(self.source, self.state.world)
        with agreed(self.state.world, "the engine's configuration") as facts:
            config, overrides, changed, groups, group_of = self._configuration(trainable, start)
            facts.update(engine_facts(config, overrides, changed, groups, group_of, trainable))
        self._group_values = [dict(group) for group in groups]
        self.engine = _C.Engine(json.dumps(config), overrides, self.state.world, trainable, groups, group_of)
        self.engine.set_micro_batches(self.num_micro_batches)
        if trainable:
            self.freezing.follow()
        load_weights(self.engine, self.config_json, self.source, start)

    def _configuration(self, trainable: bool, start: Start) -> Tuple[dict, List[str], dict, List[dict], Dict[str, int]]:
        """Of the engine: its sections, overrides of its model, what of the model the plugin changes, groups, and the group
        of each parameter."""
        optimizer = self.optimizer or OptimizerDescription()
        first = optimizer.groups[0] if optimizer.groups else Group([])
        defaults: Dict[str, Any] = {"name": optimizer.kind, "weight_decay": 0.0}
        if optimizer.kind == "sgd":
            defaults.update(momentum=max((group.momentum for group in optimizer.groups), default=0.0),
                            nesterov=optimizer.nesterov)
        else:
            defaults.update(betas=list(first.betas), eps=first.eps)
        config = native_config(
            plugin=self.plugin, hf_config=self.config, pretrained=start.pretrained, optimizer_defaults=defaults, world_size=self.state.num_processes,
            mixed_precision=self.state.mixed_precision, seq_length=self.seq_length, micro_batch_size=self.micro_batch_size,
            seed=start.seed, timeout_s=self.state._timeout_s, grad_scaler=self.grad_scaler,
            cpu=self.state._device.type == "cpu", threads=_threads(self.state), checkpointed=self.checkpointed)
        if self.state._device.type == "cuda":
            config["device"].update(type="cuda", index=self.state._device.index or 0)
        self.clip_grad = config["optimizer"]["clip_grad"]
        model = {**self._items, **{key: json.dumps(value) for key, value in self.model_values.items()}}
        changed = config.pop("model")
        overrides = [f"model.{key}={value}" for key, value in model.items() if key not in changed and value != "null"]
        overrides += [f"model.{key}={json.dumps(value)}" for key, value in changed.items()]
        groups, group_of = self._grouped(optimizer, trainable)
        return config, overrides, changed, groups, group_of

    def _grouped(self, optimizer: OptimizerDescription, trainable: bool) -> Tuple[List[dict], Dict[str, int]]:
        """The engine's groups, the last one for what is not trained, and the group of each of its parameters."""
        if not trainable or not optimizer.groups:
            return [], {}
        values = [self._values(optimizer, group) for group in optimizer.groups] + [{_FROZEN: True}]
        begin = [(value, group.begins, group.lr_mult, group.weight_decay) for value, group in zip(values, optimizer.groups)]
        begin.append((values[-1], (0.0, 0.0), 1.0, None))
        self._joint = {}
        place = {name: i for i, group in enumerate(optimizer.groups) for name in group.names}
        chosen: Dict[str, Tuple[int, str]] = {}
        for parameter in self.parameters:
            number = place.get(parameter.name, len(values) - 1)
            tied = parameter.name == "lm_head.weight" and parameter.ours != "output_layer.weight"
            if tied and parameter.name not in place:
                continue  # the table's own name decides
            other = chosen.setdefault(parameter.ours, (number, parameter.name))
            if other[0] != number and not parameter.requires_grad:
                chosen[parameter.ours] = (len(values) - 1, parameter.name)  # frozen for good: no group is all of it
            elif other[0] != number and begin[other[0]] != begin[number]:
                raise ConfigError(f"'{other[1]}' and '{parameter.name}' are one parameter in Tessera ({parameter.ours}), so they "
                                  "must be in the same parameter group, in groups of equal values, or both be frozen")
            elif other[0] != number:  # one group for the engine, as long as their values stay equal
                self._joint.setdefault((other[0], number), f"'{other[1]}' and '{parameter.name}'")
        return values, {ours: number for ours, (number, _) in chosen.items()}

    @staticmethod
    def _values(optimizer: OptimizerDescription, group: Group) -> dict:
        if optimizer.kind == "sgd":
            return {"momentum": group.momentum}
        return {"beta1": group.betas[0], "beta2": group.betas[1], "eps": group.eps}

    # Batches.

    def batch(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, position_ids: Any = None,
              shifted: bool = False, document_ids: Any = None) -> Any:
        """This data rank's samples, arrays [batch, seq] as a Hugging Face model takes them, as a _C.Batch. `labels` are
        those of the same positions unless `shifted`; attention stays within equal `document_ids`. Collective over data
        ranks."""
        import numpy as np

        from tessera import _C

        tokens, labels, position_ids = map(ids_of, ("input_ids", "labels", "position_ids"), (input_ids, labels, position_ids))
        if tokens.ndim != 2:
            raise InvalidArgument(f"input_ids have the shape {tuple(tokens.shape)}; they must be [batch, sequence]")
        for name, array in (("attention_mask", attention_mask), ("labels", labels), ("position_ids", position_ids)):
            if array is not None and name != "position_ids" and tuple(np.shape(array)) != tokens.shape:
                raise InvalidArgument(f"{name} has the shape {tuple(np.shape(array))}, input_ids {tuple(tokens.shape)}; they "
                                      "must be the same [batch, sequence]")
        begin, end = _key_ranges(attention_mask)
        documents = document_ids
        if position_ids is not None:
            position_ids = np.broadcast_to(position_ids, tokens.shape)
            if attention_mask is None and documents is None and not shifted:  # packed samples: a position that does not follow the one before begins another one
                steps = np.diff(position_ids, axis=1, prepend=position_ids[:, :1] - 1) != 1
                documents = np.cumsum(steps, axis=1) if steps.any() else None
        if labels is not None and not shifted:
            labels = np.concatenate([labels[:, 1:], np.full((len(labels), 1), _IGNORED, labels.dtype)], axis=1)
        self._warn_of_length(tokens.shape[1])
        batch = _C.Batch(tokens, labels, position_ids, begin, end, documents)
        self._agree(batch)
        self._batch_tokens = batch.global_batch * tokens.shape[1]
        return batch

    def _warn_of_length(self, length: int) -> None:
        positions = int(self._items["max_positions"])
        if length > positions and self._items["position_embedding"] == "rotary" and not self._told_length:
            self._told_length = True
            warn_once(f"sequences of {length} tokens are longer than the {positions} positions of the model's "
                      "max_position_embeddings: rotary positions are computed beyond them, as in Transformers, but the model "
                      "may know none of them")

    def _agree(self, batch: Any) -> None:
        """The batch's place in the global one, after every rank has told what it calls and what batch it has."""
        from tessera.utils.objects import encode

        if self._peers_place is not None:
            batch.take_place(self._peers_place)
            self._peers_place = None
        else:
            self.engine.agree(batch, self.calling, script_place, lambda: encode(self.arguments))

    def begin_call(self, call: str, arguments: dict) -> Optional[dict]:
        """Notes what batch() tells other ranks. A rank without any argument (Megatron's loops hand it {}) gets the arguments of a
        peer of its data rank, whose batch this call is for; others get None. Errors: DataError if no peer has a batch."""
        from tessera.utils.objects import decode

        if self.freezing.applied:  # a trainable engine
            self.freezing.follow()
        self.calling = call
        self.arguments = {name: value for name, value in arguments.items() if value is not None}
        if self.arguments or self.mesh.tp * self.mesh.pp == 1:
            return None
        data, self._peers_place = self.engine.take_batch(call, script_place)
        return decode(data)

    def meet(self, call: str, *values: int) -> list:
        return meet(self.state.world, call, *values)

    def _drop_unwanted(self) -> None:
        while self.unwanted_calls:
            self.engine.drop_call(self.unwanted_calls.pop())
        while self.unwanted_forwards:
            self.engine.drop_forward(self.unwanted_forwards.pop())

    def train(self, batch: Any) -> Tuple[float, OpenCall]:
        """Forward and backward: the mean loss over all data ranks, and the gradient, which belongs to nothing yet."""
        self._drop_unwanted()
        self._tokens += self._batch_tokens
        number, loss = self.engine.open_call(batch)
        for note in self.engine.take_notes():
            logger.info(note)
        self.note_loss(loss, batch)
        return loss, OpenCall(self, number)

    def train_with(self, batch: Any, output: str, loss: Any) -> OpenCall:
        """The same with a loss of the caller's, asked micro-batch by micro-batch: loss(number, first sample, samples,
        outputs) returns the gradient by the outputs; both are arrays or have __dlpack__."""
        self._drop_unwanted()
        self._tokens += self._batch_tokens
        number, _ = self.engine.open_call_with_loss(batch, output, loss)
        return OpenCall(self, number)

    def note_loss(self, loss: float, batch: Any) -> None:
        """The loss of the call just made, equal on all ranks; says once if it is not finite. Collective then."""
        self.last_loss = loss
        self._not_finite.check_loss(self, loss, batch)

    def evaluate(self, batch: Any) -> float:
        total, targets = self.engine.evaluate_sum(batch)
        return total / targets if targets else float("nan")

    def forward(self, batch: Any, output: str = "logits", record: bool = True) -> Tuple[Any, Optional[OpenForward]]:
        """fp32 logits [batch, seq, vocab] (or "token_losses" [batch, seq]) of this data rank, on each of its ranks: an array,
        on a GPU something with __dlpack__."""
        self._drop_unwanted()
        self._tokens += self._batch_tokens if record else 0
        number, value = self.engine.forward(batch, output, record)
        return value, OpenForward(self, number) if record else None

    # Updates.

    def check_factor(self, factor: float, changed: str = "") -> None:
        """Every rank must scale a call's gradient alike, and `changed`, a parameter frozen or unfrozen since the call, is
        refused on all of them. Errors: InvalidArgument naming the factors, or the parameter."""
        self._meet_with("loss.backward()", factor, "backwarded the same loss with different factors",
                        "The model's own loss is known on every rank, so what it is multiplied by must be equal too", changed)

    def meet_unchanged(self, call: str, changed: str, bits: int = 0) -> List[int]:
        """meet(), where no rank may have changed what is trained; returns the other number that each rank gave."""
        told = self.meet(call, bits, bool(changed))
        first = next((rank for rank, values in enumerate(told) if values[1]), None)
        if first is not None:
            raise InvalidArgument(f"requires_grad of {changed or f'a parameter on rank {first}'} was changed between the model's call "
                                  "and backward(): change it before the call, or after the optimizer's step")
        return [values[0] for values in told]

    def _meet_with(self, call: str, number: float, what: str, remedy: str, changed: str = "") -> None:
        """meet(), for a number that must be the same on every rank."""
        number = float("nan") if number != number else float(number)  # of the many, one
        told = [float_of(bits) for bits in self.meet_unchanged(call, changed, bits_of(number))]
        if any(bits_of(each) != bits_of(told[0]) for each in told):
            raise InvalidArgument(f"ranks {what}: {', '.join(f'rank {i}: {value:g}' for i, value in enumerate(told))}. {remedy}")

    def has_gradient(self) -> bool:
        return self.engine is not None and self.engine.finished_calls > 0

    def zero_grad(self) -> None:
        if self.engine is not None:
            self.engine.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> float:
        """The gradient's true global norm; the next update clips to `max_norm` (or to the plugin's, if that is less)."""
        self._meet_with("clip_grad_norm_()", max_norm, "clip the same gradient to different norms", "Give the same max_norm")
        norm = self.engine.grad_norm()
        limits = [limit for limit in (max_norm, self.clip_grad, self._clip_once) if limit]
        self._clip_once = min(limits)
        return norm

    def update(self, rates: Sequence[Tuple[float, float]], options: Sequence[dict]) -> dict:
        """One optimizer step with (lr, weight decay) and the other options of each of the caller's groups: grad_norm
        (before clipping), skipped, loss_scale."""
        self._drop_unwanted()
        self._check_rates(rates, options)
        own = [group.rates(rates) for group in self.optimizer.groups]
        self._check_joint(own, options)
        for number, group in enumerate(self.optimizer.groups):
            values = self._values(self.optimizer, Group([], **options[group.origin]))
            if values != self._group_values[number]:
                self.engine.set_group(number, values)
                self._group_values[number] = values
        self.engine.set_clip_grad(self._clip_once or self.clip_grad)
        self._clip_once = None
        result = self.engine.update([*own, (0.0, 0.0)])
        if self._log is None:
            from tessera._step_log import StepLog

            self._log = StepLog(self.state)
        self._not_finite.check_step(self, result)
        self._log.write(self.engine.steps_done, self.last_loss, rates[0][0], result, self._tokens)
        self._tokens = 0
        return result

    def _check_joint(self, rates: Sequence[Tuple[float, float]], options: Sequence[dict]) -> None:
        """Groups that share a parameter of the engine's must go on alike. Errors: InvalidArgument, on every rank, as rates are
        equal there."""
        groups = self.optimizer.groups
        for (a, b), parts in self._joint.items():
            if rates[a] != rates[b] or options[groups[a].origin] != options[groups[b].origin]:
                raise InvalidArgument(f"optimizer.step(): {parts} are one parameter in Tessera, and the values of their parameter groups "
                                      f"{groups[a].origin} and {groups[b].origin} are not equal any more; put both into one group")

    def _check_rates(self, rates: Sequence[Tuple[float, float]], options: Sequence[dict]) -> None:
        """Every rank must step with the same rates and options. Errors: InvalidArgument naming two ranks and their values."""
        own = [{"lr": lr, "weight_decay": weight_decay, **option} for (lr, weight_decay), option in zip(rates, options)]
        text = json.dumps(own)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        if len({values[0] for values in self.meet("optimizer.step()", digest)}) == 1:
            return
        everyone = [json.loads(each) for each in self.state.world.all_gather_bytes(text.encode())]
        for rank, theirs in enumerate(everyone):
            if len(theirs) != len(everyone[0]):
                raise InvalidArgument(f"optimizer.step() with {len(everyone[0])} parameter groups on rank 0 and {len(theirs)} on rank "
                                      f"{rank}")
            for number, (a, b) in enumerate(zip(everyone[0], theirs)):
                for key in a:
                    if repr(a[key]) != repr(b[key]):  # a nan is equal to another one here
                        raise InvalidArgument(
                            f"optimizer.step() with different values: {key} of parameter group {number} is {a[key]} on rank 0 and "
                            f"{b[key]} on rank {rank}. Schedulers must be stepped alike on every rank")

    # Whole weights and gradients.

    def collect(self, gradients: bool = False) -> Dict[str, Any]:
        """fp32 arrays by Hugging Face name on rank 0, {} elsewhere. Collective."""
        whole: Dict[str, Any] = {}
        self.meet("full_gradients()" if gradients else "model.state_dict()")
        self.engine.collect(gradients, lambda name, array: whole.update(self._split(name, array)))
        return whole

    def load(self, values: Dict[str, Any], strict: bool = True, unknown: bool = False) -> Tuple[List[str], List[str]]:
        """Rank 0's `values`, arrays or tensors by Hugging Face name, become the weights; returns missing and unknown names
        (`unknown`: these may be there). Collective. Errors: InvalidArgument on every rank, before anything is changed."""
        from tessera import _whole_weights

        self.meet("model.load_state_dict()")
        return _whole_weights.load(self, values, strict, unknown)

    def _split(self, ours: str, array: Any) -> Dict[str, Any]:
        import numpy as np

        parts, row = {}, 0
        for name, shape, transposed in self.mappings[ours]:
            rows = shape[1] if transposed else shape[0]
            part = array[row: row + rows]
            parts[name] = np.ascontiguousarray(part.T) if transposed else part
            row += rows
        return parts

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self.engine = None
        self.closed = True


def _threads(state: Any) -> int:
    """CPU threads of this process; 0 leaves the choice to the engine."""
    if os.environ.get("OMP_NUM_THREADS") or os.environ.get("TESSERA_THREADS"):
        return int(os.environ.get("TESSERA_THREADS") or os.environ["OMP_NUM_THREADS"])
    if state.num_processes == 1:
        return 0
    from tessera import _C

    local = _C.environment().get("local_world_size") or state.num_processes
    return max(1, (os.cpu_count() or 1) // local)


def _key_ranges(attention_mask: Any) -> Tuple[Any, Any]:
    """First and one past the last key of each sample; (None, None) where all keys count."""
    import numpy as np

    if attention_mask is None:
        return None, None
    mask = np.asarray(attention_mask) != 0
    if mask.all():
        return None, None
    length = mask.shape[1]
    begin = np.where(mask.any(axis=1), mask.argmax(axis=1), 0)
    end = np.where(mask.any(axis=1), length - mask[:, ::-1].argmax(axis=1), 0)
    holes = np.flatnonzero(mask.sum(axis=1) != end - begin)
    if len(holes):
        raise InvalidArgument(f"attention_mask of sample {int(holes[0])} has zeros between ones; only padding at the ends can "
                              "be masked. For packed samples give position_ids that restart, and no mask")
    return begin, end
