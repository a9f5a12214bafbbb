"""offload.optimizer: nvme: a model trains where its optimizer's state has no room in memory, with the same numbers."""

import resource
import subprocess

from cli_support import environment, metrics, run, text_documents, write_config, write_corpus

GIB = 1 << 30
# Of a GPT-2: what it has, and bytes that hold its weights and gradients but not Adam's moments besides.
SMALL = {"num_layers": 2, "hidden_size": 768, "num_heads": 12, "vocab_size": 50257}, 3 * GIB // 4
LARGE = {"num_layers": 36, "hidden_size": 1280, "num_heads": 20, "vocab_size": 50257}, 8 * GIB


def settings(folder, corpus, name, shape, **more):
    model = {f"model__{key}": value for key, value in shape.items()}
    training = {"training__steps": 2, "training__global_batch_size": 1, "training__micro_batch_size": 1,
                "training__recompute": "full", "lr_schedule__style": "constant", "lr_schedule__warmup_steps": 0}
    return write_config(folder, corpus, name, **model, **training, checkpoint__every=0, **more)


def numbers(folder):
    return [(entry["loss"], entry["grad_norm"]) for entry in metrics(folder)]


def test_state_on_a_disk_needs_no_memory(tessera_program, tmp_path, long_run):
    shape, most = LARGE if long_run else SMALL
    corpus = write_corpus(tmp_path / "text", text_documents())
    disk = tmp_path / "disk"
    disk.mkdir()
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most)), "timeout": 1800}
    plain = settings(tmp_path, corpus, "plain", shape)
    offloaded = settings(tmp_path, corpus, "offloaded", shape, offload__optimizer="nvme", offload__path=str(disk))
    assert subprocess.run([tessera_program, "train", plain], capture_output=True, env=environment(), **limited).returncode != 0
    run(tessera_program, "train", offloaded, **limited)
    assert not list(disk.iterdir())
    run(tessera_program, "train", plain, "logging.dir=" + str(tmp_path / "free"), timeout=1800)
    assert len(numbers(tmp_path / "offloaded")) == 2
    assert numbers(tmp_path / "offloaded") == numbers(tmp_path / "free")
