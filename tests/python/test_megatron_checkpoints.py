"""Checkpoints of Megatron-LM to Transformers and back, against files that PyTorch wrote and reads."""

import io
import json
import pickle
import subprocess
import types
import zipfile
from pathlib import Path

import pytest
from cli_support import run
from documents_support import commands, shell_environment

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from megatron_runs import flat  # noqa: E402
from megatron_writer import Model, rank_states, write  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def random_model(kind: str, tied: bool = True, gelu: str = "gelu", heads=transformers.MegatronBertForPreTraining):
    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    elif kind == "bert":
        config = transformers.MegatronBertConfig(vocab_size=61, max_position_embeddings=16, hidden_size=24, intermediate_size=96, hidden_act=gelu,
                                                 num_hidden_layers=4, num_attention_heads=4, layer_norm_eps=1e-5)
        model = heads(config)
    else:
        config = transformers.LlamaConfig(vocab_size=61, max_position_embeddings=16, hidden_size=24, intermediate_size=20,
                                          num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
                                          tie_word_embeddings=tied)
    if kind != "bert":
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():  # biases and norms too
            value.normal_()
    return model


@pytest.fixture(scope="module")
def gpt2():
    return random_model("gpt2")


@pytest.fixture(scope="module")
def llama():
    return random_model("llama", tied=False)


def to_hf(program, source: Path, target: Path, *more) -> dict:
    run(program, "convert", "--from", "megatron", source, "--to", "hf", target, *more)
    return load_file(target / "model.safetensors")


