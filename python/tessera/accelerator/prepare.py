"""What Accelerator.prepare does with each kind of object."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Tuple

from tessera.accelerator.announce import announce
from tessera.accelerator.facts import accelerator_facts, kind_facts, loader_facts, model_facts, optimizer_facts, scheduler_facts
from tessera.accelerator.prepared import Prepared
from tessera.comm.agreement import agreed
from tessera.comm.warnings import warn_once
from tessera.data.indexed_loaders import indexed_loaders
from tessera.data_loader import DataLoaderBase, SkipDataLoader, prepare_data_loader
from tessera.engine.changed_model import change_of, check_optimizer
from tessera.engine.optimizer_groups import Group, OptimizerDescription
from tessera.engine.plan import ModelPlan, TrainingPlan
from tessera.engine.session import Session
from tessera.engine.own_train_step import make_train_step
from tessera.errors import ConfigError
from tessera.logging import get_logger
from tessera.plugin.config_map import micro_batch_size_of, parameter_rules
from tessera.plugin.lr_horizon import resolve_horizon
from tessera.plugin.unused import unused_by_loaders, unused_by_model, warn_of
from tessera.scheduler import AcceleratedScheduler, MegatronScheduler
from tessera.utils.deepspeed import DeepSpeedScheduler, DummyOptim, DummyScheduler, make_optimizer, make_scheduler
from tessera.utils.megatron_lm import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from tessera.utils.other import is_compiled_module

logger = get_logger(__name__)


def _instance(obj: Any, module: str, *names: str) -> bool:
    """Whether it is of one of these types of a module that somebody has imported."""
    found = sys.modules.get(module)
    return found is not None and issubclass(type(obj), tuple(getattr(found, name) for name in names))


def is_prepared(obj: Any) -> bool:
    """Whether prepare() made it."""
    return (isinstance(obj, (AcceleratedScheduler, DataLoaderBase)) or _instance(obj, "tessera.engine.model", "TesseraModel")
            or _instance(obj, "tessera.optimizer", "AcceleratedOptimizer"))


def _is_loader(obj: Any) -> bool:
    return (isinstance(obj, SkipDataLoader) or _instance(obj, "torch.utils.data", "DataLoader", "IterableDataset")
            or (hasattr(obj, "__iter__") and hasattr(obj, "batch_size") and not hasattr(obj, "shape")))


# Asked in this order.
_TESTS: Dict[str, Callable[[Any], bool]] = {
    "plain": lambda obj: _instance(obj, "tessera.causal_lm", "CausalLM", "AdamW"),
    "indexed": lambda obj: isinstance(obj, MegatronLMDummyDataLoader),
    "model": lambda obj: _instance(obj, "torch.nn", "Module"),
    "optimizer": lambda obj: _instance(obj, "torch.optim", "Optimizer"),
    "scheduler": lambda obj: isinstance(obj, (MegatronLMDummyScheduler, DeepSpeedScheduler)) or _instance(
        obj, "torch.optim.lr_scheduler", "LRScheduler", "ReduceLROnPlateau"),
    "loader": _is_loader}


class Preparation:
    """One call of prepare()."""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.state = accelerator.state
        self.plugin = self.state.megatron_lm_plugin
        self.plans: Dict[int, ModelPlan] = {}  # by place among the objects
        self.description: Optional[OptimizerDescription] = None  # of the optimizer among them
        self.regrouped: List[Tuple[dict, list]] = []  # an optimizer's groups, and the parameters that they came with

    @property
    def prepared(self) -> Prepared:
        return self.accelerator._prepared

    def _add(self, kind: str, *made: Any) -> None:
        self.accelerator._prepared = self.prepared.with_more(kind, *made)

    @property
    def num_micro_batches(self) -> int:
        return 1 if self.plugin is None else self.plugin.num_micro_batches

    def run(self, objects: tuple) -> list:
        """The prepared objects. One that fails leaves accelerator and models as they were."""
        before = self.prepared
        training = [(model._session, model._session.training) for model in before.models]
        try:
            return self._run(objects)
        except BaseException:
            self.accelerator._prepared = before
            for session, plan in training:
                session.training = plan
            for group, parameters in self.regrouped:
                group["params"] = parameters
            raise

    def _run(self, objects: tuple) -> list:
        with agreed(self.state.world, "prepare()") as facts:
            objects = self._of_deepspeed(objects)
            results: List[Any] = list(objects)
            kinds = self._kinds(objects)
            self._take_facts(objects, kinds, facts)
        for i in kinds["indexed"]:
            objects[i].set_megatron_data_args()
        for i in kinds["model"]:
            results[i] = self.model(objects[i], self.plans[i])
        for i in kinds["plain"]:
            results[i] = self.plain(objects[i], self.plans.get(i))
        for i in kinds["loader"]:
            results[i] = self.loader(objects[i])
        if kinds["indexed"]:
            self.indexed([objects[i] for i in kinds["indexed"]])
        for i in kinds["optimizer"]:
            results[i] = self.optimizer(objects[i])
        self._settle()
        if kinds["optimizer"]:
            self.prepared.models[0].build()
        for i in kinds["optimizer"]:
            results[i].take_moments()
        for i in kinds["scheduler"]:
            results[i] = self.scheduler(objects[i])
        if kinds["optimizer"]:
            self._say_what_schedules_nothing()
        if kinds["indexed"]:
            made = indexed_loaders(self.accelerator, [objects[i] for i in kinds["indexed"]])
            for i, loader in zip(kinds["indexed"], made):
                results[i] = loader
            self._add("dataloaders", *(loader for loader in made if loader is not None))
        for i in kinds["model"]:  # last: nothing fails after that
            from tessera.engine.parameters import take_over

            take_over(_uncompiled(objects[i]), results[i])
        self._tell_unused(kinds)
        if kinds["optimizer"]:
            announce(self.accelerator)
        return results

    def _of_deepspeed(self, objects: tuple) -> tuple:
        """The objects with what DummyOptim and DummyScheduler stand for. Errors: ConfigError, as in Accelerate also for an optimizer or
        a scheduler beside the JSON's."""
        plugin = self.state.deepspeed_plugin
        config = None if plugin is None else plugin.json
        made = {id(each): make_optimizer(config, each) for each in objects if isinstance(each, DummyOptim)}
        found = [made.get(id(each), each) for each in objects]
        for i, each in enumerate(objects):
            if isinstance(each, DummyScheduler):
                optimizer = made.get(id(each.optimizer), each.optimizer)
                if isinstance(optimizer, DummyOptim):
                    raise ConfigError("prepare() got a DummyScheduler without its DummyOptim; give both to one prepare()")
                found[i] = make_scheduler(config, each, optimizer, 1 if self.accelerator.split_batches else self.state.mesh.dp)
        for kind, stand_in in (("optimizer", DummyOptim), ("scheduler", DummyScheduler)):
            if config is not None and config.get(kind) is not None:
                for given in objects:
                    if not isinstance(given, stand_in) and not is_prepared(given) and _TESTS[kind](given):
                        raise ConfigError(f'{config.where} has an "{kind}" and prepare() got a {type(given).__name__}: give it a '
                                          f"tessera.utils.{stand_in.__name__}, or take the {kind} out of the JSON")
        return tuple(found)

    def _settle(self) -> None:
        """Tells the model's session how it is trained, as far as that is known."""
        sizes = self.prepared.batch_sizes
        for model in self.prepared.models:
            session = model._session
            session.training = TrainingPlan(self.description or session.training.optimizer,
                                            micro_batch_size_of(self.plugin, sizes) if sizes else 1)

    def _tell_unused(self, kinds: Dict[str, List[int]]) -> None:
        """What the plugin says for nothing, as far as these objects show it."""
        if kinds["model"] or kinds["plain"]:
            session = self.prepared.models[0]._session
            warn_of(unused_by_model(self.plugin, encoder=not session.heads.looks_back, indexed=bool(kinds["indexed"])))
        if kinds["indexed"]:
            self.accelerator._prepared = replace(self.prepared, indexed=True)
        if kinds["loader"] and not self.prepared.indexed:
            warn_of(unused_by_loaders(self.plugin))

    def _kinds(self, objects: tuple) -> Dict[str, List[int]]:
        """The places of what each kind of object is among `objects`."""
        kinds: Dict[str, List[int]] = {kind: [] for kind in _TESTS}
        for i, obj in enumerate(objects):
            if is_prepared(obj):
                self._check_own(obj)
            elif kind := next((kind for kind, test in _TESTS.items() if test(obj)), None):
                kinds[kind].append(i)
        plain = [hasattr(objects[i], "describe") for i in kinds["plain"]]  # models
        if len(kinds["model"]) + sum(plain) + len(self.prepared.models) > 1:
            raise ConfigError("prepare() got two models; Tessera trains one model per process: free_memory() lets go of the "
                              "first")
        if len(kinds["optimizer"]) + plain.count(False) + len(self.prepared.optimizers) > 1:
            raise ConfigError("prepare() got two optimizers; one optimizer updates the whole model (give it several parameter "
                              "groups)")
        return kinds

    def _check_own(self, obj: Any) -> None:
        """Errors: ConfigError for a model or optimizer that another Accelerator has, or that was let go of."""
        session = getattr(obj, "_session", None)
        if session is None:
            return
        session.check_open()
        if all(model._session is not session for model in self.prepared.models):
            raise ConfigError(f"prepare() got a {type(obj).__name__} that another Accelerator of this process has prepared; use "
                              "that one, or its free_memory() and then new objects")

    def _take_facts(self, objects: tuple, kinds: Dict[str, List[int]], facts: Dict[str, Any]) -> None:
        """What must be equal on all ranks; describes models on the way. Nothing here communicates."""
        facts.update(accelerator_facts(self.accelerator))
        facts.update(kind_facts(objects, kinds))
        names: Dict[int, str] = {}
        if self.prepared.models:
            names = _names_of(self.prepared.models[0])
        for i in kinds["model"]:
            from tessera.engine.model_description import describe_model
            from tessera.engine.model_check import check_model

            model = _uncompiled(objects[i])
            plan = describe_model(model)
            self.plans[i] = self._planned(plan, check_model(model, plan.config_json))
            facts.update(model_facts(self.plans[i]))
            names = _names_of(model)
        for i in kinds["plain"]:
            if hasattr(objects[i], "describe"):
                self.plans[i] = self._planned(objects[i].describe(), {})
                facts.update(model_facts(self.plans[i]))
            else:
                facts.update(optimizer_facts(objects[i], {}))
        for i in kinds["optimizer"]:
            facts.update(optimizer_facts(objects[i], names))
        for i in kinds["scheduler"]:
            facts.update(scheduler_facts(objects[i], "scheduler"))
        for i in kinds["loader"]:
            facts.update(loader_facts(objects[i], f"loader {i + 1}", _length(objects[i])))
        for i in kinds["indexed"]:
            facts[f"loader {i + 1}"] = {k: v for k, v in objects[i].dataset_args.items() if k != "data_cache_path"}

    def _planned(self, plan: ModelPlan, values: Dict[str, Any]) -> ModelPlan:
        """With what the modules say over the config, and what the plugin and the Accelerator make of it."""
        change = change_of(self.plugin, plan.config_json, plan.source.from_files, [each.name for each in plan.parameters])
        return replace(plan, values=values, change=change, grad_scaler=self.accelerator.scaler_handler)

    # Models and optimizers.

    def plain(self, obj: Any, plan: Optional[ModelPlan]) -> Any:
        """A model or an optimizer of tessera.causal_lm."""
        from tessera.causal_lm import PlainModel, PlainOptimizer

        if plan is not None:
            model = PlainModel(Session(plan, self.state), obj)
            self._add("models", model)
            return model
        if not self.prepared.models or not isinstance(self.prepared.models[0], PlainModel):
            raise ConfigError("prepare() got an optimizer before its model, or one for another kind of model; give both to one "
                              "prepare(): a CausalLM with tessera's AdamW, a torch model with torch's")
        optimizer = PlainOptimizer(obj, self.prepared.models[0]._session, self.accelerator.gradient_state)
        self.description = optimizer.description
        self._add("optimizers", optimizer)
        return optimizer

    def model(self, model: Any, plan: ModelPlan) -> Any:
        from tessera.engine.model import TesseraModel
        from tessera.engine.encoder_step import EncoderStepRunner
        from tessera.engine.seq2seq_step import Seq2SeqStepRunner
        from tessera.engine.step_runner import StepRunner

        model, session = _uncompiled(model), Session(plan, self.state)
        prepared = TesseraModel(session, model)
        prepared.prepared_by(self.accelerator)
        self._add("models", prepared)
        if self.plugin is not None:
            self.plugin.set_network_size_args(model)
            own = (self.plugin.custom_train_step_class, self.plugin.custom_get_batch_function, self.plugin.custom_loss_function)
            if any(each is not None for each in own):
                runner = (Seq2SeqStepRunner if session.heads.encodes else StepRunner if session.heads.looks_back else EncoderStepRunner)
                prepared._train_step = runner(make_train_step(self.accelerator, self.plugin, session))
        return prepared

    def optimizer(self, optimizer: Any) -> Any:
        from tessera.engine.optimizer_state import TorchState
        from tessera.optimizer import AcceleratedOptimizer, describe

        if not self.prepared.models:
            raise ConfigError("prepare() got an optimizer before its model; give both to one prepare(), or the model first")
        model = self.prepared.models[0]
        session = model._session
        session.check_can_take_optimizer()
        if session.plan.change is not None:
            self._regroup(optimizer, model)
        description = describe(optimizer, _names_of(model))
        names = [list(group.names) for group in description.groups]
        self._apply_conditions(description, model)
        torch_state = TorchState(session, description, names)
        moments = torch_state.agree(optimizer.state_dict())
        self.description = description
        if self.plugin is not None:
            self.plugin.set_optimizer_type(optimizer)
        prepared = AcceleratedOptimizer(optimizer, session, self.accelerator.gradient_state, torch_state, moments)
        self._add("optimizers", prepared)
        return prepared

    def _regroup(self, optimizer: Any, model: Any) -> None:
        """Gives the optimizer the parameters of a model that the plugin changes: those it drops go, and those it has besides
        join the first group that has a parameter of as many dimensions, which is what decides over weight decay."""
        check_optimizer(optimizer)
        own = {id(parameter): parameter for parameter in model.parameters()}
        before = [(group, list(group["params"])) for group in optimizer.param_groups]
        grouped = {id(parameter) for _, parameters in before for parameter in parameters}
        self.regrouped += before
        for group, parameters in before:
            group["params"] = [parameter for parameter in parameters if id(parameter) in own]
        for name, parameter in model.named_parameters():
            if id(parameter) in grouped or name not in model._session.plan.change.added:
                continue
            groups = [group for group, _ in before if any(each.dim() == parameter.dim() for each in group["params"])]
            (groups or [before[0][0]])[0]["params"].append(parameter)

    def _apply_conditions(self, description: OptimizerDescription, model: Any) -> None:
        """Splits groups by what the plugin's no_wd_decay_cond and scale_lr_cond say."""
        if self.plugin is None or (self.plugin.no_wd_decay_cond is None and self.plugin.scale_lr_cond is None):
            return
        rules = parameter_rules(self.plugin, model.named_parameters())
        groups: List[Group] = []
        for number, group in enumerate(description.groups):
            parts: Dict[Tuple, List[str]] = {}
            for name in group.names:
                rule = rules.get(name, {})
                parts.setdefault((rule.get("lr_mult", 1.0), rule.get("weight_decay")), []).append(name)
            for (lr_mult, weight_decay), names in parts.items():
                groups.append(Group(names, group.betas, group.eps, group.momentum, number, lr_mult, weight_decay, group.begins))
        description.groups[:] = groups

    # Loaders.

    def loader_alone(self, loader: Any, device_placement: Optional[bool], slice_fn: Any) -> Any:
        """Accelerator.prepare_data_loader: compared over ranks as in prepare()."""
        with agreed(self.state.world, "prepare_data_loader()") as facts:
            facts.update(accelerator_facts(self.accelerator))
            facts.update(loader_facts(loader, "data_loader", _length(loader)))
            facts.update(device_placement=device_placement, slice_fn_for_dispatch=slice_fn)
        prepared = self.loader(loader, device_placement, slice_fn)
        self._settle()
        return prepared

    def loader(self, loader: Any, device_placement: Optional[bool] = None, slice_fn: Any = None) -> Any:
        accelerator, config, mesh = self.accelerator, self.accelerator.dataloader_config, self.state.mesh
        place = accelerator.device_placement if device_placement is None else device_placement
        prepared = prepare_data_loader(
            loader, accelerator.device, split_batches=config.split_batches, put_on_device=place,
            rng_types=accelerator.rng_types, dispatch_batches=config.dispatch_batches, even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn, use_seedable_sampler=config.use_seedable_sampler,
            data_seed=getattr(config, "data_seed", None), non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader, num_micro_batches=self.num_micro_batches,
            data_rank=mesh.coordinates["dp"], data_ranks=mesh.dp, gradient_state=accelerator.gradient_state,
            world=self.state.world)
        if self.prepared.loader_facts is None:
            accelerator._prepared = replace(self.prepared, loader_facts={"batches": _length(loader), "steps": _length(prepared)})
        self._add("dataloaders", prepared)
        self._note_batch_size(getattr(loader, "batch_size", None), config.split_batches)
        return prepared

    def _note_batch_size(self, batch_size: Optional[int], split: bool) -> None:
        if batch_size is None:
            return
        if split:
            batch_size = max(1, batch_size // (self.state.mesh.dp * self.num_micro_batches))
        self._add("batch_sizes", batch_size)
        deepspeed = self.state.deepspeed_plugin
        if deepspeed is not None and deepspeed.json is not None:
            self._compare_batch_size(deepspeed.json)
        if self.plugin is not None:
            self.plugin.set_training_args(micro_batch_size_of(self.plugin, self.prepared.batch_sizes), self.state.mesh.dp)

    def _compare_batch_size(self, config: Any) -> None:
        """Loaders decide over batches; DeepSpeed's JSON is completed by them, and told where it says something else."""
        sizes = self.prepared.batch_sizes
        size = min(sizes) if self.state.deepspeed_plugin.is_train_batch_min else max(sizes)
        said = config.number("train_micro_batch_size_per_gpu", True)
        if said is not None and said not in sizes:
            warn_once(f"{config.where}: train_micro_batch_size_per_gpu {said} has no effect: the loaders given to prepare() have batches of "
                      f"{', '.join(map(str, sorted(set(sizes))))} on each process")
        config.fill("train_micro_batch_size_per_gpu", size)
        config.fill("train_batch_size", size * self.accelerator.gradient_accumulation_steps * self.state.mesh.dp)

    def indexed(self, dummies: list) -> None:
        size = dummies[0].dataset_args["micro_batch_size"]
        self._note_batch_size(size, False)

    # Schedulers.

    def scheduler(self, scheduler: Any) -> Any:
        accelerator = self.accelerator
        if isinstance(scheduler, MegatronLMDummyScheduler):
            scheduler = self._horizon(scheduler)
        prepared = AcceleratedScheduler(scheduler, self.prepared.optimizers,
                                        step_with_optimizer=accelerator.step_scheduler_with_optimizer,
                                        split_batches=accelerator.split_batches, gradient_state=accelerator.gradient_state)
        self._add("schedulers", prepared)
        return prepared

    def _say_what_schedules_nothing(self) -> None:
        """The plugin's schedule is that of a MegatronLMDummyScheduler; other schedulers, or none, know nothing of it."""
        names = ("lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        given = [f"{name}={getattr(self.plugin, name)}" for name in names if getattr(self.plugin, name, None) is not None]
        if given and not any(isinstance(scheduler.scheduler, MegatronScheduler) for scheduler in self.prepared.schedulers):
            warn_once(f"MegatronLMPlugin without effect: {', '.join(given)}: the script's own schedule counts unless a "
                      "MegatronLMDummyScheduler is given to prepare()")

    def _horizon(self, dummy: Any) -> Any:
        accelerator = self.accelerator
        if not self.prepared.optimizers:
            raise ConfigError("prepare() got a MegatronLMDummyScheduler without its optimizer; give both to one prepare()")
        facts = self.prepared.loader_facts or {}
        horizon = resolve_horizon(
            self.plugin, total_num_steps=dummy.total_num_steps, warmup_num_steps=dummy.warmup_num_steps or 0,
            loader_batches=facts.get("batches"), loader_steps=facts.get("steps"), dp=self.state.mesh.dp,
            num_micro_batches=self.num_micro_batches, micro_batch_size=self.prepared.models[0]._session.training.micro_batch_size,
            gradient_accumulation_steps=accelerator.gradient_accumulation_steps)
        logger.info(horizon.reason)
        return MegatronScheduler(self.prepared.optimizers[0].optimizer, horizon)


def _uncompiled(model: Any) -> Any:
    if not is_compiled_module(model):
        return model
    warn_once("torch.compile is not used: Tessera's kernels are compiled already")
    return model._orig_mod


def _length(loader: Any) -> Optional[int]:
    try:
        return len(loader)
    except TypeError:
        return None


def _names_of(model: Any) -> Dict[int, str]:
    names: Dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names
