"""Conversions of what is large: tensors that go in several blocks, the memory that takes, targets without room."""

import json
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest
from cli_support import environment, run, text_documents, write_config, write_corpus

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from megatron_writer import write  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_megatron_checkpoints import failing, same  # noqa: E402

MEGABYTE = 1e6
# Rows of 4352 bytes: blocks of 8 MiB end within a head of 32 and within the halves of gate and up.
WIDTH, HEADS = 1088, 34


def wide(kind: str):
    torch.manual_seed(5)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=4001, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=HEADS, bos_token_id=0, eos_token_id=0)
    else:
        config = transformers.LlamaConfig(vocab_size=4001, max_position_embeddings=8, hidden_size=WIDTH, intermediate_size=5000,
                                          num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS if kind == "heads" else 2,
                                          rms_norm_eps=1e-5, tie_word_embeddings=kind == "heads")
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module", params=["gpt2", "heads", "groups"])
def folder(request, tmp_path_factory):
    """A model and the folder that it is in."""
    model = wide(request.param)
    place = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(place)
    yield model, place
    shutil.rmtree(place)


@pytest.mark.parametrize("form", [["--tensor", 2, "--names", "local"], ["--ckpt_format", "torch_dist"]])
def test_blocks_make_the_whole(tessera_program, tmp_path, folder, form):
    """There, from there in another layout, and back."""
    model, source = folder
    run(tessera_program, "convert", "--from", "hf", source, "--to", "megatron", tmp_path / "one", *form)
    run(tessera_program, "convert", "--from", "megatron", tmp_path / "one", "--to", "megatron", tmp_path / "two", "--tensor", 1, "--names", "legacy")
    run(tessera_program, "convert", "--from", "megatron", tmp_path / "two", "--to", "megatron", tmp_path / "three", "--tensor", 2)
    for form, place in (("megatron", "one"), ("megatron", "three")):
        run(tessera_program, "convert", "--from", form, tmp_path / place, "--to", "hf", tmp_path / f"hf_{place}")
        same(load_file(tmp_path / f"hf_{place}/model.safetensors"), model)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("version", [0, 1, 3])
def test_blocks_of_every_order_of_rows(tessera_program, tmp_path, version):
    model = wide("gpt2")
    source = write(tmp_path / "megatron", model, era="oldest" if version < 2 else "2021", version=version, tp=2)
    run(tessera_program, "convert", "--from", "megatron", source, "--to", "hf", tmp_path / "hf")
    same(load_file(tmp_path / "hf/model.safetensors"), model)
    shutil.rmtree(tmp_path)


def peak_of(program: Path, *words) -> float:
    """The most memory that a command held, in MB."""
    process = subprocess.Popen([program, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(), text=True)
    peak = 0.0
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max(peak, *(int(line.split()[1]) * 1024 / MEGABYTE for line in lines if line.startswith("VmHWM")), 0.0)
        time.sleep(0.005)
    assert process.returncode == 0, process.stderr.read()
    process.stderr.close()
    return peak


def test_memory_is_less_than_the_largest_tensor(tessera_program, tmp_path):
    """Of weights: tensors are never whole in memory, whatever their number and size."""
    config = transformers.LlamaConfig(vocab_size=64000, max_position_embeddings=8, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2,
                                      num_attention_heads=16, num_key_value_heads=4)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "hf")
    largest = 64000 * 1024 * 2 / MEGABYTE
    for source, target, *more in (("hf", "tessera"), ("hf", "megatron", "--tensor", 2, "--pipeline", 2), ("hf", "dcp"), ("megatron", "hf"),
                                  ("dcp", "hf"), ("tessera", "megatron", "--ckpt_format", "torch_dist", "--dtype", "float16")):
        place = tmp_path / (target if source == "hf" else f"{source}_{target}")
        peak = peak_of(tessera_program, "convert", "--from", source, tmp_path / source, "--to", target, place, *more)
        assert 0 < peak < 0.7 * largest, (source, target, peak, largest)
    shutil.rmtree(tmp_path)


def test_memory_of_a_run_is_that_of_few_tensors(tessera_program, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", text_documents())
    run(tessera_program, "train", write_config(tmp_path, corpus, training__steps=1, lr_schedule__warmup_steps=0, model__vocab_size=60000, model__hidden_size=384,
                                               model__num_layers=1, training__seq_length=8, training__micro_batch_size=1,
                                               training__global_batch_size=1, checkpoint__every=1, device__threads=2))
    largest = 60000 * 384 * 4 / MEGABYTE
    for words in (["--from", "tessera", tmp_path / "run", "--to", "megatron", tmp_path / "megatron", "--tensor", 3],
                  ["--from", "megatron", tmp_path / "megatron", "--to", "tessera", tmp_path / "again"]):
        peak = peak_of(tessera_program, "convert", *words, "--with_optimizer")
        assert 0 < peak < 4 * largest, (words, peak, largest)
    shutil.rmtree(tmp_path)


def test_a_target_without_room_is_refused(tessera_program, tmp_path):
    """Four terabytes of nothing: a file with a hole."""
    rows, width = 1 << 28, 8192
    bytes_needed = 2 * rows * width
    if shutil.disk_usage(tmp_path).free > bytes_needed:
        pytest.skip("there is room for four terabytes")
    source = tmp_path / "hf"
    config = transformers.LlamaConfig(vocab_size=rows, max_position_embeddings=8, hidden_size=width, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=64, num_key_value_heads=64, tie_word_embeddings=True)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config.to_dict()))
    shapes = {"model.embed_tokens.weight": [rows, width], "model.norm.weight": [width]}
    for name, shape in {"self_attn.q_proj": [width, width], "self_attn.k_proj": [width, width], "self_attn.v_proj": [width, width],
                        "self_attn.o_proj": [width, width], "mlp.gate_proj": [8, width], "mlp.up_proj": [8, width], "mlp.down_proj": [width, 8],
                        "input_layernorm": [width], "post_attention_layernorm": [width]}.items():
        shapes[f"model.layers.0.{name}.weight"] = shape
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(torch.tensor(shape).prod())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(source / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        try:
            out.truncate(8 + len(text) + at)
        except OSError as error:
            pytest.skip(f"this file system has no files of four terabytes: {error}")
    for words in (["hf"], ["tessera"], ["dcp"], ["megatron", "--tensor", 1], ["megatron", "--ckpt_format", "torch_dist"]):
        target = tmp_path / "new/target"
        more = words[1:] + (["--dtype", "bfloat16"] if words[0] == "hf" else [])
        wanted = at + (bytes_needed if "--tensor" in words else 0)  # Megatron's own model has the tied head once more
        done = failing(tessera_program, "convert", "--from", "hf", source, "--to", words[0], target, *more)
        assert done.returncode == 3 and "not enough space in " in done.stderr and f"{wanted} bytes needed, " in done.stderr, (words, done.stderr)
        assert " free. " in done.stderr and not (tmp_path / "new").exists(), words
