"""Megatron's format torch_dist: one checkpoint for all layouts, written here with torch.distributed.checkpoint by the names and
shapes that Megatron Core gives its tensors."""

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch.distributed.checkpoint as dcp  # noqa: E402
from cli_support import run  # noqa: E402
from megatron_writer import rank_states  # noqa: E402
from megatron_runs import stacked, write_dist_run  # noqa: E402
from test_megatron_checkpoints import failing, random_model, same, to_hf  # noqa: E402
from test_megatron_runs import (Started, close, corpus, go_on, llama, plain, refused, same_run, settings, tensors,  # noqa: E402, F401
                                to_megatron, to_run)
from test_megatron_runs import gpt2  # noqa: E402, F401


def write(folder: Path, model, *, era: str = "core te", together: bool = True, change=None, **options) -> Path:
    """FOLDER/iter_0000007: common.pt and the tensors; `together`: those of equal layers are one, as Megatron has it unless layers differ."""
    state = rank_states(model, era=era, **options)[0, 0]
    tensors = {name: value.contiguous() for name, value in state.pop("model").items() if value is not None}
    state.pop("optimizer")
    if together:
        tensors = stacked(tensors, model.config.num_hidden_layers)
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


@pytest.mark.parametrize("kind, options", [("gpt2", {}), ("gpt2", {"era": "core local", "together": False}), ("llama", {}),
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

    def unfit(name: str, change, *words: str, more=()) -> None:
        source = write(tmp_path / name, model, change=change)
        done = failing(tessera_program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "out", *more)
        assert all(word in done.stderr for word in words), done.stderr
        assert not (tmp_path / "out").exists()

    weight = "decoder.layers.mlp.linear_fc2.weight"
    unfit("missing", lambda _, t: t.pop(weight), "missing: decoder.layers.0.mlp.linear_fc2.weight")
    unfit("fewer", lambda _, t: t.update({weight: t[weight][:3]}), "missing: decoder.layers.3.mlp.linear_fc2.weight")
    unfit("more", lambda _, t: t.update({weight: torch.cat([t[weight], t[weight][:1]])}), "unexpected: decoder.layers.4.mlp.linear_fc2.weight")
    unfit("shape", lambda _, t: t.update({weight: t[weight].transpose(1, 2).contiguous()}), "decoder.layers.0.mlp.linear_fc2.weight is float32 [96, 24]")
    unfit("other", lambda _, t: t.update({"decoder.layers.mlp.router.weight": torch.zeros(4, 2)}), "unexpected: decoder.layers.0.mlp.router.weight")
    unfit("old", lambda s, _: s.update(checkpoint_version=1.0), "checkpoint_version", "not one of this format")
    source = write(tmp_path / "common", model)
    (source / "iter_0000007" / "common.pt").unlink()
    done = failing(tessera_program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "out")
    assert "common.pt" in done.stderr
    shutil.rmtree(source)


def written(started, folder: Path, **options) -> Path:
    return write_dist_run(folder, started.model, started.averages, started.squares, **{"updates": started.updates} | options)


@pytest.mark.parametrize("kind, options, parallel", [
    ("gpt2", {"kind": "fp32", "torch_step": True}, []), ("gpt2", {"kind": "flat fp32"}, ["parallel.tensor=2"]),
    ("llama", {"kind": "reshardable fp32"}, ["parallel.pipeline=2"])])
def test_a_run_goes_on_as_with_torch(tessera_program, tmp_path, request, corpus, kind, options, parallel):  # noqa: F811
    started = request.getfixturevalue(kind)
    to_run(tessera_program, written(started, tmp_path / "megatron", **options), tmp_path / "run")
    go_on(tessera_program, tmp_path / "run", corpus, started.updates + started.more, *parallel)
    close(tessera_program, tmp_path / "run", started, tmp_path)


@pytest.mark.parametrize("options", [{"kind": "bf16"}, {"kind": "fp16", "iteration": 5}, {"kind": "reshardable bf16"},
                                     {"kind": "flat fp16", "iteration": 5}, {"kind": "flat bf16", "layers_apart": True}])
def test_every_form_of_the_optimizer_holds_the_same(tessera_program, tmp_path, gpt2, plain, options):  # noqa: F811
    to_run(tessera_program, written(gpt2, tmp_path / "megatron", **options), tmp_path / "run")
    same_run(tensors(tmp_path / "run", options.get("iteration", 3)), plain)
    scale = "1024" if "fp16" in options["kind"] else None
    assert scale is None or f'"loss_scale": {scale}' in (tmp_path / f"run/checkpoints/step-{5:08d}/manifest.json").read_text()


def test_runs_that_are_not_read(tessera_program, tmp_path, gpt2):  # noqa: F811
    def broken(name: str, *words: str, change=None, **options):
        refused(tessera_program, written(gpt2, tmp_path / name, change=change, **options), tmp_path, *words)

    moment = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    broken("none", "there is none in this checkpoint", change=lambda s, _: s.pop("optimizer"))
    broken("chain", "chained", change=lambda s, _: s.update(optimizer={0: {}, 1: {}}))
    for kind in ("dp_reshardable", "dp_zero_gather_scatter"):
        broken(kind, f"'{kind}' follows the layout", "--dist-ckpt-optim-fully-reshardable", kind="reshardable bf16",
               change=lambda s, _, kind=kind: s["optimizer"].update(param_state_sharding_type=kind))
    broken("moment", "decoder.layers.0.mlp.linear_fc1.weight", "its exp_avg is missing", change=lambda _, t: t.pop(moment))
    broken("shape", "its exp_avg is float32 [95, 24]", change=lambda _, t: t.update({moment: t[moment][:, 1:].contiguous()}))
    broken("more", "decoder.layers.4.mlp.linear_fc1.weight: the exp_avg of no weight", change=lambda _, t: t.update({moment: torch.cat([t[moment], t[moment][:1]])}))
    broken("type", "needs as many float32", kind="bf16", change=lambda _, t: t.update({moment: t[moment].bfloat16()}))
    broken("masters", "its main weight is missing", kind="bf16",
           change=lambda _, t: t.pop("optimizer.state.fp32_param.decoder.final_layernorm.weight"))
    broken("other", "rounded they are not the model's", kind="reshardable bf16",
           change=lambda _, t: t["optimizer.state.param.decoder.final_layernorm.weight"].mul_(1.5))
    broken("uncounted", "does not say how many updates", change=lambda s, _: [g.pop("step") for g in s["optimizer"]["param_groups"]])
    broken("groups", "does not say how many updates", kind="flat bf16",
           change=lambda _, t: t.pop("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"))
    broken("blob", "is a dict, not a list of one", kind="flat bf16",
           change=lambda _, t: t.update({"optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1": {"a": 1}}))
    broken("ramp", "args.rampup_batch_size", change=lambda s, _: setattr(s["args"], "rampup_batch_size", ["4", "4", "100"]))
    broken("flat", "its parts have 9215 elements", kind="flat bf16",
           change=lambda _, t: t.update({moment + "@0,0,0,100": t[moment + "@0,0,0,100"][..., 1:].contiguous()}))
    source = written(gpt2, tmp_path / "cut")
    whole = next((source / "iter_0000003").glob("*.distcp"))
    whole.write_bytes(whole.read_bytes()[:5000])
    refused(tessera_program, source, tmp_path, whole.name, "lie outside of the file")


def dist(program, source: str, folder: Path, target: Path, *more) -> Path:
    run(program, "convert", "--from", source, folder, "--to", "megatron", target, "--ckpt_format", "torch_dist", "--make_vocab_size_divisible_by",
        8, *more)
    return target


@pytest.mark.parametrize("kind, tied", [("gpt2", True), ("llama", True), ("llama", False), ("bert", True)])
def test_what_is_written_is_read(tessera_program, tmp_path, kind, tied):
    """By ourselves, and by torch: the same tensors under the same names as the writer of the tests has them."""
    model = random_model(kind, tied=tied)
    model.save_pretrained(tmp_path / "hf")
    source = dist(tessera_program, "hf", tmp_path / "hf", tmp_path / "dist", "--tensor", 2)
    same(to_hf(tessera_program, source, tmp_path / "again"), model)
    release = source / "release"
    assert sorted(path.name for path in release.iterdir()) == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    assert (source / "latest_checkpointed_iteration.txt").read_text() == "release"
    metadata = dcp.FileSystemReader(release).read_metadata()
    wanted = stacked({name: value for name, value in rank_states(model, era="core te", divisor=16)[0, 0]["model"].items() if value is not None},
                     model.config.num_hidden_layers)
    found = {name: torch.empty(facts.size) for name, facts in metadata.state_dict_metadata.items() if hasattr(facts, "size")}
    dcp.load(found, checkpoint_id=release, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        rows = slice(0, 61 if name.endswith("word_embeddings.weight") or name.startswith("output_layer.") else None)
        assert found[name].shape == value.shape and torch.equal(found[name][rows], value[rows]), name
    states = {name for name in metadata.state_dict_metadata if "_extra_state" in name}
    stack = "encoder" if kind == "bert" else "decoder"
    assert {f"{stack}.layers.mlp.linear_fc1._extra_state/shard_{i}_4" for i in range(4)} <= states
    common = torch.load(release / "common.pt", weights_only=False)
    assert common["args"].tensor_model_parallel_size == 2 and common["args"].no_save_optim and common["iteration"] == 0


@pytest.mark.parametrize("kind, family, more", [("fp32", "gpt2", []), ("bf16", "llama", ["--distributed_optimizer"]), ("fp16", "gpt2", []), ("fp32", "gpt2", ["--torch_adam"]),
                                                ("bf16", "llama", ["--torch_adam"]),
                                                ("fp16", "gpt2", ["--distributed_optimizer"])])
def test_a_run_there_and_back(tessera_program, tmp_path, request, kind, family, more):
    started = request.getfixturevalue(family)
    to_run(tessera_program, written(started, tmp_path / "megatron", kind=kind, iteration=5), tmp_path / "one")
    again = dist(tessera_program, "tessera", tmp_path / "one", tmp_path / "again", "--with_optimizer", *more)
    assert (again / "iter_0000005/common.pt").exists()
    to_run(tessera_program, again, tmp_path / "two")
    same_run(tensors(tmp_path / "one", 5), tensors(tmp_path / "two", 5))
    one, two = [json.loads((tmp_path / name / "checkpoints/step-00000005/manifest.json").read_text()) for name in ("one", "two")]
    assert one["user"]["optimizer_updates"] == 3
    for key in ("step", "consumed_samples", "user"):
        assert one[key] == two[key]
    assert settings(tmp_path / "one") == settings(tmp_path / "two")
    done = failing(tessera_program, "convert", "--from", "tessera", tmp_path / "one", "--to", "megatron", tmp_path / "x", "--with_optimizer",
                   "--torch_adam", "--distributed_optimizer")
    assert "whose state is the same" in done.stderr and not (tmp_path / "x").exists()


def test_what_torch_dist_cannot_be(tessera_program, tmp_path):
    random_model("gpt2").save_pretrained(tmp_path / "hf")
    def message(*more, form="torch_dist"):
        done = failing(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "x", "--ckpt_format", form, *more)
        assert not (tmp_path / "x/release").exists()
        return done.stderr
    assert "tensors of torch_dist have one set of names" in message("--names", "local")
    assert "is for a run" in message("--distributed_optimizer")
    assert "it goes with --with_optimizer" in message("--torch_adam")
    assert "torch and torch_dist are written" in message(form="zarr")
    assert "do not divide by 8 tensor ranks" in message("--tensor", 8)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/file").write_text("")
    assert "already exists" in message()
