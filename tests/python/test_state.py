"""States of the processes: ranks as threads first, then real processes over the compiled module."""

import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from thread_ranks import Ranks, clean_environment, free_port, needs_module, run_processes, start_process

from tessera.comm import process_group
from tessera.comm.process_group import Device, machine_numbers
from tessera.errors import CommunicationError, CommunicationTimeout, ConfigError
from tessera.state import AcceleratorState, DistributedType, GradientState, PartialState, is_initialized
from tessera.state.support import mesh_of
from tessera.utils.dataclasses import (DeepSpeedPlugin, FullyShardedDataParallelPlugin, GradientAccumulationPlugin,
                                        MegatronLMPlugin)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "MEGATRON_LM_", "FORK_LAUNCHED")):
            monkeypatch.delenv(name)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def test_one_process(ranks):
    state = PartialState()
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert state.distributed_type == DistributedType.NO and not state.use_distributed and state.backend is None
    assert state.is_main_process and state.is_local_main_process and state.is_last_process and not state.debug
    assert state.device.type == "cpu" and PartialState().__dict__ is state.__dict__
    assert repr(state) == (
        "Distributed environment: DistributedType.NO\nNum processes: 1\nProcess index: 0\n"
        "Local process index: 0\nDevice: cpu\n"
    )
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        pass


def test_four_ranks_on_two_machines(ranks):
    def work(rank):
        state = PartialState()
        called = [
            name
            for name, run in {
                "main": state.on_main_process(lambda: True),
                "local": state.on_local_main_process(lambda: True),
                "last": state.on_last_process(lambda: True),
                "two": state.on_process(process_index=2)(lambda: True),
                "second": state.on_local_process(local_process_index=1)(lambda: True),
            }.items()
            if run()
        ]
        return (
            state.process_index,
            state.local_process_index,
            state.num_processes,
            str(state.distributed_type),
            state.backend,
            state.is_main_process,
            state.is_local_main_process,
            state.is_last_process,
            called,
        )

    kind = ("DistributedType.MULTI_CPU", "gloo")
    assert ranks.run(4, work, machines=2) == [
        (0, 0, 4, *kind, True, True, False, ["main", "local"]),
        (1, 1, 4, *kind, False, False, False, ["second"]),
        (2, 0, 4, *kind, False, True, False, ["local", "two"]),
        (3, 1, 4, *kind, False, False, True, ["last", "second"]),
    ]


def test_print_is_once_per_machine(ranks, capsys):
    ranks.run(4, lambda rank: PartialState().print("hello from", rank), machines=2)
    assert sorted(capsys.readouterr().out.splitlines()) == ["hello from 0", "hello from 2"]


def test_devices(ranks, monkeypatch):
    ranks.gpus = ["A", "B"]
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")

    def device(rank, cpu=False):
        state = PartialState(cpu=cpu)
        return str(state.device), str(state.distributed_type).partition(".")[2], state.backend

    assert ranks.run(3, device) == [(f"cuda:{i}", "MULTI_GPU", "nccl") for i in (0, 1, 0)]
    assert ranks.run(2, device, True) == [("cpu", "MULTI_CPU", "gloo")] * 2
    for value, expected in {"cuda:1": "cuda:1", "cpu": "cpu"}.items():
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", value)
        PartialState._reset_state()
        assert PartialState().device == expected
    for value, message in {"mps": "mps", "cuda:5": "only 2 GPUs"}.items():
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", value)
        PartialState._reset_state()
        with pytest.raises(ConfigError, match=message):
            PartialState()
        assert not PartialState._shared_state  # nothing half made
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    assert PartialState().device == "cpu"


def test_device_is_what_torch_takes():
    torch = pytest.importorskip("torch")
    device = Device("cpu")
    assert device == torch.device("cpu") and device == "cpu" and device != "cuda" and Device("cuda", 1).index == 1
    assert torch.ones(2).to(device).device == device and torch.device(device) == torch.device("cpu")
    assert repr(Device("cuda", 1)) == "device(type='cuda', index=1)"


def test_bad_arguments(ranks):
    for arguments, message in [
        ({"rank": 1}, "rank"),
        ({"backend": "mpi"}, "mpi"),
        ({"init_method": "file://x"}, "file://x"),
    ]:
        with pytest.raises(ConfigError, match=message):
            PartialState(**arguments)


