"""Whole weights by Hugging Face name, on their way into the engine. No torch."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np


def as_array(value: Any) -> np.ndarray:
    """fp32 of an array or a tensor."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.ascontiguousarray(value, dtype=np.float32)


def check(values: Dict[str, Any], session: Any, strict: bool) -> str:
    """What is wrong with them, or nothing."""
    shapes = {name: tuple(shape) for parts in session.mappings.values() for name, shape, _ in parts}
    given = {name: value for name, value in values.items() if name in shapes or not _is_tied_head(name, values, session)}
    unknown = [name for name in given if name not in shapes]
    missing = [name for name in shapes if name not in given] if strict else []
    wrong = [name for name in given if name in shapes and tuple(np.shape(given[name])) != shapes[name]]
    texts = []
    if unknown:
        texts.append(f"the model has no parameter '{unknown[0]}' ({len(unknown)} such names)")
    if missing:
        texts.append(f"'{missing[0]}' is missing ({len(missing)} such names); strict=False leaves those as they are")
    texts += [f"'{name}' has the shape {tuple(np.shape(given[name]))}, the model needs {shapes[name]}" for name in wrong[:3]]
    return f"weights that do not fit: {'; '.join(texts)}" if texts else ""


def _is_tied_head(name: str, values: Dict[str, Any], session: Any) -> bool:
    """A tied head may stand beside the table it is, with the same values."""
    table = session.mappings["embedding.word_embeddings.weight"][0][0]
    return name == "lm_head.weight" and table in values and np.array_equal(as_array(values[name]), as_array(values[table]))


def joined(ours: str, values: Dict[str, Any], session: Any) -> np.ndarray:
    """A parameter of Tessera's out of its parts."""
    parts = [as_array(values[name]).T if transposed else as_array(values[name])
             for name, _, transposed in session.mappings[ours]]
    return np.ascontiguousarray(np.concatenate(parts))
