#!/usr/bin/env bash
# What to run on a machine with a GPU: tests, ranks, sanitizers, benches. All together takes 25 minutes at most.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$here/../.."
source scripts/common.sh
source scripts/testing.sh
source tests/gpu/parts.sh

usage() {
  cat <<'TEXT'
usage: tests/gpu/run_all.sh [--build FOLDER] [PART...]
  PART            info tests ranks sanitizer kernels train faults; all of them when none is named
  --build FOLDER  a build with TESSERA_CUDA=ON, TESSERA_TESTS=ON and TESSERA_BENCH=ON, or what tests/gpu/bundle.sh
                  made; otherwise this folder, build/gpu or build/cuda
Results: build/gpu-results, or the folder that the variable OUT names. Exit code 77 without a GPU.
TEXT
}

all_parts=(info tests ranks sanitizer kernels train faults)
declare -A part_seconds=([info]=30 [tests]=330 [ranks]=270 [sanitizer]=240 [kernels]=150 [train]=270 [faults]=150)
parts=()
build=""
while [ $# -gt 0 ]; do
  case "$1" in
    --build) build="${2:-}" && shift ;;
    -h | --help) usage; exit 0 ;;
    *)
      [[ " ${all_parts[*]} " == *" $1 "* ]] || { usage >&2; exit 2; }
      parts+=("$1")
      ;;
  esac
  shift
done
if [ ${#parts[@]} -eq 0 ]; then parts=("${all_parts[@]}"); fi
if [ -z "$build" ]; then
  for build in . build/gpu build/cuda; do [ ! -x "$build/tessera" ] || break; done
fi
[ -x "$build/tessera" ] || die "no tessera program in $build: run tests/gpu/bundle.sh or cmake --preset cuda && cmake --build --preset cuda"
build="$(cd "$build" && pwd)"
top="$(mkdir -p "${OUT:-build/gpu-results}" && cd "${OUT:-build/gpu-results}" && pwd)"
use_libraries

begin=$SECONDS code=0
for part in "${parts[@]}"; do
  say "$part"
  results="$top/$part"
  rm -rf "$results"
  mkdir -p "$results"
  deadline=$((SECONDS + ${part_seconds[$part]})) part_code=0
  ("part_$part") 2>&1 | tee "$results.txt" || part_code=$? # a process of its own, which may exit
  case $part_code in
    0) note "$part: done" ;;
    77) [ $code -ne 0 ] || code=77 ;;
    *)
      note "$part: FAILED (exit code $part_code)"
      code=1
      ;;
  esac
done
say "All parts in $(elapsed $begin); results in $top"
exit $code
