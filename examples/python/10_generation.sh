#!/usr/bin/env bash
# 10_generation.py on four processes: two tensor ranks, two pipeline stages. Arguments go to the script.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
tessera launch --config_file "$here/configs/megatron_tp2_pp2.yaml" "$here/10_generation.py" "$@"