def failing(program, *command) -> subprocess.CompletedProcess:
    """A command that ends with an error of one line."""
    done = subprocess.run([program, *map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode in (2, 3, 4), (done.returncode, done.stderr)
    return done


def same(tensors: dict, model) -> None:
    wanted = {name: value for name, value in model.state_dict().items() if name in tensors}
    assert len(wanted) >= len([name for name, _ in model.named_parameters()])
    for name, value in tensors.items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("era, version, tp, pp, vpp, more", [
    ("oldest", 0, 1, 1, 1, {}), ("oldest", 0, 2, 1, 1, {}), ("oldest", 1, 2, 2, 1, {}), ("2021", 2, 4, 1, 1, {}),
    ("2021", 3, 2, 2, 2, {"namespace": types.SimpleNamespace}), ("2023", 3, 1, 4, 1, {}), ("te", 3, 2, 2, 1, {}),
    ("core local", 3, 2, 2, 1, {"module": "module."}), ("core te", 3, 2, 2, 2, {})])
def test_gpt2_of_every_age(tessera_program, tmp_path, gpt2, era, version, tp, pp, vpp, more):
    source = write(tmp_path / "megatron", gpt2, era=era, version=version, tp=tp, pp=pp, vpp=vpp, **more)
    tensors = to_hf(tessera_program, source, tmp_path / "hf")
    same(tensors, gpt2)
    assert tensors["transformer.wte.weight"].shape == (61, 24)  # without rows of padding


@pytest.mark.parametrize("era, tp, pp, vpp, tied", [("2023", 2, 1, 1, False), ("core local", 2, 2, 1, False), ("core te", 1, 2, 2, False),
                                                    ("core te", 2, 2, 1, True)])
def test_llama_with_groups_and_gates(tessera_program, tmp_path, llama, era, tp, pp, vpp, tied):
    model = random_model("llama", tied) if tied else llama
    source = write(tmp_path / "megatron", model, era=era, tp=tp, pp=pp, vpp=vpp)
    # By the folder of the iteration too.
    same(to_hf(tessera_program, source / "iter_0000007", tmp_path / "hf"), model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.tensor([[1, 5, 60, 2, 9]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("gelu, era, tp, pp, vpp", [("gelu", "2021", 1, 1, 1), ("gelu_new", "2021", 2, 2, 1), ("gelu", "2023", 2, 2, 2),
                                                    ("gelu", "core te", 2, 2, 1)])
def test_bert_keeps_its_gelu_and_its_heads(tessera_program, tmp_path, gelu, era, tp, pp, vpp):
    """From Megatron, and what is written of it again in another layout."""
    model = random_model("bert", gelu=gelu)
    source = write(tmp_path / "megatron", model, era=era, tp=tp, pp=pp, vpp=vpp)
    same(to_hf(tessera_program, source, tmp_path / "hf"), model)
    loaded = transformers.MegatronBertForPreTraining.from_pretrained(tmp_path / "hf").eval()
    assert loaded.config.hidden_act == gelu
    tokens, types = torch.tensor([[1, 5, 60, 2, 9]]), torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        for found, wanted in zip(loaded(tokens, token_type_ids=types)[:2], model.eval()(tokens, token_type_ids=types)[:2]):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # where memory lies decides rounding on some CPUs
    run(tessera_program, "convert", "--from", "megatron", source, "--to", "tessera", tmp_path / "two")
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "two", "--to", "megatron", tmp_path / "three", "--tensor", 4, "--pipeline", 2)
    same(to_hf(tessera_program, tmp_path / "three", tmp_path / "four"), model)


def test_what_is_written_of_bert_is_megatrons(tessera_program, tmp_path):
    """Each rank of 2 x 2 against the writer of the tests."""
    model = random_model("bert", gelu="gelu_new")
    model.save_pretrained(tmp_path / "hf")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "m", "--tensor", 2, "--pipeline", 2,
        "--make_vocab_size_divisible_by", 8)
    for (r, p), wanted in rank_states(model, tp=2, pp=2).items():
        found = shard(tmp_path / "m", f"{r:02d}_{p:03d}")
        assert found["args"].openai_gelu and found["args"].bert_binary_head and found["args"].tokenizer_type == "BertWordPieceLowerCase"
        ours, theirs = flat(found["model"]), flat(wanted["model"])
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            rows = slice(0, 29 if r == 1 and ("word_embeddings" in name or name == "lm_head.bias") else None)
            assert torch.equal(ours[name][rows], value[rows]), name


def test_berts_that_megatron_or_tessera_cannot_hold(tessera_program, tmp_path):
    def written(model, name, *more):
        model.save_pretrained(tmp_path / name)
        return failing(tessera_program, "convert", "--from", "hf", tmp_path / name, "--to", "megatron", tmp_path / "x", *more).stderr
    assert "head for classes" in written(random_model("bert", heads=transformers.MegatronBertForSequenceClassification), "classes")
    other = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
                                                                 intermediate_size=96, max_position_embeddings=16))
    assert "norms behind each branch" in written(other, "other") and not (tmp_path / "x").exists()
    model = random_model("bert")
    def change(state, r, p):
        state["model"]["language_model"]["embedding"].pop("tokentype_embeddings")
    refused(tessera_program, write(tmp_path / "types", model, change=change), tmp_path, "a BERT without token types is not read")
    def shorten(state, r, p):
        state["model"]["lm_head"]["bias"] = torch.zeros(63)
    refused(tessera_program, write(tmp_path / "bias", model, change=shorten), tmp_path, "lm_head.bias is float32 [63]")
    done = run(tessera_program, "convert", "--from", "megatron", write(tmp_path / "fused", model, bias_gelu_fusion=True), "--to", "hf", tmp_path / "fused_hf")
    assert "bias_gelu_fusion: Megatron's head for masked tokens" in done.stderr
    masked = random_model("bert", heads=transformers.MegatronBertForMaskedLM)
    masked.save_pretrained(tmp_path / "masked")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "masked", "--to", "megatron", tmp_path / "m", "--pipeline", 2)
    assert "binary_head" not in shard(tmp_path / "m", "00_001")["model"]
    same(to_hf(tessera_program, tmp_path / "m", tmp_path / "again"), masked)


