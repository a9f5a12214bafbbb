"""What is written from the tables of fields and arguments: two tables of docs/, the keys that the launcher takes, the names that a
configuration's errors know. `python3 -m tessera.plugin.reference ROOT` writes them into a source tree; a test compares."""

import re
import sys
from pathlib import Path
from typing import Dict, List

from tessera.plugin.fields import FIELDS, variables
from tessera.plugin.megatron_args import ARGUMENTS, PREFIXES

_HEAD = """\
# MegatronLMPlugin, field by field

<!-- written by tessera.plugin.reference; tests/python/test_plugin.py compares -->

What each field of `tessera.utils.MegatronLMPlugin` does, and each key of its `other_megatron_args`. A key of the native
configuration is described in [configuration.md](configuration.md). "warns": it has no effect here, and one warning says
so. "refuses": a value other than the default raises `tessera.ConfigError` with the reason.
"""

_DEFAULTS = """
The defaults are those of Accelerate up to 1.12: no context parallelism, rotary positions or full recomputation unless asked
for. A field that is not given is read from its variable.

"""

_WRITTEN = "// Written by python/tessera/plugin/reference.py from the table of the plugin's fields; a test compares.\n// clang-format off\n"
_KINDS = {"int": "integer", "float": "number", "bool": "boolean"}
# Names that Accelerate put among Megatron-LM's arguments, and one of ours.
_ACCELERATES = re.compile(r"custom_|model_type_name|model_return_dict|megatron_dataset_flag|num_micro_batches|"
                          r"re(turn|quire)_logits|consumed_samples|orig_vocab_size|pretraining_flag|.*_cond$|num_labels|"
                          r"set_all_logging_options|lr_mult|reinitialize")


def _shown(kind: str, detail: str) -> str:
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
    """docs/megatron_lm_plugin.md."""
    lines: List[str] = ["## Fields", _DEFAULTS.rstrip("\n"), "", "| Field | Default | Variable | Effect |", "|---|---|---|---|"]
    for name, row in FIELDS.items():
        read = ", ".join(f"`{variable}`" for variable in variables(name))
        lines.append(f"| `{name}` | {_value(row.default)} | {read} | {_shown(row.effect, row.detail)} |")
    groups: Dict[str, List[str]] = {}
    for name, effect in ARGUMENTS.items():
        if effect[:2] != ("field", name):
            groups.setdefault(_shown(*effect[:2]), []).append(name)
    lines += ["", "## other_megatron_args", "",
              "Besides the names below every field above is an argument too. Unknown names are refused, with the nearest one.", "",
              "Of a model that becomes another one, tensors that still fit keep their weights and the others are drawn anew. Weights that "
              "`from_pretrained` has read are kept, and such a value is refused for them, unless `reinitialize` is True.", "",
              "| Arguments | Effect |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {effect} |" for effect, names in groups.items()]
    lines += [f"| others that begin with `{prefix}` | {_shown(*effect[:2])} |" for prefix, effect in PREFIXES.items()]
    return _HEAD + "\n" + "\n".join(lines) + "\n"


def arguments_table() -> str:
    """Of docs/guides/coming_from_megatron.md: Megatron-LM's arguments that have an effect, in YAML and in the plugin."""
    rows = ["| Megatron-LM | YAML | Plugin |", "|---|---|---|"]
    for name, effect in sorted(ARGUMENTS.items()):
        what = FIELDS[effect.detail].effect if effect.kind == "field" else effect.kind
        if _ACCELERATES.match(name) or what in ("warns", "refuses"):
            continue
        place = effect.detail if effect.kind == "field" else f"other_megatron_args[{name!r}]"
        rows.append(f"| `--{name.replace('_', '-')}` | {f'`{effect.yaml}`' if effect.yaml else 'none'} | `{place}` |")
    return "\n".join(rows) + "\n"


def launch_keys() -> str:
    """src/launch/megatron_keys.inc: the keys of `megatron_lm_config`, which are flags too."""
    return _WRITTEN + "".join(f'{{"megatron_lm_{name}", Kind::{_KINDS.get(row.kind, "text")}, "{row.key}"}},\n'
                              for name, row in FIELDS.items() if row.key)


def yaml_names() -> str:
    """src/base/megatron_names.inc: what Megatron-LM calls the keys of a configuration."""
    named = {name: effect.yaml for name, effect in sorted(ARGUMENTS.items())
             if effect.yaml.partition(".")[2] not in ("", name) and not _ACCELERATES.match(name)}
    return _WRITTEN + "".join(f'{{"{name}", "{key}"}},\n' for name, key in named.items())


def written(root: Path) -> Dict[Path, str]:
    """Of each file that is written from the tables its whole text."""
    guide = root / "docs/guides/coming_from_megatron.md"
    before, head, rest = guide.read_text(encoding="utf-8").partition("| Megatron-LM | YAML | Plugin |\n")
    after = rest[re.match(r"(\|.*\n)*", rest).end():] if head else ""  # type: ignore[union-attr]
    return {root / "docs/megatron_lm_plugin.md": page(), guide: before + arguments_table() + after,
            root / "src/launch/megatron_keys.inc": launch_keys(), root / "src/base/megatron_names.inc": yaml_names()}


if __name__ == "__main__":
    for path, text in written(Path(sys.argv[1])).items():
        path.write_text(text, encoding="utf-8")
