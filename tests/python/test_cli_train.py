"""tessera train: killed, interrupted, resumed, and given what it cannot use."""

import json
import shutil
import signal

import pytest
from cli_support import metrics, run, shards, start, text_documents, wait_for_lines, write_config, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", text_documents())


def same(lines: list) -> list:
    """What must not depend on interruptions; the floats as they were printed."""
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens", "skipped")} for line in lines]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_and_resumed_is_the_uninterrupted_run(tessera_program, tmp_path, corpus, precision):
    settings = {"training__steps": 50, "checkpoint__every": 8, "training__precision": precision}
    run(tessera_program, "train", write_config(tmp_path, corpus, "straight", **settings))
    config = write_config(tmp_path, corpus, "killed", **settings)
    process = start(tessera_program, config)
    wait_for_lines(process, tmp_path / "killed", 13)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    again = run(tessera_program, "train", config)
    assert "resuming from" in again.stderr
    lines = metrics(tmp_path / "killed")
    assert [line["step"] for line in lines] == list(range(1, 51))
    assert same(lines) == same(metrics(tmp_path / "straight"))
    assert shards(tmp_path / "killed") == shards(tmp_path / "straight")


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_ends_the_run_after_the_step(tessera_program, tmp_path, corpus, saves):
    config = write_config(tmp_path, corpus, training__steps=2000, checkpoint__every=0, checkpoint__on_interrupt=saves)
    process = start(tessera_program, config)
    wait_for_lines(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    last = metrics(tmp_path / "run")[-1]["step"]
    assert f"interrupted after step {last}" in error
    saved = tmp_path / f"run/checkpoints/step-{last:08d}"
    assert saved.is_dir() == saves
    assert (str(saved) in error) == saves
    run(tessera_program, "train", config, f"training.steps={last + 2}", "lr_schedule.decay_steps=2000")
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, last + 3))


def test_trains_evaluates_and_reports(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus, training__steps=40, training__eval_interval=20, training__eval_iters=1)
    done = run(tessera_program, "train", config)
    assert "done: step 40" in done.stdout and "validation loss" in done.stdout
    lines = metrics(tmp_path / "run")
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_ms", "peak_mem_bytes",
            "skipped"} <= lines[0].keys()
    assert lines[-1]["tokens"] == 40 * 4 * 48
    assert [line["step"] for line in lines if "eval_loss" in line] == [20, 40]
    assert "nothing to do" in run(tessera_program, "train", config).stdout


def refused(program, code, config, *overrides, parts, env={}):
    error = run(program, "train", config, *overrides, code=code, env=env).stderr
    for part in parts:
        assert str(part) in error, error
    assert "error:" in error
    return error


def test_configurations_it_cannot_use(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus)
    lines = config.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  steps:"))
    lines[at] = "  stepz: 3"
    config.write_text("\n".join(lines) + "\n")
    refused(tessera_program, 2, config, parts=[f"{config}:{at + 1}:3", "stepz", "steps"])
    config = write_config(tmp_path, corpus)
    refused(tessera_program, 2, config, "training.seq_length=49", parts=["training.seq_length", "max_positions", 49, 48])
    refused(tessera_program, 2, config, "model.num_heads=5", parts=["model.num_heads", 5, 48])
    refused(tessera_program, 2, config, "training.steps=many", parts=["training.steps", "many"])
    refused(tessera_program, 2, config, "training.stepz=3", parts=["training.stepz=3", "did you mean 'steps'"])
    refused(tessera_program, 2, config, "parallel.tensor=5", parts=["parallel.tensor", "model.num_heads"])
    refused(tessera_program, 2, config, "parallel.context=5", parts=["parallel.context", "training.seq_length", "multiple of 10"])
    misspelt = ['optimizer.no_decay=["*.bias", "*.qvk.weight"]', "parallel.pipeline=2"]
    refused(tessera_program, 2, config, *misspelt, parts=["optimizer.no_decay", '"*.qvk.weight" matches no parameter', "qkv"])
    launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    refused(tessera_program, 2, config, "parallel.data=3", parts=["parallel.data", 3, 2], env=launched)
    refused(tessera_program, 2, tmp_path / "absent.yaml", parts=["absent.yaml"])
    assert not (tmp_path / "run").exists()


