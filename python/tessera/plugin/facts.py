"""What of a plugin must be equal on all ranks, as place: value, for `comm.agreement.agreed`."""

from __future__ import annotations

from typing import Any, Dict

from tessera.comm.agreement import text_of
from tessera.plugin.fields import FIELDS

_PLACES = ("tensorboard_dir", "set_all_logging_options")  # where one rank writes


def plugin_facts(plugin: Any) -> Dict[str, Any]:
    if plugin is None:
        return {"megatron_lm_plugin": None}
    facts: Dict[str, Any] = {"megatron_lm_plugin": type(plugin)}
    for name in FIELDS:
        if name not in _PLACES:
            value = getattr(plugin, name)
            # What a function of the caller's keeps may be a process's own: a rank, a file.
            named = getattr(value, "__qualname__", None)
            facts[f"MegatronLMPlugin.{name}"] = value if named is None else f"{value.__module__}.{named}"
    return facts


def changed_fields(before: Any, now: Any) -> str:
    """In which fields a second plugin is another one than the first; empty where it is the same."""
    old, new = ({place: text_of(value) for place, value in plugin_facts(plugin).items()} for plugin in (before, now))
    if before is None:
        return "there was none before"
    changed = [f"{place} is {old[place]} already, not {new[place]}" for place in new if old[place] != new[place]]
    return ", ".join(changed)
