"""Later decoder families through prepare() against Transformers. Arguments: output, tensor ranks, pipeline stages, expert ranks, cases.
Rank 0 writes by case the largest error of the loss and of every gradient, relative to the largest element of that gradient, and of the
weights after they came back by load_state_dict()."""

import copy
import sys

import torch
import transformers
from results import fresh_states, write_results

from tessera import Accelerator
from tessera.utils import MegatronLMPlugin, full_gradients

IDS = torch.randint(1, 97, (4, 12), generator=torch.Generator().manual_seed(1))
SIZES = dict(num_hidden_layers=2, hidden_size=30, num_attention_heads=6, num_key_value_heads=2, intermediate_size=48, vocab_size=97,
             max_position_embeddings=32)
WIDE = dict(SIZES, head_dim=10)
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0]}
CASES = {
    "mistral": ("Mistral", dict(SIZES, head_dim=10, sliding_window=4)),
    "qwen2": ("Qwen2", dict(SIZES, hidden_size=24, sliding_window=4, use_sliding_window=True, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(WIDE, sliding_window=4, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"])),
    "gemma2": ("Gemma2", dict(WIDE, sliding_window=4, query_pre_attn_scalar=7, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3", dict(WIDE, sliding_window=4, query_pre_attn_scalar=7, layer_types=["sliding_attention", "full_attention"])),
    "gpt_neox": ("GPTNeoX", dict({key: value for key, value in SIZES.items() if key != "num_key_value_heads"}, hidden_size=48)),
    "gpt_bigcode": ("GPTBigCode", dict(n_layer=2, n_embd=30, n_head=6, vocab_size=97, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                                       attn_pdrop=0.0)),
    "bloom": ("Bloom", dict(n_layer=2, hidden_size=30, n_head=6, vocab_size=97)),
    "phi3": ("Phi3", dict(SIZES, hidden_size=60, sliding_window=4, pad_token_id=0)),
    "glm": ("Glm", dict(SIZES, head_dim=12, pad_token_id=0)),
    "glm4": ("Glm4", dict(SIZES, head_dim=12, pad_token_id=0)),
    "olmo2": ("Olmo2", dict(SIZES, hidden_size=48)),
    "mpt": ("Mpt", dict(n_layers=2, d_model=30, n_heads=6, vocab_size=97, max_seq_len=32)),
    "falcon": ("Falcon", dict(num_hidden_layers=2, hidden_size=48, num_attention_heads=6, num_kv_heads=2, vocab_size=97,
                              new_decoder_architecture=True)),
    "falcon_in_line": ("Falcon", dict(num_hidden_layers=2, hidden_size=48, num_attention_heads=6, multi_query=False, vocab_size=97,
                                      parallel_attn=False, bias=True)),
    "mixtral": ("Mixtral", dict(SIZES, hidden_size=24, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3Moe", dict(WIDE, hidden_size=28, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
                                   decoder_sparse_step=2, norm_topk_prob=True)),
    "olmoe": ("Olmoe", dict(SIZES, hidden_size=24, num_experts=6, num_experts_per_tok=3, pad_token_id=0, eos_token_id=1)),
    "longrope": ("Llama", dict(SIZES, hidden_size=24, rope_parameters=LONG)),
    "yarn": ("Llama", dict(SIZES, hidden_size=24, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                                                   "original_max_position_embeddings": 8})),
}


def make(kind: str, settings: dict):
    torch.manual_seed(1)
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))  # norms and biases count
    return model


def error_of(kind: str, settings: dict, tp: int, pp: int, ep: int) -> float:
    model = make(kind, settings)
    reference = copy.deepcopy(model).train()
    plugin = None if tp * pp * ep == 1 else MegatronLMPlugin(
        tp_degree=tp, pp_degree=pp, expert_model_parallel_size=ep, sequence_parallelism=tp > 1, num_micro_batches=2,
        gradient_clipping=0.0)
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    ours, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = {"input_ids": IDS, "labels": IDS}
    own = IDS[accelerator.process_index::ep] if ep > 1 else IDS
    loss = ours(input_ids=own, labels=own).loss
    accelerator.backward(loss)
    loss = accelerator.reduce(loss.detach(), "mean")
    gradients = full_gradients(ours)
    weights = ours.state_dict()
    ours.load_state_dict({name: -value for name, value in weights.items()})
    turned = ours.state_dict()
    error = 0.0
    if accelerator.is_main_process:
        expected = reference(**batch).loss
        expected.backward()
        error = abs(loss.item() / expected.item() - 1)
        for name, parameter in reference.named_parameters():
            error = max(error, ((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()).item())
            if not (torch.equal(weights[name], parameter) and torch.equal(turned[name], -parameter)):
                error = float("inf")
    accelerator.free_memory()
    fresh_states()
    return error


tp, pp, ep = map(int, sys.argv[2:5])
write_results(sys.argv[1], {name: error_of(*CASES[name], tp, pp, ep) for name in sys.argv[5].split(",")})