def shard(folder: Path, rank: str) -> dict:
    with torch.serialization.safe_globals([types.SimpleNamespace]):
        return torch.load(folder / "release" / f"mp_rank_{rank}" / "model_optim_rng.pt", weights_only=True)


def test_what_is_written_is_megatrons(tessera_program, tmp_path, gpt2):
    """Against literal slices: rank 1 of 2, stage 1 of 2."""
    gpt2.save_pretrained(tmp_path / "hf")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "m", "--tensor", 2, "--pipeline", 2,
        "--make_vocab_size_divisible_by", 8)
    assert (tmp_path / "m/latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(path.name for path in (tmp_path / "m/release").iterdir()) == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    state, hf, m = shard(tmp_path / "m", "01_001"), gpt2.state_dict(), Model(gpt2)
    assert state["checkpoint_version"] == 3.0 and state["args"].orig_vocab_size == 61 and state["args"].padded_vocab_size == 64
    assert list(state["model"]) == ["language_model", "word_embeddings_for_head"]
    assert "embedding" not in state["model"]["language_model"]
    encoder = state["model"]["language_model"]["encoder"]
    rows = [part * 24 + head * 6 + d for head in (2, 3) for part in range(3) for d in range(6)]  # of [3, heads, hn]
    attention = hf["transformer.h.3.attn.c_attn.weight"].T
    assert torch.equal(encoder["layers.1.self_attention.query_key_value.weight"], attention[rows])
    assert torch.equal(encoder["layers.1.self_attention.query_key_value.bias"], hf["transformer.h.3.attn.c_attn.bias"][rows])
    assert torch.equal(encoder["layers.0.self_attention.dense.weight"], hf["transformer.h.2.attn.c_proj.weight"].T[:, 12:])
    assert torch.equal(encoder["layers.0.mlp.dense_h_to_4h.weight"], hf["transformer.h.2.mlp.c_fc.weight"].T[48:])
    assert torch.equal(encoder["layers.0.mlp.dense_4h_to_h.bias"], hf["transformer.h.2.mlp.c_proj.bias"])
    assert torch.equal(encoder["final_layernorm.bias"], hf["transformer.ln_f.bias"])
    head = state["model"]["word_embeddings_for_head"]["weight"]
    assert torch.equal(head[:29], m.embedding[32:]) and all(torch.equal(row, m.embedding[60]) for row in head[29:])


@pytest.mark.parametrize("kind, names", [("gpt2", "legacy"), ("gpt2", "local"), ("llama", "local"), ("llama", "transformer_engine")])
def test_there_and_back_through_other_layouts(tessera_program, tmp_path, gpt2, llama, kind, names):
    """Transformers, Megatron (2 x 2), Tessera, Megatron (1 x 2, two virtual stages each), Transformers: the same bits."""
    model = gpt2 if kind == "gpt2" else llama
    model.save_pretrained(tmp_path / "hf")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "one", "--tensor", 2, "--pipeline", 2,
        "--names", names)
    run(tessera_program, "convert", "--from", "megatron", tmp_path / "one", "--to", "tessera", tmp_path / "two")
    run(tessera_program, "convert", "--from", "tessera", tmp_path / "two", "--to", "megatron", tmp_path / "three", "--pipeline", 2, "--virtual", 2,
        "--names", names)
    # Rank 0 has the first and the third quarter of the layers, as Megatron's interleaved schedule runs them.
    with torch.serialization.safe_globals([types.SimpleNamespace]):
        state = torch.load(tmp_path / "three/release/mp_rank_00_000/model_optim_rng.pt", weights_only=True)
    assert state["args"].virtual_pipeline_model_parallel_size == 2 and "model" not in state and "model2" not in state
    for chunk, layer in (("model0", 0), ("model1", 2)):
        first_norm = {"legacy": "layers.0.input_layernorm.weight", "local": "decoder.layers.0.input_layernorm.weight",
                      "transformer_engine": "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"}[names]
        tensors = state[chunk]["language_model"]["encoder"] if names == "legacy" else state[chunk]
        wanted = model.transformer.h[layer].ln_1 if kind == "gpt2" else model.model.layers[layer].input_layernorm
        assert torch.equal(tensors[first_norm], wanted.weight)
        assert not any("layers.1." in name for name in tensors)
    same(to_hf(tessera_program, tmp_path / "three", tmp_path / "four"), model)


