"""The page docs/megatron_lm_plugin.md, written from the tables that the code follows (a test compares)."""

from typing import Dict, List

from tessera.plugin.fields import FIELD_EFFECTS, FIELDS
from tessera.plugin.megatron_args import ARGUMENTS, PREFIXES, Effect

_HEAD = """\
# MegatronLMPlugin, field by field

<!-- written by tessera.utils.reference; tests/python/test_plugin.py compares -->

What each field of `tessera.utils.MegatronLMPlugin` does, and each key of its `other_megatron_args`. A key of the native
configuration is described in [configuration.md](configuration.md). "warns": it has no effect here, and one warning says
so. "refuses": a value other than the default raises `tessera.ConfigError` with the reason.
"""

_DEFAULTS = """
The defaults are those of Accelerate up to 1.12: no context parallelism, rotary positions or full recomputation unless asked
for. A field that is not given is read from its variable.

"""


def _shown(effect: Effect) -> str:
    kind, detail = effect
    if kind == "config":
        return f"`{detail}`"
    if kind == "model":
        return f"the model returns `{detail}`" if "." in detail else f"`model.{detail}`, which makes another model"
    if kind == "field":
        return f"the field `{detail}`"
    if kind == "horizon":
        return "the learning rate or weight decay of each step"
    return f"{kind}: {detail}"


def _value(value) -> str:
    return "" if value is None else f"`{value}`"


def page() -> str:
    """The whole page, as Markdown."""
    lines: List[str] = ["## Fields", _DEFAULTS.rstrip("\n"), "", "| Field | Default | Variable | Effect |", "|---|---|---|---|"]
    for name, rule in FIELDS.items():
        variables = ", ".join(f"`MEGATRON_LM_{suffix}`" for suffix in rule.env)
        lines.append(f"| `{name}` | {_value(rule.default)} | {variables} | {_shown(FIELD_EFFECTS[name])} |")
    groups: Dict[str, List[str]] = {}
    for name, effect in ARGUMENTS.items():
        if effect != ("field", name):
            groups.setdefault(_shown(effect), []).append(name)
    lines += ["", "## other_megatron_args", "",
              "Besides the names below every field above is an argument too. Unknown names are refused, with the nearest one.", "",
              "Of a model that becomes another one, tensors that still fit keep their weights and the others are drawn anew. Weights that "
              "`from_pretrained` has read are kept, and such a value is refused for them, unless `reinitialize` is True.", "",
              "| Arguments | Effect |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {effect} |" for effect, names in groups.items()]
    lines += [f"| others that begin with `{prefix}` | {_shown(effect)} |" for prefix, effect in PREFIXES.items()]
    return _HEAD + "\n" + "\n".join(lines) + "\n"
