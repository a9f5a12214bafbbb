"""Whole weights by Hugging Face name, on their way into the engine, and how a model is shown. No torch."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from tessera.errors import InvalidArgument


def as_array(value: Any) -> np.ndarray:
    """fp32 of an array or a tensor."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.ascontiguousarray(value, dtype=np.float32)


def known_names(values: Dict[str, Any], session: Any) -> Dict[str, Any]:
    """The same under the names that the engine's parts have: a tied head is the table, and needs no name of its own."""
    if "lm_head.weight" not in values or "output_layer.weight" in session.mappings:
        return values
    values = dict(values)
    head, table = values.pop("lm_head.weight"), session.mappings["embedding.word_embeddings.weight"][0][0]
    if table in values and not np.array_equal(as_array(head), as_array(values[table])):
        raise InvalidArgument(f"weights that do not fit: 'lm_head.weight' and '{table}' differ, but the model's head is tied: they "
                              "are one parameter")
    return {table: head, **values}


def check(values: Dict[str, Any], session: Any, strict: bool, unknown_pass: bool) -> Tuple[List[str], List[str]]:
    """Missing and unknown names. Errors: InvalidArgument saying what is wrong with the values."""
    shapes = {name: tuple(shape) for parts in session.mappings.values() for name, shape, *_ in parts}
    unknown = [name for name in values if name not in shapes]
    missing = [name for name in shapes if name not in values]
    texts = []
    if unknown and not unknown_pass:
        texts.append(f"the model has no parameter '{unknown[0]}' ({len(unknown)} such names)")
    if missing and strict:
        texts.append(f"'{missing[0]}' is missing ({len(missing)} such names); strict=False leaves those as they are")
    wrong = [name for name in values if name in shapes and tuple(np.shape(values[name])) != shapes[name]]
    texts += [f"'{name}' has the shape {tuple(np.shape(values[name]))}, the model needs {shapes[name]}" for name in wrong[:3]]
    for name in shapes if not texts else ():
        try:
            if name in values:
                as_array(values[name])  # one at a time: what cannot be read must not end in the middle of the others
        except Exception as error:
            texts.append(f"'{name}' cannot be read as numbers: {error}")
            break
    if texts:
        raise InvalidArgument(f"weights that do not fit: {'; '.join(texts)}")
    return missing, unknown


def joined(ours: str, values: Dict[str, Any], session: Any) -> np.ndarray:
    """A parameter of Tessera's out of its parts."""
    parts = []
    for name, _, transposed, member in session.mappings[ours]:
        array = as_array(values[name] if member is None else values[name][member])
        parts.append(array.T if transposed else array[session.row_orders.get(name, slice(None))])
    return np.ascontiguousarray(np.concatenate(parts))


def split(session: Any, ours: str, array: np.ndarray, whole: Dict[str, np.ndarray]) -> None:
    """Adds the parts of a parameter of Tessera's to `whole`, which has them by Hugging Face name."""
    row = 0
    for name, shape, transposed, member in session.mappings[ours]:
        if member is not None:
            whole.setdefault(name, np.empty(shape, array.dtype))[member] = array
            continue
        rows = shape[1] if transposed else shape[0]
        part = array[row: row + rows]
        whole[name] = np.ascontiguousarray(part.T) if transposed else stored(part, session.row_orders.get(name))
        row += rows


def stored(part: np.ndarray, order: Optional[List[int]]) -> np.ndarray:
    """Rows of Tessera's as Hugging Face stores them: row i is its row order[i]."""
    if order is None:
        return part
    result = np.empty_like(part)
    result[order] = part
    return result


def load(session: Any, values: Dict[str, Any], strict: bool, unknown_pass: bool) -> Tuple[List[str], List[str]]:
    """Session.load."""
    main, world = session.state.is_main_process, session.state.world
    plan: List[Any] = ["", [], [], []]
    if main:
        try:
            values = known_names(values, session)
            missing, unknown = check(values, session, strict, unknown_pass)
            plan[1:] = [[ours for ours, parts in session.mappings.items() if any(part[0] in values for part in parts)], missing, unknown]
        except Exception as error:  # of whatever kind: the others wait for what this rank says
            plan[0] = str(error) or type(error).__name__
    problem, names, missing, unknown = json.loads(world.broadcast_bytes(json.dumps(plan).encode() if main else b"", 0))
    if problem:
        raise InvalidArgument(problem)
    current = session.collect() if missing else {}
    for ours in names:
        array = joined(ours, {**current, **values}, session) if main else np.empty(_shape(session, ours), np.float32)
        world.broadcast(array, 0)
        session.engine.load_parameter(ours, array)
    session.engine.gather_weights()
    return missing, unknown


def _shape(session: Any, ours: str) -> Tuple[int, ...]:
    shapes = [shape[::-1] if transposed else shape if member is None else shape[1:]
              for _, shape, transposed, member in session.mappings[ours]]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def overview(session: Any, parameters: Dict[str, Any]) -> str:
    """What print(model) shows."""
    items, mesh = session._items, session.mesh
    sizes = [parameter.numel() for parameter in parameters.values()]
    trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    place = ", ".join(f"{axis} {mesh.coordinates[axis]} of {getattr(mesh, axis)}" for axis in ("tp", "cp", "pp", "dp") if axis != "cp" or mesh.cp > 1)
    held = "made at the first call" if session.engine is None else f"{session.engine.elements_held:,} parameters"
    kind = session.kind
    if session.plan.change is not None:
        kind = f"{kind} changed by the plugin, {', '.join(session.plan.change.changes)}"
    return (f"TesseraModel({kind}: {items['num_layers']} layers of width {items['hidden_size']}, vocabulary "
            f"{items['vocab_size']}\n  parameters: {sum(sizes):,} in {len(sizes)} tensors; {trained:,} trained, {sum(sizes) - trained:,} "
            f"frozen\n  this rank's part ({place}): {held} on {session.state.device}\n)")
