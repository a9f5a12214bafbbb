"""megatron_generate() and generate() of the prepared model: Transformers' texts token for token, draws of a NumPy reference."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from plugin_support import fresh_states, make_model, make_t5, prepared  # noqa: E402, F401

_C = pytest.importorskip("tessera._C")

SMALL = dict(vocab_size=61, hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             max_position_embeddings=48, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "gpt2": lambda: make_model(vocab_size=61, n_positions=48, n_embd=20, n_head=5, initializer_range=0.3, eos_token_id=2, bos_token_id=1),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=5)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=4,
                                                                               query_pre_attn_scalar=8)),
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(
        vocab_size=61, hidden_size=24, n_layer=2, n_head=6, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=4, query_pre_attn_scalar=8, layer_types=["sliding_attention"] * 2 + ["full_attention"])),
    "t5": lambda: make_t5(num_layers=3, vocab_size=61, eos_token_id=2, initializer_factor=1.5),
    "flan": lambda: make_t5(num_layers=3, vocab_size=61, eos_token_id=2, initializer_factor=1.5, own_head=True,
                            feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": lambda: make_t5("MT5", own_head=True, num_decoder_layers=2, vocab_size=61, eos_token_id=2, initializer_factor=1.5),
}


def prompts(count, seed=3, longest=9, vocab=61):
    """Ids padded on the left, and their mask."""
    generator = np.random.default_rng(seed)
    ids, mask = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.int64)
    for row, length in enumerate([longest, *generator.integers(1, longest, count - 1)]):
        ids[row, longest - length:] = generator.integers(3, vocab, length)
        mask[row, longest - length:] = 1
    return torch.tensor(ids), torch.tensor(mask)


def pair(family):
    """The prepared model, and Transformers'."""
    torch.manual_seed(4)
    reference = FAMILIES[family]().eval()
    _, model, _ = prepared(change=lambda _: copy.deepcopy(reference))
    return model.eval(), reference


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_texts_of_transformers(family):
    model, reference = pair(family)
    ids, mask = prompts(12)
    for more in (dict(), dict(repetition_penalty=1.4, min_new_tokens=4), dict(num_beams=4), dict(num_beams=3, length_penalty=-0.5,
                 early_stopping=True, num_return_sequences=2), dict(num_beams=2, early_stopping="never", length_penalty=1.5)):
        options = dict(max_new_tokens=11, do_sample=False, pad_token_id=1, **more)  # Transformers takes 0 for none
        expected = reference.generate(ids, attention_mask=mask, **options)
        own = model.generate(ids, attention_mask=mask, **options)
        assert own.shape == expected.shape and own.dtype == expected.dtype, more
        assert torch.equal(own, expected), (more, own, expected)
    waiting = model.generate(ids, attention_mask=mask, max_new_tokens=11, do_sample=False, pad_token_id=1, batch_size=5)
    assert torch.equal(waiting, reference.generate(ids, attention_mask=mask, max_new_tokens=11, do_sample=False, pad_token_id=1))


def log_probability(reference, ids, mask, row, width):
    """Of a text of generate() behind its prompt."""
    if reference.config.is_encoder_decoder:
        logits = reference(input_ids=ids[None], attention_mask=mask[None], decoder_input_ids=row[None, :-1]).logits[0]
        text = row[1:]
    else:
        whole = row[mask.argmax():]
        logits = reference(input_ids=whole[None, :-1]).logits[0, width - mask.argmax() - 1:]
        text = row[width:]
    return logits.double().log_softmax(-1).gather(1, text[:, None]).squeeze(1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "t5", "flan"])
def test_many_unequal_prompts(family, long_run):
    """All differences must be between texts that are equally good to 1e-5."""
    count = 200 if long_run else 24
    model, reference = pair(family)
    ids, mask = prompts(count, seed=8, longest=17)
    for more in (dict(), dict(num_beams=4)):
        options = dict(max_new_tokens=16, do_sample=False, pad_token_id=1, **more)
        expected = reference.generate(ids, attention_mask=mask, **options)
        own = model.generate(ids, attention_mask=mask, batch_size=24, **options)
        own = torch.nn.functional.pad(own, (0, expected.shape[1] - own.shape[1]), value=1)
        other = [row for row in range(count) if not torch.equal(own[row], expected[row])]
        assert len(other) <= count // 100, (more, other)
        for row in other:
            scores = [log_probability(reference, ids[row], mask[row], texts[row], ids.shape[1]) for texts in (own, expected)]
            if not more:  # up to the first token that differs
                first = int((scores[0] != scores[1]).nonzero()[0]) + 1
                scores = [each[:first] for each in scores]
            assert abs(float(scores[0].sum() / scores[1].sum()) - 1) < 1e-5, (more, row)


