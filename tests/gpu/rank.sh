#!/usr/bin/env bash
# rank.sh COMMAND...: one of several processes that share a GPU. NCCL takes them for hosts of their own, which talk over
# the loopback interface.
set -euo pipefail
export NCCL_HOSTID="tessera-rank-${RANK:-0}" NCCL_SOCKET_IFNAME=lo
exec "$@"
