# What tests/run.sh and .ci/run share: one folder of results, written by the functions below. Needs common.sh, and
# $results naming the folder. tests/count_results.py adds it up.
# shellcheck shell=bash

cmake_options=()

# Builds here are made from nothing: several files compiled as one take half the time (CMAKE_UNITY_BUILD). ccache finds what
# build folders have in common, as long as it is told that the place of a build folder says nothing.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$PWD}"

# start_results FOLDER: the folder that results go to, emptied.
start_results() {
  results="$1"
  rm -rf "$results"
  mkdir -p "$results"
}

# check NAME COMMAND...: a script that counts as one test; exit code 77 means skipped.
check() {
  local name="$1" code=0
  shift
  "$@" >"$results/$name.log" 2>&1 </dev/null || code=$?
  case $code in
    0) echo passed >"$results/$name.status" && note "ok       $name: $(tail -n 1 "$results/$name.log")" ;;
    77) echo skipped >"$results/$name.status" && note "skipped  $name: $(tail -n 1 "$results/$name.log")" ;;
    *)
      echo failed >"$results/$name.status"
      note "FAILED   $name (exit code $code):"
      cat "$results/$name.log"
      ;;
  esac
}

# gtest_name BINARY PREFIX: what its results are called; a shard of it (GTEST_SHARD_INDEX) has a name of its own.
gtest_name() { printf '%s' "$2$(basename "$1")${GTEST_SHARD_INDEX:+-$GTEST_SHARD_INDEX}"; }

# is_late: the deadline (a value of SECONDS), where there is one, is over or nearly so.
is_late() { [ -n "${deadline:-}" ] && [ $((deadline - SECONDS)) -le 5 ]; }

# seconds_left SECONDS: these, or fewer where the deadline comes earlier.
seconds_left() {
  local left=$((${deadline:-SECONDS + $1} - SECONDS))
  printf '%s' $((left < $1 ? left : $1))
}

# out_of_time NAME: counts what the deadline has cut as skipped, and says so.
out_of_time() {
  note "SKIPPED  $1: no time is left of CI_MINUTES=${CI_MINUTES:-}"
  echo skipped >"$results/$1.status"
}

# try_gtest BINARY PREFIX [OPTION...]: one C++ test program, in $gtest_seconds at most; a failing one's log is shown.
# NAME.failed then holds the filter that picks what failed.
try_gtest() {
  local binary="$1" name log failed code=0 begin=$SECONDS seconds
  name="$(gtest_name "$1" "$2")"
  if is_late; then
    out_of_time "$name"
    return
  fi
  seconds="$(seconds_left "${gtest_seconds:-1200}")"
  log="$results/$name.log"
  shift 2
  # In a subshell of its own, whose complaint about a crash goes to the log as well. Signals: a background job ignores some.
  (env --default-signal=INT,QUIT timeout --kill-after=10 "$seconds" "$binary" "$@" \
    "--gtest_output=json:$results/$name.gtest.json" </dev/null) >"$log" 2>&1 || code=$?
  if [ $code -eq 0 ]; then
    note "ok       $name ($(grep -oE '[0-9]+ tests? from' "$log" | tail -n 1 | grep -oE '^[0-9]+ tests?' || echo '?'), $((SECONDS - begin)) s)"
    return
  fi
  if [ $code -eq 124 ] && is_late && ! grep -q '^\[  FAILED' "$log"; then
    out_of_time "$name"
    return
  fi
  note "FAILED   $name (exit code $code$([ $code -eq 124 ] && echo ', out of time')):"
  sed '/^\[ RUN /{N;/\n\[  *OK \]/d}' "$log" # all but the tests that passed
  # A crash leaves no report, and a sanitizer's complaint at exit leaves one without failures: count one of our own.
  if [ $code -ne 1 ] || ! failed="$("$(python_command)" tests/count_results.py --failed "$results/$name.gtest.json")" || [ -z "$failed" ]; then
    echo failed >"$results/$name.status"
    return
  fi
  printf '%s' "$failed" >"$results/$name.failed"
}

# retry_gtest BINARY PREFIX [OPTION...]: what failed in it, once more.
retry_gtest() {
  local binary="$1" name failed code=0
  name="$(gtest_name "$1" "$2")"
  [ -e "$results/$name.failed" ] || return 0
  failed="$(cat "$results/$name.failed")"
  shift 2
  (unset GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
    timeout --kill-after=10 "${gtest_seconds:-1200}" "$binary" "$@" "--gtest_filter=$failed" \
    "--gtest_output=json:$results/$name.again.gtest.json" </dev/null) >"$results/$name.again.log" 2>&1 || code=$?
  note "again    $name $failed: $([ $code -eq 0 ] && echo 'passed this time' || echo "failed, $results/$name.again.log")"
}

# run_gtest BINARY PREFIX [OPTION...]: one C++ test program, and the tests that failed in it once more alone.
run_gtest() {
  try_gtest "$@"
  retry_gtest "$@"
}