def test_barrier_is_one(ranks):
    arrived = []

    def work(rank):
        state = PartialState()
        time.sleep(0.1 * rank)
        arrived.append(rank)
        state.wait_for_everyone()
        return len(arrived)

    assert ranks.run(3, work) == [3, 3, 3]


@pytest.mark.parametrize(
    "turn, machines, firsts",
    [("main_process_first", 2, {0}), ("local_main_process_first", 2, {0, 2}), ("local_main_process_first", 1, {0})],
)
def test_turns(ranks, turn, machines, firsts):
    events, lock = [], threading.Lock()

    def work(rank):
        state = PartialState()
        with getattr(state, turn)():
            with getattr(state, turn)():  # nested blocks change nothing
                if rank in firsts:
                    time.sleep(0.3)
            with lock:
                events.append(rank)
        with getattr(state, turn)():
            pass

    ranks.run(4, work, machines=machines)
    assert set(events[: len(firsts)]) == firsts if turn == "main_process_first" or machines == 1 else True
    for first, others in ({0: (1,), 2: (3,)} if len(firsts) == 2 else {0: (1, 2, 3)}).items():
        assert all(events.index(first) < events.index(other) for other in others)


def test_the_first_may_work_longer_than_any_deadline(ranks, monkeypatch):
    def work(rank):
        from datetime import timedelta

        state = PartialState(timeout=timedelta(seconds=0.4))  # heartbeats every 0.1 s
        with state.main_process_first():
            if rank == 0:
                time.sleep(1.5)
        return state._turns.period_s

    assert ranks.run(3, work, timeout_s=0.4) == [0.1] * 3


def test_without_a_heartbeat_the_deadline_ends_the_wait(ranks):
    def work(rank):
        state = PartialState()
        if rank == 0:
            process_group.meet(state._connected(), "main_process_first()")
            state._connected().split(0, 0, "main_process_first")
            time.sleep(1.2)
        else:
            with state.main_process_first():
                pass

    results = ranks.run(2, work, timeout_s=0.4, failing=True)
    assert isinstance(results[1], CommunicationError) and "rank 0 did not come" in str(results[1])


def test_an_exception_of_the_first_ends_the_others(ranks):
    def work(rank):
        with PartialState().main_process_first():
            if rank == 0:
                raise KeyError("no such dataset")
        return "entered"

    results = ranks.run(3, work, failing=True)
    assert isinstance(results[0], KeyError)
    for result in results[1:]:
        assert isinstance(result, CommunicationError) and str(result).startswith(
            "rank 0 failed: KeyError: 'no such " "dataset'"
        )


