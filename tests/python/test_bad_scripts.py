"""What scripts get wrong: the error says what, where and what to do, and all ranks end."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HEAD = """
import torch, transformers
from tessera import Accelerator
from tessera.utils import MegatronLMPlugin

def gpt2(**changes):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**dict(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8),
                                                                  **changes}))

ids = torch.randint(0, 50, (2, 6))

def expect(kind, *words):
    class Expect:
        def __enter__(self):
            return self
        def __exit__(self, type, error, traceback):
            assert type is not None, f"no error, expected {kind} with {words}"
            assert issubclass(type, kind), (type, error)
            missing = [word for word in words if word not in str(error)]
            assert not missing, f"{missing} not in: {error}"
            return True
    return Expect()
"""

ONE_PROCESS = HEAD + """
import logging, os, tessera
plugin = dict(gradient_clipping=0.0, recompute_activations=True)
accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**plugin))
assert Accelerator().state.megatron_lm_plugin is accelerator.state.megatron_lm_plugin
equal = MegatronLMPlugin(**plugin)
assert Accelerator(megatron_lm_plugin=equal).state.megatron_lm_plugin is equal
with expect(ValueError, "gradient_clipping is 0.0 already, not 0.5", "to the first `Accelerator()`"):
    Accelerator(megatron_lm_plugin=MegatronLMPlugin(**{**plugin, "gradient_clipping": 0.5}))
tiny = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8, vocab_size=20)
with expect(tessera.ConfigError, "'roberta' is not supported", "gpt2, gpt_bigcode, llama, qwen2, mistral, starcoder2, gpt_neox, bert"):
    accelerator.prepare(transformers.RobertaForMaskedLM(transformers.RobertaConfig(**tiny)))
with expect(tessera.ConfigError, "BertLMHeadModel is not a model with a head that Tessera computes", "AutoModelForMaskedLM"):
    accelerator.prepare(transformers.BertLMHeadModel(transformers.BertConfig(**tiny)))
with expect(tessera.ConfigError, "no Hugging Face config"):
    accelerator.prepare(torch.nn.Linear(2, 2))
with expect(tessera.ConfigError, "two models"):
    accelerator.prepare(gpt2(), gpt2())
with expect(tessera.ConfigError, "before its model"):
    accelerator.prepare(torch.optim.AdamW(gpt2().parameters()))
with expect(tessera.ConfigError, "RMSprop", "AdamW, Adam or SGD"):
    model = gpt2()
    accelerator.prepare(model, torch.optim.RMSprop(model.parameters()))
accelerator.free_memory()
with expect(tessera.ConfigError, "amsgrad"):
    model = gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters(), amsgrad=True))
accelerator.free_memory()
with expect(tessera.ConfigError, "not the model's"):
    accelerator.prepare(gpt2(), torch.optim.AdamW(gpt2().parameters()))
accelerator.free_memory()
plain = gpt2()
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(plain, optimizer)
with expect(ValueError, "the model's 8 positions"):
    model(input_ids=torch.zeros(1, 9, dtype=torch.long), labels=torch.zeros(1, 9, dtype=torch.long))
with expect(tessera.Error, "50"):
    model(input_ids=ids + 50, labels=ids)
with expect(ValueError, "input_ids are of type bool"):
    model(input_ids=ids > 3, labels=ids)
with expect(ValueError, "labels are of type float32"):
    model(input_ids=ids, labels=ids.float())
with expect(ValueError, "without input_ids"):
    model(labels=ids)
with expect(ValueError, "special_tokens_mask"):
    model(input_ids=ids, special_tokens_mask=ids)
with expect(ValueError, "inputs_embeds"):
    model(input_ids=ids, inputs_embeds=torch.zeros(2, 6, 16))
with expect(ValueError, "zeros between ones"):
    model(input_ids=ids, labels=ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1]] * 2))
with expect(ValueError, "labels has the shape"):
    model(input_ids=ids, labels=ids[:, :3])
with expect(tessera.ConfigError, "whole model"):
    accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0)
for width in (6, 3, 8, 1, 6):  # shapes may change from batch to batch; one token has no target
    if width > 1:
        accelerator.backward(model(input_ids=ids[:, :1].expand(2, width), labels=ids[:, :1].expand(2, width)).loss)
        optimizer.step()
accelerator.save_state("saved")
accelerator.free_memory()
with expect(tessera.ConfigError, "free_memory() has let go of this model"):
    model(input_ids=ids, labels=ids)
with expect(tessera.ConfigError, "free_memory() has let go of this model"):
    accelerator.prepare(model)
other = gpt2(n_layer=3, n_embd=24)
model, optimizer = accelerator.prepare(other, torch.optim.AdamW(other.parameters()))
with expect(tessera.CheckpointError, "does not fit", "decoder.layers.2", "[50, 16]", "[50, 24]"):
    accelerator.load_state("saved")
with expect(tessera.CheckpointError, "nowhere holds no whole state"):
    accelerator.load_state("nowhere")
os.mkdir("megatron")
open("megatron/latest_checkpointed_iteration.txt", "w").write("5000")
with expect(tessera.CheckpointError, "megatron is a checkpoint of Megatron-LM", "tessera convert --from megatron"):
    accelerator.load_state("megatron")
with expect(NotImplementedError, "LOMO"):
    accelerator.lomo_backward(None, 0.1)
accelerator.free_memory()
told = []
logging.getLogger("tessera").addFilter(lambda record: told.append(record.getMessage()) or True)
model = accelerator.prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(
    num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50, max_position_embeddings=4)))
for width in (4, 6, 5, 6):
    model(input_ids=ids[:, :width], labels=ids[:, :width])
assert len([text for text in told if "max_position_embeddings" in text]) == 1, told
print("ALL REFUSED")
"""

FAILS_ON_ONE = HEAD + """
accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
model = gpt2()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(3):
    if step == 1 and accelerator.process_index == 1:
        raise ZeroDivisionError("something of the user's")
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
"""

WRONG_DEGREES = HEAD + """
Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=3))
"""


def run(python_build, tmp_path, script: str, processes: int = 1):
    path = tmp_path / "script.py"
    path.write_text(script)
    return python_build.run(path, launcher=python_build.launcher("--num_processes", processes), code=None, cwd=tmp_path)


def test_what_one_process_refuses(python_build, tmp_path):
    done = run(python_build, tmp_path, ONE_PROCESS)
    assert "ALL REFUSED" in done.stdout, done.stdout[-2000:] + done.stderr[-6000:]


def test_an_exception_on_one_rank_ends_all(python_build, tmp_path):
    done = run(python_build, tmp_path, FAILS_ON_ONE, 2)
    assert done.returncode != 0
    report = done.stderr[done.stderr.rindex("error: rank"):] if "error: rank" in done.stderr else done.stderr
    assert report.startswith("error: rank 1"), done.stderr[-4000:]
    assert "ZeroDivisionError: something of the user's" in done.stderr


def test_degrees_that_do_not_fit_the_processes(python_build, tmp_path):
    done = run(python_build, tmp_path, WRONG_DEGREES, 2)
    assert done.returncode != 0 and "tp_degree" in done.stderr and "2" in done.stderr, done.stderr[-3000:]
