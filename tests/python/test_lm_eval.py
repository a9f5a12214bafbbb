"""tessera.integrations.lm_eval under EleutherAI's harness itself: three tasks over local files, beside the harness's own model class."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval", reason="pip install lm-eval")

COMMON = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\nmetadata:\n  version: 1\n"
TASKS = {
    "own_choices": ("output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
                    "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
                    [{"question": "the cat sat on", "choices": ["the mat", "a dog and a cat"], "answer": 0},
                     {"question": "one and one is", "choices": ["two", "three", "a"], "answer": 2}]),
    "own_perplexity": ("output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list:\n  - metric: word_perplexity\n"
                       "  - metric: bits_per_byte\n",
                       [{"text": "the cat sat on the mat " * 9}, {"text": "one and one is two"}]),
    "own_texts": ("output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\ngeneration_kwargs:\n"
                  "  until: ['cat']\n  max_gen_toks: 7\n  do_sample: false\nmetric_list:\n  - metric: exact_match\n",
                  [{"question": "the cat sat", "answer": "x"}, {"question": "one and one is two and", "answer": "y"}]),
}


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = "[UNK] <end> the cat sat on mat one and is two three a dog".split()
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="[UNK]")


def results(model, names, folder):
    from lm_eval.tasks import TaskManager

    done = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=TaskManager(include_path=str(folder), include_defaults=False),
                                   log_samples=True, bootstrap_iters=0)
    samples = {name: [sample["filtered_resps"] for sample in done["samples"][name]] for name in names}
    numbers = {name: {key: value for key, value in done["results"][name].items() if isinstance(value, float)} for name in names}
    return numbers, samples


def test_three_tasks_as_by_transformers(tmp_path):
    from lm_eval.models.huggingface import HFLM
    from tessera import Accelerator
    from tessera.integrations.lm_eval import TesseraLM

    for name, (text, lines) in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n" + COMMON.format(data=data) + text)
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=4, vocab_size=14, n_positions=16, initializer_range=0.5, bos_token_id=1, eos_token_id=1)).eval()
    expected = results(HFLM(pretrained=reference, tokenizer=tokenizer, device="cpu", batch_size=1, max_length=16), list(TASKS), tmp_path)
    model = Accelerator(cpu=True).prepare(transformers.GPT2LMHeadModel.from_pretrained(saved(reference, tmp_path)))
    numbers, samples = results(TesseraLM(model, tokenizer), list(TASKS), tmp_path)
    assert [len(numbers[name]) for name in TASKS] == [2, 2, 1] and all(samples.values())
    for name in TASKS:
        assert numbers[name] == pytest.approx(expected[0][name], rel=1e-5), (name, numbers[name])
    assert samples["own_texts"] == expected[1]["own_texts"]


def saved(model, folder):
    model.save_pretrained(folder / "model")
    return folder / "model"
