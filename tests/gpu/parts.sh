# The parts of tests/gpu/run_all.sh. Each runs with these set: $build (programs), $results (its own folder), $deadline (in
# $SECONDS), $device (cuda, or cpu in a rehearsal), $patience (limits of time are multiplied by it). It says what it finds
# in lines that begin with ok, FAILED, partly or skipped, which tests/gpu/summary.py reads, and ends with 0, 1 or, without
# a GPU, 77.
# shellcheck shell=bash disable=SC2154

tessera() { "$build/tessera" "$@"; }
python() { "$(python_command)" "$@"; }
rehearsing() { [ "$device" = cpu ]; }
seconds_left() { printf '%s' $((deadline > SECONDS ? deadline - SECONDS : 0)); }

# limited SECONDS COMMAND...: with a limit of time, and within what is left of the part's.
limited() {
  local seconds=$(($1 * patience)) left
  shift
  left="$(seconds_left)"
  if [ "$left" -lt 1 ]; then
    echo "out of time before: $*"
    return 124
  fi
  timeout --kill-after=10 $((left < seconds ? left : seconds)) "$@"
}

# out_of_time CODE: whether an exit code is that of a limit of time.
out_of_time() { [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; }

# need_gpu: ends the part where there is none.
need_gpu() {
  local why
  if rehearsing; then return 0; fi
  if ! command -v nvidia-smi >/dev/null; then
    why="no nvidia-smi"
  elif why="$(nvidia-smi -L 2>&1)"; then
    return 0
  fi
  echo "skipped  no GPU: $why"
  exit 77
}

missing_libraries() { { ldd "$build/tessera" 2>&1 || true; } | awk '/not found/ {print $1}'; }

# use_libraries: the folders of libraries that programs of the build lack here: the pack's own, the toolkit's, those of
# Python packages.
use_libraries() {
  local folder missing paths=("$build/lib")
  for folder in /usr/local/cuda/lib64 /usr/local/cuda-*/lib64 /usr/local/cuda/compat; do
    [ ! -d "$folder" ] || paths+=("$folder")
  done
  if command -v "$(python_command)" >/dev/null; then
    while read -r folder; do paths+=("$folder"); done < <(python -c '
import glob, site, sys
for packages in dict.fromkeys(sys.path + site.getsitepackages() + [site.getusersitepackages()]):
    for folder in sorted(glob.glob(packages + "/nvidia/*/lib") + glob.glob(packages + "/torch/lib")):
        print(folder)')
  fi
  own_library_path="${LD_LIBRARY_PATH:-}"
  export LD_LIBRARY_PATH
  missing="$(missing_libraries)"
  for folder in "${paths[@]}"; do
    # Only folders that help: others hold further copies of libraries that are there already.
    for library in $missing; do
      if [ -e "$folder/$library" ]; then
        LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
        break
      fi
    done
    missing="$(missing_libraries)"
    [ -n "$missing" ] || break
  done
  if [ -n "$missing" ]; then die "libraries that $build/tessera needs are not on this machine: ${missing//$'\n'/ }"; fi
}

# check_machine: what parts need of it, said at once instead of after minutes.
check_machine() {
  local python headers missing=()
  python="$(python_command)"
  command -v "$python" >/dev/null || die "no $python on this machine: PYTHON names one"
  headers="$(python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
  [ -e "$headers/Python.h" ] || missing+=("Python.h ($headers): part python")
  command -v c++ >/dev/null || missing+=("a C++ compiler: part python")
  python -c 'import numpy' 2>/dev/null || missing+=("NumPy: part python")
  python -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ("torch", "transformers"))))' ||
    missing+=("PyTorch and Transformers: parts compare_*")
  command -v compute-sanitizer >/dev/null || [ -x /usr/local/cuda/bin/compute-sanitizer ] || missing+=("compute-sanitizer: part sanitizer")
  local what
  for what in "${missing[@]}"; do note "missing  $what"; done
}