def test_machine_numbers():
    assert machine_numbers([["a", 0], ["a", 1], ["b", 0], ["b", 1]]) == [0, 0, 1, 1]
    assert machine_numbers([["a", 0], ["b", 0], ["a", 1]]) == [0, 1, 0]
    assert machine_numbers([["a", 0], ["a", 1], ["a", 0], ["a", 1]]) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "tp, pp, data",
    [
        (1, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (8, 1, [[i] for i in range(8)]),
        (1, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_mesh(ranks, tp, pp, data):
    def work(rank):
        mesh = mesh_of(PartialState().world, MegatronLMPlugin(tp_degree=tp, pp_degree=pp))
        own = mesh.data.all_gather(np.array([rank]))[:, 0].tolist()
        place = mesh.coordinates
        assert place["tp"] + tp * (place["dp"] + mesh.dp * place["pp"]) == rank  # Megatron's order
        assert own[place["dp"]] == rank and mesh.tp * mesh.pp * mesh.dp == 8
        return own

    assert ranks.run(8, work) == [next(group for group in data if rank in group) for rank in range(8)]


def test_mesh_that_does_not_fit(ranks):
    results = ranks.run(3, lambda rank: mesh_of(PartialState().world, MegatronLMPlugin(tp_degree=2)), failing=True)
    assert all(
        isinstance(result, ConfigError) and "does not divide the 3 processes" in str(result) for result in results
    )


@pytest.mark.parametrize(
    "inputs, parts, padded",
    [
        ([1, 2, 3, 4, 5], [[1, 2], [3, 4], [5]], [[1, 2], [3, 4], [5, 5]]),
        ((1,), [(1,), (), ()], [(1,), (1,), (1,)]),
        (
            {"a": [1, 2, 3, 4], "b": "wxyz"},
            [{"a": [1, 2], "b": "wxyz"}, {"a": [3], "b": "wxyz"}, {"a": [4], "b": "wxyz"}],
            [{"a": [1, 2], "b": "wxyz"}, {"a": [3, 4], "b": "wxyz"}, {"a": [4, 4], "b": "wxyz"}],
        ),
    ],
)
def test_split_between_processes(ranks, inputs, parts, padded):
    before = repr(inputs)

    def work(rank, padding):
        with PartialState().split_between_processes(inputs, apply_padding=padding) as part:
            return part

    assert ranks.run(3, work, False) == parts and ranks.run(3, work, True) == padded
    assert repr(inputs) == before


def test_split_arrays(ranks):
    torch = pytest.importorskip("torch")

    def work(rank, values):
        with PartialState().split_between_processes(values, apply_padding=True) as part:
            return part.tolist()

    expected = [[[0, 1], [2, 3]], [[4, 5], [4, 5]]]
    assert ranks.run(2, work, np.arange(6).reshape(3, 2)) == expected
    assert ranks.run(2, work, torch.arange(6).reshape(3, 2)) == expected
    with pytest.raises(ValueError, match="one length"):
        ranks.run(2, work, {"a": [1], "b": [1, 2]})


def test_accelerator_state(ranks):
    with pytest.raises(ValueError, match="Accelerator"):
        AcceleratorState()
    assert not is_initialized()
    state = AcceleratorState(mixed_precision="BF16", _from_accelerator=True)
    assert is_initialized() and state.mixed_precision == "bf16" and state.distributed_type == DistributedType.NO
    assert repr(state).endswith("Device: cpu\n\nMixed precision type: bf16\n")
    assert state.megatron_lm_plugin is None and state.deepspeed_plugin is None and not state.is_fsdp2
    assert AcceleratorState().mesh is state.mesh and state.mesh.dp == 1
    AcceleratorState(mixed_precision="bf16")
    with pytest.raises(ValueError, match="mixed_precision='fp16'"):
        AcceleratorState(mixed_precision="fp16")
    AcceleratorState._reset_state(True)
    with pytest.raises(AttributeError, match="reset"):
        state.num_processes
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        state.nonsense


@pytest.mark.parametrize("how", ["plugin", "environment"])
def test_megatron_on_one_process_without_a_launcher(ranks, monkeypatch, how):
    plugin = MegatronLMPlugin(tp_degree=1, pp_degree=1) if how == "plugin" else None
    if how == "environment":
        monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    state = AcceleratorState(megatron_lm_plugin=plugin, _from_accelerator=True)
    assert state.distributed_type == DistributedType.MEGATRON_LM == PartialState().distributed_type
    assert state.megatron_lm_plugin is not None and state.is_main_process and not state.use_distributed


def test_megatron_mesh(ranks):
    def work(rank):
        plugin = MegatronLMPlugin(tp_degree=2, pp_degree=1)
        state = AcceleratorState(megatron_lm_plugin=plugin, _from_accelerator=True)
        with state.split_between_processes([10, 20, 30, 40]) as part:
            return state.is_main_process, state.mesh.coordinates["dp"], state.mesh.data.size, part

    assert ranks.run(4, work) == [
        (True, 0, 2, [10, 20]),
        (False, 0, 2, [10, 20]),
        (False, 1, 2, [30, 40]),
        (False, 1, 2, [30, 40]),
    ]


@pytest.mark.parametrize(
    "arguments, environment, error",
    [
        ({"fsdp_plugin": object()}, {}, NotImplementedError),
        ({"deepspeed_plugin": object()}, {}, NotImplementedError),
        ({"torch_tp_plugin": object()}, {}, NotImplementedError),
        ({"parallelism_config": object()}, {}, NotImplementedError),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, NotImplementedError),
        ({}, {"ACCELERATE_USE_FSDP": "1"}, NotImplementedError),
        ({"mixed_precision": "fp8"}, {}, ConfigError),
        ({}, {"ACCELERATE_MIXED_PRECISION": "bf8"}, ConfigError),
    ],
)
def test_what_does_not_run_here_is_refused(ranks, monkeypatch, arguments, environment, error):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error):
        AcceleratorState(_from_accelerator=True, **arguments)
    assert not is_initialized()


def test_deepspeed_from_the_environment(ranks, monkeypatch, tmp_path):
    """As `accelerate launch --use_deepspeed --deepspeed_config_file` sets it."""
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    for name, value in {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), "ACCELERATE_GRADIENT_CLIPPING": "2",
                        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one of the two"):
        AcceleratorState(megatron_lm_plugin=MegatronLMPlugin(), _from_accelerator=True)
    state = AcceleratorState(_from_accelerator=True)
    assert (state.deepspeed_plugin.zero_stage, state.deepspeed_plugin.clip_grad, state.mixed_precision) == (3, 2.0, "bf16")


def test_a_plugin_that_comes_late_and_says_something_else(ranks):
    AcceleratorState(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), _from_accelerator=True)
    AcceleratorState(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), _from_accelerator=True)
    for late in ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}, {"fsdp_plugin": FullyShardedDataParallelPlugin()}):
        with pytest.raises(ValueError, match="to the first `Accelerator"):
            AcceleratorState(**late, _from_accelerator=True)


