"""Saves and loads where a line "# block" stands, and trains the same epoch after each."""

from what_readers_have import model, optimizer, train_dataloader

from tessera import Accelerator

accelerator = Accelerator()
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)


def epoch() -> list:
    losses = []
    for batch in train_dataloader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


epoch()
# block 003/save_checkpoint.py
told = {"first": epoch()}
# block 003/load_checkpoint.py
told["again"] = epoch()
