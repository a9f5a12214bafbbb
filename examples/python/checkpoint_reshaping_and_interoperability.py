"""Checkpoints of Megatron-LM's GPT models to Transformers and back, with the flags of Transformers' program of that name.

    python examples/python/checkpoint_reshaping_and_interoperability.py --convert_checkpoint_from_megatron_to_transformers \\
        --load_path gpt/iter_0005000 --save_path gpt/trfs_checkpoint --max_shard_size 200MB --print-checkpoint-structure
    python examples/python/checkpoint_reshaping_and_interoperability.py --load_path gpt/trfs_checkpoint \\
        --save_path gpt/megatron_lm_checkpoint --target_tensor_model_parallel_size 2 --target_params_dtype bf16

Weights of Transformers are safetensors. `tessera convert` does the work, for Llama's kind of model too; neither PyTorch nor
Megatron-LM is needed, and nothing that a checkpoint holds is run."""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List

from tessera.cli import own_command

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-path", help="without effect: Megatron-LM is not needed")
    parser.add_argument("--convert_checkpoint_from_megatron_to_transformers", action="store_true",
                        help="the direction; without it from Transformers to Megatron")
    parser.add_argument("--load_path", type=Path, required=True, help="the checkpoint to convert")
    parser.add_argument("--save_path", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--print-checkpoint-structure", action="store_true", help="print names and shapes of what is written")
    megatron = parser.add_argument_group("from Transformers to Megatron")
    megatron.add_argument("--target_tensor_model_parallel_size", type=int, default=1)
    megatron.add_argument("--target_pipeline_model_parallel_size", type=int, default=1)
    megatron.add_argument("--target_data_parallel_size", type=int, default=1)
    megatron.add_argument("--target_params_dtype", choices=DTYPES, default="fp32")
    megatron.add_argument("--make_vocab_size_divisible_by", type=int, default=128)
    megatron.add_argument("--use_distributed_optimizer", action="store_true")
    transformers = parser.add_argument_group("from Megatron to Transformers")
    transformers.add_argument("--tokenizer_name", help="a folder, or a name that Transformers finds, of the tokenizer to add")
    transformers.add_argument("--max_shard_size", default="10GB", help="bytes, or text such as 200MB")
    given = parser.parse_args()
    if given.megatron_path:
        print("note: --megatron-path has no effect: Megatron-LM is not needed", file=sys.stderr)
    return given


def tessera(*command: Any) -> str:
    """What `tessera` prints. It has said why where it fails."""
    done = subprocess.run(own_command() + [str(word) for word in command], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


def show(name: str, value: Any, indent: int = 0) -> None:
    """A line for each key: nested ones further in, tensors with their shape."""
    label = "." * max(0, indent - 2) + f"# {name:{50 - indent}s}" if name else None
    if isinstance(value, dict) and "tensor" in value:
        print(label, ":", f"torch.Size({value['shape']})")
    elif isinstance(value, dict) and "namespace" in value:
        print(label, ":", "namespace({})".format(", ".join(f"{key}={plain(each)!r}" for key, each in value["namespace"].items())))
    elif isinstance(value, dict):
        if label:
            print(label)
        for key, each in value.items():
            show(key, each, indent + 2)
    else:
        print(label, ":", value)


def plain(value: Any) -> Any:
    return value["global"] if isinstance(value, dict) and "global" in value else value


def tensors_of(folder: Path) -> Dict[str, Any]:
    """Names and shapes in a folder's safetensors files."""
    found: Dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as part:
            header = json.loads(part.read(struct.unpack("<Q", part.read(8))[0]))
        found |= {name: {"tensor": each["dtype"], "shape": each["shape"]} for name, each in header.items() if name != "__metadata__"}
    return found


def add_tokenizer(folder: Path, tokenizer: Any) -> str:
    """The name of its class, which config.json tells AutoTokenizer."""
    if tokenizer is None:
        return "GPT2TokenizerFast"
    print(f"Adding {type(tokenizer).__name__} tokenizer files")
    tokenizer.save_pretrained(folder)
    return type(tokenizer).__name__


def to_transformers(given: argparse.Namespace) -> None:
    tokenizer = None
    if given.tokenizer_name:  # first: it may not be there
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(given.tokenizer_name)
    given.save_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.save_path.parent, prefix=".incomplete-") as aside:
        folder = Path(aside) / "model"
        tessera("convert", "--from", "megatron", given.load_path, "--to", "hf", folder, "--dtype", "float32", "--max_shard_size",
                given.max_shard_size)
        config = json.loads((folder / "config.json").read_text())
        last = config["vocab_size"] - 1
        config |= {"bos_token_id": last, "eos_token_id": last, "tokenizer_class": add_tokenizer(folder, tokenizer)}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if given.print_checkpoint_structure:
            show("", tensors_of(folder))
        put(folder, given.save_path)
    print(f"Model weights saved in {given.save_path}")


def put(folder: Path, target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    if target.exists():
        sys.exit(f"{target}: already exists. Name a new folder, or remove this one first; nothing is overwritten.")
    os.rename(folder, target)


def to_megatron(given: argparse.Namespace) -> None:
    options: List[Any] = ["--tensor", given.target_tensor_model_parallel_size, "--pipeline", given.target_pipeline_model_parallel_size,
                          "--data", given.target_data_parallel_size, "--dtype", DTYPES[given.target_params_dtype],
                          "--make_vocab_size_divisible_by", given.make_vocab_size_divisible_by]
    if given.use_distributed_optimizer:
        options.append("--distributed_optimizer")
    given.save_path.parent.mkdir(parents=True, exist_ok=True)
    tessera("convert", "--from", "hf", given.load_path, "--to", "megatron", given.save_path, *options)
    if given.print_checkpoint_structure:
        for pp in range(given.target_pipeline_model_parallel_size):
            for tp in range(given.target_tensor_model_parallel_size):
                stage = f"_{pp:03d}" if given.target_pipeline_model_parallel_size > 1 else ""
                name = "model_rng.pt" if given.use_distributed_optimizer else "model_optim_rng.pt"
                print(f"Checkpoint structure of model state dict shard belonging to TP rank {tp} and PP rank {pp}:")
                show("", json.loads(tessera("checkpoint", "inspect", given.save_path / f"release/mp_rank_{tp:02d}{stage}" / name)))
    print(f"Megatron's checkpoint saved in {given.save_path}")


if __name__ == "__main__":
    chosen = arguments()
    to_transformers(chosen) if chosen.convert_checkpoint_from_megatron_to_transformers else to_megatron(chosen)