# for_torch COMMAND...: with PyTorch's own libraries, never those that ours were found in.
for_torch() { env "LD_LIBRARY_PATH=$own_library_path" "$@"; }

part_info() {
  tessera env
  ldd "$build/tessera" | grep -E 'cu(dart|blas|dnn)|nccl' || true
  if command -v nvcc >/dev/null; then nvcc --version | tail -n 2; fi
  nproc
  if rehearsing; then return 0; fi
  need_gpu
  nvidia-smi
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,ecc.mode.current,mig.mode.current --format=csv
  nvidia-smi topo -m || true
}

# The same test bodies as on the CPU. Those that need several ranks are left to the parts ranks and layouts.
part_tests() {
  need_gpu
  local entry
  for entry in "${cuda_tests[@]}"; do
    local program="$build/tests/test_${entry%%:*}"
    [ -x "$program" ] || continue
    TESSERA_TEST_WORLD=0 gtest_seconds=$(($(seconds_left) + 1)) run_gtest "$program" gpu- "--gtest_filter=${entry#*:}:-*Emulator*"
  done
  python tests/count_results.py "$results"
}

# corpus: text to train on, made from what lies here; prints its prefix.
corpus() {
  local prefix="$results/corpus"
  cat scripts/*.sh tests/gpu/*.sh configs/*.yaml tests/*.py >"$prefix.txt"
  tessera preprocess --input "$prefix.txt" --append-eod --overwrite --tokenizer-type bytes --output-prefix "$prefix" >"$prefix.log" 2>&1 ||
    { cat "$prefix.log"; return 1; }
  find "$results" -name 'corpus*.idx' | sed 's/\.idx$//'
}

# A rehearsal trains less.
train_steps() { if rehearsing; then echo 2; else echo 10; fi; }

# train_ranks RANKS NAME DATA [section.key=value...]: a small Llama, RANKS processes on one GPU; its time goes into NAME.milliseconds. NCCL takes only one
# process per GPU and host, so each says it is a host of its own (rank.sh).
train_ranks() {
  local ranks="$1" name="$2" data="$3" code=0 begin where=(device.type=cuda device.index=0)
  shift 3
  begin="$(date +%s%N)"
  if rehearsing; then where=(device.type=cpu device.threads=1); fi
  limited 120 "$build/tessera" launch --num_processes "$ranks" tests/gpu/rank.sh "$build/tessera" train configs/llama_tiny.yaml \
    "data.path=$data" "logging.dir=$results/$name" "checkpoint.dir=$results/$name/checkpoints" checkpoint.every=0 \
    "training.steps=$(train_steps)" training.global_batch_size=16 training.eval_interval=0 \
    "${where[@]}" "$@" >"$results/$name.log" 2>&1 || code=$?
  echo $((($(date +%s%N) - begin) / 1000000)) >"$results/$name.milliseconds"
  return $code
}

# losses NAME: of every step of a run.
losses() { sed -n 's/.*"loss": *\([-0-9.e+]*\).*/\1/p' "$results/$1/metrics.jsonl"; }

# compare_losses WHAT STEPS EXPECTED FOUND [LIMIT]: files with a loss in each line.
compare_losses() {
  paste "$3" "$4" | awk -v what="$1" -v steps="$2" -v limit="${5:-1e-4}" '
    NF != 2 { short = 1 }
    { d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d }
    END {
      bad = short || NR != steps || worst > limit
      printf "%s %s: %d steps, losses differ from one rank by %.1e (limit %.0e)\n", bad ? "FAILED  " : "ok      ", what, NR, worst, limit
      exit bad
    }'
}

# several_ranks ALONE LIMIT "RANKS NAME SETTING..."...: runs of several ranks beside the run ALONE of one.
several_ranks() {
  local alone="$1" limit="$2" ranks name layout code failed=0
  shift 2
  for layout in "$@"; do
    read -r ranks name layout <<<"$layout"
    code=0
    # shellcheck disable=SC2086  # several settings
    train_ranks "$ranks" "$name" "$data" training.micro_batch_size=2 $layout || code=$?
    if [ $code -eq 0 ]; then
      compare_losses "$ranks ranks, $name" "$(train_steps)" <(losses "$alone") <(losses "$name") "$limit" || failed=1
    elif out_of_time $code; then
      echo "partly   $ranks ranks, $name: out of time after $(losses "$name" 2>/dev/null | wc -l) steps"
    else
      tail -n 40 "$results/$name.log"
      echo "FAILED   $ranks ranks, $name"
      failed=1
    fi
  done
  return $failed
}

# with_mps: what two ranks gain when NVIDIA's multi-process service lets their kernels run at once. Nothing is set on the GPU.
with_mps() {
  local code=0
  if rehearsing || ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "skipped  MPS: no nvidia-cuda-mps-control"
    return 0
  fi
  export CUDA_MPS_PIPE_DIRECTORY="$results/mps" CUDA_MPS_LOG_DIRECTORY="$results/mps"
  mkdir -p "$results/mps"
  if ! nvidia-cuda-mps-control -d >"$results/mps.log" 2>&1; then
    echo "skipped  MPS: $(tail -n 1 "$results/mps.log")"
  else
    train_ranks 2 tp2_mps "$data" training.micro_batch_size=2 parallel.tensor=2 parallel.sequence=true || code=$?
    echo quit | timeout 20 nvidia-cuda-mps-control || true
    if [ $code -eq 0 ]; then
      echo "ok       MPS: the run tp2 took $(cat "$results/tp2_mps.milliseconds") ms with it, $(cat "$results/tp2.milliseconds") ms without"
    else
      echo "partly   MPS: the run tp2 ended with $code under it: $(tail -n 1 "$results/tp2_mps.log")"
    fi
  fi
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# The communicators' own tests, then whole runs by the launcher: with 2 ranks first, those of the fast path among them
# (bf16, heads of 64, attention by cuDNN or an error), with 4 and 8 as there is time.
part_ranks() {
  need_gpu
  local data code=0 failed=0 fast=(training.precision=bf16 model.hidden_size=256 model.num_heads=4 model.num_kv_heads=2
    device.require_fast_attention=true)
  limited 90 "$(python_command)" tests/gpu/rank_processes.py "$build/tests/test_comm" 2 \
    'Nccl/Conformance.*-*.BarrierHoldsUntilAllAreThere/*:*.EventsTellWhatFinished/*' "$results/comm" >"$results/comm.log" 2>&1 || code=$?
  report_gtest "$code" "communicators, 2 processes" "$results/comm.log" || failed=1

  if [ -x "$(bench_folder)/cuda_nccl_bench" ]; then
    code=0
    limited 60 "$build/tessera" launch --num_processes 2 tests/gpu/rank.sh "$(bench_folder)/cuda_nccl_bench" 2>&1 | tee "$results/cuda_nccl.txt" || code=$?
    if [ $code -eq 0 ]; then echo "ok       host time of NCCL's calls"; else echo "partly   host time of NCCL's calls (exit code $code)"; fi
  fi

  data="$(corpus)" || return 1
  train_ranks 1 ranks1 "$data" training.micro_batch_size=4 || { tail -n 40 "$results/ranks1.log"; echo "FAILED   1 rank"; return 1; }
  several_ranks ranks1 1e-4 "2 tp2 parallel.tensor=2 parallel.sequence=true" "2 dp2 parallel.zero_stage=1" "2 pp2 parallel.pipeline=2" || failed=1
  train_ranks 1 fast1 "$data" training.micro_batch_size=4 "${fast[@]}" || { tail -n 40 "$results/fast1.log"; echo "FAILED   1 rank, fast path"; return 1; }
  several_ranks fast1 5e-3 "2 fast_tp2 parallel.tensor=2 parallel.sequence=true ${fast[*]}" "2 fast_dp2 parallel.zero_stage=1 ${fast[*]}" \
    "2 fast_pp2 parallel.pipeline=2 ${fast[*]}" || failed=1
  with_mps
  several_ranks ranks1 1e-4 "4 tp2_pp2 parallel.tensor=2 parallel.pipeline=2" \
    "8 tp2_pp2_dp2 parallel.tensor=2 parallel.pipeline=2 parallel.zero_stage=1" || failed=1
  return $failed
}

# report_gtest CODE WHAT LOG: one line about a run of a test program; its log when it failed.
report_gtest() {
  local code="$1" what="$2" log="$3" passed skipped
  passed="$(grep -c '^\[       OK' "$log" || true)"
  skipped="$(grep -c '^\[  SKIPPED \].*(' "$log" || true)"
  if grep -q '^\[  FAILED' "$log"; then code=1; fi
  if [ "$code" -eq 0 ] && [ "$passed" -gt 0 ]; then
    echo "ok       $what: $passed tests passed, $skipped skipped"
  elif [ "$code" -eq 0 ] && rehearsing; then
    echo "skipped  $what: without a GPU"
  elif out_of_time "$code"; then
    echo "partly   $what: out of time after $passed tests passed"
  else
    sed '/^\[ RUN /{N;/\n\[ *\(OK\|SKIPPED\) /d}' "$log" | tail -n 60
    echo "FAILED   $what (exit code $code)"
    return 1
  fi
}

# The layout matrix of tests/engine, a process per rank: losses, every gradient and the weights against one rank. And CUDA
# graphs, bit for bit.
part_layouts() {
  need_gpu
  local ranks code failed=0 done=0 wanted=20 tests='*LayoutMatrix.*:CudaGraph.*' sizes=(2 4 3 8 6)
  if rehearsing; then wanted=2 tests='*LayoutMatrix.*/gpt2_tp?_pp1_dp1_zero1_mbs1' sizes=(2 3); fi
  for ranks in "${sizes[@]}"; do
    local log="$results/ranks$ranks.log"
    code=0
    limited 480 "$(python_command)" tests/gpu/rank_processes.py "$build/tests/test_engine" "$ranks" "$tests" "$results/ranks$ranks" \
      >"$log" 2>&1 || code=$?
    report_gtest "$code" "layouts of $ranks ranks" "$log" || failed=1
    done=$((done + $(grep -c '^\[       OK' "$log" || true)))
  done
  if [ "$done" -ge $wanted ]; then
    echo "ok       $done layouts equal one rank (at least $wanted wanted)"
  else
    echo "FAILED   only $done layouts equal one rank (at least $wanted wanted)"
    failed=1
  fi
  return $failed
}

# Loss, logits and gradients on the GPU against the CPU.
part_parity() {
  need_gpu
  limited 120 "$(python_command)" tests/gpu/parity.py "$build/tests/parity_driver" "$results" "$device"
}

# sanitize TOOL LIMIT [OPTION...]: the kernels' tests under one tool of compute-sanitizer.
sanitize() {
  local tool="$1" limit="$2" code=0 log="$results/$1.log" passed
  shift 2
  limited "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 "$@" "$build/tests/test_kernels" "--gtest_filter=*Cuda*:*cuda*-*Emulator*" \
    >"$log" 2>&1 || code=$?
  passed="$(grep -c '\[       OK' "$log" || true)"
  if [ $code -eq 0 ]; then
    echo "ok       $tool: $passed tests, $(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$log" | tail -n 1)"
  elif out_of_time $code; then
    if grep -q '=== ERROR\|=== Error\|hazard\|Invalid\|Uninitialized' "$log"; then
      grep -m 20 -A 8 '=== ERROR\|=== Error\|hazard\|Invalid\|Uninitialized' "$log"
      echo "FAILED   $tool: findings within $passed tests"
      return 1
    fi
    echo "partly   $tool: no findings; out of time after $passed tests"
  elif [ "$passed" -eq 0 ] && ! grep -q '\[ RUN' "$log"; then
    tail -n 5 "$log"
    echo "skipped  $tool: compute-sanitizer does not run the program here (exit code $code)"
  else
    tail -n 60 "$log"
    echo "FAILED   $tool (exit code $code): $(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$log" | tail -n 1)"
    return 1
  fi
}

