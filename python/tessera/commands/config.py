"""`tessera config`: writes the file that `tessera launch` starts jobs with.

Without flags it asks; with any flag of the file's keys it asks nothing; `tessera config default` (or --default) writes
plain training on what the machine has; `tessera config update` brings an older file up to date.
"""

import argparse
import sys
from typing import Any, Dict, List, Optional

from tessera.commands.config_file import DEFAULTS, basic_config, default_config_path, read_config, write_config
from tessera.commands.questions import PRECISIONS, ask_config, gpu_list, model_ranks
from tessera.compat.refusals import boolean
from tessera.errors import ConfigError
from tessera.plugin import fields

_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MEGATRON_LM")
_LAYOUT = [name for name, rule in fields.FIELDS.items() if rule.key]
_INTEGERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
_SWITCHES = ("use_cpu", "debug", "enable_cpu_affinity", "same_network")


def _spellings(*names: str) -> List[str]:
    return list(dict.fromkeys(flag for name in names for flag in (f"--{name}", "--" + name.replace("_", "-"))))


def _switch(text: str) -> bool:
    value = boolean(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tessera config", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["default", "update"], help="default: no questions; update: an older file")
    parser.add_argument(*_spellings("config_file"), metavar="FILE", help=f"where to write ({default_config_path()}); *.json is JSON")
    parser.add_argument("--default", action="store_true", help="the same as `tessera config default`")
    parser.add_argument(*_spellings("distributed_type"), choices=_TYPES, help="follows from the other flags if not given")
    parser.add_argument(*_spellings("mixed_precision"), choices=PRECISIONS)
    for name in _INTEGERS:
        parser.add_argument(*_spellings(name), type=int, metavar="N")
    parser.add_argument(*_spellings("main_process_ip"), metavar="ADDRESS")
    parser.add_argument(*_spellings("rdzv_backend"), choices=["static", "c10d"])
    parser.add_argument(*_spellings("gpu_ids"), metavar="IDS", help="all, or numbers separated by commas")
    parser.add_argument("--cpu", dest="use_cpu", nargs="?", const=True, type=_switch, metavar="BOOL", help="the same as --use_cpu")
    for name in _SWITCHES:
        parser.add_argument(*_spellings(name), nargs="?", const=True, type=_switch, metavar="BOOL")
    layout = parser.add_argument_group("layout (megatron_lm_config); each also as --megatron_lm_NAME")
    for name in _LAYOUT:
        rule = fields.FIELDS[name]
        layout.add_argument(*_spellings(name, "megatron_lm_" + name), dest="megatron_lm_" + name, metavar="VALUE",
                            **({"nargs": "?", "const": "true"} if rule.kind == "bool" else {}))
    return parser


def _from_flags(flags: Dict[str, Any]) -> Dict[str, Any]:
    """The keys of the file, of flags that were given. Errors: ConfigError for values that no job can have."""
    layout = {}
    for flag in [flag for flag in flags if flag.startswith("megatron_lm_")]:
        name = flag[len("megatron_lm_"):]
        layout[flag] = fields.check(name, fields.parse(name, flags.pop(flag), "--" + name))
    config = {**DEFAULTS, **flags}
    if "distributed_type" not in flags:
        several = config["num_processes"] > 1
        config["distributed_type"] = "MEGATRON_LM" if layout else ("MULTI_CPU" if config["use_cpu"] else "MULTI_GPU") if several else "NO"
    kind = config["distributed_type"]
    if kind == "MULTI_CPU":
        config["use_cpu"] = True
    if kind == "MEGATRON_LM":
        config["megatron_lm_config"] = layout
    elif layout:
        raise ConfigError(f"{', '.join(layout)}: a layout is for distributed_type MEGATRON_LM, not {kind}")
    parts = model_ranks(layout)
    if "num_processes" not in flags:
        config["num_processes"] = parts
    processes, machines = config["num_processes"], config["num_machines"]
    if processes < 1 or machines < 1 or processes % machines or not 0 <= config["machine_rank"] < machines:
        raise ConfigError(f"num_processes {processes} must be a multiple of num_machines {machines}, both at least 1, and "
                          f"machine_rank {config['machine_rank']} below num_machines")
    if processes % parts:
        raise ConfigError(f"num_processes {processes} must be a multiple of {parts}, the tensor x pipeline x context degree")
    if kind == "MULTI_GPU" and processes < 2:
        raise ConfigError("distributed_type MULTI_GPU needs at least 2 processes; for one leave it out")
    if machines > 1 and "main_process_ip" not in flags:
        raise ConfigError(f"num_machines {machines} needs a main_process_ip: the address of machine 0")
    if "gpu_ids" in config:
        try:
            config["gpu_ids"] = gpu_list(config["gpu_ids"])
        except ValueError:
            raise ConfigError(f"gpu_ids '{config['gpu_ids']}' must be all, or numbers separated by commas") from None
    return config


def _updated(path: str) -> Dict[str, Any]:
    """An older file's keys with the spelling of today."""
    config = read_config(path)
    if "distributed_type" not in config:
        raise ConfigError(f"{path} is no file of `accelerate config` or `tessera config`: distributed_type is missing")
    if "fp16" in config:
        half = config.pop("fp16")
        config.setdefault("mixed_precision", "fp16" if half else "no")
    backend = config.pop("dynamo_backend", "NO")
    if str(backend).upper() != "NO":
        config["dynamo_config"] = {"dynamo_backend": backend}
    if not config.get("megatron_lm_config"):  # a section that has lost its indentation
        config["megatron_lm_config"] = {key: config.pop(key) for key in list(config)
                                        if key.startswith("megatron_lm_") and key != "megatron_lm_config"} or None
    layout = config["megatron_lm_config"] or {}
    if "megatron_lm_learning_rate_decay_iters" in layout:
        layout["megatron_lm_lr_decay_iters"] = layout.pop("megatron_lm_learning_rate_decay_iters")
    return {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}


def main(argv: Optional[List[str]] = None) -> int:
    """Runs the command; returns the exit code."""
    flags = {key: value for key, value in vars(_parser().parse_args(argv)).items() if value is not None}
    what, path = flags.pop("what", None), str(flags.pop("config_file", default_config_path()))
    plain = flags.pop("default") or what == "default"
    try:
        if what == "update":
            config = _updated(path)
        elif plain:
            if set(flags) - {"mixed_precision"}:
                raise ConfigError("`tessera config default` takes --mixed_precision and --config_file only; leave out 'default' "
                                  "to write what the flags say")
            config = basic_config(flags.get("mixed_precision", "no"))
        else:
            config = _from_flags(flags) if flags else ask_config()
        written = write_config(config, path)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EOFError:
        print("\nerror: the input ended before all questions were answered; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nnothing was written", file=sys.stderr)
        return 130
    used = "" if written == default_config_path() else f"--config_file {written} "
    print(f"Saved to {written}. Start with: tessera launch {used}SCRIPT.py")
    return 0
