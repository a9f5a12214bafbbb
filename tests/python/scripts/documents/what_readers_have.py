"""What the documents' scripts use and do not make: samples of random ids, a small model, an optimizer. No size divides by another:
the last step of an epoch is short."""

import torch
import transformers

VOCAB, LENGTH, SAMPLES = 67, 12, 11
num_epochs = 2
torch.manual_seed(5)
_ids = torch.randint(1, VOCAB, (SAMPLES, LENGTH))
train_dataloader = train_loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in _ids], batch_size=1)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
    n_layer=4, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
    eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