part_sanitizer() {
  need_gpu
  local tool sanitizer failed=0 tools=(memcheck racecheck initcheck synccheck)
  sanitizer="$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer || true)"
  if [ -z "$sanitizer" ]; then
    echo "skipped  no compute-sanitizer on this machine"
    return 0
  fi
  for tool in "${!tools[@]}"; do
    local options=()
    # Ours alone: NVIDIA's libraries take the time, and read memory that they have not written and ignore what they read.
    if grep -q -- '--kernel-name ' <<<"$("$sanitizer" --help)"; then options=(--kernel-name kernel_substring=tessera); fi
    sanitize "${tools[$tool]}" $(($(seconds_left) / (${#tools[@]} - tool))) "${options[@]}" || failed=1
  done
  return $failed
}

# bench_folder: where programs of tests/bench are, in a build or a pack.
bench_folder() { printf '%s' "$build/tests/bench"; }

# kernel_bench NAME: one program of kernels beside the machine's ceilings. What it has found counts, also out of time.
kernel_bench() {
  need_gpu
  local bench code=0 lines
  bench="$(bench_folder)/$1"
  if [ ! -x "$bench" ]; then
    if rehearsing; then
      echo "skipped  no program $1 in a build without CUDA"
      return 0
    fi
    echo "FAILED   no program $1 in $(bench_folder)"
    return 1
  fi
  limited 150 "$bench" 2>&1 | tee "$results/$1.txt" || code=${PIPESTATUS[0]}
  lines="$(grep -c '/s' "$results/$1.txt" || true)"
  if [ "$code" -eq 0 ] && [ "$lines" -gt 0 ]; then
    echo "ok       $1: $lines lines with figures"
  elif out_of_time "$code"; then
    echo "partly   $1: out of time after $lines lines with figures"
  else
    echo "FAILED   $1 (exit code $code)"
    return 1
  fi
}

part_kernels_memory() { kernel_bench cuda_memory_bench; }
part_kernels_gemm() { kernel_bench cuda_gemm_bench; }
part_kernels_attention() { kernel_bench cuda_attention_bench; }

# The kernels that take most of what is not matrix products: share of the memory's bandwidth, and what warps wait for.
part_counters() {
  need_gpu
  local ncu kernel code values failed=0 stalled=smsp__average_warps_issue_stalled bench
  bench="$(bench_folder)/cuda_memory_bench"
  ncu="$(command -v ncu || command -v /usr/local/cuda/bin/ncu || true)"
  if [ -z "$ncu" ] || rehearsing; then
    echo "skipped  no ncu (Nsight Compute) on this machine"
    return 0
  fi
  for kernel in norm_forward_kernel norm_backward_kernel cross_entropy_forward_kernel cross_entropy_backward_kernel \
    embedding_backward_kernel update_kernel; do
    code=0
    limited 60 "$ncu" --csv --page raw --kernel-name "$kernel" --launch-count 1 --kill on --metrics \
      "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,${stalled}_long_scoreboard_per_issue_active.ratio,${stalled}_barrier_per_issue_active.ratio,${stalled}_lg_throttle_per_issue_active.ratio" \
      "$bench" >"$results/$kernel.csv" 2>&1 || code=$?
    # The heads of the columns, their units, the values.
    values="$(grep '^"' "$results/$kernel.csv" | python -c '
import csv, sys
rows = list(csv.reader(sys.stdin))
if len(rows) >= 3:
    print(", ".join(f"{name.split(chr(46))[0]} {value} {unit}".strip() for name, unit, value in zip(*rows[:3]) if "__" in name))')"
    if [ -n "$values" ]; then
      echo "ok       $kernel: $values"
    elif grep -q ERR_NVGPUCTRPERM "$results/$kernel.csv"; then
      echo "skipped  ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM)"
      return 0
    elif out_of_time $code; then
      echo "partly   $kernel: out of time"
    else
      tail -n 10 "$results/$kernel.csv"
      echo "FAILED   $kernel: ncu ended with $code"
      failed=1
    fi
  done
  return $failed
}

# compare_torch REHEARSED CASE...: Tessera beside PyTorch, or why not; a rehearsal runs the case REHEARSED instead.
compare_torch() {
  local code=0 rehearsed="$1" name cases=()
  shift
  if ! for_torch "$(python_command)" -c 'import torch, transformers' 2>/dev/null; then
    echo "skipped  no PyTorch and Transformers to compare with"
    return 0
  fi
  if rehearsing; then
    cases=(--case "$rehearsed" --contenders 'tessera,eager')
  elif ! for_torch "$(python_command)" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "skipped  PyTorch sees no GPU"
    return 0
  else
    for name in "$@"; do cases+=(--case "$name"); done
  fi
  limited 475 env "OUR_LIBRARIES=${LD_LIBRARY_PATH:-}" "LD_LIBRARY_PATH=$own_library_path" "$(python_command)" tests/bench/compare_torch.py --device "$device" "${cases[@]}" --seconds $(($(seconds_left) * 9 / 10)) \
    --program "$(bench_folder)/train_bench" --build "$build" --output "$results/compare_torch.json" || code=$?
  if [ $code -eq 0 ]; then
    echo "ok       compared with PyTorch"
  elif out_of_time $code && [ -s "$results/compare_torch.json" ]; then
    echo "partly   compared with PyTorch: out of time"
  else
    echo "FAILED   compare_torch.py (exit code $code)"
    return 1
  fi
}

# Each within eight minutes: what one command on the machine may take.
part_compare_small() { need_gpu && compare_torch tiny_gpt2 gpu_124m_fp32 gpu_124m_autocast; }
part_compare_124m() { need_gpu && compare_torch tiny_llama gpu_124m_bf16; }
part_compare_xl() { need_gpu && compare_torch tiny_llama gpu_xl_bf16; }
part_compare_llama() { need_gpu && compare_torch tiny_llama gpu_llama_7b_bf16; }
part_compare_llama3() { need_gpu && compare_torch tiny_llama gpu_llama3_8b_bf16; }

part_train() {
  need_gpu
  local precision failed=0 batch=8 seq=1024 steps=20 model=(model.num_layers=12 model.hidden_size=768 model.num_heads=12 model.vocab_size=50257)
  if rehearsing; then
    batch=2 seq=64 steps=2 model=(model.num_layers=2 model.hidden_size=64 model.num_heads=2 model.vocab_size=257)
  fi
  for precision in bf16 fp32; do
    echo "GPT-2, $precision, $batch samples of $seq tokens, $steps steps:"
    if echo $steps | limited 90 "$(bench_folder)/train_bench" $batch $seq 5 model.family=gpt2 "${model[@]}" \
      model.max_positions=$seq training.seq_length=$seq training.micro_batch_size=$batch training.global_batch_size=$batch \
      "training.precision=$precision" "device.type=$device" | tee "$results/train_$precision.txt"; then
      echo "ok       training in $precision"
    else
      echo "FAILED   training in $precision"
      failed=1
    fi
  done
  return $failed
}

# Texts on one GPU beside the bound of reading the weights once per token.
part_generation() {
  need_gpu
  local code=0
  limited 240 "$(python_command)" tests/gpu/generation.py "$(bench_folder)/generate_bench" "$device" $(($(seconds_left) * 9 / 10)) "$results" || code=$?
  if out_of_time $code; then
    echo "partly   generation: out of time"
  elif [ $code -ne 0 ]; then
    return 1
  fi
}

# build_module FOLDER: compiles the Python module for the machine's Python into FOLDER/tessera; prints why it cannot be,
# and ends with 77 then.
build_module() {
  local folder="$1" library source name pids=() pid headers bindings suffix
  command -v c++ >/dev/null || { echo "no C++ compiler"; return 77; }
  headers="$(python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
  [ -e "$headers/Python.h" ] || { echo "no C headers of $(python -V)"; return 77; }
  python -c 'import numpy' 2>/dev/null || { echo "no NumPy"; return 77; }
  bindings="$(python -c 'import pybind11; print(pybind11.get_include())' 2>/dev/null || true)"
  if [ -d "$build/include/pybind11" ]; then bindings="$build/include"; fi
  [ -n "$bindings" ] || { echo "no pybind11"; return 77; }
  library="$(find "$build/lib" "$build" -maxdepth 1 -name 'libtessera.so.*.*' 2>/dev/null | sort | head -n 1)"
  [ -n "$library" ] || { echo "no libtessera.so in $build"; return 77; }
  suffix="$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
  rm -rf "$folder"
  mkdir -p "$folder/objects"
  cp -r python/tessera "$folder/tessera"
  rm -rf "$folder"/tessera/_C.*.so
  for source in python/bindings/*.cpp; do
    name="$(basename "$source" .cpp)"
    c++ -std=c++20 -fPIC -fvisibility=hidden "-I$headers" "-I$bindings" -Iinclude -c "$source" -o "$folder/objects/$name.o" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || return 1; done
  c++ -shared -o "$folder/tessera/_C$suffix" "$folder"/objects/*.o "$library" "-Wl,-rpath,$(dirname "$library")"
}

# train_plain NAME RANKS TP PP: tests/gpu/train_plain.py; its losses go into a file, one in each line.
train_plain() {
  local log="$results/$1.log"
  limited 60 "$build/tessera" launch --num_processes "$2" tests/gpu/rank.sh "$(python_command)" tests/gpu/train_plain.py "$3" "$4" \
    >"$log" 2>&1 || { tail -n 30 "$log"; echo "FAILED   $1"; return 1; }
  sed -n 's/.*LOSSES //p' "$log" | tr ' ' '\n' >"$results/$1.losses"
}

part_python() {
  need_gpu
  local code=0 failed=0 layout name tp pp why
  build_module "$results/package" >"$results/module.log" 2>&1 || code=$?
  if [ $code -eq 77 ]; then
    why="$(tail -n 1 "$results/module.log")"
    echo "skipped  the Python module cannot be compiled here: $why"
    return 0
  elif [ $code -ne 0 ]; then
    tail -n 40 "$results/module.log"
    echo "FAILED   the Python module did not compile"
    return 1
  fi
  export PYTHONPATH="$results/package" ACCELERATE_TORCH_DEVICE="$device" OMP_NUM_THREADS=1
  if ! python -c 'from tessera import _C' 2>"$results/import.log"; then
    tail -n 5 "$results/import.log"
    echo "FAILED   the compiled Python module cannot be imported"
    return 1
  fi
  echo "ok       compiled the module for $(python -V)"

  train_plain alone 1 1 1 || return 1
  echo "ok       a script alone: losses $(tr '\n' ' ' <"$results/alone.losses")"
  for layout in "tp2 2 1" "pp2 1 2" "dp2 1 1"; do
    read -r name tp pp <<<"$layout"
    train_plain "$name" 2 "$tp" "$pp" && compare_losses "a script with 2 ranks, $name" 6 "$results/alone.losses" "$results/$name.losses" || failed=1
  done

  if ! python -c 'import torch, transformers' 2>/dev/null; then
    echo "skipped  no PyTorch and Transformers to compare with"
    return $failed
  fi
  code=0
  limited 120 "$(python_command)" tests/gpu/train_beside_torch.py "$device" 2>"$results/beside_torch.log" || code=$?
  if out_of_time $code; then
    echo "partly   comparison with PyTorch: out of time"
  elif [ $code -ne 0 ]; then
    tail -n 30 "$results/beside_torch.log"
    echo "FAILED   comparison with PyTorch"
    failed=1
  fi
  return $failed
}

# refused NAME WORDS COMMAND...: a command that must end with an error that has these words.
refused() {
  local name="$1" words="$2" code=0
  shift 2
  limited 60 "$@" >"$results/$name.log" 2>&1 || code=$?
  if [ $code -ne 0 ] && [ $code -lt 124 ] && grep -qiE "$words" "$results/$name.log"; then
    echo "ok       $name: $(grep -iE "$words" "$results/$name.log" | head -n 1)"
    return 0
  fi
  echo "FAILED   $name: exit code $code, and no word of '$words'"
  tail -n 20 "$results/$name.log"
  return 1
}

# child_of PROCESS: the last of its children.
child_of() { grep -lE "^PPid:[[:space:]]+$1\$" /proc/[0-9]*/status 2>/dev/null | sed 's|/proc/\([0-9]*\)/.*|\1|' | sort -n | tail -n 1; }

# lost_rank TRAIN...: kills one of two ranks; the launcher must end and say so.
lost_rank() {
  local launcher victim ended code=0 begin=$SECONDS
  rm -rf "$results/faults"
  "$build/tessera" launch --num_processes 2 tests/gpu/rank.sh "$@" >"$results/lost_rank.log" 2>&1 &
  launcher=$!
  while [ "$(losses faults 2>/dev/null | wc -l)" -lt 3 ] && kill -0 "$launcher" 2>/dev/null && [ $((SECONDS - begin)) -lt 60 ]; do sleep 1; done
  victim="$(child_of "$launcher" || true)"
  [ -z "$victim" ] || kill -KILL "$victim"
  begin=$SECONDS
  while kill -0 "$launcher" 2>/dev/null && [ $((SECONDS - begin)) -lt 60 ]; do sleep 1; done
  ended=$((SECONDS - begin))
  kill -KILL "$launcher" 2>/dev/null && ended=-1
  wait "$launcher" || code=$?
  if [ -n "$victim" ] && [ $ended -ge 0 ] && [ $code -ne 0 ] && grep -q 'rank [01]' "$results/lost_rank.log"; then
    echo "ok       lost_rank: the launcher ended $ended s after a rank was killed: $(grep -m 1 'was killed' "$results/lost_rank.log" || true)"
  else
    echo "FAILED   lost_rank: exit code $code"
    tail -n 20 "$results/lost_rank.log"
    return 1
  fi
}

part_faults() {
  need_gpu
  local data failed=0 where=(device.index=0)
  data="$(corpus)" || return 1
  if rehearsing; then where=(device.threads=1); fi
  local train=("$build/tessera" train configs/llama_tiny.yaml "data.path=$data" training.steps=100000
    training.micro_batch_size=4 training.eval_interval=0 "logging.dir=$results/faults" checkpoint.every=0)
  refused no_device "no .*device|no GPU|CUDA" env CUDA_VISIBLE_DEVICES= "${train[@]}" device.type=cuda || failed=1
  if ! rehearsing; then
    refused no_such_device "device" "${train[@]}" device.type=cuda device.index=99 || failed=1
    refused too_large "memory" "${train[@]}" device.type=cuda model.hidden_size=65536 model.ffn_hidden_size=262144 || failed=1
  fi
  lost_rank "${train[@]}" "device.type=$device" "${where[@]}" parallel.timeout_s=30 || failed=1
  return $failed
}
