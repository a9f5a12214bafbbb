"""Megatron's BERT dataset written anew over numpy.random.RandomState: what tests/python/test_bert_data.py compares with."""

import struct
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

import numpy


class Rules(NamedTuple):
    """How samples are drawn; the defaults are pretrain_bert's."""

    seed: int = 1234
    vocabulary: int = 40
    cls: int = 1
    sep: int = 2
    mask: int = 3
    pieces: Set[int] = set()
    head: bool = True
    mask_prob: float = 0.15
    longest: int = 3
    whole_words: bool = True
    longer: bool = False
    geometric: bool = False


def write_sentences(prefix: Path, documents: Sequence[Sequence[Sequence[int]]]) -> Path:
    """PREFIX.idx and .bin: a sequence for each sentence, uint16."""
    sentences = [sentence for document in documents for sentence in document]
    sizes = [len(sentence) for sentence in sentences]
    begins = numpy.cumsum([0] + [len(document) for document in documents])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(begins)) + struct.pack(f"<{len(sizes)}i", *sizes)
    index += struct.pack(f"<{len(sizes)}q", *(2 * sum(sizes[:i]) for i in range(len(sizes)))) + begins.astype("<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(s)}H", *s) for s in sentences))
    return prefix


def words_of(tokens: List[int], rules: Rules) -> List[List[int]]:
    words: List[List[int]] = []
    for position, token in enumerate(tokens):
        if token in (rules.cls, rules.sep):
            continue
        if rules.whole_words and words and token in rules.pieces:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def masked(tokens: List[int], target: int, random: Any, rules: Rules) -> Tuple[List[int], Dict[int, int]]:
    words = words_of(tokens, rules)
    budget = min(rules.mask_prob * target, max(1, int(round(len(tokens) * rules.mask_prob))))
    lengths = numpy.arange(1, rules.longest + 1)
    weights = 1.0 / lengths
    weights = weights / weights.sum(keepdims=True)
    if rules.longer:
        weights = weights[::-1]
    runs = [[words[first:first + n] for n in lengths] for first in range(len(words))]
    random.shuffle(runs)
    written, labels = list(tokens), {}
    for options in runs:
        if len(labels) >= budget:
            break
        n = min(random.geometric(0.2), rules.longest) if rules.geometric else random.choice(lengths, p=weights / weights.sum(keepdims=True))
        run = sum(options[n - 1], [])
        while len(labels) + len(run) > budget and n > 1:
            n -= 1
            run = sum(options[n - 1], [])
        if len(labels) + len(run) > budget or any(position in labels for position in run):
            continue
        for position in run:
            if random.random_sample() < 0.8:
                written[position] = rules.mask
            elif random.random_sample() >= 0.5:
                written[position] = int(random.randint(0, rules.vocabulary))
            labels[position] = tokens[position]
    random.shuffle(runs)
    return written, labels


def sample(sentences: Sequence[Sequence[int]], target: int, index: int, rules: Rules) -> Dict[str, Any]:
    random = numpy.random.RandomState((rules.seed + index) % 2**32)
    pivot, swapped = len(sentences), False
    if rules.head:
        pivot = random.randint(low=1, high=len(sentences)) if len(sentences) >= 3 else 1
        swapped = bool(random.random_sample() < 0.5)
    first, second = ([token for sentence in part for token in sentence] for part in (sentences[:pivot], sentences[pivot:]))
    if swapped:
        first, second = second, first
    while len(first) + len(second) > target:
        longer = first if len(first) > len(second) else second
        del longer[0 if random.random_sample() < 0.5 else -1]
    tokens = [rules.cls, *first, rules.sep]
    types = [0] * len(tokens)
    if second:
        tokens += [*second, rules.sep]
        types += [1] * (len(second) + 1)
    written, labels = masked(tokens, target, random, rules)
    return {"tokens": written, "labels": [labels.get(i, -100) for i in range(len(tokens))], "types": types, "label": int(swapped)}