@torch.no_grad()
def test_probabilities_of_prompts():
    model, reference = pair("llama")
    ids, mask = prompts(5)
    rows = [row[seen.bool()].tolist() for row, seen in zip(ids, mask)]
    engine = model._session.engine
    for new, samples in ((3, 2), (0, 1)):
        texts = engine.generate(rows, {"max_new_tokens": new, "num_samples": samples, "logprobs": True, "prompt_logprobs": True,
                                       "prefill_chunk": 8, "seed": 3})
        for row, own in zip(rows, texts):
            assert len(own) == samples
            for tokens, logprobs, _, _ in own:
                text = torch.tensor([row + tokens])
                expected = reference(input_ids=text).logits[0, :-1].double().log_softmax(-1).gather(1, text[0, 1:, None]).squeeze(1)
                assert len(tokens) == new and np.allclose(logprobs, expected.numpy(), atol=1e-5)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        engine.generate(rows, {"prompt_logprobs": True})


def test_texts_of_an_encoder():
    """megatron_generate() and streams; what goes with decoders alone."""
    model, reference = pair("t5")
    ids, mask = prompts(4)
    expected = reference.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=2)
    own = model.megatron_generate(ids, mask, max_new_tokens=7, top_k=1)
    assert torch.equal(own, expected)
    assert torch.equal(model.megatron_generate(ids, mask, max_length=8, top_k=1), expected)
    seen = []
    streamer = type("Streamer", (), {"put": staticmethod(lambda ids: seen.extend(ids.flatten().tolist())), "end": staticmethod(list)})
    text = model.generate(ids[:1], attention_mask=mask[:1], max_length=8, do_sample=False, streamer=streamer)
    assert seen == text[0].tolist() and torch.equal(text[0], expected[0, :text.shape[1]])
    drawn = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True, num_return_sequences=3, random_seed=2)
    assert drawn.shape[0] == 12
    with pytest.raises(ValueError, match="add_BOS"):
        model.megatron_generate(ids, mask, max_new_tokens=3, add_BOS=True)


def reference_draw(logits, uniform, temperature=1.0, top_k=0, top_p=0.0):
    """Temperature, the k likeliest (of equal ones the first), of these the likeliest until p, then in order of ids."""
    order = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    if top_p > 0:
        kept = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
        order, weights = order[:kept], weights[:kept]
    by_id = np.argsort(order)
    sums = np.cumsum(weights[by_id])
    return int(order[by_id][np.searchsorted(sums, uniform * sums[-1], side="right")])


@pytest.mark.parametrize("way", [dict(), dict(temperature=0.6), dict(top_k=7), dict(top_p=0.8), dict(top_p=0.3, temperature=1.7),
                                 dict(top_k=20, top_p=0.5, temperature=0.9)], ids=str)
def test_draws_of_numpy(way):
    generator = np.random.default_rng(5)
    for _ in range(300):
        logits = generator.normal(0, 2, 501).astype(np.float32)
        logits[generator.integers(0, 501, 30)] = 1.5  # some are equal
        uniform = float(generator.random())
        assert _C.sample_token(logits, way, uniform) == reference_draw(logits, uniform, **way)


def test_drawn_texts_follow_their_numbers():
    model, _ = pair("gpt2")
    ids, mask = prompts(3)
    call = dict(max_new_tokens=6, top_k=10, temperature=0.9)
    first, second = (model.megatron_generate(ids, mask, **call) for _ in range(2))
    assert not torch.equal(first, second)  # the numbers go on
    again = [model.megatron_generate(ids, mask, random_seed=seed, **call) for seed in (5, 5, 6)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])


def test_megatron_generate():
    model, reference = pair("gpt2")
    ids, mask = prompts(4)
    right = torch.zeros_like(ids)
    for row in range(4):
        right[row, :mask[row].sum()] = ids[row][mask[row] == 1]
    right_mask = mask.flip(1)
    likeliest = dict(top_k=1, stop_token=None)
    both = [model.megatron_generate(*each, max_new_tokens=5, **likeliest) for each in ((ids, mask), (right, right_mask))]
    assert torch.equal(*both) and both[0].shape == (4, 14)
    expected = reference.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    for row in range(4):
        length = int(mask[row].sum())
        assert both[0][row, :length + 5].tolist() == expected[row, 9 - length:].tolist()
        assert not both[0][row, length + 5:].any()  # the id of padding, as there is no stop token
    # No rounding to a multiple of 4; every text up to max_length.
    whole = model.megatron_generate(ids, mask, max_length=11, **likeliest)
    assert whole.shape == (4, 11) and torch.equal(whole[1, :int(mask[1].sum()) + 2], both[0][1, :int(mask[1].sum()) + 2])
    # add_BOS puts the id in front and overwrites nothing.
    front = model.megatron_generate(ids, mask, max_new_tokens=5, top_k=1, add_BOS=True, stop_token=7)
    assert (front[:, 0] == 7).all() and front[0, 1:10].tolist() == ids[0].tolist()
    beams = model.megatron_generate(ids, mask, max_new_tokens=6, num_beams=3, length_penalty=1.5)
    assert beams.shape[0] == 4 and torch.equal(beams[:1, :9], ids[:1])