def test_recompute_auto_is_settled_before_anything_starts(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus, "auto", parallel__pipeline=2, training__recompute="auto", device__type="cpu")
    block = ["training.recompute=full", "training.recompute_method=block"]
    planned = json.loads(run(tessera_program, "plan", config, *block, "--json").stdout)
    limit = max(rank["memory_bytes"] for rank in planned["ranks"])

    refused = run(tessera_program, "train", config, f"device.memory_gb={(limit - 1) / 1e9!r}", code=2).stderr
    assert "auto finds nothing that fits into" in refused and "What fits:" in refused
    assert not (tmp_path / "auto").exists()

    done = run(tessera_program, "train", config, f"device.memory_gb={limit / 1e9!r}")
    assert done.stderr.count("training.recompute auto is full (block, 1 layer), the first that fits into") == 1
    saved = (tmp_path / "auto/config.yaml").read_text()
    assert "recompute: full\n" in saved and "recompute_method: block\n" in saved
    by_hand = write_config(tmp_path, corpus, "by_hand", parallel__pipeline=2)
    run(tessera_program, "train", by_hand, *block)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("auto", "by_hand")]
    assert losses[0] == losses[1]
    # More memory, another choice, the same run: it goes on.
    again = run(tessera_program, "train", config, "training.steps=8", "lr_schedule.decay_steps=6", "device.memory_gb=1").stderr
    assert "training.recompute changes from full to none" in again and "auto is none, the first" in again
    assert [line["step"] for line in metrics(tmp_path / "auto")] == list(range(1, 9))


def test_data_it_cannot_use(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, tmp_path / "nowhere")
    error = run(tessera_program, "train", config, code=4).stderr
    assert "nowhere" in error

    broken = tmp_path / "broken"
    for suffix in (".idx", ".bin"):
        shutil.copy(corpus.with_suffix(suffix), broken.with_suffix(suffix))
    broken.with_suffix(".bin").write_bytes(corpus.with_suffix(".bin").read_bytes()[:-2])
    refused(tessera_program, 4, write_config(tmp_path, broken), parts=["broken.bin"])
    broken.with_suffix(".idx").write_bytes(corpus.with_suffix(".idx").read_bytes()[:40])
    refused(tessera_program, 4, write_config(tmp_path, broken), parts=["broken.idx"])

    refused(tessera_program, 4, write_config(tmp_path, corpus, model__vocab_size=200, data__tokenizer="some/tokenizer.json"),
            parts=["corpus", 256, 200])
    refused(tessera_program, 4, write_config(tmp_path, corpus, model__init_from=str(tmp_path / "no_model")), parts=["no_model"])
    # None of these tries stands in the way of the right one.
    run(tessera_program, "train", write_config(tmp_path, corpus, training__seq_length=32))


def test_folders_it_must_not_use(tessera_program, tmp_path, corpus):
    foreign = tmp_path / "run"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("words")
    config = write_config(tmp_path, corpus)
    refused(tessera_program, 2, config, parts=[foreign, "not empty"])
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]

    config = write_config(tmp_path, corpus, "mine")
    run(tessera_program, "train", config)
    before = metrics(tmp_path / "mine")
    refused(tessera_program, 2, config, "model.num_layers=3", parts=["model.num_layers: 2 there, 3 here", "another run"])
    refused(tessera_program, 2, config, "checkpoint.resume=none", parts=["checkpoint.resume=none"])
    assert metrics(tmp_path / "mine") == before
    (tmp_path / "file").write_text("words")
    done = run(tessera_program, "train", config, f"logging.dir={tmp_path}/file/run", code=3)
    assert "file/run" in done.stderr


def test_a_diverging_run_stops(tessera_program, tmp_path, corpus):
    config = write_config(tmp_path, corpus, training__steps=50, training__max_skipped_steps=3, optimizer__lr=1e30,
                          optimizer__clip_grad=0.0, lr_schedule__warmup_steps=0)
    error = refused(tessera_program, 6, config, parts=["not finite 3 steps in a row", "optimizer.lr", "loss nan"])
    assert "-nan" not in error
    lines = metrics(tmp_path / "run")
    assert lines[-1]["loss"] is None and lines[-1]["skipped"] >= 2
