#!/usr/bin/env bash
# What to run on a machine with a GPU: tests, ranks, sanitizers, benches in 25 minutes at most, and beside PyTorch in forty
# minutes more. No part takes more than eight minutes.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
source scripts/common.sh
source scripts/testing.sh
source tests/gpu/parts.sh

usage() {
  cat <<'TEXT'
usage: tests/gpu/run_all.sh [--build FOLDER] [--rehearse] [PART...]
  PART            info tests ranks layouts parity sanitizer kernels train python faults: these when none is named;
                  compare_small compare_124m compare_xl compare_llama compare_llama3, together: compare
  --build FOLDER  a build with TESSERA_CUDA=ON, TESSERA_TESTS=ON and TESSERA_BENCH=ON, or what tests/gpu/bundle.sh
                  made; otherwise this folder, build/gpu or build/cuda
  --rehearse      without a GPU: the same on the CPU, with less of everything; any build will do
Results go to build/gpu-results (variable RESULTS), those of a part in place of its last ones. After each part
results.json and results.md there say all there is; with OUT=FOLDER these two and logs.tar.gz are put there as well.
Exit code 77 without a GPU. PYTHON names the Python, else it is python3.
TEXT
}

usual_parts=(info tests ranks layouts parity sanitizer kernels train python faults)
compare_parts=(compare_small compare_124m compare_xl compare_llama compare_llama3)
declare -A part_seconds=([info]=30 [tests]=240 [ranks]=180 [layouts]=300 [parity]=60 [sanitizer]=180 [kernels]=120
  [train]=120 [python]=120 [faults]=60 [compare_small]=400 [compare_124m]=480 [compare_xl]=480 [compare_llama]=480
  [compare_llama3]=480)
parts=()
build="" device=cuda patience=1
while [ $# -gt 0 ]; do
  case "$1" in
    --build) build="${2:-}" && shift ;;
    --rehearse) device=cpu patience=4 ;;
    -h | --help) usage; exit 0 ;;
    compare) parts+=("${compare_parts[@]}") ;;
    *)
      [[ " ${usual_parts[*]} ${compare_parts[*]} " == *" $1 "* ]] || { usage >&2; exit 2; }
      parts+=("$1")
      ;;
  esac
  shift
done
if [ ${#parts[@]} -eq 0 ]; then parts=("${usual_parts[@]}"); fi
if [ -z "$build" ]; then
  for build in . build/gpu build/cuda; do [ ! -x "$build/tessera" ] || break; done
fi
[ -x "$build/tessera" ] || die "no tessera program in $build: run tests/gpu/bundle.sh or cmake --preset cuda && cmake --build --preset cuda"
build="$(cd "$build" && pwd)"
top="${RESULTS:-build/gpu-results}"
top="$(mkdir -p "$top" && cd "$top" && pwd)"
use_libraries

# hand_over: everything found so far, in few files.
hand_over() {
  python tests/gpu/summary.py "$top" "$build" "$device" || note "no summary: tests/gpu/summary.py failed"
  [ -n "${OUT:-}" ] || return 0
  mkdir -p "$OUT"
  cp "$top/results.json" "$top/results.md" "$OUT/" || true
  # Without the data and the models, which can be made again.
  tar -czf "$OUT/logs.tar.gz" -C "$top" --exclude='corpus*' --exclude='*.safetensors' --exclude=package --exclude=checkpoints . || true
}

begin=$SECONDS code=0
for part in "${parts[@]}"; do
  say "$part"
  results="$top/$part"
  rm -rf "$results"
  mkdir -p "$results"
  part_begin=$SECONDS deadline=$((SECONDS + ${part_seconds[$part]} * patience)) part_code=0
  ("part_$part") 2>&1 | tee "$results.txt" || part_code=$? # a process of its own, which may exit
  echo "$part_code $((SECONDS - part_begin))" >"$results.status"
  case $part_code in
    0) note "$part: done" ;;
    77) [ $code -ne 0 ] || code=77 ;;
    *)
      note "$part: FAILED (exit code $part_code)"
      code=1
      ;;
  esac
  hand_over
done
say "All parts in $(elapsed $begin); results in $top"
exit $code
