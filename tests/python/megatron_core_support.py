"""Megatron Core's classes on the CPU, in one process: what they ask of CUDA is answered for tensors of the CPU."""

import contextlib
from pathlib import Path
from typing import Any, Iterator

import megatron.core.tensor_parallel.random as random_states
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.safe_globals import register_safe_globals
from megatron.core.transformer.transformer_config import TransformerConfig


def on_cpu(make: Any) -> Any:
    def made(*args: Any, **options: Any) -> Any:
        return make(*args, **options | ({"device": "cpu"} if options.get("device") == "cuda" else {}))
    return made


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """A world of one. Optimizers ask what kind of CUDA tensor a parameter is, and move what they gather there."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    patch = pytest.MonkeyPatch()
    kind_of = torch.Tensor.type
    patch.setattr(torch.Tensor, "type", lambda self, *a, **o: kind_of(self, *a, **o) if a or o else kind_of(self).replace("torch.", "torch.cuda."))
    patch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for name in ("tensor", "zeros", "empty"):
        patch.setattr(torch, name, on_cpu(getattr(torch, name)))
    patch.setattr(random_states.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    parallel_state.initialize_model_parallel(1, 1)
    register_safe_globals()  # once more: another file's torch.serialization.safe_globals takes away what both allow
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        patch.undo()


def gpt(**settings: Any) -> GPTModel:
    """The GPT-2 of the tests."""
    config = TransformerConfig(num_layers=4, hidden_size=24, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0,
                               attention_dropout=0, masked_softmax_fusion=False, layernorm_epsilon=1e-5,
                               activation_func=lambda x: torch.nn.functional.gelu(x, approximate="tanh"), **settings)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, position_embedding_type="learned_absolute",
                    share_embeddings_and_output_weights=True)


def llama() -> GPTModel:
    """The Llama of the tests."""
    config = TransformerConfig(num_layers=4, hidden_size=24, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=20,
                               use_cpu_initialization=True, hidden_dropout=0, attention_dropout=0, masked_softmax_fusion=False,
                               normalization="RMSNorm", layernorm_epsilon=1e-5, gated_linear_unit=True, add_bias_linear=False,
                               activation_func=torch.nn.functional.silu)
    return GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=64, max_sequence_length=16,
                    position_embedding_type="rope", share_embeddings_and_output_weights=False)


def call(model: Any, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    length = tokens.shape[1]
    return model(tokens, torch.arange(length)[None], torch.ones(1, 1, length, length).triu(1).bool(), **more)
