"""Teaches a GPT-2 by a reward alone: it writes texts, and each step makes those likelier that were better than the others of
their batch (REINFORCE with the batch's mean as baseline). The reward is the share of a text's tokens that are small letters.

    python examples/python/11_policy_gradient.py
    examples/python/11_policy_gradient.sh

Writing and training take turns on the same engine, on any layout: nothing is copied between the two."""

import argparse

import torch
from text import END, VOCAB_SIZE
from transformers import GPT2Config, GPT2LMHeadModel

from tessera import Accelerator
from tessera.utils import set_seed

PROMPT = b"def "
LETTERS = torch.tensor(list(range(ord("a"), ord("z") + 1)))


def share_of_letters(written: torch.Tensor) -> torch.Tensor:
    """The reward of each text: [texts, new tokens] to [texts], between 0 and 1."""
    return torch.isin(written, LETTERS).float().mean(dim=1)


def policy_loss(logits: torch.Tensor, texts: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """-advantage x log-probability, mean over the tokens that were written; the prompt was given and has no loss.

    logits [texts, seq, vocab], texts [texts, seq], advantages [texts]."""
    begin = len(PROMPT)
    log_probabilities = logits[:, begin - 1:-1].float().log_softmax(dim=-1)  # position t - 1 tells of token t
    written = log_probabilities.gather(2, texts[:, begin:, None]).squeeze(2)
    return -(advantages[:, None] * written).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps, each after a batch of texts")
    parser.add_argument("--texts", type=int, default=64, help="texts written for each step, over all data ranks")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(7)
    # Without dropout, what a text's probability was when it was written is what the step computes again.
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=VOCAB_SIZE, n_positions=32, bos_token_id=END,
                                       eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    mesh = accelerator.state.mesh
    rank = mesh.coordinates["dp"]
    if args.texts % mesh.dp != 0:
        raise SystemExit(f"--texts {args.texts} cannot be shared out to {mesh.dp} data ranks")
    own = slice(args.texts // mesh.dp * rank, args.texts // mesh.dp * (rank + 1))
    prompt = torch.tensor([list(PROMPT)])

    for step in range(1, args.steps + 1):
        # Every rank gets all texts, the same ones on every layout; none ends early, so that all have one length.
        texts = model.generate(prompt, do_sample=True, num_return_sequences=args.texts, max_new_tokens=args.max_new_tokens,
                               eos_token_id=[])
        rewards = share_of_letters(texts[:, len(PROMPT):])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        # A data rank trains on its share; their mean is minimised.
        logits = model(input_ids=texts[own]).logits
        accelerator.backward(policy_loss(logits, texts[own], advantages[own]))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 5 == 0 or step == args.steps:
            accelerator.print(f"step {step}  reward {rewards.mean().item():.6f}")
    accelerator.print(f"writes {bytes(token for token in texts[0].tolist() if token != END)!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
