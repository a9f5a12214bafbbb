#!/usr/bin/env bash
# Fuzzes the readers of files and messages: builds tests/fuzz with libFuzzer (clang) and runs one target or all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

usage() {
  cat <<'TEXT'
usage: tests/fuzz.sh SECONDS [TARGET]
       tests/fuzz.sh --minimise [TARGET]
  SECONDS     how long each target is run
  TARGET      one of tests/fuzz/TARGET.cpp; without it all, one after the other
  --minimise  takes what was found in build/fuzz into tests/fuzz/corpus, as few and as short inputs as reach the same code
Each run goes on from what earlier ones found, in build/fuzz/found/TARGET. An input that crashes, hangs, leaks or takes
too much memory is put beside it: build/fuzz/crashes/TARGET. Any such makes the exit code 1.
TEXT
}

seconds="${1:-}"
case "$seconds" in
  --minimise) ;;
  '' | *[!0-9]*) usage >&2; exit 2 ;;
esac
[ $# -le 2 ] || { usage >&2; exit 2; }

all_targets() {
  local source
  for source in tests/fuzz/*.cpp; do
    case "$source" in *_test.cpp) ;; *) basename "$source" .cpp ;; esac
  done
}
mapfile -t targets < <(all_targets)
if [ $# -eq 2 ]; then
  [ -f "tests/fuzz/$2.cpp" ] || die "there is no target $2; there are: ${targets[*]}"
  targets=("$2")
fi

command -v clang++ >/dev/null || die "clang++ is missing: scripts/install_deps.sh --fuzz"
build=build/fuzz
cmake -S . -B "$build" -G Ninja -DTESSERA_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ >/dev/null
cmake --build "$build" --target "${targets[@]/#/fuzz_}" >"$build/build.log" 2>&1 ||
  { tail -n 50 "$build/build.log" >&2; die "the targets do not compile; $build/build.log"; }

# What an input may cost: seconds, and memory in MiB in all and at once.
limits=(-timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=256)
# Short stacks of allocations: they are kept for every one of millions.
export UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS="${ASAN_OPTIONS:-malloc_context_size=2:quarantine_size_mb=8}"

# Targets that write files do so in memory: a disk would take most of their time.
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm

# Bytes of an input at most: as many as the longest that is stored, or it would be cut off and be no seed.
longest() {
  local bytes
  bytes="$(find "tests/fuzz/corpus/$1" -type f -printf '%s\n' | sort -n | tail -n 1)"
  echo $((${bytes:-0} > 1024 ? bytes : 1024))
}

minimise() {
  local target="$1" merged="$build/merged/$1"
  rm -rf "$merged"
  mkdir -p "$merged" "$build/found/$target" "tests/fuzz/corpus/$target"
  # What once was a fault is kept under its own name, whatever it reaches.
  "$build/fuzz_$target" -merge=1 -use_counters=0 "${limits[@]}" "-max_len=$(longest "$target")" "$merged" "tests/fuzz/corpus/$target" "$build/found/$target" \
    >"$build/$target.log" 2>&1 || { tail "$build/$target.log" >&2; die "$target: the merge failed"; }
  find "tests/fuzz/corpus/$target" -type f ! -name 'fault-*' -delete
  cp "$merged"/* "tests/fuzz/corpus/$target/"
  note "$target: $(find "tests/fuzz/corpus/$target" -type f | wc -l) inputs, $(du -sb "tests/fuzz/corpus/$target" | cut -f1) bytes"
}

failed=false
fuzz() {
  local target="$1" log="$build/$1.log" options=() code=0 found crashes figures
  found="$build/found/$target"
  crashes="$build/crashes/$target"
  mkdir -p "$found" "$crashes" "tests/fuzz/corpus/$target"
  [ ! -f "tests/fuzz/$target.dict" ] || options+=("-dict=tests/fuzz/$target.dict")
  "$build/fuzz_$target" "${limits[@]}" "${options[@]}" -entropic=0 "-max_total_time=$seconds" "-artifact_prefix=$crashes/" \
    -print_final_stats=1 "-max_len=$(longest "$target")" "$found" "tests/fuzz/corpus/$target" >"$log" 2>&1 </dev/null || code=$?
  figures="$(sed -n 's/^stat::number_of_executed_units: *//p; s/^stat::average_exec_per_sec: *//p' "$log" | tr '\n' ' ')"
  note "$(printf '%-18s %s executions, %s/s, coverage %s, crashes %s' "$target" ${figures:-? ?} \
    "$(grep -oE 'cov: [0-9]+' "$log" | tail -n 1 | grep -oE '[0-9]+' || echo '?')" \
    "$(find "$crashes" -type f | wc -l)")"
  if [ $code -ne 0 ]; then
    failed=true
    note "$target ended with code $code; $log ends:"
    tail -n 25 "$log"
  fi
}

for target in "${targets[@]}"; do
  if [ "$seconds" = --minimise ]; then minimise "$target"; else fuzz "$target"; fi
done
if $failed; then exit 1; fi