def test_precision_from_the_environment(ranks, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert AcceleratorState(_from_accelerator=True).mixed_precision == "fp16"


def test_parted(ranks):
    def work(rank):
        state = PartialState()
        state.destroy_process_group()
        with pytest.raises(CommunicationError, match="parted"):
            state.wait_for_everyone()
        with pytest.raises(NotImplementedError):
            state.destroy_process_group(group=1)

    ranks.run(2, work)


def test_gradient_state(ranks):
    state = GradientState()
    assert state.sync_gradients and state.num_steps == 1 and state.sync_with_dataloader and not state.adjust_scheduler
    assert not state.in_dataloader and not state.end_of_dataloader and state.remainder == -1
    GradientState(GradientAccumulationPlugin(num_steps=4))
    assert state.num_steps == 4 == GradientState().num_steps

    class Loader:
        end_of_dataloader, remainder = True, 3

    outer, inner = Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert state.active_dataloader is inner and state.in_dataloader and state.end_of_dataloader and state.remainder == 3
    state._remove_dataloader(inner)
    assert state.active_dataloader is outer and "Extra samples added: 3" in repr(state)
    state._remove_dataloader(outer)
    state._set_sync_gradients(False)
    assert not state.in_dataloader and not GradientState().sync_gradients


def test_the_hook_tells_the_others(monkeypatch, capsys):
    said, shown, codes = [], [], []
    monkeypatch.setattr(sys, "excepthook", lambda *what: shown.append(what[1]))
    process_group.tell_others_at_the_end(SimpleNamespace(rank=2, abort=said.append))
    for error in (
        ValueError("boom"),
        CommunicationError("rank 0 failed: X [barrier]"),
        CommunicationError("no answer"),
        CommunicationTimeout("too late"),
    ):
        try:
            sys.excepthook(type(error), error, None)
            codes.append(None)
        except SystemExit as end:
            codes.append(end.code)
    assert said == ["rank 2 failed: ValueError: boom"] and [str(error) for error in shown] == ["boom", "no answer", "too late"]
    assert codes == [None, 5, 5, 7]
    assert capsys.readouterr().err == "rank 2 ends: CommunicationError: rank 0 failed: X [barrier]\n"


# ---- Real processes ----

SCRIPT = """
import sys, time
from datetime import timedelta
from tessera.state import PartialState
state = PartialState(timeout=timedelta(seconds={timeout}))
{body}
"""


def script(tmp_path, body: str, timeout: float = 60):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(timeout=timeout, body=body))
    return path


def test_processes(tmp_path):
    needs_module()
    body = """
import numpy as np
from tessera.state import AcceleratorState, GradientState
from tessera.utils import operations
from tessera.utils.dataclasses import MegatronLMPlugin
with state.main_process_first():
    if state.is_main_process:
        time.sleep(0.5)
        open(sys.argv[0] + ".first", "x").close()
    import os
    assert os.path.exists(sys.argv[0] + ".first")
with state.local_main_process_first():
    pass
state.wait_for_everyone()
assert operations.gather(np.array([state.process_index])).tolist() == [0, 1, 2, 3]
assert operations.reduce(np.array([1.5, 2.0]), "sum").tolist() == [6.0, 8.0]
assert operations.gather_object([("rank", state.process_index)]) == [("rank", i) for i in range(4)]
assert operations.broadcast_object_list([state.process_index, "x"], from_process=3) == [3, "x"]
full = AcceleratorState(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, pp_degree=1), _from_accelerator=True)
assert operations.gather(np.array([full.process_index])).tolist() in ([0, 2], [1, 3]), full.mesh
AcceleratorState._reset_state(True)
assert PartialState().num_processes == 4
PartialState().wait_for_everyone()
print("rank", state.process_index, "done")
state.destroy_process_group()
"""
    for rank, (code, out, err) in enumerate(run_processes(script(tmp_path, body), 4)):
        assert code == 0 and out == f"rank {rank} done\n" and err == "", err


