"""Questions on the terminal, and those of `tessera config`."""

from typing import Any, Callable, Dict, List, Tuple

from tessera.commands.config_file import DEFAULTS

PRECISIONS = ("no", "fp16", "bf16")


def yes_no(text: str) -> bool:
    return {"yes": True, "y": True, "no": False, "n": False}[text.strip().lower()]


def at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value
    return convert


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def some_text(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text.strip()


def ask(question: str, convert: Callable[[str], Any], default: Any = None, hint: str = "") -> Any:
    """Asks until the answer can be converted; an empty one is the default, if there is one."""
    while True:
        answer = input(question + " ")
        if not answer.strip() and default is not None:
            return default
        try:
            return convert(answer)
        except (KeyError, ValueError):
            print(f"Please enter {hint}.")


def ask_yes_no(question: str, default: bool) -> bool:
    return ask(f"{question} [{'YES/no' if default else 'yes/NO'}]:", yes_no, default, "yes or no")


def choose(question: str, options: List[str]) -> int:
    """The number of an option, which may be given by number or word; the first is the default."""
    print(question)
    for number, option in enumerate(options):
        print(f"  {number}  {option}")
    words = {option.lower(): number for number, option in enumerate(options)}

    def convert(text: str) -> int:
        word = text.strip().lower()
        if word in words:
            return words[word]
        number = int(word)
        if not 0 <= number < len(options):
            raise ValueError
        return number

    return ask("Number or word [0]:", convert, 0, f"a number from 0 to {len(options) - 1}, or one of the words")


def _machines(config: Dict[str, Any]) -> None:
    machines = ask("How many machines take part? [1]:", at_least(1), 1, "an integer of at least 1")
    config["num_machines"] = machines
    if machines == 1:
        return
    config["machine_rank"] = choose("What is the rank of this machine?", [str(rank) for rank in range(machines)])
    config["main_process_ip"] = ask("What is the IP address of the machine of rank 0?", some_text, hint="an address")
    config["main_process_port"] = ask("Which port shall be used on it? [29500]:", at_least(1), 29500, "a port number")
    config["same_network"] = ask_yes_no("Are all machines on the same local network?", True)
    if not config["same_network"]:
        names = ["static", "c10d"]
        config["rdzv_backend"] = names[choose("Which rendezvous backend?", names)]


def _layout() -> Dict[str, Any]:
    """The section megatron_lm_config."""
    degree: Tuple = (at_least(1), 1, "an integer of at least 1")
    layout: Dict[str, Any] = {"megatron_lm_tp_degree": ask("What is the tensor-parallel degree? [1]:", *degree)}
    if layout["megatron_lm_tp_degree"] > 1:
        layout["megatron_lm_sequence_parallelism"] = ask_yes_no("Do you want sequence parallelism?", True)
    layout["megatron_lm_pp_degree"] = ask("What is the pipeline-parallel degree? [1]:", *degree)
    if layout["megatron_lm_pp_degree"] > 1:
        layout["megatron_lm_num_micro_batches"] = ask("What is the number of micro-batches? [1]:", *degree)
    layout["megatron_lm_recompute_activations"] = ask_yes_no("Do you want selective recomputation of activations?", True)
    layout["megatron_lm_use_distributed_optimizer"] = ask_yes_no(
        "Do you want the distributed optimizer, which shards the optimizer's state over data-parallel ranks?", True)
    layout["megatron_lm_gradient_clipping"] = ask(
        "To which global norm shall gradients be clipped (0 = not at all)? [1.0]:", not_negative, 1.0, "a number of at least 0")
    return layout


def _processes(config: Dict[str, Any], cpu: bool) -> int:
    layout = config.get("megatron_lm_config", {})
    parts = layout.get("megatron_lm_tp_degree", 1) * layout.get("megatron_lm_pp_degree", 1)
    least = 2 if config["distributed_type"] == "MULTI_GPU" and config["num_machines"] == 1 else 1
    unit = max(parts, 1)
    machines = config["num_machines"]

    def convert(text: str) -> int:
        value = int(text)
        if value < least or value % unit != 0 or value % machines != 0:
            raise ValueError
        return value

    default = max(unit, least) * machines if (max(unit, least) % machines) else max(unit, least)
    wanted = f"an integer of at least {least}" + (f", a multiple of {unit} (tensor x pipeline degree)" if unit > 1 else "") + (
        f", a multiple of {machines} (machines)" if machines > 1 else "")
    return ask(f"How many {'processes' if cpu else 'GPU(s)'} in all shall be used? [{default}]:", convert, default, wanted)


def ask_config() -> Dict[str, Any]:
    """Asks everything and returns the keys of the file."""
    config = dict(DEFAULTS)
    kind = choose("Which type of machine are you using?", ["No distributed training", "multi-CPU", "multi-GPU"])
    config["distributed_type"] = ("NO", "MULTI_CPU", "MULTI_GPU")[kind]
    if kind:
        _machines(config)
        config["debug"] = ask_yes_no("Shall collective operations be checked while running? It is slower.", False)
        config["use_cpu"] = kind == 1
        if ask_yes_no("Do you want to use Megatron-LM (tensor or pipeline parallelism)?", False):
            config["distributed_type"] = "MEGATRON_LM"
            config["megatron_lm_config"] = _layout()
        config["num_processes"] = _processes(config, kind == 1)
    else:
        config["use_cpu"] = ask_yes_no("Do you want to run on the CPU only, even if there is a GPU?", False)
    if config["distributed_type"] in ("NO", "MULTI_GPU") and not config["use_cpu"]:
        config["gpu_ids"] = ask("Which GPU(s), by id, separated by commas? [all]:", gpu_list, "all", "numbers such as 0,1, or all")
        config["enable_cpu_affinity"] = ask_yes_no("Shall each process keep to its own CPU cores?", False)
    config["mixed_precision"] = PRECISIONS[choose("Do you wish to use mixed precision?", list(PRECISIONS))]
    return config


def gpu_list(text: str) -> str:
    """"all" or numbers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if words == ["all"]:
        return "all"
    for word in words:
        if int(word) < 0:
            raise ValueError
    return ",".join(words)