def test_where_texts_of_megatron_generate_end(tmp_path):
    """At the end of the vocabulary that Megatron's arguments name, at the id they name, else at the model's."""
    ids = torch.tensor([[5, 9, 3]])
    torch.manual_seed(4)
    reference = FAMILIES["gpt2"]().eval()
    free = reference.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[], pad_token_id=0)[0, 3:].tolist()
    ends = [token for place, token in enumerate(free) if token not in free[:place]][1:4]
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(f'{{"a": 0, "<|endoftext|>": {ends[0]}}}')
    reference.config.eos_token_id = reference.generation_config.eos_token_id = ends[2]
    for arguments, end in ((dict(vocab_file=str(vocabulary), merge_file="merges.txt"), ends[0]), (dict(eos_token_id=ends[1]), ends[1]),
                           (dict(), ends[2])):
        _, model, _ = prepared(change=lambda _: copy.deepcopy(reference), other_megatron_args=arguments)
        text = model.eval().megatron_generate(ids, max_new_tokens=12, top_k=1)[0, 3:].tolist()
        assert text == free[:free.index(end) + 1], arguments


def test_the_documents_calls():
    """The calls of 004/generate.py, with a tokenizer that knows bytes."""
    from pathlib import Path
    from types import SimpleNamespace

    block = (Path(__file__).resolve().parents[1] / "documents/004/generate.py").read_text(encoding="utf-8")
    calls = block[block.index("# inference using"):].replace("max_new_tokens = 64", "max_new_tokens = 6")

    class Bytes:
        eos_token, pad_token, decoded = "</s>", None, []

        def __call__(self, texts, return_tensors, padding):
            ids = [list(text.encode()) for text in texts]
            width = max(map(len, ids))
            rows = torch.tensor([each + [0] * (width - len(each)) for each in ids])
            return {"input_ids": rows, "attention_mask": torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in ids])}

        def batch_decode(self, ids):
            self.decoded.append([bytes(int(each) for each in row if 0 < each < 256).decode(errors="replace") for row in ids])
            return self.decoded[-1]

    _, model, _ = prepared(change=lambda _: make_model(vocab_size=257, n_positions=64, eos_token_id=256, bos_token_id=256,
                                                       initializer_range=0.3))
    printed = []
    tokenizer = Bytes()
    exec(calls, dict(tokenizer=tokenizer, model=model.eval(), accelerator=SimpleNamespace(print=printed.append)))
    assert len(printed) == 4 and [len(texts) for texts in printed] == [4, 4, 4, 1]
    for texts in printed:
        assert all(each.startswith(prompt) for each, prompt in zip(texts, ["Are you human?", "The purpose of life is"][len(texts) == 1:]))


def megatron_beams(logits_of, prompt, beams, new, stop, penalty):
    """beam_search_and_return_on_first_stage, in plain Python."""
    open_beams, finished = [(0.0, [])], []

    def add(score, text, length):
        finished.append((score / length**penalty, text))
        finished.sort(key=lambda each: -each[0])
        del finished[beams:]

    for step in range(1, new + 1):
        candidates = []
        for place, (total, text) in enumerate(open_beams):
            scores = torch.log_softmax(logits_of(prompt + text).double(), -1)
            candidates += [(total + float(score), place, token) for token, score in enumerate(scores)]
        candidates = sorted(candidates, key=lambda each: -each[0])[:2 * beams]
        following = []
        for rank, (total, place, token) in enumerate(candidates):
            if token == stop:
                if rank < beams:
                    add(total, open_beams[place][1], step)
            elif len(following) < beams:
                following.append((total, open_beams[place][1] + [token]))
        open_beams = following
        if len(finished) == beams and finished[-1][0] >= candidates[0][0] / step**penalty:
            return finished[0][1]
    for total, text in open_beams:
        add(total, text, new)
    return finished[0][1]


def test_beams_of_megatron():
    model, reference = pair("gpt2")
    ids, mask = prompts(6)

    def logits_of(tokens):
        with torch.no_grad():
            return reference(torch.tensor([tokens])).logits[0, -1]

    for beams, penalty in ((2, 1.0), (4, 1.5), (3, 0.3)):
        own = model.megatron_generate(ids, mask, max_new_tokens=8, num_beams=beams, length_penalty=penalty)
        for row in range(6):
            prompt = ids[row][mask[row] == 1].tolist()
            text = prompt + megatron_beams(logits_of, prompt, beams, 8, 2, penalty)
            assert own[row, :len(text)].tolist() == text and (own[row, len(text):] == 2).all()