def test_connections_end_before_the_libraries_below_them(tmp_path):
    """Whatever still refers to them: threads that ran on while the process was taken down have crashed it."""
    needs_module()
    path = tmp_path / "script.py"
    path.write_text("""
import atexit

@atexit.register  # before Tessera registers anything, so it is called after that
def last():
    try:
        kept[1].barrier()
    except Exception as error:
        print(type(error).__name__, error)

from tessera.comm import process_group
from tessera.state import PartialState

class User:
    def close(self):
        kept[1].barrier()
        print("closed")

world = PartialState()._connected()
kept = [None, world.split(0, world.rank, "kept"), User()]
kept[0] = kept
process_group.close_at_exit(kept[2])
""")
    for rank, (code, out, err) in enumerate(run_processes(path, 2)):
        assert code == 0 and err == "", err
        closed, left = out.splitlines()
        assert closed == "closed" and re.match(rf"CommunicationError rank {rank} .*has left the job", left), out


def test_a_rank_that_fails_ends_all_with_its_traceback_first(tmp_path):
    needs_module()
    body = """
if state.process_index == 1:
    time.sleep(0.3)
    raise ValueError("boom in rank 1")
state.wait_for_everyone()
"""
    begin = time.monotonic()
    ends = run_processes(script(tmp_path, body), 3)
    assert time.monotonic() - begin < 30 and [code for code, _, _ in ends] == [5, 1, 5]
    assert ends[1][2].startswith("Traceback") and ends[1][2].endswith("ValueError: boom in rank 1\n")
    for rank in (0, 2):
        assert ends[rank][2].startswith(
            f"rank {rank} ends: CommunicationError: rank 1 failed: ValueError: boom in " "rank 1"
        )
        assert ends[rank][2].count("\n") == 1


def test_a_failure_in_main_process_first_ends_all(tmp_path):
    needs_module()
    body = """
with state.main_process_first():
    if state.is_main_process:
        raise OSError("disk is full")
print("entered")
"""
    ends = run_processes(script(tmp_path, body), 2)
    assert [code for code, _, _ in ends] == [1, 5] and [out for _, out, _ in ends] == ["", ""]
    assert "Traceback" in ends[0][2] and ends[1][2].startswith(
        "rank 1 ends: CommunicationError: rank 0 failed: " "OSError: disk is full"
    )


def test_the_heartbeat_outlasts_the_deadline(tmp_path):
    needs_module()
    body = """
with state.main_process_first():
    if state.is_main_process:
        time.sleep(7)
state.wait_for_everyone()
"""
    assert [code for code, _, _ in run_processes(script(tmp_path, body, timeout=2), 2)] == [0, 0]


def test_a_stopped_first_process_does_not_hold_the_others(tmp_path):
    needs_module()
    body = """
with state.main_process_first():
    if state.is_main_process:
        print("here", flush=True)
        time.sleep(60)
"""
    path, port = script(tmp_path, body, timeout=4), free_port()
    processes = [start_process(path, rank, 2, port) for rank in range(2)]
    try:
        assert processes[0].stdout.readline() == "here\n"
        processes[0].send_signal(signal.SIGSTOP)
        _, err = processes[1].communicate(timeout=40)
        assert processes[1].returncode == 7 and "CommunicationTimeout" in err and "main_process_first" in err
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_under_the_launcher(tmp_path, tessera_program):
    needs_module()
    import subprocess

    path = script(
        tmp_path,
        "state.wait_for_everyone()\nif state.process_index == 2: raise ValueError('boom')\nstate.wait_for_everyone()",
    )
    command = [tessera_program, "launch", "--num_processes", "4", "--cpu", sys.executable, path]
    end = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=90)
    assert end.returncode != 0
    first = end.stderr.index("Traceback")
    assert end.stderr.count("Traceback") == 1 or "rank 2" in end.stderr
    assert end.stderr.index("ValueError: boom") < end.stderr.index("ends: CommunicationError", first)
    assert "error: rank 2" in end.stderr
