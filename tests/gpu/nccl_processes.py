#!/usr/bin/env python3
"""Runs the communicators' common tests over NCCL with a process per rank, on as many GPUs as there are.

`nccl_processes.py TEST_COMM [RANKS]`: each process gets an NCCL_HOSTID of its own, so that NCCL takes them for machines
and lets them share a GPU. Tests whose ranks share variables of the process are left out."""

import os
import socket
import subprocess
import sys

SHARED = ["BarrierHoldsUntilAllAreThere", "EventsTellWhatFinished"]


def main() -> int:
    program, ranks = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tests = "Nccl/Conformance.*-" + ":".join(f"*.{name}/*" for name in SHARED)
    processes = []
    for rank in range(ranks):
        env = dict(os.environ, TESSERA_TEST_RANK=str(rank), TESSERA_TEST_WORLD=str(ranks), TESSERA_TEST_PORT=str(port),
                   NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
        output = None if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen([program, f"--gtest_filter={tests}"], env=env, stdout=output, stderr=output))
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        if code != 0:
            print(f"rank {rank} ended with {code}")
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
