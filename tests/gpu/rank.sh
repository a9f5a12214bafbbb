#!/usr/bin/env bash
# rank.sh COMMAND...: one of several processes that share a GPU. NCCL takes them for hosts of their own, which talk over
# the loopback interface; few channels, because each is set up between all of them.
set -euo pipefail
export NCCL_HOSTID="tessera-rank-${RANK:-0}" NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_MAX_NCHANNELS=2
exec "$@"
