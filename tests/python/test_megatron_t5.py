"""Megatron-LM's own T5 to Tessera and back, against files of an independent writer."""

import json
from pathlib import Path

import pytest
from cli_support import metrics, run

torch = pytest.importorskip("torch")
import megatron_t5_writer as t5  # noqa: E402
from megatron_runs import SETTINGS, flat, plain, schedule_state  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_megatron_checkpoints import failing  # noqa: E402


def tessera_folder(folder: Path, tensors: dict) -> Path:
    folder.mkdir()
    (folder / "tessera.json").write_text(json.dumps({"format": "tessera-model", "format_version": 1, "tessera_version": "test",
                                                     "model": {**t5.MODEL, "hf_model_type": None}, "source": None}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("version, ranks", [(0, 1), (0, 2), (1, 2), (2, 4), (3, 2)])
def test_it_is_read(tessera_program, tmp_path, version, ranks):
    wanted = t5.weights()
    done = run(tessera_program, "convert", "--from", "megatron", t5.write(tmp_path / "m", wanted, ranks, version), "--to", "tessera", tmp_path / "t")
    assert "rows of padding of the vocabulary are left out" in done.stderr
    same(load_file(tmp_path / "t/model.safetensors"), wanted)
    model = json.loads((tmp_path / "t/tessera.json").read_text())["model"]
    for key, value in t5.MODEL.items():
        assert key in ("dropout", "attention_dropout") or model[key] == value, key


def test_what_is_written_is_megatrons(tessera_program, tmp_path):
    """Each of two ranks against the writer of the tests: the same keys in the same order, the same bits."""
    wanted = t5.weights()
    run(tessera_program, "convert", "--from", "tessera", tessera_folder(tmp_path / "t", wanted), "--to", "megatron", tmp_path / "m", "--tensor", 2,
        "--make_vocab_size_divisible_by", 8)
    for rank in range(2):
        state = torch.load(tmp_path / f"m/release/mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=False)
        ours, theirs = flat(state["model"]), flat(t5.rank_model(wanted, rank, 2))
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            rows = slice(0, 29 if rank == 1 and ("word_embeddings" in name or name == "lm_head.bias") else None)
            assert torch.equal(ours[name][rows], value[rows]), name
        args = state["args"]
        assert (args.num_layers, args.encoder_num_layers, args.decoder_num_layers) == (2, 2, 3) and args.openai_gelu
    for names in ("local", "transformer_engine"):
        run(tessera_program, "convert", "--from", "megatron", tmp_path / "m", "--to", "megatron", tmp_path / names, "--names", names, "--tensor", 4)
        run(tessera_program, "convert", "--from", "megatron", tmp_path / names, "--to", "tessera", tmp_path / f"{names}_back")
        same(load_file(tmp_path / f"{names}_back/model.safetensors"), wanted)
    run(tessera_program, "convert", "--from", "megatron", tmp_path / "m", "--to", "megatron", tmp_path / "dist", "--ckpt_format", "torch_dist")
    run(tessera_program, "convert", "--from", "megatron", tmp_path / "dist", "--to", "tessera", tmp_path / "dist_back")
    same(load_file(tmp_path / "dist_back/model.safetensors"), wanted)


def test_what_does_not_fit_is_refused(tessera_program, tmp_path):
    wanted = t5.weights()

    def refused(name: str, *words: str, to=("tessera",), **options):
        done = failing(tessera_program, "convert", "--from", "megatron", t5.write(tmp_path / name, wanted, **options), "--to", to[0], tmp_path / "x", *to[1:])
        assert all(word in done.stderr for word in words), done.stderr
        assert not (tmp_path / "x").exists()

    def without(stack: str, name: str):
        return lambda state: state["model"]["language_model"][stack].pop(name)
    refused("layer", "missing: decoder.layers.3", decoder_num_layers=4)
    refused("fewer", "unexpected: encoder.layers.1", encoder_num_layers=1)
    refused("norm", "missing: decoder.layers.2.pre_mlp_layernorm.bias", change=without("decoder", "layers.2.post_inter_attention_layernorm.bias"))
    refused("key", "missing: decoder.layers.0.cross_attention.linear_kv.weight", change=without("decoder", "layers.0.inter_attention.key_value.weight"))
    refused("head", "missing: output_layer.bias", change=lambda state: state["model"].pop("lm_head"))
    refused("norms", "without LayerNorm", normalization="RMSNorm")
    refused("hf", "no Hugging Face form", to=("hf",))
    refused("stages", "T5 is written for one stage, not 2", to=("megatron", "--pipeline", 2))

    def swap(state):
        decoder = state["model"]["language_model"]["decoder"]
        decoder["layers.0.inter_attention.query.weight"] = decoder["layers.0.inter_attention.key_value.weight"]
    refused("shape", "decoder.layers.0.cross_attention.linear_q.weight is float32 [48, 24]", change=swap)
    run(tessera_program, "convert", "--from", "megatron", t5.write(tmp_path / "one", wanted), "--to", "megatron", tmp_path / "core", "--names", "local")
    path = tmp_path / "core/release/mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["position_embeddings.weight"][3, 5] += 1
    torch.save(state, path)
    done = failing(tessera_program, "convert", "--from", "megatron", tmp_path / "core", "--to", "tessera", tmp_path / "x")
    assert "the second tensor that is 'embedding.position_embeddings.weight': differs from the first" in done.stderr
    assert not (tmp_path / "x").exists()
    source = t5.write(tmp_path / "two", wanted, pipeline_model_parallel_size=2)
    (source / "iter_0000007/mp_rank_00").rename(source / "iter_0000007/mp_rank_00_000")
    (source / "iter_0000007/mp_rank_00_001").mkdir()
    torch.save(torch.load(source / "iter_0000007/mp_rank_00_000/model_optim_rng.pt", weights_only=False),
               source / "iter_0000007/mp_rank_00_001/model_optim_rng.pt")
    done = failing(tessera_program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "x")
    assert "is 2; T5 is read of one stage" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_comes_and_goes_with_its_optimizer(tessera_program, tmp_path, ranks):
    """Weights and both moments, each drawn; there and back in another layout the same bits and settings."""
    kinds = [t5.weights(seed) for seed in (5, 6, 7)]
    kinds[2] = {name: value.abs() for name, value in kinds[2].items()}
    settings = SETTINGS | {"consumed_train_samples": 12, "seq_length": 16, "encoder_seq_length": 16, "decoder_seq_length": 8, "mask_prob": 0.2,
                           "short_seq_prob": 0.25, "vocab_extra_ids": 7}
    source = tmp_path / "m"
    for rank in range(ranks):
        parts = [flat(t5.rank_model(each, rank, ranks)) for each in kinds]
        inner, _ = plain({name: [part[name].clone() for part in parts] for name in parts[0]}, 3, False)
        state = {"args": t5.arguments(ranks, **settings), "iteration": 3, "checkpoint_version": 3.0, "model": t5.rank_model(kinds[0], rank, ranks),
                 "optimizer": inner, "opt_param_scheduler": schedule_state(3)}
        path = source / f"iter_0000003/mp_rank_{rank:02d}/model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (source / "latest_checkpointed_iteration.txt").write_text("3")

    def tensors(folder: Path) -> dict:
        return load_file(next((folder / "checkpoints/step-00000003").glob("*.safetensors")))
    run(tessera_program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "run", "--with_optimizer")
    wanted = {f"{prefix}.{name}": value for prefix, kind in zip(("param", "adam_m", "adam_v"), kinds) for name, value in kind.items()}
    same(tensors(tmp_path / "run"), wanted)
    config = (tmp_path / "run/config.yaml").read_text()
    for line in ("decoder_seq_length: 8", "mask_prob: 0.2", "short_seq_prob: 0.25", "vocab_extra_ids: 7", "encoder_layers: 2"):
        assert line in config, config
    for name, more in (("ranks", ["--tensor", 4]), ("core", ["--names", "local", "--torch_adam"]), ("long", ["--distributed_optimizer", "--tensor", 2]),
                       ("dist", ["--ckpt_format", "torch_dist"])):
        run(tessera_program, "convert", "--from", "tessera", tmp_path / "run", "--to", "megatron", tmp_path / name, "--with_optimizer", *more)
        run(tessera_program, "convert", "--from", "megatron", tmp_path / name, "--to", "tessera", tmp_path / f"{name}_run", "--with_optimizer")
        same(tensors(tmp_path / f"{name}_run"), wanted)
        assert (tmp_path / f"{name}_run/config.yaml").read_text().replace(f"{name}_run", "run") == config
