#!/usr/bin/env bash
# check_cuda_code.sh LIBRARY: whether it holds machine code for H100 and H200 (sm_90), and PTX for newer GPUs.
set -euo pipefail
library="$1"
cubins="$(cuobjdump --list-elf "$library")"
ptx="$(cuobjdump --list-ptx "$library")"
sm90=$(grep -c 'sm_90\.cubin' <<<"$cubins" || true)
forms=$(grep -c '\.ptx' <<<"$ptx" || true)
if [ "$sm90" -eq 0 ] || [ "$forms" -eq 0 ]; then
  printf '%s\n%s\n%s\n' "$cubins" "$ptx" "$library: no code for sm_90, or no PTX"
  exit 1
fi
echo "$library: $sm90 files of sm_90 code, $(grep -c 'sm_80\.cubin' <<<"$cubins" || true) of sm_80, $forms with PTX"
