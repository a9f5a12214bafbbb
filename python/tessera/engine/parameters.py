"""Parameters whose values are in the engine, and the model object that prepare() was given."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Dict, Iterator, Tuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tessera.comm.warnings import warn_once
from tessera.errors import ConfigError

_READ = ("tessera.utils.full_parameters(model) gathers the values, full_gradients(model) the gradients, and calling the model "
         "is calling what prepare() returned")
_WRITE = "change them by tessera.utils.load_parameters(model, {name: values}, strict=False)"
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward")
_EMA = ("average the values of tessera.utils.full_parameters(model), and evaluate them after tessera.utils.load_parameters(model, "
        "average)")


def _known_functions() -> frozenset:
    """What a parameter answers: it asks for names, shapes and requires_grad, never for values."""
    tensor = torch.Tensor
    properties = ("shape", "dtype", "layout", "requires_grad", "is_leaf", "ndim", "names", "is_sparse", "is_quantized", "itemsize",
                  "nbytes", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "is_hpu", "is_sparse_csr", "is_vulkan", "is_ipu",
                  "is_maia", "is_mtia", "_backward_hooks", "_version", "output_nr", "grad_fn", "retains_grad", "name", "_base")
    methods = ("size", "dim", "numel", "nelement", "ndimension", "stride", "is_contiguous", "storage_offset", "element_size",
               "is_floating_point", "is_complex", "is_signed", "requires_grad_", "__len__", "__format__", "__hash__", "__dir__",
               "_use_count", "is_inference", "_is_view", "get_device", "dim_order", "is_shared", "is_pinned", "has_names")
    found = {getattr(tensor, name).__get__ for name in properties if hasattr(tensor, name)}
    found |= {getattr(tensor, name) for name in methods if hasattr(tensor, name)}
    return frozenset(found | {tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel,
                              torch.is_inference, torch.is_signed})


_KNOWN = _known_functions()
_LIKE = {getattr(torch, name): name for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
                                                 "randint_like")}


class EngineParameter(torch.nn.Parameter):
    """A parameter of the whole model: its name, shape and requires_grad. Value and gradient are in the engine, and whatever
    would read or write them raises a ConfigError that says what does."""

    _tessera_name = ""
    _tessera_session: Any = None  # a weak reference
    _tessera_device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._tessera_device

    @property
    def is_cuda(self) -> bool:
        return self._tessera_device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self._tessera_device.type == "cpu"

    is_meta = False

    @property
    def grad(self) -> None:
        # torch.nn.utils.clip_grad_norm_ and loops that log norms would otherwise do nothing, and say nothing.
        warn_once("parameter.grad is None: gradients are in the engine. Clip with accelerator.clip_grad_norm_(), which returns the "
                  "norm, or read them with tessera.utils.full_gradients(model)")
        return None

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise ConfigError("gradients are in the engine and cannot be set; give outputs.loss.backward() another loss")

    @property
    def data(self) -> "EngineParameter":
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise _cannot(self, "data", f"be written to: {_WRITE}")

    def detach(self) -> "EngineParameter":
        """The same without requires_grad."""
        with torch._C.DisableTorchFunctionSubclass():
            other = EngineParameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), False)
        other.__dict__.update(self.__dict__)
        return other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = next((each for each in (*args, *kwargs.values()) if isinstance(each, EngineParameter)), None)
        if func in _LIKE and own is args[0]:
            with torch._C.DisableTorchFunctionSubclass():
                plain = torch.empty(own.shape, dtype=own.dtype, device="meta")
                return func(plain, *args[1:], **{"device": own.device, **kwargs})
        raise _refusal(_first_inside(args) if own is None else own, func)

    def __deepcopy__(self, memo: dict) -> Any:
        raise _cannot(self, "copy.deepcopy", f"be copied; for an average over steps {_EMA}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _cannot(self, "pickle", "be pickled: save_pretrained() or torch.save(model.state_dict()) of the model that prepare() "
                      "returned saves weights, accelerator.save_state() the whole training")

    def __repr__(self) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            kind = "trainable" if self.requires_grad else "frozen"
            return f"Parameter '{self._tessera_name}' {list(self.shape)}, {self.dtype}, {kind}; its values are in the engine"


def _cannot(parameter: Any, what: str, sentence: str) -> ConfigError:
    name = getattr(parameter, "_tessera_name", "") or "a parameter"
    return ConfigError(f"{what} on '{name}': since prepare() its values are in the engine, in parts over the ranks, so it cannot "
                       f"{sentence}")


def _first_inside(arguments: Any) -> Any:
    for each in arguments:
        if isinstance(each, EngineParameter):
            return each
        found = _first_inside(each) if isinstance(each, (list, tuple)) else None
        if found is not None:
            return found
    return None


def _refusal(parameter: Any, func: Any) -> ConfigError:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__ + (" = " if name == "__set__" else "")
    if name in _HOOKS:
        return _cannot(parameter, name, "have a hook or a gradient here: scale the loss instead, or read the gradient by "
                       "tessera.utils.full_gradients(model)")
    writes = name.endswith((" = ", "_")) and not name.endswith("__") or name.startswith("__i") and name != "__invert__"
    writes = writes or name in ("__setitem__", "__delitem__")
    return _cannot(parameter, name.rstrip(" ="), f"be written to: {_WRITE}" if writes else f"be read: {_READ}")


def take_over(model: torch.nn.Module, prepared: Any) -> None:
    """Turns the model's parameters, the same objects, into the engine's, and the model itself into one that only says so.
    Their memory is given back as soon as nobody else holds it."""
    session, named = prepared._session, prepared._parameters_of_model
    shapes = {each.name: each.shape for each in session.parameters}
    with_gradient = [name for name, parameter in named.items() if parameter.grad is not None]
    if with_gradient:
        warn_once(f"{len(with_gradient)} parameters had a gradient before prepare() (the first is {with_gradient[0]}); it is dropped: "
                  "gradients of the prepared model count alone")
    device = torch.device(session.state.device)
    for name, parameter in named.items():
        _convert(parameter, shapes[name], _tessera_name=name, _tessera_session=weakref.ref(session), _tessera_device=device)
    _retire(model, named)


def _convert(parameter: torch.nn.Parameter, shape: Tuple[int, ...], **facts: Any) -> None:
    attributes = dict(parameter.__dict__)
    if parameter.device.type != "meta" or tuple(parameter.shape) != shape:
        try:
            empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(empty, parameter.requires_grad))
        except RuntimeError:  # something else refers to it: keep the object, let go of the values
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(shape)
    parameter.__class__ = EngineParameter
    parameter.__dict__.update(attributes, **facts)


_GONE = ("this model went into prepare(), and its weights into the engine: use the model that prepare() returned")


class RetiredModel(torch.nn.Module):
    """What a model is that went through prepare(): its config, its parameters' names and shapes; the rest is refused."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own and not name.startswith("_"):
            return own[name]
        if name in ("parameters", "named_parameters", "num_parameters") or name.startswith("__"):
            return object.__getattribute__(self, name)
        raise AttributeError(f"'{name}': {_GONE}")

    def __getattr__(self, name: str) -> Any:  # where __getattribute__ has found nothing
        raise AttributeError(f"'{name}': {_GONE}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"setting '{name}': {_GONE}")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"calling it: {_GONE}")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Tuple[str, torch.nn.Parameter]]:
        """The same objects that the prepared model has."""
        yield from self.__dict__["_engine_parameters"].items()

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from self.__dict__["_engine_parameters"].values()

    def num_parameters(self, only_trainable: bool = False) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not only_trainable)

    def __repr__(self) -> str:
        return f"{self.__dict__['_engine_class']} ({_GONE})"

    def __deepcopy__(self, memo: dict) -> Any:
        raise ConfigError(f"copy.deepcopy: {_GONE}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(f"pickle: {_GONE}")


def _retire(model: torch.nn.Module, named: Dict[str, EngineParameter]) -> None:
    own = model.__dict__
    kept = {key: value for key, value in own.items() if not key.startswith("_")}
    name = type(model).__name__
    own.clear()
    own.update(kept, _engine_parameters=named, _engine_class=name)
    model.__class__ = RetiredModel


def _held_by(optimizer: Any, session: Any = None) -> bool:
    """Whether it has parameters of a prepared model, of `session` or of any."""
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            if isinstance(parameter, EngineParameter) and (session is None or parameter._tessera_session() is session):
                return True
    return False


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _held_by(optimizer):
        raise ConfigError(f"{type(optimizer).__name__}.step(): this optimizer has parameters of a prepared model and was not prepared "
                          "itself, so it would change nothing. Call optimizer = accelerator.prepare(optimizer) and step what "
                          "that returned")


# For every torch optimizer of the process: one that was left out of prepare() would train nothing and say nothing.
register_optimizer_step_pre_hook(_refuse_step)


def check_has_optimizer(session: Any) -> None:
    """At a backward pass. Errors: ConfigError if the model's optimizer was never prepared; without one, says once that
    gradients add up for nobody."""
    if session.training.optimizer is not None or session.told_of_no_optimizer:
        return
    session.told_of_no_optimizer = True
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.optim.Optimizer) and _held_by(obj, session):
            session.told_of_no_optimizer = False
            raise ConfigError(f"backward: {type(obj).__name__} has this model's parameters but was not prepared, so it would train "
                              "nothing. Call optimizer = accelerator.prepare(optimizer) before the first backward")
    warn_once("backward without a prepared optimizer: gradients add up, and nothing uses them but full_gradients() and "
              "clip_grad_norm_(). Give prepare() the optimizer too")
