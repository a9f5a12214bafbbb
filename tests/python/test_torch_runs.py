"""Runs of DeepSpeed and of torch.distributed.checkpoint that go on in Tessera, against plain torch."""

from pathlib import Path

import pytest
from cli_support import metrics, run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch.distributed.checkpoint as dcp  # noqa: E402
from deepspeed_writer import write_stage2, write_stage3, write_universal  # noqa: E402
from megatron_runs import lr_at  # noqa: E402
from test_megatron_checkpoints import failing  # noqa: E402
from test_megatron_runs import Started, close, corpus, go_on, gpt2, llama  # noqa: E402, F401

SETTINGS = """
optimizer: {lr: 2.0e-3, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1, clip_grad: 1.0}
lr_schedule: {style: cosine, decay_steps: 20, warmup_steps: 5, min_lr: 2.0e-4}
training: {steps: 20, seq_length: 12, micro_batch_size: 2, global_batch_size: 4, eval_interval: 0}
data: {path: corpus, split: "100,0,0"}
checkpoint: {every: 1000}
"""


def settings(folder: Path, text: str = SETTINGS) -> Path:
    (folder / "settings.yaml").write_text(text)
    return folder / "settings.yaml"


def names(model) -> list:
    return [name for name, _ in model.named_parameters()]


def write_dcp(started: Started, folder: Path) -> Path:
    """As get_state_dict lays an optimizer out: by names."""
    averages, squares = (dict(each.named_parameters()) for each in (started.averages, started.squares))
    state = {name: {"step": torch.tensor(float(started.updates)), "exp_avg": averages[name].detach(), "exp_avg_sq": squares[name].detach()}
             for name in names(started.model)}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(state)}]
    dcp.save({"model": started.model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}, checkpoint_id=folder)
    return folder


def write_fsdp(started: Started, folder: Path) -> Path:
    """As Accelerate saves FSDP's shards."""
    whole = write_dcp(started, folder / "whole")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name).symlink_to(whole, target_is_directory=True)
    return folder


FORMS = {
    "dcp": ("dcp", write_dcp),
    "fsdp": ("accelerate", write_fsdp),
    "zero 2": ("deepspeed", lambda s, folder: write_stage2(s.model, folder, 3, moments=(s.averages, s.squares), updates=s.updates)),
    "zero 2, padded": ("deepspeed", lambda s, folder: write_stage2(s.model, folder, 2, padded=True, moments=(s.averages, s.squares))),
    "zero 3": ("deepspeed", lambda s, folder: write_stage3(s.model, folder, 2, moments=(s.averages, s.squares), updates=s.updates)),
    "universal": ("deepspeed", lambda s, folder: write_universal(s.model, folder, moments=(s.averages, s.squares), updates=s.updates)),
}


def to_run(program, started: Started, form: str, folder: Path, *more):
    kind, write = FORMS[form]
    started.model.config.save_pretrained(folder / "config")
    return run(program, "convert", "--from", kind, write(started, folder / "theirs"), "--hf_config", folder / "config", "--to", "tessera",
               folder / "run", "--with_optimizer", "--settings", settings(folder), *more)


@pytest.mark.parametrize("kind, form, parallel", [("gpt2", "dcp", []), ("llama", "fsdp", ["parallel.tensor=2"]), ("gpt2", "zero 2", []),
                                                  ("llama", "zero 2, padded", ["parallel.pipeline=2", "parallel.data=2"]),
                                                  ("gpt2", "zero 3", ["parallel.data=2"]), ("gpt2", "universal", [])])
def test_it_goes_on_as_with_torch(tessera_program, tmp_path, request, corpus, kind, form, parallel):  # noqa: F811
    started = request.getfixturevalue(kind)
    to_run(tessera_program, started, form, tmp_path)
    go_on(tessera_program, tmp_path / "run", corpus, started.updates + started.more, *parallel)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 5, 6, 7]
    assert [line["lr"] for line in lines] == pytest.approx([lr_at(update) for update in range(3, 7)])
    close(tessera_program, tmp_path / "run", started, tmp_path)


def test_what_no_run_goes_on_from_is_refused(tessera_program, tmp_path, gpt2):  # noqa: F811
    gpt2.model.config.save_pretrained(tmp_path / "config")

    def refused(kind: str, source: Path, *words: str, text: str = SETTINGS) -> None:
        done = failing(tessera_program, "convert", "--from", kind, source, "--hf_config", tmp_path / "config", "--to", "tessera",
                       tmp_path / "run", "--with_optimizer", "--settings", settings(tmp_path, text))
        assert all(word in done.stderr for word in words), done.stderr
        assert not (tmp_path / "run").exists()

    dcp.save({"model": gpt2.model.state_dict()}, checkpoint_id=tmp_path / "bare")
    refused("dcp", tmp_path / "bare", "holds no 'exp_avg' of an optimizer")
    refused("deepspeed", write_stage2(gpt2.model, tmp_path / "two", 2), "groups")
    whole = write_dcp(gpt2, tmp_path / "whole")
    refused("dcp", whole, "training.steps (3)", "of step 3", text=SETTINGS.replace("steps: 20, seq", "steps: 3, seq"))
    refused("dcp", whole, "optimizer.name is sgd", text=SETTINGS.replace("{lr: 2.0e-3, betas: [0.9, 0.95], eps: 1.0e-8", "{name: sgd, lr: 2.0e-3"))
    refused("dcp", whole, "not the model of config.json", text=SETTINGS + "model: {family: gpt2, num_layers: 3, hidden_size: 24, num_heads: 3}")
    gpt2.model.save_pretrained(tmp_path / "plain")
    refused("accelerate", tmp_path / "plain", "optimizer.bin have numbers")
    done = failing(tessera_program, "convert", "--from", "dcp", whole, "--to", "tessera", tmp_path / "run", "--with_optimizer")
    assert "--settings CONFIG.yaml" in done.stderr
