"""Launch files as `accelerate config` writes them: the same keys in the same order, YAML or JSON."""

import json
import os
from pathlib import Path
from typing import Any, Dict, Optional, Union

from tessera.compat.refusals import check_precision
from tessera.errors import ConfigError

# What Accelerate writes even where nobody was asked.
DEFAULTS: Dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "NO", "downcast_bf16": "no",
    "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no",
    "num_machines": 1, "num_processes": 1, "rdzv_backend": "static", "same_network": True, "tpu_env": [],
    "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False}


def default_config_path() -> Path:
    """Where `tessera config` writes, and `tessera launch` looks first: $XDG_CONFIG_HOME/tessera/default_config.yaml."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder) / "tessera" / "default_config.yaml"


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    # What YAML 1.1 would read as something else than this text.
    plain = text.replace("_", "a").replace(".", "a").replace("/", "a").replace("-", "a")
    other = text.lower() in ("", "no", "yes", "on", "off", "true", "false", "null", "y", "n", "~")
    if not other and plain.isalnum() and plain.isascii() and text[0].isalpha():
        return text
    return "'" + text.replace("'", "''") + "'"


def to_yaml(config: Dict[str, Any]) -> str:
    """A mapping of scalars, lists of scalars and such mappings as YAML, sorted by key."""
    lines = []
    for key, value in sorted(config.items()):
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {name}: {_scalar(item)}" for name, item in sorted(value.items())]
        elif isinstance(value, (list, tuple)):
            lines += [f"{key}:", *(f"- {_scalar(item)}" for item in value)] if value else [f"{key}: []"]
        else:
            lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def write_config(config: Dict[str, Any], path: Union[str, Path]) -> Path:
    """Writes a file, as JSON if it is called *.json; folders are made. Errors: ConfigError if it cannot be written."""
    path = Path(path)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n" if path.suffix == ".json" else to_yaml(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    return path


def read_config(path: Union[str, Path]) -> Dict[str, Any]:
    """The keys of a launch file. Errors: ConfigError if there is none, or none of PyYAML to read it with."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading a YAML file needs PyYAML (pip install pyyaml)") from None
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no launch file: it must hold keys and values")
    return config


def gpu_count() -> int:
    """GPUs that Tessera can use here; 0 without the compiled module too."""
    try:
        from tessera._C import cuda_devices
    except ImportError:
        return 0
    return len(cuda_devices())


def basic_config(mixed_precision: str = "no") -> Dict[str, Any]:
    """Plain training on all the GPUs of this machine, or on its CPU."""
    precision = mixed_precision.lower()
    check_precision(precision)
    gpus = gpu_count()
    return {**DEFAULTS, "distributed_type": "MULTI_GPU" if gpus > 1 else "NO", "mixed_precision": precision,
            "num_processes": max(1, gpus), "use_cpu": gpus == 0}


def write_basic_config(mixed_precision: str = "no", save_location: Optional[Union[str, Path]] = None) -> Union[Path, bool]:
    """Writes `basic_config` to a file (`default_config_path()` if none is named) and returns its path; False, with a line
    on the terminal, if there is one already."""
    config = basic_config(mixed_precision)
    path = Path(save_location) if save_location is not None else default_config_path()
    if path.exists():
        print(f"{path} exists already and is left as it is; remove it, name another file, or run `tessera config`")
        return False
    return write_config(config, path)
