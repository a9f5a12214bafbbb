"""Megatron's T5 dataset written anew over numpy.random.RandomState: what tests/python/test_t5_data.py compares with."""

from typing import Any, Dict, List, NamedTuple, Sequence, Set

import numpy


class T5Rules(NamedTuple):
    """How samples are drawn; the defaults are pretrain_t5's."""

    seed: int = 1234
    pieces: Set[int] = set()
    begin: int = 36
    end: int = 37
    sentinels: Sequence[int] = tuple(range(38, 100))
    mask_prob: float = 0.15
    longest: int = 10
    whole_words: bool = True
    geometric: bool = True


def left_out(text: List[int], target: int, random: Any, rules: T5Rules) -> List[range]:
    """Runs of positions."""
    starts = [at for at, token in enumerate(text) if at == 0 or not (rules.whole_words and token in rules.pieces)]
    ends = starts[1:] + [len(text)]
    budget = min(rules.mask_prob * target, max(1, int(round(len(text) * rules.mask_prob))))
    inverse = 1 / numpy.arange(1, rules.longest + 1)
    inverse /= inverse.sum()
    order = numpy.arange(len(starts))
    random.shuffle(order)
    taken: Set[int] = set()
    runs = []
    for word in order:
        if len(taken) >= budget:
            break
        words = min(random.geometric(0.2), rules.longest) if rules.geometric else random.choice(numpy.arange(1, rules.longest + 1), p=inverse)
        for count in range(words, 0, -1):
            run = range(starts[word], ends[min(word + count, len(ends)) - 1])
            if len(taken) + len(run) <= budget:
                if not taken.intersection(run):
                    runs.append(run)
                    taken.update(run)
                break
    return sorted(runs, key=lambda run: run.start)


def t5_sample(sentences: Sequence[Sequence[int]], target: int, index: int, rules: T5Rules) -> Dict[str, List[int]]:
    random = numpy.random.RandomState((rules.seed + index) % 2**32)
    text = [token for sentence in sentences for token in sentence][:target]
    seen, said, at = [], [], 0
    for sentinel, run in zip(rules.sentinels, left_out(text, target, random, rules)):
        seen += [*text[at:run.start], sentinel]
        said += [sentinel, *(text[position] for position in run)]
        at = run.stop
    return {"text_enc": seen + text[at:], "text_dec": [rules.begin, *said], "labels": [*said, rules.end]}
