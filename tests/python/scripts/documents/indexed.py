"""A script on Megatron's indexed data, with the document's changes where a line "# block" stands. Arguments: the data's prefix, and
the tokenizer's folder."""

import sys
from argparse import Namespace
from functools import partial

import torch
import transformers

from tessera import Accelerator, DistributedType
from tessera.utils import MegatronLMPlugin

args = Namespace(data_path=sys.argv[1], splits_string="80,20,0", block_size=14, per_device_train_batch_size=1, max_train_steps=4,
                 num_warmup_steps=1, gradient_accumulation_steps=1, lr_scheduler_type="linear")
eval_interval, eval_iters, completed_steps = 2, 2, 0
accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(eval_interval=eval_interval, eval_iters=eval_iters))
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
    n_layer=4, n_embd=32, n_head=4, vocab_size=67, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=65,
    eos_token_id=65))
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[2])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# block 004/scheduler.py
# block 004/custom_train_step.py
main()
# block 004/dummy_dataloader.py
try:  # where no scheduler says how long the training is
    accelerator.prepare(megatron_dataloader)
    refused = ""
except ValueError as error:
    refused = str(error)
# block 004/prepare_dataloaders.py
# block 004/indexed_loop.py
told = {"evaluated": [loss.item() for loss in losses], "refused": refused}
