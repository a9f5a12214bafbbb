"""A prepared model for EleutherAI's lm-evaluation-harness (PyPI: lm-eval), on the layout it was prepared for."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from tessera.engine.generation import run
from tessera.errors import InvalidArgument

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise ImportError("tessera.integrations.lm_eval needs EleutherAI's harness: pip install lm-eval") from error

# What a task may ask of a text, by the harness's names, and the options that do it.
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "repetition_penalty": "repetition_penalty"}


class TesseraLM(TemplateLM):
    """`lm_eval.simple_evaluate(model=TesseraLM(model, tokenizer), tasks=...)`.

    `model`: a decoder that Accelerator.prepare() returned; `tokenizer`: Transformers' of the same model. Every rank calls
    simple_evaluate() with the same tasks and gets all results; the harness's own ranks stay at one, as data ranks share the texts out by
    themselves. Texts longer than the model's positions lose their beginning. `max_new_tokens`: of texts whose task names no number."""

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int = 256):
        super().__init__()
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self.max_length = model.session.engine.max_positions

    @property
    def eot_token_id(self) -> int:
        found = self.tokenizer.eos_token_id
        if found is None:
            raise InvalidArgument("the tokenizer has no eos_token: the harness puts it before texts that stand alone")
        return found

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: Any = None, **kwargs: Any) -> List[int]:
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def _loglikelihood_tokens(self, requests: List[Tuple[Any, List[int], List[int]]], disable_tqdm: bool = False, **kwargs: Any
                              ) -> List[Tuple[float, bool]]:
        texts, firsts = [], []
        for _, context, continuation in requests:
            whole = (context + continuation)[-(self.max_length + 1):]
            texts.append(whole)
            firsts.append(max(1, len(whole) - len(continuation)))
        scores = self.model.session.engine.score(texts, firsts, True)
        return [(float(sum(logprobs)), likeliest) for logprobs, likeliest in scores]

    def loglikelihood_rolling(self, requests: List[Any], disable_tqdm: bool = False) -> List[float]:
        texts, firsts, owner = [], [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for context, continuation in map(utils.make_disjoint_window, utils.get_rolling_token_windows(
                    token_list=tokens, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)):
                texts.append(context + continuation)
                firsts.append(len(context))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (logprobs, _) in zip(owner, self.model.session.engine.score(texts, firsts, False)):
            totals[number] += float(sum(logprobs))
        return totals

    def generate_until(self, requests: List[Any], disable_tqdm: bool = False) -> List[str]:
        texts: List[str] = [""] * len(requests)
        alike: Dict[str, List[int]] = {}  # requests by what they ask for, computed together
        for number, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in alike.values():
            options, until = self._options(dict(requests[numbers[0]].args[1]))
            room = self.max_length - options["max_new_tokens"]
            if room < 1:
                raise InvalidArgument(f"a task asks for {options['max_new_tokens']} new tokens, and the model has {self.max_length} positions")
            prompts = [self.tok_encode(requests[number].args[0])[-room:] or [self.prefix_token_id] for number in numbers]
            for number, (own,) in zip(numbers, run(self.model, prompts, options)):
                texts[number] = cut(self.tokenizer.decode(own[0], skip_special_tokens=True), until)
        return texts

    def _options(self, asked: Dict[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
        until = asked.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        new = next((asked.pop(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if asked.get(name)), self.max_new_tokens)
        draws = asked.pop("do_sample", asked.get("temperature", 0) > 0)
        options = {_SAMPLING[name]: asked.pop(name) for name in list(asked) if name in _SAMPLING}
        if asked:
            raise InvalidArgument(f"a task asks for {', '.join(sorted(asked))}, which generation here does not have")
        if not draws:
            options["temperature"] = 0.0

        def stop(tokens: List[int]) -> bool:
            text = self.tokenizer.decode(tokens[-64:])
            return any(end in text for end in until)

        return {**options, "max_new_tokens": int(new), "stop_tokens": [self.eot_token_id], **({"stop": stop} if until else {})}, until


def cut(text: str, until: List[str]) -> str:
    """Up to the first of its ends."""
    return text[:min([text.find(end) for end in until if end in text], default=len(text))]
