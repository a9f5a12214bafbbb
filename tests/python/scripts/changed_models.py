"""Models that the plugin's arguments change, on one layout. Arguments: output folder, tp, pp, and the folder of an earlier
layout's output or "none". Rank 0 writes for each case what it trained with, as numpy arrays by Tessera's names."""

import json
import sys
from pathlib import Path

import numpy as np
from results import fresh_states
import torch
import transformers

from tessera import Accelerator
from tessera.engine.whole_weights import joined
from tessera.utils import MegatronLMPlugin, full_gradients, set_seed



def printed(block):
    """The arguments in a printed block of Accelerate's page."""
    names = {"MegatronLMPlugin": MegatronLMPlugin}
    exec((Path(__file__).parents[2] / "documents" / block).read_text(), names)
    return names["megatron_lm_plugin"].other_megatron_args


CASES = {
    "multiquery": printed("004/multiquery.py"),
    "rotary": {"position_embedding_type": "rotary"},
    "rotary_multiquery": {"position_embedding_type": "rope", "attention_head_type": "multiquery", "rotary_base": 500},
    "alibi": printed("004/alibi.py"),
    "untied": {"untie_embeddings_and_output_weights": True},
    "grouped_llama": {"group_query_attention": True, "num_query_groups": 2, "normalization": "LayerNorm", "add_qkv_bias": True},
}
IDS = torch.randint(0, 97, (4, 12), generator=torch.Generator().manual_seed(1))


def make(case):
    torch.manual_seed(2)
    if case == "grouped_llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48, vocab_size=97,
            max_position_embeddings=16, bos_token_id=1, eos_token_id=2))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=1, eos_token_id=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def run(case, arguments, out, tp, pp, earlier):
    set_seed(17)
    model = make(case)
    given = {name: value.detach().clone() for name, value in model.named_parameters()}
    plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, num_micro_batches=2, gradient_clipping=0.0, other_megatron_args=arguments)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    rank, ranks = accelerator.state.mesh.coordinates["dp"], accelerator.state.mesh.dp
    ids = IDS[rank::ranks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    state = model.state_dict()
    model.save_pretrained(out / case)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    gradients = full_gradients(model)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    model.train()
    optimizer.step()
    trained = model.state_dict()
    accelerator.save_state(str(out / f"{case}_state"))
    after = model(input_ids=ids, labels=ids).loss.item()
    resumed = after
    if earlier is not None:  # weights and moments of another layout
        accelerator.load_state(str(earlier / f"{case}_state"))
        resumed = model(input_ids=ids, labels=ids).loss.item()
    if accelerator.is_main_process:
        session = model.session
        arrays = {"loss": loss.item(), "logits": logits.numpy(), "after": after, "resumed": resumed}
        for kind, values in (("weight", state), ("grad", gradients), ("trained", trained)):
            arrays |= {f"{kind}.{ours}": joined(ours, values, session) for ours in session.mappings}
        arrays |= {f"given.{name}": value.numpy() for name, value in given.items()}
        arrays |= {f"state.{name}": value.numpy() for name, value in state.items()}
        np.savez(out / f"{case}.npz", **arrays)
        (out / f"{case}.json").write_text(json.dumps({
            "print": repr(model), "names": [name for name, _ in model.named_parameters()],
            "shapes": [list(each.shape) for each in model.parameters()],
            "grouped": sum(len(group["params"]) for group in optimizer.param_groups)}))
    accelerator.free_memory()
    fresh_states()


folder, before = Path(sys.argv[1]), None if sys.argv[4] == "none" else Path(sys.argv[4])
folder.mkdir(parents=True, exist_ok=True)
for name in CASES:
    run(name, CASES[name], folder, int(sys.argv[2]), int(sys.argv[3]), before)
