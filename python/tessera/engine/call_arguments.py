"""Arguments of a Hugging Face model's forward(): what each asks for is done or refused by name."""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tessera.errors import InvalidArgument

# What the engine does not compute.
_REFUSED = {
    "inputs_embeds": "embeddings as input", "past_key_values": "a cache of keys",
    "cache": "a cache of keys",  # the same, as Transformers calls it since 5.24
    "use_cache": "a cache of keys", "cache_position": "a cache of keys", "head_mask": "masking heads",
    "encoder_hidden_states": "cross-attention",
    "encoder_attention_mask": "cross-attention", "encoder_outputs": "what an encoder returned", "decoder_inputs_embeds": "embeddings as input",
    "decoder_head_mask": "masking heads", "cross_attn_head_mask": "masking heads", "output_attentions": "attention weights", "output_hidden_states": "hidden states",
    "shift_labels": "labels that are shifted already (give `labels`, at their tokens' own positions)"}
KNOWN = ("return_dict", "num_items_in_batch", "logits_to_keep")
TAKEN = ("input_ids", "attention_mask", "position_ids", "labels")


def check(arguments: Dict[str, Any], known: Optional[Sequence[str]] = KNOWN, takes: Sequence[str] = TAKEN) -> None:
    """Errors: InvalidArgument for what asks for something that the engine does not compute, and for names that nobody knows
    (`known` None: those pass)."""
    for name, value in arguments.items():
        if name in _REFUSED:
            if value is not None and value is not False:
                raise InvalidArgument(f"{name}: Tessera's models do not take or return {_REFUSED[name]}")
        elif known is not None and name not in known:
            raise InvalidArgument(f"the model was called with an argument it does not know: {name}. It takes "
                                  f"{', '.join(takes[:-1])} and {takes[-1]}; remove other columns from the batches")


def check_call(kind: str, input_ids: Any, labels: Any, token_type_ids: Any, others: Dict[str, Any]) -> None:
    """Checks one call of a decoder of type `kind`. Errors: InvalidArgument."""
    check_has_ids(input_ids)
    if token_type_ids is not None and (kind in ("gpt2", "gpt_bigcode") or bool(token_type_ids.any())):
        raise InvalidArgument("token_type_ids are not supported; remove that column from the batches")
    check(others)
    keep = others.get("logits_to_keep")
    if labels is not None and keep is not None and (hasattr(keep, "shape") or keep):
        raise InvalidArgument("logits_to_keep with labels: the loss needs all logits; give one of the two")


def check_has_ids(input_ids: Any) -> None:
    if input_ids is None:
        raise InvalidArgument("the model was called without input_ids")


def positional_names(own: type) -> List[str]:
    """The names of forward()'s arguments by their places, which differ between families."""
    return [name for name, parameter in inspect.signature(own.forward).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]


def named(names: Sequence[str], positional: Tuple[Any, ...], given: Dict[str, Any]) -> Dict[str, Any]:
    """`given` and what came by place. Errors: InvalidArgument for what came twice, or beyond the last place."""
    if len(positional) > len(names):
        raise InvalidArgument(f"the model was called with {len(positional)} arguments by place; it takes {len(names)}: "
                              f"{', '.join(names)}")
    by_place = dict(zip(names, positional))
    twice = [name for name in by_place if given.get(name) is not None]
    if twice:
        raise InvalidArgument(f"the model was called with {twice[0]} twice: by place and by name")
    return {**given, **by_place}


def kept(logits: Any, which: Any) -> Any:
    """The logits [batch, seq, vocab] that logits_to_keep names: the last `which` positions (0 = all), or positions of a tensor
    as in Transformers."""
    import torch

    if not isinstance(which, torch.Tensor):
        return logits if not which else logits[:, -int(which):, :]
    which = which.to(logits.device)
    if which.ndim == 2:
        return logits[which] if which.dtype == torch.bool else torch.take_along_dim(logits, which[..., None], dim=1)
    return logits[:, which, :]


def per_item(session: Any, batch: Any, items: Any) -> float:
    """What the mean over target tokens is multiplied by to be the sum over them, divided by `items` (num_items_in_batch), and
    averaged over data ranks, as gradients are under Accelerate. Collective over data ranks. Errors: InvalidArgument on all
    of them where they say different numbers."""
    import numpy as np

    number = float(items)
    mesh = session.mesh
    everyone = np.array([[number]], dtype=np.float64)
    if mesh.dp > 1:
        everyone = mesh.data.all_gather(everyone[0])
    if not (everyone == number).all():
        said = ", ".join(f"data rank {rank}: {value:g}" for rank, value in enumerate(everyone[:, 0]))
        raise InvalidArgument(f"num_items_in_batch differs ({said}); all data ranks need the same: "
                              "accelerator.gather(number).sum(), and the loss times the number of data ranks")
    if not number > 0:
        raise InvalidArgument(f"num_items_in_batch is {number:g}; it must be above 0")
    return batch.global_targets / (mesh.dp * number)
