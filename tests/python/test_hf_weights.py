"""Hugging Face weights into the engine and out again: from memory, from a folder by byte ranges, in every family."""

import json

import numpy as np
import pytest
from cli_support import run, text_documents, write_config, write_corpus

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
    if family == "gpt_neox":
        sizes.pop("num_key_value_heads")
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))
    if family == "bloom":
        return transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=2, hidden_size=32, n_head=4, vocab_size=97))
    if family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=10))
    if family in ("gemma2", "gemma3"):
        kind = "Gemma2" if family == "gemma2" else "Gemma3Text"
        config = getattr(transformers, f"{kind}Config")(**sizes, head_dim=10, sliding_window=5)
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
        with torch.no_grad():  # norms begin at zero
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
        return model
    if family in ("phi3", "glm4"):
        kind = "Phi3" if family == "phi3" else "Glm4"
        more = dict(head_dim=12) if family == "glm4" else {}
        return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes, **more, pad_token_id=0))
    if family == "olmo2":
        return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**sizes))
    if family == "mpt":
        return transformers.MptForCausalLM(transformers.MptConfig(n_layers=2, d_model=32, n_heads=4, vocab_size=97, max_seq_len=32))
    if family == "falcon":
        return transformers.FalconForCausalLM(transformers.FalconConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=2, vocab_size=97, new_decoder_architecture=True))
    if family == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=None))
    if family == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=3))
    if family == "qwen3_moe":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, head_dim=8, num_experts=4, num_experts_per_tok=2,
                                                                      moe_intermediate_size=20))
    if family == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))


@pytest.mark.parametrize("family, dtype, processes, tp, pp, source", [
    ("gpt2", torch.float32, 4, 2, 2, "memory"), ("llama", torch.bfloat16, 2, 2, 1, "meta"),
    ("qwen2", torch.float32, 2, 1, 2, "meta"), ("mistral", torch.float16, 1, 1, 1, "memory"),
    ("gpt_bigcode", torch.float32, 2, 2, 1, "meta"), ("starcoder2", torch.bfloat16, 2, 1, 2, "memory"),
    ("gpt_neox", torch.float32, 2, 2, 1, "meta"), ("gemma2", torch.float32, 2, 2, 1, "meta"), ("bloom", torch.float32, 1, 1, 1, "memory"),
    ("gemma3", torch.float32, 2, 1, 2, "memory"), ("qwen3", torch.bfloat16, 1, 1, 1, "meta"), ("phi3", torch.float32, 1, 1, 1, "meta"),
    ("glm4", torch.bfloat16, 1, 1, 1, "memory"), ("olmo2", torch.float32, 2, 2, 1, "meta"), ("mpt", torch.float32, 1, 1, 1, "memory"),
    ("falcon", torch.float32, 2, 2, 1, "memory"), ("mixtral", torch.float32, 2, 2, 1, "meta"),
    ("qwen3_moe", torch.bfloat16, 2, 1, 2, "memory")], ids=str)
def test_round_trip(python_build, tmp_path, long_run, family, dtype, processes, tp, pp, source):
    if family in ("gemma3", "qwen3", "phi3", "glm4", "mpt") and not long_run:
        pytest.skip("--long")
    folder = tmp_path / "model"
    original = make_model(family).to(dtype)
    # Of one with experts each layer's as one tensor.
    original.save_pretrained(folder, **({"save_original_format": False} if family == "mixtral" else {}))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    python_build.run(script, folder, tmp_path, tp, pp, source, launcher=python_build.launcher("--num_processes", processes))
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "same", dtype="auto").state_dict()
    for name, value in original.state_dict().items():
        assert same[name].dtype == dtype and torch.equal(same[name], value), name
    assert json.loads((tmp_path / "result.json").read_text())["logits"] <= 1e-5
    assert len(list((tmp_path / "trained").glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("key, ours", [("attention_bias", {"model__qkv_bias": True, "model__proj_bias": True}),
                                       ("mlp_bias", {"model__linear_bias": True, "model__proj_bias": False})])
def test_a_llama_with_one_kind_of_bias_is_converted_and_trained_alike(tessera_program, tmp_path, key, ours):
    from safetensors.numpy import load_file

    torch.manual_seed(1)
    sizes = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=24, vocab_size=300, max_position_embeddings=48,
                 rms_norm_eps=1e-5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False, **{key: True}))
    with torch.no_grad():  # Transformers begins with biases of zero
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path / "hf")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "tessera", tmp_path / "ours")
    config = dict(
        model__family="llama", model__num_layers=1, model__hidden_size=16, model__ffn_hidden_size=24, model__num_heads=2,
        model__num_kv_heads=1, model__vocab_size=300, model__max_positions=48, model__norm_eps=1e-5, model__tied_head=False,
        training__steps=1, optimizer__lr=1e-30, optimizer__weight_decay=0.0, lr_schedule__warmup_steps=0)
    corpus = write_corpus(tmp_path / "corpus", text_documents())
    for name in ("hf", "ours"):
        start = {**config, "model__init_from": str(tmp_path / name)}
        untold = run(tessera_program, "train", write_config(tmp_path, corpus, f"{name}-untold", **start), code=4)
        for option, value in ours.items():
            if value:
                assert f"{option.replace('__', '.')}: true there, " in untold.stderr
        run(tessera_program, "train", write_config(tmp_path, corpus, f"{name}-told", **start, **ours))
        run(tessera_program, "convert", "--from", "tessera", tmp_path / f"{name}-told", "--to", "hf", tmp_path / f"{name}-back")
        before, after = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / f"{name}-back/model.safetensors")
        assert before.keys() == after.keys() and any(tensor.endswith("bias") for tensor in after)
        assert all(np.array_equal(value, after[tensor]) for tensor, value in before.items())
        assert json.loads((tmp_path / f"{name}-back/config.json").read_text())[key] is True
