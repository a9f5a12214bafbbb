#!/usr/bin/env bash
# Makes build/gpu: what tests/gpu/run_all.sh needs on a machine with a GPU that cannot compile. Run it where nvcc is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/common.sh
source scripts/testing.sh

usage() {
  cat <<'TEXT'
usage: tests/gpu/bundle.sh [FOLDER]
  FOLDER  what is made, build/gpu at first: programs for H100 and H200 (sm_90), the libraries they need beside CUDA's,
          scripts and configs. Elsewhere, FOLDER/tests/gpu/run_all.sh runs from it alone.
The variable ARCHITECTURES compiles for other GPUs, e.g. ARCHITECTURES=80-real.
TEXT
}

case "${1:-}" in -h | --help | -*) usage; exit 0 ;; esac
pack="${1:-build/gpu}"
work=build/gpu-build
limit_mib=60

say "Building ($work)"
scripts/install_deps.sh --tests --cuda
# oneDNN alone is 40 MB; the plain kernels serve for comparison.
cmake -S . -B "$work" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_CUDA=ON -DTESSERA_TESTS=ON -DTESSERA_BENCH=ON \
  -DTESSERA_ONEDNN=OFF -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES:-90-real}" -DCMAKE_CUDA_FLAGS=-Xfatbin=-compress-all >/dev/null
programs=()
for entry in "${cuda_tests[@]}"; do programs+=("test_${entry%%:*}"); done
benches=(train_bench)
for bench in kernels/bench/cuda_*.cpp tests/bench/cuda_*.cpp; do
  [ ! -e "$bench" ] || benches+=("$(basename "$bench" .cpp)")
done
nice -n 5 cmake --build "$work" --target tessera_program "${programs[@]}" "${benches[@]}"

say "Packing ($pack)"
rm -rf "$pack"
mkdir -p "$pack/lib" "$pack/tests/bench" "$pack/tests/gpu" "$pack/scripts"
strip_into() { strip --strip-unneeded -o "$2/$(basename "$1")" "$1"; }
strip_into "$work/tessera" "$pack"
for program in "${programs[@]}"; do strip_into "$work/tests/$program" "$pack/tests"; done
for bench in "${benches[@]}"; do strip_into "$work/tests/bench/$bench" "$pack/tests/bench"; done
# Everything but the C and C++ runtimes, which any Linux has, and CUDA's own, which belong to the driver's machine.
for program in "$pack/tessera" "$pack"/tests/test_*; do ldd "$program"; done |
  awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|libpthread|librt|ld-linux[^/]*|libstdc\+\+|libgcc_s)\.so|/libcu|/libnccl|/libnv' |
  while read -r library; do strip_into "$library" "$pack/lib"; done
cp -r configs "$pack/configs"
cp scripts/common.sh scripts/testing.sh "$pack/scripts/"
cp tests/gpu/*.sh "$pack/tests/gpu/"
cp tests/count_results.py "$pack/tests/"
cp tests/bench/*.py "$pack/tests/bench/"

size=$(du -sm "$pack" | cut -f1)
du -ah "$pack" | sort -rh | head -n 12
[ "$size" -le $limit_mib ] || die "$pack has $size MiB, more than the $limit_mib that it may have"
say "Done: $pack, $size MiB. Run tests/gpu/run_all.sh there"
