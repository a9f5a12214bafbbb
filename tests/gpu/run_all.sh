#!/usr/bin/env bash
# What to run on a machine with a GPU: README.md has the commands. No part takes more than eight minutes.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
source scripts/common.sh
source scripts/testing.sh
source tests/gpu/parts.sh
source tests/gpu/offload.sh

usage() {
  cat <<'TEXT'
usage: tests/gpu/run_all.sh [--build FOLDER] [--within SECONDS] [--rehearse] [PART...]
  PART            info parity tests ranks layouts kernels_memory kernels_gemm kernels_attention (together: kernels)
                  counters train generation python faults sanitizer: these when none is named; compare_small compare_124m compare_xl compare_llama
                  compare_llama3, together: compare
  --within        all of it in so many seconds: what is worth most of the parts named (of all, when none is named), never
                  measured first, correctness before speed, the sanitizer last. What is out of time says "partly"
  --build FOLDER  a build with TESSERA_CUDA=ON, TESSERA_TESTS=ON and TESSERA_BENCH=ON, or what tests/gpu/bundle.sh
                  made; otherwise this folder, build/gpu or build/cuda
  --rehearse      without a GPU: the same on the CPU, with less of everything; any build will do
Results go to build/gpu-results (variable RESULTS), those of a part in place of its last ones. After each part
results.json and results.md there say all there is; with OUT=FOLDER these two and logs.tar.gz are put there as well.
Exit code 77 without a GPU. PYTHON names the Python, else it is python3.
TEXT
}

kernel_parts=(kernels_memory kernels_gemm kernels_attention)
usual_parts=(info parity tests ranks layouts "${kernel_parts[@]}" counters train generation python faults sanitizer)
compare_parts=(compare_small compare_124m compare_xl compare_llama compare_llama3)
declare -A part_seconds=([info]=30 [tests]=240 [ranks]=240 [layouts]=300 [parity]=60 [sanitizer]=180
  [kernels_memory]=150 [kernels_gemm]=150 [kernels_attention]=120 [counters]=240 [train]=120 [generation]=240 [python]=120 [faults]=60 [compare_small]=400 [compare_124m]=480 [compare_xl]=480 [compare_llama]=480
  [compare_llama3]=480)
parts=()
build="" device=cuda patience=1 within=""
while [ $# -gt 0 ]; do
  case "$1" in
    --build) build="${2:-}" && shift ;;
    --within)
      within="${2:-}" && shift
      [[ "$within" =~ ^[1-9][0-9]*$ ]] || { usage >&2; exit 2; }
      ;;
    --rehearse) device=cpu patience=4 ;;
    -h | --help) usage; exit 0 ;;
    compare) parts+=("${compare_parts[@]}") ;;
    kernels) parts+=("${kernel_parts[@]}") ;;
    *)
      [[ " ${usual_parts[*]} ${compare_parts[*]} " == *" $1 "* ]] || { usage >&2; exit 2; }
      parts+=("$1")
      ;;
  esac
  shift
done
if [ ${#parts[@]} -eq 0 ] && [ -z "$within" ]; then parts=("${usual_parts[@]}"); fi
if [ -z "$build" ]; then
  for build in . build/gpu build/cuda; do [ ! -x "$build/tessera" ] || break; done
fi
[ -x "$build/tessera" ] || die "no tessera program in $build: run tests/gpu/bundle.sh or cmake --preset cuda && cmake --build --preset cuda"
build="$(cd "$build" && pwd)"
top="${RESULTS:-build/gpu-results}"
top="$(mkdir -p "$top" && cd "$top" && pwd)"
check_machine
use_libraries

# choose_parts: those that --within has time for, and what each may take.
choose_parts() {
  local action name rest named=("${parts[@]}") options=(--within "$within" --results "$top" --program "$build/tessera")
  if rehearsing; then options+=(--rehearse); fi
  if ! rehearsing && command -v nvidia-smi >/dev/null; then
    options+=(--gpu "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)")
    options+=(--memory-gb "$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1 | awk '{ print $1 * 1.048576e-3 }')")
  fi
  parts=()
  while read -r action name rest; do
    if [ "$action" = run ]; then
      parts+=("$name")
      part_seconds[$name]=$rest
    else
      note "skipped  $name: $rest"
    fi
  done < <(python tests/gpu/choose.py "${options[@]}" "${named[@]}")
  [ ${#parts[@]} -gt 0 ] || die "there is no part that $within seconds are enough for"
  patience=1
}

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
if [ -n "$within" ]; then choose_parts; fi
for part in "${parts[@]}"; do
  say "$part"
  results="$top/$part"
  rm -rf "$results"
  mkdir -p "$results"
  part_begin=$SECONDS deadline=$((SECONDS + ${part_seconds[$part]} * patience)) part_code=0
  if [ -n "$within" ] && [ $deadline -gt $((begin + within - 5)) ]; then deadline=$((begin + within - 5)); fi
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