@pytest.mark.parametrize("call, part", [
    (dict(), "max_new_tokens is required"), (dict(max_new_tokens=0), "max_new_tokens"), (dict(max_length=9), "leaves no room"),
    (dict(max_new_tokens=2, temperature=0.0), "temperature"), (dict(max_new_tokens=2, temperature=101), "temperature"),
    (dict(max_new_tokens=2, top_k=1001), "top_k"), (dict(max_new_tokens=2, top_p=1.5), "top_p"),
    (dict(max_new_tokens=2, top_p_decay=2.0), "top_p_decay"), (dict(max_new_tokens=2, num_beams=0), "num_beams"),
    (dict(max_new_tokens=2, num_beams=2.5), "num_beams"), (dict(max_new_tokens=2, top=3), "does not know top"),
    (dict(max_new_tokens=2, stop_token=99), "99"), (dict(max_new_tokens=2, prevent_newline_after_colon=True), "newline")], ids=str)
def test_what_megatron_generate_refuses(call, part):
    _, model, _ = prepared()
    with pytest.raises(ValueError, match=part):
        model.eval().megatron_generate(torch.ones((2, 9), dtype=torch.long), **call)


def test_prompts_that_cannot_be():
    _, model, _ = prepared()
    model.eval()
    ids = torch.ones((2, 4), dtype=torch.long)
    for given, mask, part in ((ids, [[1, 1, 1, 1], [0, 0, 0, 0]], "all padding"), (ids, [[1, 0, 1, 1], [1] * 4], "between"),
                              (ids * 99, None, "99"), (ids.float(), None, "whole numbers"), (ids[0], None, "whole numbers"),
                              (torch.ones((1, 17), dtype=torch.long), None, "17")):
        with pytest.raises(ValueError, match=part):
            model.megatron_generate(given, None if mask is None else torch.tensor(mask), max_new_tokens=3)


def test_what_generate_refuses_and_passes(caplog):
    model, _ = pair("llama")
    ids, mask = prompts(1)
    for more, part in ((dict(no_repeat_ngram_size=3), "no_repeat_ngram_size"), (dict(penalty_alpha=0.5), "penalty_alpha"),
                       (dict(nonsense=1), "nonsense"), (dict(num_beams=2, do_sample=True), "do_sample"),
                       (dict(num_return_sequences=2), "num_return_sequences"), (dict(stop_strings=["a"]), "tokenizer"),
                       (dict(return_dict_in_generate=True), "return_dict_in_generate")):
        with pytest.raises(ValueError, match=part):
            model.generate(ids, attention_mask=mask, max_new_tokens=3, **more)
    for more in (dict(min_new_tokens=9), dict(min_length=20)):
        assert model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, **more).shape[1] == ids.shape[1] + 3
    assert [record.getMessage() for record in caplog.records if "at most 3" in record.getMessage()] == [
        f"generate() was asked for at least {least} new tokens and at most 3: texts have 3" for least in (9, 20 - ids.shape[1])]
    words = type("Words", (), {"decode": staticmethod(lambda ids: " ".join(map(str, ids)))})
    text = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=[])[0, 9:].tolist()
    cut = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=[], stop_strings=f"{text[2]}",
                         tokenizer=words)
    assert cut[0, 9:].tolist() == text[:text.index(text[2]) + 1]
    seen = []
    streamer = type("Streamer", (), {"put": staticmethod(lambda ids: seen.extend(ids.flatten().tolist())), "end": staticmethod(list)})
    model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=[], streamer=streamer)
    assert seen == ids[0].tolist() + text
    drawn = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True, num_return_sequences=3, random_seed=2)
    assert drawn.shape[0] == 3 and len({tuple(row) for row in drawn.tolist()}) > 1


def test_texts_between_steps():
    """Generation reads the weights of the last step, and leaves the training as it was."""
    from plugin_support import step

    accelerator, model, optimizer = prepared()
    ids = torch.ones((2, 3), dtype=torch.long)
    losses = []
    for _ in range(3):
        losses.append(step(accelerator, model, optimizer))
        text = model.megatron_generate(ids, max_new_tokens=4, top_k=1, stop_token=None)
        with torch.no_grad():
            model.eval()
            assert torch.equal(model(input_ids=text[:, :-1]).logits[:, -1].argmax(-1), text[:, -1])
            model.train()
    accelerator, model, optimizer = prepared()
    assert [step(accelerator, model, optimizer) for _ in range(3)] == losses
