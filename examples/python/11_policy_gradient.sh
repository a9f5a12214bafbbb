#!/usr/bin/env bash
# 11_policy_gradient.py on two tensor ranks. Arguments go to the script.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
tessera launch --config_file "$here/configs/megatron_tp2.yaml" "$here/11_policy_gradient.py" "$@"
