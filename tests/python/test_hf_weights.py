"""Hugging Face weights into the engine and out again: from memory, from a folder by byte ranges, in every family."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SCRIPT = """
import json, sys
import torch, transformers
from tessera import Accelerator, init_empty_weights
from tessera.utils import MegatronLMPlugin

folder, out, tp, pp, meta = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "meta"
config = transformers.AutoConfig.from_pretrained(folder)
if meta:
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
else:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp, pp_degree=pp, gradient_clipping=0.0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
model, optimizer = accelerator.prepare(model, optimizer)
model.save_pretrained(out + "/same")
ids = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(1))
for _ in range(2):
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    logits = model(input_ids=ids).logits
model.save_pretrained(out + "/trained", max_shard_size="20KB", torch_dtype=torch.float32)
if accelerator.is_main_process:
    again = transformers.AutoModelForCausalLM.from_pretrained(out + "/trained")
    with torch.no_grad():
        error = (again(input_ids=ids).logits - logits).abs().max().item() / logits.abs().max().item()
    with open(out + "/result.json", "w") as file:
        json.dump({"logits": error}, file)
accelerator.end_training()
"""


def make_model(family: str) -> torch.nn.Module:
    torch.manual_seed(1)
    sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
                 vocab_size=97, max_position_embeddings=32)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=32))
    if family == "gpt_bigcode":
        return transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(n_layer=2, n_embd=32, n_head=4, vocab_size=97,
                                                                                n_positions=32))
    if family == "starcoder2":
        return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**sizes))
    if family == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=None))
    if family == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))


@pytest.mark.parametrize("family, dtype, processes, tp, pp, source", [
    ("gpt2", torch.float32, 4, 2, 2, "memory"), ("llama", torch.bfloat16, 2, 2, 1, "meta"),
    ("qwen2", torch.float32, 2, 1, 2, "meta"), ("mistral", torch.float16, 1, 1, 1, "memory"),
    ("gpt_bigcode", torch.float32, 2, 2, 1, "meta"), ("starcoder2", torch.bfloat16, 2, 1, 2, "memory")], ids=str)
def test_round_trip(python_build, tmp_path, family, dtype, processes, tp, pp, source):
    folder = tmp_path / "model"
    original = make_model(family).to(dtype)
    original.save_pretrained(folder)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    python_build.run(script, folder, tmp_path, tp, pp, source, launcher=python_build.launcher("--num_processes", processes))
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "same", dtype="auto").state_dict()
    for name, value in original.state_dict().items():
        assert same[name].dtype == dtype and torch.equal(same[name], value), name
    assert json.loads((tmp_path / "result.json").read_text())["logits"] <= 1e-5
    assert len(list((tmp_path / "trained").glob("model-*.safetensors"))) > 1
