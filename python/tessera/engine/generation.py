"""Texts from the prepared model: `megatron_generate` as Accelerate 0.14 to 1.12 had it, `generate` with the names of
Transformers' GenerationConfig. Every rank calls with the same arguments and gets all ids."""

from __future__ import annotations

import numbers
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from tessera.comm.warnings import warn_once
from tessera.data.documents import eod_id
from tessera.errors import InvalidArgument
from tessera.utils.objects import array_of

# GenerationConfig's fields that are done, by what they are for; others must have their defaults.
_DONE = frozenset("""max_length max_new_tokens min_length min_new_tokens do_sample num_beams temperature top_k top_p repetition_penalty
length_penalty early_stopping num_return_sequences eos_token_id pad_token_id bos_token_id stop_strings decoder_start_token_id""".split())
# What says nothing about the text, or is always so here.
_PASSED = frozenset("""use_cache cache_implementation return_dict_in_generate output_scores output_logits transformers_version
_from_model_config _commit_hash _original_object_hash generation_kwargs disable_compile trust_remote_code""".split())


class GenerationMembers:
    """Members of the prepared model."""

    def megatron_generate(self, inputs: Any, attention_mask: Any = None, max_length: Optional[int] = None,
                          max_new_tokens: Optional[int] = None, num_beams: Optional[int] = None, temperature: Optional[float] = None,
                          top_k: Optional[int] = None, top_p: Optional[float] = None, length_penalty: Optional[float] = None,
                          **kwargs: Any) -> torch.Tensor:
        """Ids [batch, longest text]: each prompt, its new tokens right behind it, then the stop token; of a model with an
        encoder its start token in place of the prompt. `inputs`: ids [batch, seq], padded on either side as attention_mask
        says. Tokens are drawn (top_k=1: the likeliest), or searched for with
        num_beams, by Megatron's rules. Also top_p_decay, top_p_bound, add_BOS, stop_token (default: the id that ends a document
        by other_megatron_args, else the model's eos_token_id; None = none), random_seed (default: the texts' numbers go on from call to call),
        prevent_newline_after_colon (False only). Collective. Errors: ValueError for what is out of range, by name."""
        _check_kind(self, "megatron_generate")
        extra = dict(top_p_decay=0.0, top_p_bound=0.0, add_BOS=False, stop_token=_end_of_documents(self), random_seed=None,
                     prevent_newline_after_colon=False)
        unknown = sorted(set(kwargs) - set(extra))
        _need(not unknown, f"megatron_generate() does not know {', '.join(unknown)}; it takes {', '.join(extra)} by name")
        extra.update(kwargs)
        _need(not extra["prevent_newline_after_colon"], "prevent_newline_after_colon is not supported: leave it out")
        _need(isinstance(extra["add_BOS"], bool), "add_BOS must be True or False")
        stop = extra["stop_token"]
        stop = list(stop) if isinstance(stop, (list, tuple)) else [] if stop is None else [_whole("stop_token", stop)]
        prompts = prompts_of(inputs, attention_mask)
        start = _start_of(self, {})
        width = max(map(len, prompts)) if start is None else 1
        if extra["add_BOS"]:
            _need(start is None, "add_BOS is for decoders: an encoder's sequences begin with no such token")
            bos = getattr(self.config, "bos_token_id", None)
            bos = stop[0] if stop else bos  # Megatron's is its end of a document
            _need(bos is not None, "add_BOS needs a stop_token, or a bos_token_id in the model's config")
            prompts = [[int(bos), *prompt] for prompt in prompts]
        options = {**_lengths(width, max_length, max_new_tokens, int(extra["add_BOS"])), "decoder_start": start or 0,
                   **_megatron_sampling(temperature, top_k, top_p, extra), "stop_tokens": stop}
        if num_beams is not None:
            _need(isinstance(num_beams, numbers.Integral) and num_beams >= 1, "num_beams must be an integer of 1 or more")
            penalty = 1.0 if length_penalty is None else float(length_penalty)
            if num_beams > 1:
                options.update(num_beams=int(num_beams), length_penalty=penalty, beam_rule="megatron")
            else:
                options.update(temperature=0.0)  # one beam is the likeliest token
        texts = run(self, prompts, options, extra["random_seed"])
        fill = stop[0] if stop else _pad_id(self)
        begin = prompts if start is None else [[start]] * len(prompts)
        return _rows([first + own[0][0] for first, own in zip(begin, texts)], fill, inputs, self.device)

    @torch.no_grad()
    def generate(self, inputs: Any = None, generation_config: Any = None, *, input_ids: Any = None, attention_mask: Any = None,
                 tokenizer: Any = None, streamer: Any = None, random_seed: Optional[int] = None, batch_size: int = 0,
                 **kwargs: Any) -> torch.Tensor:
        """Ids [batch * num_return_sequences, width]: the prompts as they were given (of a model with an encoder
        decoder_start_token_id), then the new tokens, then pad_token_id; as Transformers' generate(), with its GenerationConfig (of the model, or given, or single fields of it by name).
        stop_strings need `tokenizer`. `streamer`: put() gets the prompt and each new token, of one prompt. `random_seed`:
        as in megatron_generate(). `batch_size`: texts computed at once, 0 = all. Collective. Errors: InvalidArgument for
        settings that are not supported, by name."""
        _check_kind(self, "generate")
        _need(inputs is None or input_ids is None, "generate() was given the prompts twice: as inputs and as input_ids")
        given = input_ids if inputs is None else inputs
        _need(given is not None, "generate() was called without prompts: give input_ids")
        config = _merged(self, generation_config, kwargs)
        prompts = prompts_of(given, attention_mask)
        start = _start_of(self, config)
        width = int(np.asarray(array_of(given)).shape[1]) if start is None else 1
        options, pad = _options_of(self, config, width, tokenizer)
        options.update(batch_size=batch_size, decoder_start=start or 0)
        if streamer is not None:
            _need(len(prompts) == 1 and options.get("num_samples", 1) == 1 and options.get("num_beams", 1) == 1,
                  "a streamer goes with one prompt, one sequence and no beams")
            streamer.put(torch.tensor(prompts if start is None else [[start]]))
            options["on_token"] = lambda prompt, sample, token: streamer.put(torch.tensor([token]))
        texts = run(self, prompts, options, random_seed)
        if streamer is not None:
            streamer.end()
        begin = np.asarray(array_of(given)).tolist() if start is None else [[start]] * len(prompts)
        return _rows([begin[i] + text[0] for i, own in enumerate(texts) for text in own], pad, given, self.device)