def test_sixteen_bits(tessera_program, tmp_path, gpt2):
    gpt2.save_pretrained(tmp_path / "hf")
    done = run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "m", "--dtype", "bfloat16")
    assert f"note: {len(list(gpt2.named_parameters()))} of {len(list(gpt2.named_parameters()))} tensors are rounded to bfloat16" in done.stderr
    assert "note: the vocabulary is padded by 67 rows, copies of its last one" in done.stderr
    state = shard(tmp_path / "m", "00")
    assert state["args"].params_dtype == torch.bfloat16
    table = state["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert torch.equal(table[:61], gpt2.transformer.wte.weight.bfloat16())
    assert to_hf(tessera_program, tmp_path / "m", tmp_path / "back")["transformer.wpe.weight"].dtype == torch.bfloat16


def test_padding_is_kept_where_nobody_knows(tessera_program, tmp_path, gpt2):
    source = write(tmp_path / "m", gpt2, vocabulary=False)
    done = run(tessera_program, "convert", "--from", "megatron", source, "--to", "hf", tmp_path / "all")
    assert "how many of the 64 rows of the vocabulary are padding" in done.stderr and "the optimizer's state is left out" in done.stderr
    assert "the count of iterations (7) is left out" in done.stderr and "rounded" not in done.stderr
    assert load_file(tmp_path / "all/model.safetensors")["transformer.wte.weight"].shape == (64, 24)
    same(to_hf(tessera_program, source, tmp_path / "cut", "--vocab_size", 61), gpt2)
    done = failing(tessera_program, "convert", "--from", "megatron", source, "--to", "hf", tmp_path / "more", "--vocab_size", 65)
    assert "has 64 rows; the vocabulary has 65" in done.stderr and not (tmp_path / "more").exists()


def refused(program, source: Path, tmp_path: Path, *words: str) -> None:
    done = failing(program, "convert", "--from", "megatron", source, "--to", "hf", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    for word in words:
        assert word in done.stderr, done.stderr


def test_what_does_not_fit_is_refused_before_anything_is_written(tessera_program, tmp_path, gpt2):
    def broken(name: str, *words: str, change=None, after=None, **more):
        source = write(tmp_path / name, gpt2, tp=2, pp=2, change=change, **more)
        if after:
            after(source / "iter_0000007")
        refused(tessera_program, source, tmp_path, *words)

    def layer(state):
        return state["model"]["language_model"]["encoder"]

    def move(folder, name, target):
        (folder / name).rename(folder / target)

    broken("rank", "tensor rank 1, stage 0 of 2 x 2 is missing", after=lambda folder: move(folder, "mp_rank_01_000", "other"))
    broken("more", "more ranks than its arguments say", after=lambda folder: move(folder, "mp_rank_01_001", "mp_rank_00_002"))
    broken("mixed", "iteration", "that of the first rank 7", change=lambda state, r, p: state.update(iteration=7 + r * p))
    broken("claim", "arguments imply", change=lambda state, r, p: setattr(state["args"], "ffn_hidden_size", 100))
    broken("extra", "unexpected: language_model.encoder.layers.0.mlp.gate.weight float32 [3]",
           change=lambda state, r, p: layer(state).update({"layers.0.mlp.gate.weight": torch.ones(3)}))
    broken("less", "missing: decoder.layers.3.input_layernorm.bias [24]", change=lambda state, r, p: layer(state).pop("layers.1.input_layernorm.bias") if p else None)
    broken("norms", "differs from that of tensor rank 0",
           change=lambda state, r, p: layer(state)["layers.0.input_layernorm.weight"].add_(r) if p else None)
    broken("head", "differs from the embedding, although the model is tied",
           change=lambda state, r, p: state["model"].get("word_embeddings_for_head", {}).update(weight=torch.zeros(32, 24)) if p else None)
    broken("experts", "args.num_experts", "such models are not read", num_experts=4)
    broken("positions", "args.position_embedding_type", "'relative' is not read", position_embedding_type="relative")
    broken("args", "args", "are missing", change=lambda state, r, p: state.pop("args"))
    broken("version", "checkpoint_version", "4 is not read", change=lambda state, r, p: state.update(checkpoint_version=4.0))
    broken("tracker", "names neither an iteration nor 'release'",
           after=lambda folder: (folder.parent / "latest_checkpointed_iteration.txt").write_text("soon"))
    refused(tessera_program, tmp_path / "nothing", tmp_path, "there is no mp_rank_00")


class Harmful:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        import os
        return os.system, (f"touch {self.file}",)


def test_files_that_are_damaged_or_hostile(tessera_program, tmp_path, gpt2):
    source = write(tmp_path / "m", gpt2)
    file = source / "iter_0000007/mp_rank_00/model_optim_rng.pt"
    whole = file.read_bytes()

    def holds(content: bytes, *words: str) -> None:
        file.write_bytes(content)
        refused(tessera_program, source, tmp_path, *words)

    def archive(pickled: bytes, compression=zipfile.ZIP_STORED, twice: bool = False) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", compression) as zipped:
            zipped.writestr("m/data.pkl", pickled)
            if twice:
                zipped.writestr("m/data.pkl2", b"")
        return out.getvalue().replace(b"m/data.pkl2", b"m/data.pkl") if twice else out.getvalue()

    holds(whole[: len(whole) // 2], "no directory, as a zip archive has")
    holds(b"", "too short for a zip archive")
    holds(archive(pickle.dumps({"args": Harmful(tmp_path / "run")}, protocol=2)), "it names posix.system", "nothing of it was run")
    assert not (tmp_path / "run").exists()
    holds(archive(pickle.dumps({"args": eval}, protocol=4)), "it names builtins.eval")
    holds(archive(pickle.dumps({"a": "x" * 200}, protocol=2), zipfile.ZIP_DEFLATED), "is compressed")
    holds(archive(pickle.dumps({}, protocol=2))[:-1], "directory")
    holds(archive(b"\x80\x02}(X\x05\x00\x00\x00args"), "it ends before its values do")
    holds(archive(b"\x80\x02K\x01K\x02s."), "a value is missing")
    holds(archive(b"\x80\x02]K\x01K\x02s."), "items are set in a list")
    old = io.BytesIO()
    torch.save({"args": 1}, old, _use_new_zipfile_serialization=False)
    holds(old.getvalue(), "saved anew")
    def storage(state, r, p):
        table = state["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
        state["model"]["language_model"]["embedding"]["word_embeddings"]["weight"] = table.view(-1)[5:5 + 60 * 24].view(60, 24)
    refused(tessera_program, write(tmp_path / "view", gpt2, change=storage), tmp_path, "has 60 rows; the vocabulary has 61")


def test_views_of_storages(tessera_program, tmp_path, gpt2):
    """Tensors that are no whole storage, transposed or of a shared one."""
    def change(state, r, p):
        encoder = state["model"]["language_model"]["encoder"]
        for name in list(encoder):
            if name.endswith("dense.weight"):
                encoder[name] = encoder[name].T.contiguous().T
            if name.endswith("layernorm.weight"):
                encoder[name] = torch.nn.Parameter(torch.stack([encoder[name], torch.zeros(24)], 1)[:, 0])
    same(to_hf(tessera_program, write(tmp_path / "m", gpt2, tp=2, change=change), tmp_path / "hf"), gpt2)


def test_t5_of_transformers_is_no_model_of_megatrons(tessera_program, tmp_path):
    transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=61, d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4)
                                            ).save_pretrained(tmp_path / "hf")
    done = failing(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "m")
    assert "another model than Megatron's T5" in done.stderr and not (tmp_path / "m").exists()


def test_options_for_the_other_side_are_refused(tessera_program, tmp_path, gpt2):
    gpt2.save_pretrained(tmp_path / "hf")
    def message(*command):
        return failing(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", *command).stderr
    assert "--tensor is for --to megatron" in message("tessera", tmp_path / "x", "--tensor", 2)
    assert "--vocab_size is for --from megatron" in message("megatron", tmp_path / "x", "--vocab_size", 2)
    assert "--max_shard_size is for --to hf" in message("megatron", tmp_path / "x", "--max_shard_size", "1MB")
    assert "4 layers do not divide by 3 stages" in message("megatron", tmp_path / "x", "--pipeline", 3)
    assert "2 virtual stages need two pipeline stages or more" in message("megatron", tmp_path / "x", "--virtual", 2)
    assert "2 layers of a stage do not divide by 3 virtual stages" in message("megatron", tmp_path / "x", "--pipeline", 2, "--virtual", 3)
    assert "--virtual is for --to megatron" in message("tessera", tmp_path / "x", "--virtual", 2)
    assert "do not divide by 8 tensor ranks" in message("megatron", tmp_path / "x", "--tensor", 8)
    assert "--names new" in message("megatron", tmp_path / "x", "--names", "new")
    assert "already exists" in message("megatron", tmp_path / "hf")
    assert not (tmp_path / "x").exists()


def test_the_documents_two_commands(python_build, tessera_program, tmp_path, gpt2):
    """004/convert_from_megatron.sh, and 004/convert_to_megatron.sh of what that made."""
    from tokenizers import Tokenizer, models
    environment = shell_environment(python_build, tmp_path) | {"EXAMPLES": str(ROOT / "examples/python")}

    def block(name: str) -> list:
        (command,) = commands(name)
        return python_build.run(launcher=["bash", "-ec", command], cwd=tmp_path, **environment).stdout.splitlines()

    write(tmp_path / "gpt", gpt2, tp=2, iteration=5000)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.save_pretrained(tmp_path / "gpt/tokenizer")
    lines = block("004/convert_from_megatron.sh")
    folder = tmp_path / "gpt/trfs_checkpoint"
    assert f"# {'transformer.h.0.attn.c_attn.weight':48s} : torch.Size([24, 72])" in lines
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == 60 and config["architectures"] == ["GPT2LMHeadModel"]
    assert (folder / "tokenizer.json").exists() and len(list(folder.glob("model-*.safetensors"))) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, gpt2.state_dict()[name]) for name, value in loaded.state_dict().items())

    lines = block("004/convert_to_megatron.sh")
    assert "Checkpoint structure of model state dict shard belonging to TP rank 1 and PP rank 1:" in lines
    assert f"......# {'layers.0.self_attention.query_key_value.bias':42s} : torch.Size([36])" in lines
    release = tmp_path / "gpt/megatron_lm_checkpoint/release"
    assert len(list(release.glob("mp_rank_0?_00?/model_rng.pt"))) == 4
    assert len(list(release.glob("mp_rank_0?_00?_00?/optim.pt"))) == 8
    optimizer = torch.load(release / "mp_rank_00_000_001/optim.pt", weights_only=True)["optimizer"]
    assert optimizer["step"] == 0 and optimizer["param_groups"][0]["correct_bias"] is False and optimizer["param_groups"][0]["params"] == []
    tensors = to_hf(tessera_program, tmp_path / "gpt/megatron_lm_checkpoint", tmp_path / "again")
    assert all(torch.equal(value, gpt2.state_dict()[name].bfloat16()) for name, value in tensors.items())
