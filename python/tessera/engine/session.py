"""What stands between Python and one C++ engine: a model's description, its batches, gradients and updates. No torch."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tessera.comm.agreement import agreed
from tessera.comm.process_group import bits_of, close_at_exit, float_of, meet, script_place
from tessera.comm.warnings import warn_once
from tessera.data.documents import DocumentRules, no_rules
from tessera.data.model_batch import model_batch
from tessera.engine import whole_weights
from tessera.engine.freezing import Freezing
from tessera.plugin.heads import heads_of
from tessera.engine.not_finite import NotFinite
from tessera.engine.open_calls import OpenCall, OpenForward
from tessera.engine.optimizer_groups import EngineGroups, Group, OptimizerDescription, check_rates
from tessera.engine.plan import ModelParameter, ModelPlan, TrainingPlan
from tessera.engine.text_numbers import TextNumbers
from tessera.engine.weights import Start, engine_facts, load_weights
from tessera.errors import ConfigError, InvalidArgument
from tessera.launch.progress import progress
from tessera.logging import get_logger
from tessera.plugin.config_map import native_config
from tessera.plugin.model_shape import section_with
from tessera.utils.objects import decode, encode

logger = get_logger(__name__)
_MEGATRON_LOSSES = {"token": "lm loss", "nsp": "sop loss", "class": "loss"}


class Session:
    """One model in training.

    The engine comes into being with build(): before that nothing is allocated and parameters can be put into groups."""

    def __init__(self, plan: ModelPlan, state: Any):
        from tessera import _C

        self.plan = plan
        self.training = TrainingPlan()  # replaced by prepare()
        self.config: dict = json.loads(plan.config_json)
        self.state = state
        self.engine: Any = None
        self.trainable = False  # that engine; one that only evaluates has no gradients
        self.generation = 0  # engines made so far: what a call left in one of them is nothing to the next
        self._built_for: Optional[OptimizerDescription] = None
        self._start: Optional[Start] = None
        self.clip_grad = 0.0  # the plugin's
        self.closed = False
        self.told_of_no_optimizer = False
        self.announced = False  # what the run is has been said
        self.last_loss: Optional[float] = None
        self.losses: Dict[str, float] = {}  # of an encoder's (or T5's) last call with the model's own loss, by Megatron's names
        self._tokens = self._batch_tokens = 0  # of the global batches since the last step, of the last one
        self.heads = heads_of(self.config)
        self.rules = DocumentRules.of(self.plugin, self.config) if self.heads.looks_back else no_rules(self.plugin, self.kind)
        self.targets: Any = None  # labels of the last batch(), int [batch, seq]: of the next position, -100 without a loss
        self.calling = "the model"  # what batches are for, as ranks tell each other
        self.arguments: dict = {}  # of that call
        self._peers_place: Any = None  # in the global batch, of a batch that came from a peer
        self._log: Any = None
        self._not_finite = NotFinite()
        self._clip_once: Optional[float] = None
        # Python may collect garbage in any thread, also while the engine computes: it is told at the next call.
        self.unwanted: List[Any] = []  # what nobody wants any more of the engine's open calls
        self._groups = EngineGroups()
        self._items: Dict[str, Any] = _C.hf_model_items(plan.architecture)
        self._told_length = False
        self.mappings = dict(_C.hf_parameters(plan.architecture))
        self.row_orders = _C.hf_row_orders(plan.architecture)
        self.of_part: Dict[str, Tuple[str, ...]] = {}  # by Hugging Face name: Tessera's parameters
        for ours, parts in self.mappings.items():
            for name, *_ in parts:
                self.of_part[name] = (*self.of_part.get(name, ()), ours)
        self.parameters = [self._placed(parameter) for parameter in plan.trained]
        self.freezing = Freezing(self)
        self.text_numbers = TextNumbers()

    def _placed(self, parameter: ModelParameter) -> ModelParameter:
        ours = self.of_part.get(parameter.name, ())
        if not ours and parameter.name == "lm_head.weight":  # tied: the table's other name
            ours = ("embedding.word_embeddings.weight",)
        if not ours:
            raise ConfigError(f"the model has a parameter '{parameter.name}' that a {self.kind} of this "
                              "config has not; Tessera builds models from their config alone and cannot train it")
        parameter.ours = ours
        return parameter

    @property
    def kind(self) -> str:
        """The model type of the caller's model."""
        return self.config.get("model_type") or self.config.get("hf_model_type") or "decoder"

    @property
    def seed(self) -> int:
        """Of the engine, which was built."""
        start = self._start
        return 1234 if start is None or start.seed is None else start.seed

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
        """Makes the engine and gives it its weights: those of rank 0, or of the engine that evaluated so far, or that was called
        in training mode before its optimizer was there. Collective. Errors: ConfigError where ranks differ."""
        if self.engine is not None and (not trainable or (self.trainable and self._built_for is self.training.optimizer)):
            return
        self.check_open()
        if self.engine is None:
            close_at_exit(self)
        from tessera import _C

        start = self._start = self._start or Start.of(self.plan.source, self.state.world)
        with agreed(self.state.world, "the engine's configuration") as facts:
            config = _C.Config(self._sections(start))
            self._groups = EngineGroups(self.training.optimizer if trainable else None, self.parameters)
            facts.update(engine_facts(config, self._groups.values, self._groups.of, trainable))
        if self.plan.change is not None and self.engine is None:
            logger.warning(self.plan.change.note(self.kind, weights=start.pretrained))
        evaluated = None if self.engine is None else self.collect()
        self.engine = None  # before the other one takes memory
        self.generation += 1
        self.unwanted.clear()
        self.trainable, self._built_for = trainable, self.training.optimizer
        self.clip_grad = config.optimizer.clip_grad
        self.engine = _C.Engine(config, self.mesh, trainable, self._groups.values, self._groups.of)
        self.engine.set_micro_batches(self.num_micro_batches)
        if trainable:
            self.freezing.follow()
        if evaluated is None:
            load_weights(self.engine, self.plan.config_json, self.plan.source, start, changed=self.plan.change is not None)
        else:
            whole_weights.load(self, evaluated, strict=True, unknown_pass=False)

    def _sections(self, start: Start) -> Dict[str, dict]:
        """The engine's configuration."""
        plan, optimizer = self.plan, self.training.optimizer or OptimizerDescription()
        first = optimizer.groups[0] if optimizer.groups else Group([])
        defaults: Dict[str, Any] = {"name": optimizer.kind, "weight_decay": 0.0}
        if optimizer.kind == "sgd":
            defaults.update(momentum=max((group.momentum for group in optimizer.groups), default=0.0),
                            nesterov=optimizer.nesterov)
        else:
            defaults.update(betas=list(first.betas), eps=first.eps)
        config = native_config(
            plugin=self.plugin, hf_config=json.loads(plan.architecture), optimizer_defaults=defaults, world_size=self.state.num_processes,
            mixed_precision=self.state.mixed_precision, micro_batch_size=self.training.micro_batch_size,
            seed=start.seed, timeout_s=self.state._timeout_s, grad_scaler=plan.grad_scaler,
            cpu=self.state._device.type == "cpu", threads=_threads(self.state), checkpointed=plan.checkpointed,
            sharding=self.state.sharding_plugin)
        if self.state._device.type == "cuda":
            config["device"].update(type="cuda", index=self.state._device.index or 0)
        return {**config, "model": section_with(self._items, plan.values, config["model"])}

    # Batches.

    def batch(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, position_ids: Any = None,
              shifted: bool = False, document_ids: Any = None, ruled: bool = False, **extras: Any) -> Any:
        """This data rank's samples as a _C.Batch: the arrays of model_batch(), under the plugin's rules about documents unless
        they are `ruled` already. Collective over data ranks."""
        batch, self.targets = model_batch(input_ids, attention_mask, labels, position_ids, shifted, document_ids,
                                          None if ruled else self.rules, **extras)
        self._warn_of_length(batch.seq_length)
        self._agree(batch)
        self._batch_tokens = batch.global_batch * batch.seq_length
        return batch

    def _warn_of_length(self, length: int) -> None:
        positions = self._items["max_positions"]
        if length > positions and self._items["position_embedding"] == "rotary" and not self._told_length:
            self._told_length = True
            warn_once(f"sequences of {length} tokens are longer than the {positions} positions of the model's "
                      "max_position_embeddings: rotary positions are computed beyond them, as in Transformers, but the model "
                      "may know none of them")

    def _agree(self, batch: Any) -> None:
        """The batch's place in the global one, after every rank has told what it calls and what batch it has."""
        if self._peers_place is not None:
            batch.take_place(self._peers_place)
            self._peers_place = None
        else:
            self.engine.agree(batch, self.calling, script_place, lambda: encode(self.arguments))

    def begin_call(self, call: str, arguments: dict) -> Optional[dict]:
        """Notes what batch() tells other ranks. A rank without any argument (Megatron's loops hand it {}) gets the arguments of a
        peer of its data rank, whose batch this call is for; others get None. Errors: DataError if no peer has a batch."""
        if self.freezing.applied:  # a trainable engine
            self.freezing.follow()
        self.calling = call
        self.arguments = {name: value for name, value in arguments.items() if value is not None}
        if self.arguments or self.mesh.tp * self.mesh.cp * self.mesh.pp == 1:
            return None
        data, self._peers_place = self.engine.take_batch(call, script_place)
        return decode(data)

    def meet(self, call: str, *values: int) -> list:
        return meet(self.state.world, call, *values)

    def _drop_unwanted(self) -> None:
        self.unwanted.clear()

    def train(self, batch: Any) -> Tuple[float, OpenCall]:
        """Forward and backward: the mean loss over all data ranks, and the gradient, which belongs to nothing yet."""
        self._drop_unwanted()
        self._tokens += self._batch_tokens
        call = self.engine.open_call(batch)
        self._name_losses(self.engine.losses)
        self.note_loss(call.loss, batch)
        return call.loss, OpenCall(self, call)

    def train_with(self, batch: Any, output: str, loss: Any) -> OpenCall:
        """The same with a loss of the caller's, asked micro-batch by micro-batch: loss(number, first sample, samples,
        outputs) returns the gradient by the outputs; both are arrays or have __dlpack__."""
        self._drop_unwanted()
        self._tokens += self._batch_tokens
        return OpenCall(self, self.engine.open_call_with_loss(batch, output, loss))

    def note_loss(self, loss: float, batch: Any) -> None:
        """The loss of the call just made, equal on all ranks; says once if it is not finite. Collective then."""
        self.last_loss = loss
        self._not_finite.check_loss(self, loss, batch)

    def evaluate(self, batch: Any) -> float:
        loss, terms = self.engine.evaluate(batch)
        self._name_losses(terms)
        return loss

    def _name_losses(self, terms: Dict[str, float]) -> None:
        """What the loss of the call just made is of, where it has parts."""
        self.losses = {} if self.heads.looks_back else {_MEGATRON_LOSSES.get(name, name): value for name, value in terms.items()}

    def forward(self, batch: Any, output: str = "logits", record: bool = True) -> Tuple[Any, Optional[OpenForward]]:
        """fp32 logits [batch, seq, vocab] (or "token_losses" [batch, seq]) of this data rank, on each of its ranks: an array,
        on a GPU something with __dlpack__."""
        self._drop_unwanted()
        self._tokens += self._batch_tokens if record else 0
        tapes, value = self.engine.forward(batch, output, record)
        return value, OpenForward(self, tapes) if record else None

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

    def check_can_take_optimizer(self) -> None:
        """An engine that trains already is made anew with the optimizer's groups; only its weights go along. Errors: ConfigError
        where it holds more than these."""
        if not self.trainable:
            return
        if self.has_gradient():
            raise ConfigError("backward() ran before the optimizer was prepared, and its gradient cannot be handed over: give the "
                              "optimizer to prepare() before the first backward, or drop the gradient by model.zero_grad()")
        if self.engine.steps_done > 0:
            raise ConfigError("load_state() ran before the optimizer was prepared, and the optimizer's state cannot be handed over: "
                              "give the optimizer to prepare() first, then load")

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
        check_rates(self, rates, options)
        own = [group.rates(rates) for group in self.training.optimizer.groups]
        self._groups.check_joint(own, options)
        for number, values in self._groups.follow(options):
            self.engine.set_group(number, values)
        self.engine.set_clip_grad(self._clip_once or self.clip_grad)
        self._clip_once = None
        result = self.engine.update([*own, (0.0, 0.0)])
        for warning, text in self.engine.take_notes():
            (logger.warning if warning else logger.info)(text)
        self._not_finite.check_step(self, result)
        progress().step(self.engine.steps_done)
        self._step_log().write(self.engine.steps_done, self.last_loss, rates[0][0], result, self._tokens,
                               self.engine.peak_memory_bytes)
        self._tokens = 0
        return result

    def _step_log(self) -> Any:
        if self._log is None:
            from tessera.engine.step_log import StepLog

            self._log = StepLog(self.state)
        return self._log

    def log_scalars(self, values: Dict[str, float]) -> None:
        """Into the plugin's tensorboard_dir, at the last step."""
        self._step_log().write_scalars(self.engine.steps_done, values)

    # Whole weights and gradients.

    def collect(self, gradients: bool = False) -> Dict[str, Any]:
        """fp32 arrays by Hugging Face name on rank 0, {} elsewhere. Collective."""
        whole: Dict[str, Any] = {}
        self.meet("full_gradients()" if gradients else "model.state_dict()")
        self.engine.collect(gradients, lambda name, array: whole_weights.split(self, name, array, whole))
        return whole

    def load(self, values: Dict[str, Any], strict: bool = True, unknown: bool = False) -> Tuple[List[str], List[str]]:
        """Rank 0's `values`, arrays or tensors by Hugging Face name, become the weights; returns missing and unknown names
        (`unknown`: these may be there). Collective. Errors: InvalidArgument on every rank, before anything is changed."""
        self.meet("model.load_state_dict()")
        return whole_weights.load(self, values, strict, unknown)

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
