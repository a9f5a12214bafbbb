"""Settings of models and batches against Transformers: loss and every gradient. Argument: output. Rank 0 writes the largest
error of each case relative to the largest element of the gradient (0 or 1 for what is said rather than computed)."""

import copy
import math
import sys

import numpy as np
from results import fresh_states, write_results
import torch
import transformers

from tessera import Accelerator
from tessera.state import PartialState
from tessera.utils import MegatronLMPlugin, full_gradients

SIZES = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=97,
             max_position_embeddings=32)
IDS = torch.randint(0, 97, (4, 12), generator=torch.Generator().manual_seed(1))
errors = {}


def llama(kind="Llama", **settings):
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))  # biases and padding rows are no zeros
    return model


def gpt2():
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=32,
                                                                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def compare(name, model, layout=(1, 1, False), **batch):
    reference = copy.deepcopy(model).train()
    tp, pp, sequence = layout
    plugin = None
    if tp * pp > 1:
        plugin = MegatronLMPlugin(tp_degree=tp, pp_degree=pp, sequence_parallelism=sequence, num_micro_batches=2, gradient_clipping=0.0)
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    ours, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    batch = {"input_ids": IDS, "labels": IDS, **batch}
    mine = {key: value[accelerator.state.mesh.coordinates["dp"]::accelerator.state.mesh.dp] if value.ndim == 2 else value
            for key, value in batch.items()}
    loss = ours(**mine).loss
    accelerator.backward(loss)
    gradients = full_gradients(ours)
    optimizer.step()
    weights = ours.state_dict()
    if accelerator.is_main_process:
        expected = reference(**{key: value.long() for key, value in batch.items()}).loss
        expected.backward()
        by_torch = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1)
        pairs = [(gradients[n], p.grad) for n, p in reference.named_parameters()]
        largest = max(g.abs().max().item() for _, g in pairs)
        error = max((a - g).abs().max().item() for a, g in pairs) / (largest or 1.0)
        if math.isnan(expected.item()):
            error += 0.0 if math.isnan(loss.item()) else 1.0
            by_torch.step()
            error += max((weights[n] - p.detach()).abs().max().item() for n, p in reference.named_parameters())
        else:
            error = max(error, abs(loss.item() / expected.item() - 1))
        errors[name] = error
    accelerator.free_memory()
    fresh_states()


def padding(layouts):
    for layout in layouts:
        for tied in (False, True):
            for kind in ("Llama", "Qwen2"):
                compare(f"padding {layout} tied {tied} {kind}", llama(kind, pad_token_id=int(IDS[0, 3]), tie_word_embeddings=tied), layout)


def one_process():
    compare("pad id set after the model was made", after(llama()))
    compare("negative pad id", llama(pad_token_id=-1), input_ids=torch.where(IDS % 2 == 0, 96, IDS))
    compare("window", llama("Mistral", sliding_window=12))
    compare("default window", llama("Mistral", max_position_embeddings=8192))
    compare("attention bias", llama(attention_bias=True))
    compare("mlp bias", llama(mlp_bias=True))
    compare("keys that Mistral passes over", llama("Mistral", attention_bias=True, mlp_bias=True))
    compare("positions that begin later", gpt2(), position_ids=torch.arange(12).expand(4, 12) + 20)
    compare("rotary positions far out", llama(), position_ids=torch.arange(12).expand(4, 12) + 700)
    compare("longer than its positions", llama(max_position_embeddings=8))
    compare("no targets", llama(), labels=torch.full_like(IDS, -100))
    compare("sequences of one token", llama(), input_ids=IDS[:, :1], labels=IDS[:, :1])
    for dtype in (torch.uint8, torch.uint16, torch.int8, torch.int16, torch.int32):
        compare(f"ids of {dtype}", gpt2(), input_ids=IDS.to(dtype), labels=IDS.to(dtype))


def after(model):
    model.config.pad_token_id = int(IDS[0, 3])
    return model


padding([(1, 1, False)] if PartialState().num_processes == 1 else [(2, 1, False), (2, 1, True), (1, 2, False)])
if PartialState().num_processes == 1:
    one_process()
else:
    for layout in ((1, 1, False), (2, 1, False), (1, 2, False)):
        compare(f"no targets {layout}", llama(), layout, labels=torch.full_like(IDS, -100))
        compare(f"far positions {layout}", llama(mlp_bias=True), layout, position_ids=torch.arange(12).expand(4, 12) + 700)
write_results(sys.argv[1], errors)
