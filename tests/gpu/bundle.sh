#!/usr/bin/env bash
# Makes build/gpu: what tests/gpu/run_all.sh needs on a machine with a GPU that has no build of Tessera. Run it where nvcc is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
source scripts/testing.sh

usage() {
  cat <<'TEXT'
usage: tests/gpu/bundle.sh [FOLDER]
  FOLDER  what is made, build/gpu at first: programs for H100 and H200 (sm_90), the libraries they need beside CUDA's,
          scripts, configs, and what the Python module is compiled from there. Elsewhere, FOLDER/tests/gpu/run_all.sh
          runs from it alone.
Variables: ARCHITECTURES compiles for other GPUs (80-real), WORK names the folder to build in (build/gpu-build).
TEXT
}

case "${1:-}" in -h | --help | -*) usage; exit 0 ;; esac
pack="${1:-build/gpu}"
work="${WORK:-build/gpu-build}"
limit_mib=60

# What a bundle is of: the commit and what is changed beside it.
key="$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)"
changes="$({ git diff HEAD 2>/dev/null || true; } | sha256sum | cut -c1-12)"
if [ "$key" != unknown ] && [ -e "$pack/key.txt" ] && [ "$(cat "$pack/key.txt")" = "$key $changes" ]; then
  say "$pack is of $key already"
  exit 0
fi

say "Building ($work)"
scripts/install_deps.sh --tests --cuda
# oneDNN alone is 40 MB; the plain kernels serve for comparison. Each test program with kernels of its own takes 10 MB.
cmake -S . -B "$work" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_CUDA=ON -DTESSERA_TESTS=ON -DTESSERA_TESTS_SHARED=ON \
  -DTESSERA_BENCH=ON -DTESSERA_ONEDNN=OFF -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-90-real}" \
  -DCMAKE_CUDA_FLAGS=-Xfatbin=-compress-all >/dev/null
programs=()
for entry in "${cuda_tests[@]}"; do programs+=("test_${entry%%:*}"); done
benches=(train_bench generate_bench)
for bench in kernels/bench/cuda_*.cpp tests/bench/cuda_*.cpp; do
  [ ! -e "$bench" ] || benches+=("$(basename "$bench" .cpp)")
done
nice -n 5 cmake --build "$work" --target tessera_program parity_driver "${programs[@]}" "${benches[@]}"
if [ ! -d "$work/pybind11" ]; then
  "$(python_command)" -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/making-pybind11" 'pybind11>=3.0,<4' </dev/null ||
    die "pip could not install pybind11, whose headers the Python module needs"
  mv -T "$work/making-pybind11" "$work/pybind11"
fi

say "Packing ($pack)"
rm -rf "$pack"
mkdir -p "$pack/lib" "$pack/tests/bench" "$pack/tests/gpu" "$pack/scripts"
strip_into() { strip --strip-unneeded -o "$2/$(basename "$1")" "$1"; }
strip_into "$work/tessera" "$pack"
for program in "${programs[@]}" parity_driver; do strip_into "$work/tests/$program" "$pack/tests"; done
for bench in "${benches[@]}"; do strip_into "$work/tests/bench/$bench" "$pack/tests/bench"; done
# Everything but the C and C++ runtimes, which any Linux has, and CUDA's own, which belong to the driver's machine.
for program in "$pack/tessera" "$pack"/tests/test_*; do ldd "$program"; done |
  awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|libpthread|librt|ld-linux[^/]*|libstdc\+\+|libgcc_s)\.so|/libcu|/libnccl|/libnv' |
  while read -r library; do strip_into "$library" "$pack/lib"; done
cp -r configs "$pack/configs"
cp scripts/common.sh scripts/testing.sh "$pack/scripts/"
cp tests/gpu/*.sh tests/gpu/*.py tests/gpu/README.md "$pack/tests/gpu/"
if [ -d docs/gpu_runs ]; then mkdir -p "$pack/docs" && cp -r docs/gpu_runs "$pack/docs/"; fi
cp tests/count_results.py "$pack/tests/"
cp tests/bench/*.py "$pack/tests/bench/"
# No module serves every Python: the machine compiles its own (part `python`).
mkdir -p "$pack/include" "$pack/python"
json="$(echo '#include <nlohmann/json.hpp>' | c++ -E -x c++ - | sed -n 's|^# 1 "\(.*\)/json.hpp".*|\1|p' | head -n 1)"
cp -r include/tessera "$work/pybind11/pybind11/include/pybind11" "$json" "$pack/include/"
cp -r python/tessera python/bindings "$pack/python/"
find "$pack/python" -name __pycache__ -prune -exec rm -rf {} + -o -name '_C.*.so' -exec rm -f {} +
echo "$key" >"$pack/commit.txt"

# The tracked files travel with it.
size=$(du -sm "$pack" | cut -f1)
tree="$({ git ls-files -z | du -cm --files0-from=-; } 2>/dev/null | tail -n 1 | cut -f1 || true)"
tree="${tree:-0}"
du -ah "$pack" | sort -rh | head -n 12
[ $((size + tree)) -le $limit_mib ] ||
  die "$pack has $size MiB and the tracked files $tree, together more than the $limit_mib that may travel"
echo "$key $changes" >"$pack/key.txt"
say "Done: $pack, $size MiB, and $tree MiB of tracked files. Run tests/gpu/run_all.sh there"
