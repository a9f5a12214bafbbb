"""Over how many steps the learning rate goes its way, and what it is at each: Megatron-LM's scheduler.

One `scheduler.step()` is one optimizer step, whatever the layout. The formulas are those of src/optim/schedule.cpp.
"""

import math
from dataclasses import dataclass
from typing import Optional, Tuple

from tessera.errors import ConfigError
from tessera.plugin.megatron_lm_plugin import MegatronLMPlugin

_WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


def _half_cosine(x: float) -> float:
    """From 1 at x = 0 to 0 at x = 1."""
    return 0.5 * (1.0 + math.cos(math.pi * x))


@dataclass(frozen=True)
class Horizon:
    """The resolved schedule. Steps are optimizer steps; with `samples_per_step` above 1 the three lengths that the
    formulas use count samples, as Megatron's sample-based training does."""

    train_iters: Optional[int]  # optimizer steps of the whole training; None: open-ended (style constant)
    decay: float
    warmup: float
    style: str = "linear"
    min_lr: float = 0.0
    init_lr: float = 0.0
    wsd_decay: float = 0.0
    wsd_style: str = "exponential"
    weight_decay_style: str = "constant"
    start_weight_decay: Optional[float] = None
    end_weight_decay: Optional[float] = None
    weight_decay_over: float = 0
    samples_per_step: int = 1
    reason: str = ""

    @property
    def decay_iters(self) -> float:
        return self.decay / self.samples_per_step

    @property
    def warmup_iters(self) -> float:
        return self.warmup / self.samples_per_step

    def lr_at(self, step: int, max_lr: float) -> float:
        """The rate of the update that follows `step` updates; `max_lr` is that of the parameter group."""
        n, low = step * self.samples_per_step, min(self.min_lr, max_lr)
        first = min(self.init_lr, max_lr)
        if self.warmup > 0 and n <= self.warmup:
            return first + (max_lr - first) * n / self.warmup
        if self.style == "constant":
            return max_lr
        if n > self.decay:
            return low
        if self.style == "inverse-square-root":
            return max(low, max_lr * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(n, 1)))
        return low + self._share(n) * (max_lr - low)

    def _share(self, n: float) -> float:
        if self.style == "WSD":
            past = n - (self.decay - self.wsd_decay)
            y = past / self.wsd_decay
            return 1.0 if past <= 0 else {"linear": 1.0 - y, "cosine": _half_cosine(y), "minus_sqrt": 1.0 - math.sqrt(max(y, 0.0)),
                                          "exponential": 2.0 * 0.5 ** y - 1.0}[self.wsd_style]
        span = self.decay - self.warmup
        x = (n - self.warmup) / span if span > 0 else 1.0
        return _half_cosine(x) if self.style == "cosine" else 1.0 - x

    def weight_decay_at(self, step: int, weight_decay: float) -> float:
        """The weight decay of the update that follows `step` updates, for a parameter group with `weight_decay` of its
        own: with style constant that, else the schedule's (0 stays 0)."""
        if self.weight_decay_style == "constant" or weight_decay == 0:
            return weight_decay
        n = step * self.samples_per_step
        if n >= self.weight_decay_over:
            return self.end_weight_decay
        y = n / self.weight_decay_over
        share = y if self.weight_decay_style == "linear" else _half_cosine(1.0 - y)
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)


