#!/usr/bin/env bash
# Builds Tessera and runs its tests; installs what they need first. The last line says how many passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh
source scripts/testing.sh

usage() {
  cat <<'TEXT'
usage: tests/run.sh [--quick | --all]
  --quick  without PyTorch and Transformers: their stored results stand in for them
  --all    also the long variants of tests, the sanitizer builds and the comparison with PyTorch's speed
Results and full logs: build/tests/results
TEXT
}

quick=false
all=false
for argument in "$@"; do
  case "$argument" in
    --quick) quick=true ;;
    --all) all=true ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
if $quick && $all; then die "--quick and --all exclude each other"; fi

build=build/tests
begin=$SECONDS

say "Installing what the tests need"
scripts/install_deps.sh --tests
if $quick; then
  environment="$(test_environment tests/requirements.txt quick)"
else
  environment="$(test_environment tests/requirements-oracles.txt oracles)"
fi
note "Python packages: $environment"

say "Building ($build)"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TESTS=ON -DTESSERA_EXAMPLES=ON -DTESSERA_BENCH=ON \
  -DTESSERA_PYTHON=ON -DCMAKE_UNITY_BUILD=ON "-DPYTHON_EXECUTABLE=$environment/bin/python" \
  "-Dpybind11_DIR=$("$environment/bin/python" -m pybind11 --cmakedir)" >/dev/null
cmake --build "$build"
# The tests import the package from its sources; the compiled module is put there (and ignored by git and by pip).
rm -f python/tessera/_C.*.so
ln -s "$PWD/$build/python/bindings"/_C.*.so python/tessera/
start_results "$build/results"

say "Source checks"
check floors_self_test "$environment/bin/python" tests/check_floors.py --self-test
check floors "$environment/bin/python" tests/check_floors.py
check style_self_test "$environment/bin/python" tests/check_style.py --self-test
check style "$environment/bin/python" tests/check_style.py
check format "$environment/bin/python" tests/check_style.py --format

say "C++ tests"
run_gtests "$build" ""
run_emulated

# run_pytest NAME FOLDER...: files of tests, three at a time where there are two cores, as many wait for something; what failed
# is run once more alone. OpenBLAS is left to choose its kernels for itself, and hundreds of processes find our modules compiled.
# Signals: a background job ignores some.
run_pytest() {
  local name="$1" code=0 workers=3
  [ "$(nproc)" -gt 1 ] || workers=0
  shift
  local command=(env -u OPENBLAS_CORETYPE -u PYTHONDONTWRITEBYTECODE --default-signal=INT,QUIT,HUP "PYTHONPATH=$PWD/python"
    "$environment/bin/python" -m pytest -q -o "cache_dir=$PWD/$results/$name.cache" "--build=$build" --durations=5)
  if $all; then command+=(--long); fi
  "${command[@]}" "--numprocesses=$workers" --dist=loadfile "--junitxml=$results/$name.junit.xml" "$@" </dev/null || code=$?
  if [ $code -eq 1 ]; then
    note "Once more what failed:"
    "${command[@]}" --last-failed "--junitxml=$results/$name.again.junit.xml" "$@" </dev/null || true
  fi
  # 5: the folder holds no test. Anything but 0, 1 and 5 left no trustworthy report.
  case $code in 0 | 1 | 5) ;; *) echo failed >"$results/$name.status" ;; esac
}

say "Python tests"
run_pytest python tests/python tests/parity/test_stored.py
if $quick; then
  note "skipped  tests/parity/test_transformers.py (--quick)"
  echo skipped >"$results/parity.status"
else
  say "Comparison with PyTorch and Transformers"
  run_pytest parity tests/parity/test_transformers.py
fi

if $all; then
  run_sanitized asan
  run_sanitized ubsan
  run_sanitized tsan
  run_cuda_build
  say "Speed beside PyTorch's"
  check compare_torch env "PATH=$environment/bin:$PATH" "$environment/bin/python" tests/bench/compare_torch.py \
    --build "$build" --output "$build/results/compare_torch.json"
  cat "$results/compare_torch.log"
fi

say "All done in $(elapsed $begin); logs in $results"
"$environment/bin/python" tests/count_results.py "$results"
