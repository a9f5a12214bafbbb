#!/usr/bin/env python3
"""Runs tests of a program with a process per rank, on one GPU or as many as there are, or on the CPU.

`rank_processes.py PROGRAM RANKS FILTER [FOLDER]`: each process gets an NCCL_HOSTID of its own, so that NCCL takes them
for machines that talk over the loopback interface, and lets them share a GPU (tests/support/process_ranks.hpp). Rank 0
prints; FOLDER takes what the others print, and GoogleTest's report of each. When this program is ended, so are they."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Optional


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(program: str, rank: int, ranks: int, port: int, tests: str, folder: Optional[Path]) -> subprocess.Popen:
    env = dict(os.environ, TESSERA_TEST_RANK=str(rank), TESSERA_TEST_WORLD=str(ranks), TESSERA_TEST_PORT=str(port),
               NCCL_HOSTID=f"rank-{rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_MAX_NCHANNELS="2")
    command = [program, f"--gtest_filter={tests}"]
    if folder:
        command.append(f"--gtest_output=json:{folder}/rank{rank}.json")
    if rank == 0:
        return subprocess.Popen(command, env=env, stderr=subprocess.STDOUT)
    with open(folder / f"rank{rank}.log" if folder else os.devnull, "wb") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)


def wait_for(processes: List[subprocess.Popen]) -> List[int]:
    """Exit codes. Ranks left behind by one that crashed get 60 seconds to find that out."""
    since = None
    while any(process.poll() is None for process in processes):
        if since is None and any((process.poll() or 0) < 0 for process in processes):
            since = time.monotonic()
        if since is not None and time.monotonic() - since > 60:
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def main() -> int:
    if len(sys.argv) not in (4, 5):
        print(__doc__, file=sys.stderr)
        return 2
    program, ranks, tests = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    folder = Path(sys.argv[4]) if len(sys.argv) == 5 else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes: List[subprocess.Popen] = []

    def end(*_) -> None:
        for process in processes:
            process.kill()
        sys.exit(124)

    signal.signal(signal.SIGTERM, end)
    for rank in range(ranks):
        processes.append(start(program, rank, ranks, port, tests, folder))
    codes = wait_for(processes)
    for rank, code in enumerate(codes):
        if code != 0:
            print(f"rank {rank} ended with {code}")
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
