"""What the tests of the plugin share: a tiny prepared model, a step of it, tiny indexed data."""

import numpy as np
import pytest
import torch
import transformers

from tessera import Accelerator
from tessera.data.indexed import IndexedDatasetBuilder
from tessera.state import AcceleratorState, GradientState
from tessera.utils import MegatronLMPlugin

IDS = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(2))


def forget_states() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_states(monkeypatch):
    monkeypatch.setattr("tessera.comm.warnings._told", set())  # other tests may have heard the warnings
    yield
    forget_states()


def make_model(**config):
    torch.manual_seed(4)
    tiny = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**tiny, **config}))


def make_mixture():
    torch.manual_seed(4)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24, vocab_size=40,
        max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.1))


def make_encoder(kind: str = "BertForMaskedLM", **config):
    torch.manual_seed(4)
    tiny = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=40,
                max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1)
    settings = transformers.MegatronBertConfig if kind.startswith("Megatron") else transformers.BertConfig
    return getattr(transformers, kind)(settings(**{**tiny, **config}))


def make_t5(kind: str = "T5", own_head: bool = False, **config):
    torch.manual_seed(4)
    tiny = dict(num_layers=2, num_decoder_layers=3, d_model=16, num_heads=2, d_kv=5, d_ff=24, vocab_size=40, dropout_rate=0.0,
                relative_attention_num_buckets=8, relative_attention_max_distance=10, initializer_factor=0.5, decoder_start_token_id=0)
    settings = getattr(transformers, f"{kind}Config")(**{**tiny, **config})
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(settings)
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(model.lm_head.weight.shape))
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def prepared(*more, optimizer=adamw, change=lambda model: model, plugin: bool = True, mixed_precision=None, **fields):
    """An Accelerator with these fields, a tiny GPT-2 (as `change` returns it) and its optimizer, and what else prepare() is
    given."""
    forget_states()
    model = change(make_model())
    optimizer = optimizer(model.parameters())
    accelerator = Accelerator(mixed_precision=mixed_precision, megatron_lm_plugin=MegatronLMPlugin(**fields) if plugin else None)
    made = [item(optimizer) if callable(item) else item for item in more]
    return (accelerator, *accelerator.prepare(model, optimizer, *made))


def step(accelerator, model, optimizer, batch=None) -> float:
    loss = model(**(batch or {"input_ids": IDS, "labels": IDS})).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def indexed(tmp_path) -> str:
    builder = IndexedDatasetBuilder(tmp_path / "data", vocab_size=40)
    rng = np.random.default_rng(1)
    for _ in range(600):
        builder.add_document(rng.integers(0, 40, 30))
    builder.finalize()
    return str(tmp_path / "data")