def run(model: Any, prompts: List[List[int]], options: Dict[str, Any], random_seed: Optional[int] = None
        ) -> List[List[Tuple[List[int], List[float], float, bool]]]:
    """(tokens, logprobs, score, stopped) of each text by prompt; `options` of tessera/engine/generate.hpp. Collective."""
    session = model.session
    numbers_of = session.text_numbers
    if random_seed is not None:
        numbers_of.restart(_whole("random_seed", random_seed) & (2**64 - 1))
    first = numbers_of.take(len(prompts) * int(options.get("num_samples", 1)))
    seed = session.seed if numbers_of.seed is None else numbers_of.seed
    return session.engine.generate(prompts, {**options, "seed": seed, "first_sample": first})


def prompts_of(inputs: Any, attention_mask: Any) -> List[List[int]]:
    """The real tokens of ids [batch, seq]. Errors: ValueError for shapes, a mask with holes, a row of padding alone."""
    ids = np.asarray(array_of(inputs))
    _need(ids.ndim == 2 and ids.shape[0] > 0 and np.issubdtype(ids.dtype, np.integer),
          f"prompts are whole numbers [batch, seq], not {ids.dtype} {ids.shape}")
    if attention_mask is None:
        return ids.tolist()
    mask = np.asarray(array_of(attention_mask)).astype(bool)
    _need(mask.shape == ids.shape, f"attention_mask has the shape {mask.shape}, the prompts {ids.shape}")
    for row, seen in enumerate(mask):
        _need(seen.any(), f"prompt {row} is all padding: its attention_mask has no 1")
        places = np.flatnonzero(seen)
        _need(places[-1] - places[0] + 1 == len(places), f"attention_mask of prompt {row} has zeros between its tokens: padding "
              "stands before or behind a prompt")
    return [row[seen].tolist() for row, seen in zip(ids, mask)]


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidArgument(message)