def undivided_steps(total: int, warmup: int, loader_batches: Optional[int], loader_steps: Optional[int], parts: int,
                    accumulation: int = 1) -> Tuple[int, int, str]:
    """A dummy scheduler's counts as optimizer steps, with the reason.

    `loader_batches`: batches of the loader before it was divided (None: it has no length); `loader_steps`: calls that the
    prepared one takes for them; `parts`: data ranks x micro-batches; `accumulation`: calls per optimizer step.
    A total that is a whole number of the loader's epochs was counted in its batches.
    """
    if not loader_batches:
        return total, warmup, f"{total} optimizer steps, as given (the loader has no length)"
    epoch = -(-loader_batches // accumulation)
    if total % epoch != 0:
        return total, warmup, f"{total} optimizer steps, as given ({total} is no whole number of epochs of {epoch})"
    calls = loader_steps if loader_steps is not None else -(-loader_batches // parts)
    steps = -(-calls // accumulation)
    epochs = total // epoch
    if steps == epoch:
        return total, warmup, f"{total} optimizer steps ({epochs} epochs of {epoch})"
    shorter = min(-(-warmup * steps // epoch), epochs * steps)
    return epochs * steps, shorter, (
        f"{epochs * steps} optimizer steps: total_num_steps {total} is {epochs} epochs of {epoch} undivided batches, and "
        f"an epoch takes {steps} steps of {parts} (data ranks x micro-batches)")


def _of_samples(plugin, batch: int) -> Tuple[float, float, Optional[str]]:
    for name in ("lr_decay_iters", "lr_warmup_iters"):
        if getattr(plugin, name) is not None:
            raise ConfigError(f"MegatronLMPlugin.{name} counts steps, and train_samples samples; give both in one of them")
    decay = plugin.lr_decay_samples if plugin.lr_decay_samples is not None else plugin.train_samples
    return decay, plugin.lr_warmup_samples or 0, f"{plugin.train_samples} samples in steps of {batch}"


def resolve_horizon(plugin=None, *, total_num_steps: Optional[int] = None, warmup_num_steps: int = 0,
                    loader_batches: Optional[int] = None, loader_steps: Optional[int] = None, dp: int = 1,
                    num_micro_batches: int = 1, micro_batch_size: int = 1, gradient_accumulation_steps: int = 1) -> Horizon:
    """What a MegatronLMPlugin, a MegatronLMDummyScheduler and the loader of the same prepare() say together.

    What the plugin says counts optimizer steps and wins: train_iters (or train_samples), lr_decay_*, lr_warmup_*. Else
    the scheduler's `total_num_steps` and `warmup_num_steps` count, see `undivided_steps`. `reason` is one line to log.
    Errors: ConfigError when nothing says how long the decay is, or fields contradict each other.
    """
    if plugin is None:
        plugin = MegatronLMPlugin(tp_degree=1, pp_degree=1)
    extra = plugin.other_megatron_args or {}
    batch, unit = dp * num_micro_batches * micro_batch_size, 1
    iters, dummy_warmup = plugin.train_iters, warmup_num_steps or 0
    reason = f"{iters} optimizer steps, the plugin's train_iters"
    if iters is not None and plugin.train_samples is not None:
        raise ConfigError("MegatronLMPlugin.train_iters and train_samples are two lengths; give one")
    if total_num_steps is not None:
        if total_num_steps < 1 or not 0 <= dummy_warmup <= total_num_steps:
            raise ConfigError(f"MegatronLMDummyScheduler: total_num_steps {total_num_steps} must be at least 1, and "
                              f"warmup_num_steps {warmup_num_steps} from 0 to it")
        steps, dummy_warmup, why = undivided_steps(total_num_steps, dummy_warmup, loader_batches, loader_steps,
                                                   dp * num_micro_batches, gradient_accumulation_steps)
        if iters is None and plugin.train_samples is None:
            iters, reason = steps, why
    if iters is None and plugin.train_samples is not None:
        unit = batch
        decay, warmup, reason = _of_samples(plugin, batch)
        iters, over = plugin.train_samples // batch, plugin.train_samples
        if iters < 1:
            raise ConfigError(f"MegatronLMPlugin.train_samples {plugin.train_samples} is less than one step of {batch}")
    else:
        for name in ("lr_decay_samples", "lr_warmup_samples"):
            if getattr(plugin, name):
                raise ConfigError(f"MegatronLMPlugin.{name} counts samples and needs train_samples; give it, or "
                                  f"{name.replace('samples', 'iters')}")
        decay = plugin.lr_decay_iters if plugin.lr_decay_iters is not None else iters
        warmup, over = dummy_warmup, iters
        if plugin.lr_warmup_iters is not None:
            warmup = plugin.lr_warmup_iters
    if decay is None:
        if plugin.lr_decay_style != "constant":
            raise ConfigError("nothing says over how many steps the learning rate decays: give MegatronLMDummyScheduler "
                              "total_num_steps, or MegatronLMPlugin train_iters or lr_decay_iters")
        decay, reason = 0, "a constant rate, without an end"
    if plugin.lr_warmup_fraction is not None:
        if plugin.lr_warmup_iters or plugin.lr_warmup_samples:
            raise ConfigError("MegatronLMPlugin.lr_warmup_fraction and lr_warmup_iters (or _samples) are two warm-ups; give one")
        warmup = plugin.lr_warmup_fraction * decay
    if plugin.lr_decay_style != "constant" and warmup > decay:
        raise ConfigError(f"the warm-up of {warmup:g} is longer than the decay of {decay:g} that includes it")
    _check_rates(plugin, extra, decay, over)
    return Horizon(
        train_iters=iters, decay=decay, warmup=warmup, style=plugin.lr_decay_style, min_lr=plugin.min_lr,
        init_lr=float(extra.get("lr_warmup_init") or 0.0), wsd_decay=float(extra.get("lr_wsd_decay_iters") or 0),
        wsd_style=str(extra.get("lr_wsd_decay_style") or "exponential"), weight_decay_style=plugin.weight_decay_incr_style,
        start_weight_decay=plugin.start_weight_decay, end_weight_decay=plugin.end_weight_decay,
        weight_decay_over=over or 0, samples_per_step=unit, reason=f"learning rate over {reason}; warm-up {warmup / unit:g} steps")


def _check_rates(plugin, extra: dict, decay: float, over: Optional[float]) -> None:
    if plugin.lr_decay_style == "WSD":
        length = extra.get("lr_wsd_decay_iters")
        if not isinstance(length, int) or not 0 < length <= decay or plugin.train_samples is not None:
            raise ConfigError(f"lr_decay_style WSD needs train_iters and other_megatron_args['lr_wsd_decay_iters'] from 1 to "
                              f"{decay:g}, the length of its last decay")
    if str(extra.get("lr_wsd_decay_style") or "exponential") not in _WSD_STYLES:
        raise ConfigError(f"other_megatron_args['lr_wsd_decay_style'] must be one of {', '.join(_WSD_STYLES)}")
    start, end, style = plugin.start_weight_decay, plugin.end_weight_decay, plugin.weight_decay_incr_style
    if style == "constant":
        if start is not None or end is not None:
            raise ConfigError("MegatronLMPlugin.start_weight_decay and end_weight_decay need weight_decay_incr_style "
                              "'linear' or 'cosine'; with 'constant' the optimizer's weight_decay counts")
        return
    if start is None or end is None or end < start:
        raise ConfigError(f"MegatronLMPlugin.weight_decay_incr_style '{style}' needs start_weight_decay and an "
                          f"end_weight_decay that is not below it, not {start} and {end}")
    if not over:
        raise ConfigError("an increasing weight decay needs the length of the training: give train_iters or total_num_steps")
