"""As megatron_runs.train, by DeepSpeed on all ranks of torchrun: `deepspeed_run.py STAGE MODEL UPDATES FOLDER` saves after the last."""

import sys

import deepspeed
import torch
from megatron_runs import lr_at, optimizer_of
from test_megatron_runs import TOKENS
from transformers import AutoModelForCausalLM

stage, source, updates, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
model = AutoModelForCausalLM.from_pretrained(source)
for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
          "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
for update in range(updates):
    for group in engine.optimizer.param_groups:
        group["lr"] = lr_at(update)
    logits = engine(TOKENS[None, :-1]).logits[0]
    engine.backward(torch.nn.functional.cross_entropy(logits, TOKENS[1:]))
    engine.step()
engine.save_checkpoint(folder)