def _whole(name: str, value: Any) -> int:
    _need(isinstance(value, numbers.Integral) and not isinstance(value, bool), f"{name} must be an integer, not {value!r}")
    return int(value)


def _within(name: str, value: Any, low: float, high: float, open_below: bool = False) -> float:
    fits = isinstance(value, numbers.Real) and (low < value if open_below else low <= value) and value <= high
    _need(fits, f"{name} must lie {'above' if open_below else 'between'} {low:g} and {'at most ' if open_below else ''}{high:g}, "
          f"not {value!r}")
    return float(value)


def _check_kind(model: Any, call: str) -> None:
    heads = model._session.heads
    if not heads.looks_back and not heads.encodes:
        raise NotImplementedError(f"{call}() writes texts with decoders; a {model._session.kind} looks to both sides")


def _start_of(model: Any, config: Dict[str, Any]) -> Optional[int]:
    """What texts begin with where an encoder reads the prompts; None for others."""
    if not model._session.heads.encodes:
        return None
    for value in (config.get("decoder_start_token_id"), getattr(model.config, "decoder_start_token_id", None), config.get("bos_token_id")):
        if value is not None:
            return _whole("decoder_start_token_id", value)
    raise InvalidArgument("generate() needs decoder_start_token_id, which texts of a model with an encoder begin with")


def _stop_ids(model: Any) -> List[int]:
    """The model's eos_token_id, as its generation config or else its config says."""
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]
    return []


def _end_of_documents(model: Any) -> Optional[int]:
    """Megatron's stop token: its tokenizer's end, or the `eos_token_id` of its arguments. Without either the model's."""
    plugin = model.session.plugin
    given = {} if plugin is None or model.session.heads.encodes else plugin.given_arguments
    if given.get("vocab_file") is not None or given.get("eos_token_id") is not None:
        return eod_id(given, {})
    return next(iter(_stop_ids(model)), None)


def _pad_id(model: Any) -> int:
    pad = getattr(model.config, "pad_token_id", None)
    return 0 if pad is None else int(pad)


def _lengths(width: int, max_length: Optional[int], max_new_tokens: Optional[int], more: int) -> Dict[str, int]:
    _need(max_length is not None or max_new_tokens is not None, "max_length or max_new_tokens is required")
    if max_new_tokens is not None:
        _need(_whole("max_new_tokens", max_new_tokens) > 0, "max_new_tokens must be greater than 0")
        return {"max_new_tokens": int(max_new_tokens)}
    _need(_whole("max_length", max_length) > width, f"max_length ({max_length}) leaves no room for new tokens: the longest prompt "
          f"has {width}")
    return {"max_new_tokens": int(max_length), "max_length": int(max_length) + more}


def _megatron_sampling(temperature: Any, top_k: Any, top_p: Any, extra: Dict[str, Any]) -> Dict[str, Any]:
    temperature = 1.0 if temperature is None else _within("temperature", temperature, 0.0, 100.0, open_below=True)
    top_k = 0 if top_k is None else _whole("top_k", top_k)
    top_p = 0.0 if top_p is None else top_p
    _within("top_k", top_k, 0, 1000)
    _within("top_p", top_p, 0.0, 1.0)
    decay, bound = (_within(name, extra[name], 0.0, 1.0) for name in ("top_p_decay", "top_p_bound"))
    options = dict(temperature=temperature, top_k=top_k, top_p=float(top_p))
    if top_p > 0.0 and decay > 0.0:
        options.update(top_p_decay=decay, top_p_bound=min(bound, float(top_p)))
    return options