# side_by_side PREFIX BINARY[ FILTER]...: C++ test programs, two at a time where there are two cores, as many of their tests
# wait for something; test_engine, which takes longest, in two halves. Then the tests that failed, once more alone.
side_by_side() {
  local prefix="$1" entry binary filter shard entries=() running=0 most=2
  [ "$(nproc)" -gt 1 ] || most=1
  shift
  for entry in "$@"; do
    case "${entry%% *}" in
      */test_engine) entries+=("0 $entry" "1 $entry") ;;
      *) entries+=("- $entry") ;;
    esac
  done
  for entry in "${entries[@]}"; do
    if [ $running -eq $most ]; then
      wait -n || true
      running=$((running - 1))
    fi
    read -r shard binary filter <<<"$entry"
    # Threads of OpenMP sleep while others work, as in the program.
    (
      if [ "$shard" != - ]; then export GTEST_TOTAL_SHARDS=2 "GTEST_SHARD_INDEX=$shard"; fi
      said="$(GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-2000}" try_gtest "$binary" "$prefix" ${filter:+"--gtest_filter=$filter"})"
      printf '%s\n' "$said"
    ) &
    running=$((running + 1))
  done
  wait
  for entry in "${entries[@]}"; do
    read -r shard binary filter <<<"$entry"
    (
      if [ "$shard" != - ]; then export "GTEST_SHARD_INDEX=$shard"; fi
      retry_gtest "$binary" "$prefix"
    )
  done
}

