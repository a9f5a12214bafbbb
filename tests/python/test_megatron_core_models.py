"""BERT and T5 against Megatron Core's own models, where megatron-core is installed (PyPI, without its dependencies): what is written is
loaded by them and gives the same logits, and what they save is read."""

import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")
import megatron_t5_writer as t5  # noqa: E402
from cli_support import run  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.T5.t5_model import T5Model  # noqa: E402
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron_core_support import one_process  # noqa: E402
from megatron_writer import Model, arguments  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_megatron_checkpoints import random_model, same, to_hf  # noqa: E402
from test_megatron_distributed import dist  # noqa: E402
from test_megatron_t5 import tessera_folder  # noqa: E402

METADATA = {"singleton_local_shards": False}
TOKENS = torch.tensor([[1, 5, 60, 2, 9, 33, 17, 8]])
READ = torch.tensor([[4, 59, 3, 3, 20, 11]])


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    with one_process(tmp_path_factory.mktemp("store")):
        yield


def config(layers: int, ffn: int, activation) -> TransformerConfig:
    return TransformerConfig(num_layers=layers, hidden_size=24, num_attention_heads=4, ffn_hidden_size=ffn, use_cpu_initialization=True,
                             hidden_dropout=0, attention_dropout=0, masked_softmax_fusion=False, layernorm_epsilon=1e-5,
                             activation_func=activation)


def bert() -> BertModel:
    """That of the tests."""
    return BertModel(config(4, 96, torch.nn.functional.gelu), num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, vocab_size=64,
                     max_sequence_length=16, share_embeddings_and_output_weights=True, parallel_output=False).eval()


def their_t5() -> T5Model:
    def gelu(x):
        return torch.nn.functional.gelu(x, approximate="tanh")
    encoder, decoder = get_t5_encoder_with_local_block_spec(t5.ENCODER), get_t5_decoder_with_local_block_spec(t5.DECODER)
    encoder.layer_norm = decoder.layer_norm = WrappedTorchNorm  # that of Transformer Engine, which is not there
    return T5Model(config(t5.DECODER, t5.FFN, gelu), config(t5.ENCODER, t5.FFN, gelu), encoder, decoder, vocab_size=64, max_sequence_length=t5.POSITIONS,
                   share_embeddings_and_output_weights=True, parallel_output=False).eval()


def load_dist(model, folder: Path) -> None:
    state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=METADATA)}, str(folder))
    model.load_state_dict(state["model"])


def save_dist(model, folder: Path, args: dict) -> Path:
    place = folder / "iter_0000007"
    place.mkdir(parents=True)
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata=METADATA), "iteration": 7, "checkpoint_version": 3.0,
                             "args": types.SimpleNamespace(**args)}, str(place), content_metadata=METADATA)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def equal(a, b) -> None:
    one, two = (dict(each.named_parameters()) for each in (a, b))
    assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def test_bert(tessera_program, tmp_path):
    source = random_model("bert").eval()
    source.save_pretrained(tmp_path / "hf")
    model = bert()
    load_dist(model, dist(tessera_program, "hf", tmp_path / "hf", tmp_path / "dist") / "release")
    run(tessera_program, "convert", "--from", "hf", tmp_path / "hf", "--to", "megatron", tmp_path / "file", "--names", "local",
        "--make_vocab_size_divisible_by", 8)
    by_file = bert()
    by_file.load_state_dict(torch.load(tmp_path / "file/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"])
    equal(model, by_file)
    kinds = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        wanted = source(TOKENS, token_type_ids=kinds)
        logits, pairs = model(TOKENS, torch.ones_like(TOKENS), kinds)
    torch.testing.assert_close(logits[..., :61], wanted.prediction_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pairs, wanted.seq_relationship_logits, rtol=1e-4, atol=1e-4)
    theirs = save_dist(model, tmp_path / "theirs", arguments(Model(source), 1, 1, 1, 64, orig_vocab_size=61))
    same(to_hf(tessera_program, theirs, tmp_path / "again"), source)


class Plain:
    """The same T5 by what is known of it, in PyTorch."""

    def __init__(self, weights: dict) -> None:
        self.w = weights

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (t5.WIDTH,), self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = (each.unflatten(2, (t5.HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.linear(f"{name}.linear_proj", mixed.transpose(1, 2).flatten(2))

    def stack(self, name: str, tokens: torch.Tensor, layers: int, memory=None) -> torch.Tensor:
        x = self.w["embedding.word_embeddings.weight"][tokens] + self.w["embedding.position_embeddings.weight"][:tokens.shape[1]]
        for i in range(layers):
            layer = f"{name}.layers.{i}"
            qkv = self.linear(f"{layer}.self_attention.linear_qkv", self.norm(f"{layer}.input_layernorm", x)).chunk(3, dim=2)
            x = x + self.attend(f"{layer}.self_attention", *qkv, causal=memory is not None)
            if memory is not None:
                q = self.linear(f"{layer}.cross_attention.linear_q", self.norm(f"{layer}.pre_cross_attn_layernorm", x))
                x = x + self.attend(f"{layer}.cross_attention", q, *self.linear(f"{layer}.cross_attention.linear_kv", memory).chunk(2, dim=2), causal=False)
            h = torch.nn.functional.gelu(self.linear(f"{layer}.mlp.linear_fc1", self.norm(f"{layer}.pre_mlp_layernorm", x)), approximate="tanh")
            x = x + self.linear(f"{layer}.mlp.linear_fc2", h)
        return self.norm(f"{name}.final_layernorm", x)

    def logits(self) -> torch.Tensor:
        memory = self.stack("encoder", READ, t5.ENCODER)
        x = self.stack("decoder", TOKENS, t5.DECODER, memory)
        return torch.nn.functional.linear(x, self.w["embedding.word_embeddings.weight"], self.w["output_layer.bias"])


def test_t5(tessera_program, tmp_path):
    weights = {name: value * 0.3 for name, value in t5.weights().items()}
    folder = tessera_folder(tmp_path / "t", weights)
    model = their_t5()
    load_dist(model, dist(tessera_program, "tessera", folder, tmp_path / "dist") / "release")
    run(tessera_program, "convert", "--from", "tessera", folder, "--to", "megatron", tmp_path / "file", "--names", "local",
        "--make_vocab_size_divisible_by", 8)
    by_file = their_t5()
    by_file.load_state_dict(torch.load(tmp_path / "file/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"])
    equal(model, by_file)
    reads, says = READ.shape[1], TOKENS.shape[1]
    with torch.no_grad():
        found = model(READ, TOKENS, torch.zeros(1, 1, reads, reads).bool(), torch.ones(1, 1, says, says).triu(1).bool(),
                      torch.zeros(1, 1, says, reads).bool())
    torch.testing.assert_close(found[..., :t5.VOCABULARY], Plain(weights).logits(), rtol=1e-4, atol=1e-4)
    theirs = save_dist(model, tmp_path / "theirs", vars(t5.arguments(1)))
    run(tessera_program, "convert", "--from", "megatron", theirs, "--to", "tessera", tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], value) for name, value in weights.items())
