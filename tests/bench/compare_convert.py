"""`tessera convert` beside copying the same files: how much of the disk's copy rate a conversion has, and its peak memory.

    ENVIRONMENT/bin/python tests/bench/compare_convert.py --build build/tests --folder build/convert

The source is a folder of a Llama (or GPT-2) in bfloat16 with random weights. A copy is `cp -r` and an fsync of each file; a conversion syncs
what it writes as well. Before each turn the source is taken out of the page cache, so that both read from the disk, and memory for what
is read and written has been written to once: a virtual machine gets a page from its host when it first is. All take turns."""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import struct
import subprocess
import time
from pathlib import Path

import numpy as np

LLAMAS = {  # layers, width, ffn, heads, groups, vocabulary
    "0.1b": (4, 1024, 2816, 16, 4, 32000), "1b": (22, 2048, 5632, 32, 4, 32000), "7b": (32, 4096, 11008, 32, 32, 32000)}
GPT2S = {"gpt2-1b": (24, 2048, 16, 50257)}  # layers, width, heads, vocabulary; stored transposed


def llama(name):
    layers, width, ffn, heads, groups, vocabulary = LLAMAS[name]
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": ffn,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary,
              "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
              "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    keys = width // heads * groups
    shapes = {"model.embed_tokens.weight": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{key}": shape for key, shape in {
            "self_attn.q_proj.weight": (width, width), "self_attn.k_proj.weight": (keys, width), "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, width), "mlp.gate_proj.weight": (ffn, width), "mlp.up_proj.weight": (ffn, width),
            "mlp.down_proj.weight": (width, ffn), "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}.items()}
    return config, shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def gpt2(name):
    layers, width, heads, vocabulary = GPT2S[name]
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads,
              "vocab_size": vocabulary, "n_positions": 1024, "activation_function": "gelu_new", "torch_dtype": "bfloat16"}
    shapes = {"transformer.wte.weight": (vocabulary, width), "transformer.wpe.weight": (1024, width)}
    for i in range(layers):
        for key, shape in {"ln_1": (width,), "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width), "ln_2": (width,),
                           "mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}.items():
            shapes |= {f"transformer.h.{i}.{key}.weight": shape, f"transformer.h.{i}.{key}.bias": shape[-1:]}
    return config, shapes | {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}


def write_model(folder, name, shard=5_000_000_000):
    """As save_pretrained lays it out, without a tensor in memory."""
    config, shapes = (llama if name in LLAMAS else gpt2)(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards = [{}]
    for key, shape in shapes.items():
        if sum(shards[-1].values()) + 2 * math.prod(shape) > shard:
            shards.append({})
        shards[-1][key] = 2 * math.prod(shape)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))] if len(shards) > 1 else ["model.safetensors"]
    block = (np.random.default_rng(1).normal(0, 0.02, 1 << 23).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    for file, tensors in zip(names, shards):
        header, at = {}, 0
        for key, size in tensors.items():
            header[key] = {"dtype": "BF16", "shape": shapes[key], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for i in range(0, at, len(block)):
                out.write(block[:min(len(block), at - i)])
    if len(shards) > 1:
        places = {key: file for file, tensors in zip(names, shards) for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return 2 * max(math.prod(shape) for shape in shapes.values())


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def size(folder):
    return sum(path.stat().st_size for path in files(folder))


def sync(folder, forget=False):
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if forget:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def touch(count):
    """Has the host supply so many bytes, or three quarters of what is there, which are free again afterwards."""
    available = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text()).group(1)) * 1024
    np.empty(min(count, available // 4 * 3), np.uint8).fill(1)


def peak_of(pid):
    """The most memory that a process has held so far in MB, what it had before exec left out."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM")), 0)


def timed(command, target=None):
    """Seconds, those of its processor time, and its peak memory; `target`: what is to be synced."""
    begun, peak = time.monotonic(), 0
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        peak = max(peak, peak_of(process.pid))
        time.sleep(0.02)
    if ended[1]:
        raise SystemExit(f"{command} failed")
    if target:
        sync(target)
    return time.monotonic() - begun, ended[2].ru_utime + ended[2].ru_stime, peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--folder", required=True, type=Path, help="on the disk to measure; three times the model's size")
    parser.add_argument("--model", default="1b", choices=[*LLAMAS, *GPT2S])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="*", help="of those that are printed; unless given, all")
    options = parser.parse_args()
    program, folder = Path(options.build) / "tessera", options.folder
    shutil.rmtree(folder, ignore_errors=True)
    largest = write_model(folder / "hf", options.model)
    convert = [program, "convert", "--from"]
    ways = {"hf -> tessera": ("hf", ["hf", "tessera"]), "hf -> megatron": ("hf", ["hf", "megatron"]),
            "hf -> megatron tp2 pp2": ("hf", ["hf", "megatron", "--tensor", 2, "--pipeline", 2]),
            "hf -> torch_dist": ("hf", ["hf", "megatron", "--ckpt_format", "torch_dist"]),
            "hf -> megatron float16": ("hf", ["hf", "megatron", "--dtype", "float16"]), "hf -> dcp": ("hf", ["hf", "dcp"]),
            "megatron -> hf": ("megatron", ["megatron", "hf"]), "tessera -> hf": ("tessera", ["tessera", "hf"])}
    if options.ways:
        ways = {way: ways[way] for way in options.ways}
    for form in {source for source, _ in ways.values()} - {"hf"}:
        timed([*convert, "hf", folder / "hf", "--to", form, folder / form])
    bytes_read, target = size(folder / "hf"), folder / "target"
    times, processor, memory = {way: [] for way in ("copy", *ways)}, {}, {}
    for _ in range(options.turns):
        for way in times:
            source, words = ways.get(way, ("hf", None))
            sync(folder / source, forget=True)
            touch(3 * bytes_read)
            if words:
                command = [*convert, words[0], folder / source, "--to", words[1], target, *words[2:]]
            else:
                command = ["cp", "-r", folder / source, target]
            seconds, processor[way], memory[way] = timed(command, target if way == "copy" else None)
            times[way].append(seconds)
            shutil.rmtree(target)
    print(f"{options.model}: {bytes_read / 1e9:.2f} GB, the largest tensor {largest / 1e6:.0f} MB")
    for way, seconds in times.items():
        ratio = statistics.median(copy / own for copy, own in zip(times["copy"], seconds))
        print(f"{way:24} {bytes_read / 1e6 / statistics.median(seconds):6.0f} MB/s  {ratio:.2f} of a copy  {processor[way]:.2f} s of a core  "
              f"peak {memory[way]:4.0f} MB  "
              f"({', '.join(f'{second:.2f}' for second in seconds)} s)")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
