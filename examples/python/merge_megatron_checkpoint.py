"""One file of weights from a checkpoint that many processes saved.

    python examples/python/merge_megatron_checkpoint.py --checkpoint-dir checkpoint-1000 --output pytorch_model.bin
    python examples/python/merge_megatron_checkpoint.py --checkpoint-dir runs/demo --output model.safetensors

The checkpoint is a run's folder, one checkpoint of it, or what Accelerator.save_state wrote. Weights get the names that
Transformers gives them, in float32, and config.json is written beside them where there is none, so that from_pretrained
loads the folder. A .bin holds what model.load_state_dict() asks for, a tied head too."""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List

from tessera.cli import own_command
from tessera.utils import load


def convert(checkpoint: Path, folder: Path) -> List[Path]:
    """Writes the whole model as Transformers does; returns its files of weights, several where it is large."""
    command = own_command() + ["convert", "--from", "tessera", str(checkpoint), "--to", "hf", str(folder)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(done.returncode)  # convert has said why
    return sorted(folder.glob("model*.safetensors"))


def join(files: List[Path], whole: Path) -> None:
    """One safetensors file with the tensors of all: 8 bytes of header length, a JSON header, the tensors' bytes."""
    header, begins, end = {"__metadata__": {"format": "pt"}}, [], 0
    for file in files:
        with open(file, "rb") as part:
            length = struct.unpack("<Q", part.read(8))[0]
            tensors = json.loads(part.read(length))
        tensors.pop("__metadata__", None)
        for name, tensor in tensors.items():
            header[name] = {**tensor, "data_offsets": [end + offset for offset in tensor["data_offsets"]]}
        begins.append(8 + length)
        end += file.stat().st_size - begins[-1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(whole, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for file, begin in zip(files, begins):
            with open(file, "rb") as part:
                part.seek(begin)
                shutil.copyfileobj(part, out)


def state_dict(files: List[Path], folder: Path) -> dict:
    """All that model.state_dict() has: a tied head under its own name too, which the model's folder leaves out."""
    tensors = {name: value for file in files for name, value in load(file).items()}
    embedding = next((name for name in ("transformer.wte.weight", "model.embed_tokens.weight") if name in tensors), None)
    if embedding and json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        tensors.setdefault("lm_head.weight", tensors[embedding])
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="a run, a checkpoint, or a folder of save_state")
    parser.add_argument("--output", type=Path, required=True, help="a new file, NAME.bin or NAME.safetensors")
    args = parser.parse_args()
    if args.output.suffix not in (".bin", ".safetensors"):
        parser.error(f"--output {args.output}: name a file that ends in .bin or .safetensors")
    if args.output.exists():
        parser.error(f"--output {args.output} exists already: remove it, or name another file")
    if args.output.suffix == ".bin":
        try:
            import torch
        except ImportError:
            parser.error(f"--output {args.output}: only PyTorch writes .bin files, and it is not installed here. "
                         "Install torch, or name a .safetensors file")

    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent, prefix=".merging-") as staging:
        folder = Path(staging) / "model"
        files, whole = convert(args.checkpoint_dir, folder), Path(staging) / args.output.name
        if args.output.suffix == ".bin":
            torch.save(state_dict(files, folder), whole)
        else:
            join(files, whole)
        os.replace(whole, args.output)
        config = args.output.parent / "config.json"
        beside = "is left as it was" if config.exists() else "describes the model"
        if not config.exists():
            shutil.copyfile(folder / "config.json", config)
    print(f"wrote {args.output}; {config} {beside}")


if __name__ == "__main__":
    main()