def _merged(model: Any, generation_config: Any, fields: Dict[str, Any]) -> Dict[str, Any]:
    """Fields that are set. Errors: InvalidArgument for those that are not supported and not at their defaults."""
    from transformers import GenerationConfig

    defaults = GenerationConfig().to_dict()
    config = dict((generation_config or model.generation_config or GenerationConfig()).to_dict())
    unknown = sorted(name for name in fields if name not in defaults and name not in _DONE)
    _need(not unknown, f"generate() does not know {', '.join(unknown)}")
    config.update(fields)
    if "max_new_tokens" in fields and "max_length" not in fields:
        config["max_length"] = None
    refused = sorted(name for name, value in config.items() if name not in _DONE and name not in _PASSED
                     and value not in (None, False) and value != defaults.get(name))
    _need(not refused, f"generate() does not support {', '.join(refused)}; it takes {', '.join(sorted(_DONE))}")
    for name in ("return_dict_in_generate", "output_scores", "output_logits"):
        _need(not config.get(name), f"generate() does not support {name}: it returns the ids")
    return config


def _options_of(model: Any, config: Dict[str, Any], width: int, tokenizer: Any) -> Tuple[Dict[str, Any], int]:
    """The engine's options, and the id that fills up rows."""
    def given(name: str, default: Any) -> Any:
        value = config.get(name)
        return default if value is None else value

    new = config.get("max_new_tokens")
    if new is None:
        length = given("max_length", 20)
        _need(length > width, f"max_length ({length}) leaves no room for new tokens: the prompts are {width} wide")
        new = length - width
    eos = given("eos_token_id", _stop_ids(model))
    eos = [int(each) for each in eos] if isinstance(eos, (list, tuple)) else [int(eos)]
    least = max(given("min_new_tokens", 0), given("min_length", 0) - width, 0)
    if least > new:  # Transformers goes on too
        warn_once(f"generate() was asked for at least {least} new tokens and at most {new}: texts have {new}")
        least = new
    beams, count = given("num_beams", 1), given("num_return_sequences", 1)
    options: Dict[str, Any] = dict(max_new_tokens=int(new), min_new_tokens=int(least), stop_tokens=eos,
                                   repetition_penalty=float(given("repetition_penalty", 1.0)))
    if beams > 1:
        _need(not given("do_sample", False), "generate() does not draw within a beam search: do_sample goes with num_beams=1")
        early = given("early_stopping", False)
        _need(early in (True, False, "never"), f"early_stopping is True, False or 'never', not {early!r}")
        options.update(num_beams=int(beams), num_return=int(count), length_penalty=float(given("length_penalty", 1.0)),
                       early_stopping="never" if early == "never" else "yes" if early else "no")
    elif given("do_sample", False):
        options.update(num_samples=int(count), temperature=_within("temperature", given("temperature", 1.0), 0.0, 1e9, open_below=True),
                       top_k=int(given("top_k", 50)), top_p=_within("top_p", given("top_p", 1.0), 0.0, 1.0))
        options["top_p"] = 0.0 if options["top_p"] == 1.0 else options["top_p"]
    else:
        _need(count == 1, "num_return_sequences above 1 needs do_sample=True or num_beams")
        options.update(temperature=0.0)
    if config.get("stop_strings"):
        options["stop"] = stop_at(config["stop_strings"], tokenizer)
    return options, int(given("pad_token_id", eos[0] if eos else _pad_id(model)))


def stop_at(strings: Union[str, Sequence[str]], tokenizer: Any) -> Callable[[List[int]], bool]:
    """Whether the text of new tokens contains one of the strings, the last token included."""
    _need(tokenizer is not None, "stop_strings need the tokenizer: generate(..., tokenizer=tokenizer)")
    ends = [strings] if isinstance(strings, str) else list(strings)
    _need(all(isinstance(end, str) and end for end in ends), "stop_strings are strings that are not empty")

    def stop(tokens: List[int]) -> bool:
        text = tokenizer.decode(tokens)
        return any(end in text for end in ends)

    return stop


def _rows(texts: List[List[int]], fill: int, like: Any, device: torch.device) -> torch.Tensor:
    rows = torch.full((len(texts), max(map(len, texts))), fill, dtype=torch.long)
    for row, text in zip(rows, texts):
        row[:len(text)] = torch.tensor(text, dtype=torch.long)
    return rows.to(like.device if isinstance(like, torch.Tensor) else device)
