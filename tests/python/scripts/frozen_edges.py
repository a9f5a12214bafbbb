"""What is refused and warned about when parameters are frozen, and states of a run without counts of updates. Writes JSON.
Arguments: output, a folder."""

import json
import logging
import sys
import zlib
from pathlib import Path

import torch
import transformers

from tessera import Accelerator


def main() -> None:
    output, folder = sys.argv[1:]
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tessera").addHandler(handler)
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, vocab_size=101,
        max_position_embeddings=16))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(0, 101, (2, 12))

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    step()
    accelerator.save_state(folder)
    expected = step()
    forget_counts(folder)
    accelerator.load_state(folder)
    again = step()
    query = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    query.requires_grad_(False)
    try:
        step()
        refused = ""
    except ValueError as error:
        refused = str(error)
    query.requires_grad_(True)
    norm = model.get_parameter("model.norm.weight")
    for trained in (True, False, True):
        norm.requires_grad_(trained)
        step()
    Path(output).write_text(json.dumps({"refused": refused, "lines": lines, "expected": expected, "again": again}))


def forget_counts(folder: str) -> None:
    """Makes the saved state one of a version that did not count updates by parameter."""
    for path in Path(folder).rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest.pop("checksum") == checksum(manifest)
        del manifest["user"]["fewer_updates"]
        path.write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))


def checksum(manifest: dict) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"{zlib.crc32(text.encode()):08x}"


if __name__ == "__main__":
    main()
