"""One way to write texts with a GPT-2 of random weights: what compare_generation.py puts beside the others.

Says `ready`; then, for each line of JSON {"lengths": of the prompts, "new": tokens for each, "beams"} on standard input, writes
the texts once and answers with {"seconds", "cpu_seconds": of all threads, "tokens": the ids that were added, of each prompt}. Prompts are the same for all.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, List

VOCAB, POSITIONS = 50257, 1024
Writer = Callable[[List[List[int]], int, int], List[List[int]]]


def model_folder(options: argparse.Namespace):
    """Transformers' GPT-2, the same for all contenders."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(options.threads)
    torch.manual_seed(1234)
    config = GPT2Config(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=options.hidden, n_layer=options.layers, n_head=options.heads,
                        bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return GPT2LMHeadModel(config).eval()


def padded(prompts: List[List[int]]):
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def of_transformers(options: argparse.Namespace) -> Writer:
    import torch

    model = model_folder(options)
    if options.precision == "bf16":
        model = model.to(torch.bfloat16)

    def write(prompts: List[List[int]], new: int, beams: int) -> List[List[int]]:
        ids, mask = padded(prompts)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, num_beams=beams, do_sample=False,
                             cache_implementation=options.cache)
        return out[:, ids.shape[1]:].tolist()

    return write


def of_tessera(options: argparse.Namespace) -> Writer:
    import torch

    from tessera import Accelerator

    model = model_folder(options)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if options.precision == "bf16" else "no")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.eval()

    def write(prompts: List[List[int]], new: int, beams: int) -> List[List[int]]:
        ids, mask = padded(prompts)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, num_beams=beams, do_sample=False)
        return out[:, ids.shape[1]:].tolist()

    return write


def of_ctranslate2(options: argparse.Namespace) -> Writer:
    import ctranslate2
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp())
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    model = model_folder(options)
    model.config.bos_token_id = model.config.eos_token_id = VOCAB - 1
    model.save_pretrained(folder / "hf")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token=f"t{VOCAB - 1}",
                            eos_token=f"t{VOCAB - 1}").save_pretrained(folder / "hf")
    ctranslate2.converters.TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
    generator = ctranslate2.Generator(str(folder / "ct2"), device="cpu", intra_threads=options.threads,
                                      compute_type={"fp32": "float32", "bf16": "bfloat16"}[options.precision])

    def write(prompts: List[List[int]], new: int, beams: int) -> List[List[int]]:
        results = generator.generate_batch([[f"t{token}" for token in prompt] for prompt in prompts], max_length=new, min_length=new,
                                           beam_size=beams, sampling_topk=1, include_prompt_in_result=False)
        return [result.sequences_ids[0] for result in results]

    return write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("writer", choices=["tessera", "transformers", "ctranslate2"])
    for name, value in (("layers", 12), ("hidden", 768), ("heads", 12), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic", help="Transformers'")
    options = parser.parse_args()
    write = {"tessera": of_tessera, "transformers": of_transformers, "ctranslate2": of_ctranslate2}[options.writer](options)
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        prompts = [[(7919 * (row + 1) + 31 * at) % VOCAB for at in range(length)] for row, length in enumerate(task["lengths"])]
        begin, cpu = time.perf_counter(), time.process_time()
        texts = write(prompts, task["new"], task["beams"])
        print(json.dumps({"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu, "tokens": texts}),
              flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
