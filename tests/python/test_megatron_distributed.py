"""Megatron's format torch_dist: one checkpoint for all layouts, written here with torch.distributed.checkpoint by the names and
shapes that Megatron Core gives its tensors."""

import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch.distributed.checkpoint as dcp  # noqa: E402
from cli_support import run  # noqa: E402
from megatron_writer import rank_states  # noqa: E402
from test_megatron_checkpoints import failing, random_model, same, to_hf  # noqa: E402


def write(folder: Path, model, *, era: str = "core te", stacked: bool = True, change=None, **options) -> Path:
    """FOLDER/iter_0000007: common.pt and the tensors; `stacked`: those of equal layers are one, as Megatron has it unless layers differ."""
    state = rank_states(model, era=era, **options)[0, 0]
    tensors = {name: value.contiguous() for name, value in state.pop("model").items() if value is not None}
    state.pop("optimizer")
    if stacked:
        layers = [name for name in tensors if ".layers.0." in name]
        for name in layers:
            each = [tensors.pop(name.replace(".layers.0.", f".layers.{i}.")) for i in range(model.config.num_hidden_layers)]
            tensors[name.replace(".layers.0.", ".layers.")] = torch.stack(each)
    moments = {f"optimizer.state.exp_avg.{name}": torch.zeros_like(value) for name, value in tensors.items()}
    tensors |= moments | {"rng_state": torch.zeros(3, dtype=torch.uint8)}
    if change:
        change(state, tensors)
    place = folder / "iter_0000007"
    dcp.save(tensors, checkpoint_id=place)
    torch.save(state, place / "common.pt")
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.mark.parametrize("kind, options", [("gpt2", {}), ("gpt2", {"era": "core local", "stacked": False}), ("llama", {}),
                                           ("llama", {"tied": False}), ("gpt2", {"vocabulary": False})])
def test_it_is_read(tessera_program, tmp_path, kind, options):
    options = dict(options)
    model = random_model(kind, tied=options.pop("tied", True))
    source = write(tmp_path / "dist", model, **options)
    more = [] if options.get("vocabulary", True) else ["--vocab_size", 61]
    same(to_hf(tessera_program, source, tmp_path / "hf", *more), model)
    # ... and from there to ranks' files of the older format.
    run(tessera_program, "convert", "--from", "megatron", source / "iter_0000007", "--to", "megatron", tmp_path / "old", "--tensor", 2, *more)
    same(to_hf(tessera_program, tmp_path / "old", tmp_path / "hf2"), model)


def test_what_does_not_fit_is_refused(tessera_program, tmp_path):
    model = random_model("gpt2")

    def refused(name: str, change, *words: str, more=()) -> None:
        source = write(tmp_path / name, model, change=change)
        done = failing(tessera_program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "out", *more)
        assert all(word in done.stderr for word in words), done.stderr
        assert not (tmp_path / "out").exists()

    weight = "decoder.layers.mlp.linear_fc2.weight"
    refused("missing", lambda _, t: t.pop(weight), "missing: decoder.layers.0.mlp.linear_fc2.weight")
    refused("fewer", lambda _, t: t.update({weight: t[weight][:3]}), "missing: decoder.layers.3.mlp.linear_fc2.weight")
    refused("more", lambda _, t: t.update({weight: torch.cat([t[weight], t[weight][:1]])}), "unexpected: decoder.layers.4.mlp.linear_fc2.weight")
    refused("shape", lambda _, t: t.update({weight: t[weight].transpose(1, 2).contiguous()}), "decoder.layers.0.mlp.linear_fc2.weight is float32 [96, 24]")
    refused("other", lambda _, t: t.update({"decoder.layers.mlp.router.weight": torch.zeros(4, 2)}), "unexpected: decoder.layers.0.mlp.router.weight")
    refused("old", lambda s, _: s.update(checkpoint_version=1.0), "checkpoint_version", "not one of this format")
    refused("run", None, "torch_dist, whose optimizer's state is not read", more=["--with_optimizer"])
    source = write(tmp_path / "common", model)
    (source / "iter_0000007" / "common.pt").unlink()
    done = failing(tessera_program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "out")
    assert "common.pt" in done.stderr
    shutil.rmtree(source)