# run_gtests BUILD PREFIX [FILTER]: every C++ test program of a build folder, those that take long first; all of test_engine's
# tests or what FILTER picks of them.
run_gtests() {
  local name binary programs=()
  for name in kernels engine comm optim; do
    if [ -x "$1/tests/test_$name" ]; then programs+=("$1/tests/test_$name"); fi
  done
  for binary in "$1"/tests/test_*; do
    [ -f "$binary" ] && [ -x "$binary" ] || continue
    case " ${programs[*]} " in *" $binary "*) ;; *) programs+=("$binary") ;; esac
  done
  programs=("${programs[@]/%\/test_engine//test_engine ${3:-*}}")
  if [ ${#programs[@]} -eq 0 ]; then
    note "FAILED   no C++ test program in $1/tests"
    echo failed >"$results/$2no-tests.status"
    return
  fi
  side_by_side "$2" "${programs[@]}"
}

# build_preset PRESET LOGNAME [TARGET...]: configures, with $cmake_options as well, and builds a preset; a failure counts, its
# log is shown, and the function fails. It fails too when the deadline comes first.
build_preset() {
  local preset="$1" name="$2" code=0
  shift 2
  if is_late; then
    out_of_time "$name-build"
    return 1
  fi
  if cmake --preset "$preset" -DTESSERA_PYTHON=OFF -DCMAKE_UNITY_BUILD=ON "${cmake_options[@]}" >"$results/$name-configure.log" 2>&1; then
    timeout "$(seconds_left 5000)" nice -n 5 cmake --build --preset "$preset" ${1+--target "$@"} >"$results/$name-build.log" 2>&1 || code=$?
    if [ $code -eq 0 ]; then return 0; fi
    if [ $code -eq 124 ] && is_late; then
      out_of_time "$name-build"
      return 1
    fi
  fi
  cat "$results/$name-configure.log"
  [ ! -e "$results/$name-build.log" ] || tail -n 200 "$results/$name-build.log"
  note "FAILED   the '$preset' build"
  echo failed >"$results/$name-build.status"
  return 1
}

# run_sanitized PRESET [FILTER]: builds a sanitizer preset and runs the C++ tests in it, of test_engine's those that FILTER picks.
run_sanitized() {
  local gtest_seconds=2400 # a program at half the speed of a quiet machine still ends
  say "C++ tests under the '$1' preset"
  build_preset "$1" "$1" test_programs || return 0
  TSAN_OPTIONS="suppressions=$PWD/tests/races_of_others.txt" \
    ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
    LSAN_OPTIONS="suppressions=$PWD/tests/leaks_of_others.txt:print_suppressions=0" run_gtests "build/$1" "$1-" "${2:-*}"
}

# Test programs that have tests of the CUDA backend, each with the filter that picks them: on the emulator, on a GPU.
cuda_filter='*Cuda*:*Cudnn*:*cuda*:*Nccl*:*Emulator*'
# A dozen layouts of the matrix: each axis, schedule and sharding once.
cuda_engine_filter='*CudaStep*:DeviceDecoder.*:CudaGraph*:Engine.*:Fp16.*:Generate.*:Trainer.*:Models/Parts*:Precisions/Resume*:LayoutEngine.*:LayoutState.OneToEight*:LayoutEdge.ExpertRanks*'
cuda_engine_filter+=":Ranks/PlantedDisagreement.*/threads_*"
for layout in one_rank dp2_zero1_bf16 dp2_zero3_bf16 tp2_partition pp2_interleaved; do
  cuda_engine_filter+=":Layouts/Offload.*/$layout"
done
for layout in gpt2_tp2sp_pp1_dp1_zero1_mbs1 gpt2_tp3_pp1_dp1_zero1_mbs1 llama_kv2_tp4_pp1_dp1_zero1_mbs1 \
  gpt2_tp1_pp1_cp2ulysses_dp1_zero1_mbs1 gpt2_tp1_pp1_cp2all_gather_dp1_zero1_mbs1 \
  gpt2_tp1_pp1_dp3_zero0_mbs2 gpt2_tp1_pp1_dp2_zero1_mbs2 gpt2_tp1_pp4_1f1b_dp1_zero1_mbs1 \
  gpt2_tp1_pp2_interleaved_v2_dp1_zero1_mbs1 llama_kv4_tp1_pp3_zbh1_dp1_zero1_mbs2 \
  alibi_untied_tp1_pp2_zbv_v2_dp1_zero1_mbs1 gpt2_tp2sp_pp1_dp1_zero1_mbs1_selective \
  llama_kv4_tp2_pp1_dp1_zero1_mbs1_fulluniform1_partition llama_kv4_tp2sp_pp2_1f1b_dp2_zero1_mbs1_selective \
  mixtral_tp1_pp1_ep2_dp4_zero1_mbs1; do
  cuda_engine_filter+=":*LayoutMatrix.*/$layout"
done
cuda_tests=(
  device:'*'
  kernels:"$cuda_filter"
  tensor:'*'
  ops:'*'
  comm:"$cuda_filter"
  autograd:'*'
  parallel:'*'
  nn:'*'
  pipeline:'Executor.*'
  optim:'Optimizer*:ParamStore*:Trajectory*:*Skipping*:Launches*'
  engine:"$cuda_engine_filter"
)

# run_emulated: the CUDA sources on the host. Counts every test program, and whether every kernel was run by one.
run_emulated() {
  local entry record="$PWD/$results/emulated-kernels.txt" targets=() programs=()
  say "CUDA sources on the emulator"
  for entry in "${cuda_tests[@]}"; do targets+=("test_${entry%%:*}"); done
  build_preset emulated emulated "${targets[@]}" || return 0
  for entry in "${cuda_tests[@]}"; do
    programs=("build/emulated/tests/test_${entry%%:*} ${entry#*:}" "${programs[@]}") # the last takes longest
  done
  TESSERA_EMULATOR_RECORD="$record" side_by_side emulated- "${programs[@]}"
  check emulated_kernels "$(python_command)" tests/emulated_kernels.py "$record"
}

# run_cuda_build [ARCHITECTURES]: the 'cuda' preset, for these GPUs or all that it is made for, and what can be said of it
# without a GPU. Skipped where there is no nvcc.
run_cuda_build() {
  local environment cmake_options=(${1:+"-DCMAKE_CUDA_ARCHITECTURES=$1"})
  say "CUDA build"
  if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    note "skipped  no nvcc"
    echo skipped >"$results/cuda-build.status"
    return 0
  fi
  scripts/install_deps.sh --cuda
  # What the emulator runs of the other test programs is the same code.
  CUDAFLAGS=-Xptxas=-v build_preset cuda cuda tessera_program test_kernels train_bench generate_bench cuda_{attention,gemm,memory,nccl}_bench || return 0
  echo passed >"$results/cuda-build.status"
  run_gtest build/cuda/tests/test_kernels cuda- '--gtest_filter=CublasLt*'
  if command -v cuobjdump >/dev/null || [ -x /usr/local/cuda/bin/cuobjdump ]; then
    check cuda_code env "PATH=$PATH:/usr/local/cuda/bin" tests/check_cuda_code.sh build/cuda/libtessera.so
  else
    environment="$(test_environment tests/requirements-cuda.txt cuda)"
    check cuda_code env "PATH=$(echo "$environment"/lib/python3*/site-packages/nvidia/cu*/bin):$PATH" \
      tests/check_cuda_code.sh build/cuda/libtessera.so
  fi
  check kernel_table nice -n 5 "$(python_command)" tests/kernel_table.py --check "$results/cuda-build.log"
}

# test_environment REQUIREMENTS NAME: prints the folder of a cached virtual environment with these packages, made on
# first use. It is made under another name and renamed, so that an interrupted install is never mistaken for it.
test_environment() {
  local requirements="$1" cache="${XDG_CACHE_HOME:-$HOME/.cache}/tessera" key folder making
  key="$({ cat tests/requirements.txt "$requirements"; "$(python_command)" -VV; } | sha256sum | cut -c1-12)"
  folder="$cache/$2-$key"
  if [ ! -x "$folder/bin/python" ]; then
    mkdir -p "$cache"
    note "installing $requirements into $folder (kept for later runs)" >&2
    making="$(mktemp -d "$cache/making-$2-XXXXXX")"
    new_venv "$making" >&2
    if ! "$making/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" >&2 </dev/null; then
      rm -rf "$making"
      die "pip could not install $requirements"
    fi
    # Another run may have been faster; then its environment serves as well.
    mv -T "$making" "$folder" 2>/dev/null || rm -rf "$making"
  fi
  printf '%s' "$folder"
}
