"""The scripts of examples/python, run as their users run them; what a layout prints is what one process prints."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import List

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/python"
LAYOUT = EXAMPLES / "configs/megatron_tp2_pp2.yaml"
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all of them run, one after the other."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def run(python_build, folder):
    """Runs a script there and returns what it printed."""
    def start(script: str, *arguments, layout: bool = False, plain: bool = False) -> str:
        launcher = python_build.launcher("--quiet", "--config_file", LAYOUT) if layout else None
        return python_build.run(EXAMPLES / script, "--steps", STEPS, *arguments, launcher=launcher, cwd=folder, plain=plain).stdout

    return start


def losses(output: str) -> List[float]:
    found = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(found) >= STEPS, output
    return found


@pytest.fixture(scope="module")
def pretrained(run, folder) -> List[float]:
    """The losses of the first example, which leaves a model for the second."""
    return losses(run("1_pretrain.py", "--output", "runs/pretrained"))


def test_pretraining_writes_a_model_that_transformers_loads(pretrained, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "runs/pretrained")
    assert model.config.vocab_size == 257 and model.num_parameters() > 100_000
    assert pretrained[-1] < pretrained[0]


def test_pretraining_on_four_processes(run, pretrained):
    printed = run("1_pretrain.py", "--output", "runs/layout", layout=True, plain=True)
    assert losses(printed) == pytest.approx(pretrained, rel=1e-5)


def test_finetuning_starts_from_that_model(run, pretrained, folder):
    assert losses(run("2_finetune_hf.py", "--model", "runs/pretrained"))[0] > 0
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(folder / f"runs/{name}").state_dict()
                     for name in ("pretrained", "finetuned"))
    moved = max((before[name] - after[name]).abs().max().item() for name in before)
    assert 0 < moved < 0.02, "two steps at a rate of 1e-3 move weights a little; other ones have not been read"


def expected_first_loss(monkeypatch) -> float:
    """The keyword-weighted loss of the third example's first step, in plain PyTorch."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("custom_loss", EXAMPLES / "3_custom_loss.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(7)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=257, n_positions=64, bos_token_id=256, eos_token_id=256, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0))
    tokens = torch.stack([row["input_ids"] for row in example.rows_of_text(16 * STEPS, 64)[:16]])
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)
    texts = [bytes(row.tolist()) for row in tokens]
    keywords = torch.tensor([text.count(b"def ") + text.count(b"return") for text in texts])
    assert keywords.sum() > 0, "no keyword is in the first samples, so nothing is tested"
    return ((1 + 0.5 * keywords) * each).mean().item()


def test_custom_loss(run, monkeypatch):
    assert losses(run("3_custom_loss.py"))[0] == pytest.approx(expected_first_loss(monkeypatch), rel=1e-5)


def test_custom_loss_on_four_processes(run, monkeypatch, long_run):
    if not long_run:
        pytest.skip("the long run has it (--long)")
    assert losses(run("3_custom_loss.py", layout=True))[0] == pytest.approx(expected_first_loss(monkeypatch), rel=1e-5)


def test_indexed_data(run, tessera_program, folder, source_dir):
    documents = [*(source_dir / "docs").glob("*.md"), *(source_dir / "docs/guides").glob("*.md")]
    subprocess.run([str(tessera_program), "preprocess", "--input", *map(str, documents), "--append-eod", "--output-prefix",
                    "data/docs"], cwd=folder, check=True, capture_output=True, timeout=60)
    output = run("4_indexed_data.py", "--data", "data/docs_text_document")
    assert "test loss" in output and 4 < losses(output)[0] < 7


def test_logits_and_metrics(run, folder):
    assert "of 20 samples" in run("5_logits_and_metrics.py")
    lines = [json.loads(line) for line in (folder / "runs/logits/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[1]["loss"] < lines[0]["loss"] and 0 <= lines[2]["accuracy"] <= 1


def test_masked_lm_and_classification(run, folder):
    assert losses(run("7_masked_lm.py", "--output", "runs/masked_lm"))[0] == pytest.approx(torch.tensor(1000.0).log().item(), rel=0.05)
    assert transformers.AutoModelForMaskedLM.from_pretrained(folder / "runs/masked_lm").config.vocab_size == 1000
    printed = run("8_classify.py", "--model", "runs/masked_lm")
    assert losses(printed)[0] == pytest.approx(torch.tensor(4.0).log().item(), rel=0.3) and "of 400 lines" in printed
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "runs/classifier")
    assert saved.config.num_labels == 4 and saved.config.architectures == ["BertForSequenceClassification"]


def test_classification_on_four_processes(run, folder, long_run):
    """The masks of the first depend on sizes of batches, the second has none."""
    if not long_run:
        pytest.skip("the long run has it (--long)")
    run("7_masked_lm.py", "--output", "runs/layout_lm", layout=True)
    alone, layout = (run("8_classify.py", "--model", "runs/layout_lm", layout=layout) for layout in (False, True))
    assert losses(alone)[0] > 0 and "of 400 lines" in layout


def test_summarization(run, folder, monkeypatch):
    printed = run("9_summarize.py", "--functions", 40, "--held-out", 10)
    assert losses(printed)[0] > 3 and "of 10 summaries" in printed and "ROUGE-L of 8 summaries: " in printed
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "runs/summarizer").config.vocab_size == 384
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("summarize", EXAMPLES / "9_summarize.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for said, reference, score in (("the cat sat", "the cat sat", 1.0), ("a b c d", "b x d", 4 / 7), ("", "x", 0.0), ("x y", "z", 0.0)):
        assert example.rouge_l(said, reference) == pytest.approx(score)


def test_summarization_on_four_processes(run, long_run):
    if not long_run:
        pytest.skip("the long run has it (--long)")
    alone, layout = (run("9_summarize.py", "--functions", 40, "--held-out", 10, layout=layout) for layout in (False, True))
    assert losses(layout)[0] == pytest.approx(losses(alone)[0], rel=1e-5) and "of 10 summaries" in layout


def test_generation_writes_the_same_on_four_processes(run):
    alone, layout = (run("10_generation.py", "--steps", 6, "--lines", 600, layout=layout) for layout in (False, True))
    assert losses(layout) == pytest.approx(losses(alone), rel=1e-5)
    written = [[line for line in output.splitlines() if line.startswith(("the likeliest", "top-", "beam"))] for output in (alone, layout)]
    assert len(written[0]) == 17 and written[0] == written[1]
    assert all(prompt in line for prompt, line in zip(("def __init__(self", "return", "if not isinstance(", "import"), written[0]))


def rewards(output: str) -> List[float]:
    return [float(reward) for reward in re.findall(r"reward (\d+\.\d+)", output)]


def test_policy_gradient_raises_the_reward_on_every_layout(python_build, folder, long_run):
    """The texts a step learns from are those of one process, so the rewards are its too."""
    script = [EXAMPLES / "11_policy_gradient.py", "--steps", 8, "--texts", 32]
    alone = rewards(python_build.run(*script, cwd=folder).stdout)
    assert len(alone) == 3 and alone[-1] > 2 * alone[0] > 0
    layouts = [["--config_file", EXAMPLES / "configs/megatron_tp2.yaml"], ["--num_processes", 2, "--cpu"]]
    for flags in layouts if long_run else layouts[:1]:
        layout = python_build.run(*script, launcher=python_build.launcher("--quiet", *flags), cwd=folder).stdout
        assert rewards(layout) == pytest.approx(alone, abs=1e-3), flags
