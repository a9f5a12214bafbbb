"""Questions on the terminal, and those of `tessera config`."""

import math
from typing import Any, Callable, Dict, List, Mapping, Tuple

from tessera.commands.config_file import DEFAULTS
from tessera.compat.refusals import boolean
from tessera.plugin.fields import AXES

PRECISIONS = ("no", "fp16", "bf16")
_AWS = "Amazon SageMaker starts no jobs of Tessera; on a rented machine of theirs answer: This machine."
_TPU = "Tessera does not run on TPUs."
_ZERO = "Tessera does not use {}. Its share of the work is done by the distributed optimizer, which is asked for under Megatron-LM."


def yes_no(text: str) -> bool:
    value = boolean(text)
    if value is None:
        raise ValueError
    return value


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


def choose(question: str, options: List[str], default: int = 0, refused: Mapping[int, str] = {}) -> int:
    """The number of an option, which may be given by number or word. A `refused` one is answered with its sentence, and
    asked again."""
    print(question)
    for number, option in enumerate(options):
        print(f"  {number}  {option}")
    words = {option.lower(): number for number, option in enumerate(options)}

    def convert(text: str) -> int:
        word = text.strip().lower()
        number = words[word] if word in words else int(word)
        if not 0 <= number < len(options):
            raise ValueError
        return number

    while True:
        number = ask(f"Number or word [{default}]:", convert, default, f"a number from 0 to {len(options) - 1}, or one of the words")
        if number not in refused:
            return number
        print(refused[number])


def _machines(config: Dict[str, Any]) -> None:
    machines = ask("How many different machines will you use? [1]:", at_least(1), 1, "an integer of at least 1")
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
    layout: Dict[str, Any] = {"megatron_lm_tp_degree": ask("What is the Tensor Parallelism degree? [1]:", *degree)}
    if layout["megatron_lm_tp_degree"] > 1:
        layout["megatron_lm_sequence_parallelism"] = ask_yes_no("Do you want to enable Sequence Parallelism?", True)
    layout["megatron_lm_pp_degree"] = ask("What is the Pipeline Parallelism degree? [1]:", *degree)
    if layout["megatron_lm_pp_degree"] > 1:
        layout["megatron_lm_num_micro_batches"] = ask("What is the number of micro-batches? [1]:", *degree)
    layout["megatron_lm_recompute_activations"] = ask_yes_no("Do you want selective recomputation of activations?", True)
    layout["megatron_lm_use_distributed_optimizer"] = ask_yes_no(
        "Do you want the distributed optimizer, which shards the optimizer's state over data-parallel ranks?", True)
    layout["megatron_lm_gradient_clipping"] = ask(
        "To which global norm shall gradients be clipped (0 = not at all)? [1.0]:", not_negative, 1.0, "a number of at least 0")
    return layout


def model_ranks(layout: Dict[str, Any]) -> int:
    """Processes of one copy of the model, of a section megatron_lm_config: tensor x pipeline x context degree."""
    return math.prod(layout.get(f"megatron_lm_{name}", 1) for name in AXES.values())


def _processes(config: Dict[str, Any], cpu: bool) -> int:
    least = 2 if config["distributed_type"] == "MULTI_GPU" and config["num_machines"] == 1 else 1
    unit, machines = model_ranks(config.get("megatron_lm_config", {})), config["num_machines"]

    def convert(text: str) -> int:
        value = int(text)
        if value < least or value % unit != 0 or value % machines != 0:
            raise ValueError
        return value

    default = max(unit, least) * machines if (max(unit, least) % machines) else max(unit, least)
    wanted = f"an integer of at least {least}" + (f", a multiple of {unit} (tensor x pipeline x context degree)" if unit > 1 else "") + (
        f", a multiple of {machines} (machines)" if machines > 1 else "")
    return ask(f"How many {'processes' if cpu else 'GPU(s)'} in all shall be used? [{default}]:", convert, default, wanted)


def _further_layout(config: Dict[str, Any]) -> None:
    """What else may be said of a layout; what was said before is the default."""
    layout, ranks, machines = config["megatron_lm_config"], model_ranks(config["megatron_lm_config"]), config["num_machines"]
    places = ["SELECTIVE", "FULL", "NONE"]
    place = places[choose("Where to perform activation checkpointing? SELECTIVE computes attention again, FULL whole layers.",
                          places, 0 if layout["megatron_lm_recompute_activations"] else 2)]
    layout["megatron_lm_recompute_activations"] = place == "SELECTIVE"
    if place == "FULL":
        layout["megatron_lm_recompute_granularity"] = "full"
    if choose("Where to perform activation partitioning? SEQUENTIAL: each rank keeps its layers' activations whole. UNIFORM: "
              "tensor ranks share what FULL checkpointing keeps.", ["SEQUENTIAL", "UNIFORM"]) == 1:
        layout["megatron_lm_partition_activations"] = True

    def convert(text: str) -> int:
        value = at_least(1)(text)
        if value * ranks % machines != 0:
            raise ValueError
        return value

    copies = config["num_processes"] // ranks
    wanted = "an integer of at least 1" + (f", so that {machines} machines get equal shares" if machines > 1 else "")
    given = ask(f"What is the Data Parallelism degree? [{copies}]:", convert, copies, wanted)
    config["num_processes"] = given * ranks
    if given != copies:
        print(f"That makes {config['num_processes']} processes in all.")


def _further(config: Dict[str, Any], distributed: bool) -> None:
    """What need not be answered: an end of the input leaves the rest as it is."""
    print("Further questions; Enter takes what is usual.")
    try:
        if config["distributed_type"] == "MEGATRON_LM":
            _further_layout(config)
        if distributed:
            config["debug"] = ask_yes_no("Shall collective operations be checked while running? It is slower.", False)
        if config["distributed_type"] in ("NO", "MULTI_GPU") and not config["use_cpu"]:
            config["gpu_ids"] = "all"
            config["gpu_ids"] = ask("Which GPU(s), by id, separated by commas? [all]:", gpu_list, "all", "numbers such as 0,1, or all")
            config["enable_cpu_affinity"] = ask_yes_no("Shall each process keep to its own CPU cores?", False)
    except EOFError:
        print("\nThe input ended here: the rest is as usual.")


def ask_config() -> Dict[str, Any]:
    """Asks everything and returns the keys of the file. The order up to mixed precision is that of Accelerate's guide to
    Megatron-LM, so that answers work by their position."""
    config = dict(DEFAULTS)
    choose("In which compute environment are you running?", ["This machine", "AWS (Amazon SageMaker)"], refused={1: _AWS})
    kind = choose("Which type of machine are you using?", ["No distributed training", "multi-CPU", "multi-GPU", "TPU"], refused={3: _TPU})
    config["distributed_type"] = ("NO", "MULTI_CPU", "MULTI_GPU")[kind]
    if kind:
        _machines(config)
        config["use_cpu"] = kind == 1
        for engine in ("DeepSpeed", "FullyShardedDataParallel (FSDP)") if kind == 2 else ():
            if ask_yes_no(f"Do you want to use {engine}?", False):
                print(_ZERO.format(engine))
        if ask_yes_no("Do you want to use Megatron-LM?", False):
            config["distributed_type"] = "MEGATRON_LM"
            config["megatron_lm_config"] = _layout()
        config["num_processes"] = _processes(config, kind == 1)
    else:
        config["use_cpu"] = ask_yes_no("Do you want to run on the CPU only, even if there is a GPU?", False)
    config["mixed_precision"] = PRECISIONS[choose("Do you wish to use mixed precision?", list(PRECISIONS))]
    _further(config, kind != 0)
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
