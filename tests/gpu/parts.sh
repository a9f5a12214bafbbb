# The parts of tests/gpu/run_all.sh. Each runs with $build (programs), $results (its own folder) and $deadline (in
# $SECONDS) set, says what it finds, and ends with 0, 1 or, without a GPU, 77.
# shellcheck shell=bash disable=SC2154

tessera() { "$build/tessera" "$@"; }

# limited SECONDS COMMAND...: with a limit of time, and within what is left of the part's.
limited() {
  local seconds="$1" left=$((deadline - SECONDS))
  shift
  if [ $left -lt 1 ]; then
    echo "out of time before: $*"
    return 124
  fi
  timeout --kill-after=10 $((left < seconds ? left : seconds)) "$@"
}

# need_gpu: ends the part where there is none.
need_gpu() {
  local why
  if ! command -v nvidia-smi >/dev/null; then
    why="no nvidia-smi"
  elif why="$(nvidia-smi -L 2>&1)"; then
    return 0
  fi
  echo "no GPU: $why"
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
  if command -v python3 >/dev/null; then
    while read -r folder; do paths+=("$folder"); done < <(python3 -c '
import glob, site, sys
for packages in dict.fromkeys(sys.path + site.getsitepackages() + [site.getusersitepackages()]):
    for folder in sorted(glob.glob(packages + "/nvidia/*/lib") + glob.glob(packages + "/torch/lib")):
        print(folder)')
  fi
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

part_info() {
  tessera env
  ldd "$build/tessera" | grep -E 'cu(dart|blas|dnn)|nccl' || true
  if command -v nvcc >/dev/null; then nvcc --version | tail -n 2; fi
  if command -v python3 >/dev/null; then
    python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)' 2>/dev/null || echo "no PyTorch"
  fi
  nproc
  need_gpu
  nvidia-smi
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,ecc.mode.current,mig.mode.current --format=csv
  nvidia-smi topo -m || true
}

part_tests() {
  need_gpu
  local entry
  for entry in "${cuda_tests[@]}"; do
    local program="$build/tests/test_${entry%%:*}"
    [ -x "$program" ] || continue
    gtest_seconds=$((deadline > SECONDS ? deadline - SECONDS : 1)) run_gtest "$program" gpu- "--gtest_filter=${entry#*:}:-*Emulator*"
  done
  python3 tests/count_results.py "$results"
}

# corpus: text to train on, made from what lies here; prints its prefix.
corpus() {
  local prefix="$results/corpus"
  cat scripts/*.sh tests/gpu/*.sh configs/*.yaml tests/*.py >"$prefix.txt"
  tessera preprocess --input "$prefix.txt" --append-eod --tokenizer-type bytes --output-prefix "$prefix" >"$prefix.log" 2>&1 ||
    { cat "$prefix.log"; return 1; }
  find "$results" -name 'corpus*.idx' | sed 's/\.idx$//'
}

# train_on_gpu RANKS NAME DATA [section.key=value...]: a small Llama, RANKS processes on one GPU. NCCL takes only one
# process per GPU and host, so each says it is a host of its own (rank.sh).
train_on_gpu() {
  local ranks="$1" name="$2" data="$3"
  shift 3
  limited 150 "$build/tessera" launch --num_processes "$ranks" tests/gpu/rank.sh "$build/tessera" train configs/llama_tiny.yaml \
    "data.path=$data" "logging.dir=$results/$name" "checkpoint.dir=$results/$name/checkpoints" checkpoint.every=0 \
    training.steps=20 training.global_batch_size=16 training.eval_interval=0 \
    device.type=cuda device.index=0 "$@" >"$results/$name.log" 2>&1
}

# losses NAME: of every step.
losses() { sed -n 's/.*"loss": *\([-0-9.e+]*\).*/\1/p' "$results/$1/metrics.jsonl"; }

part_ranks() {
  need_gpu
  local data layout name ranks failed=0 tolerance=1e-4
  data="$(corpus)" || return 1
  train_on_gpu 1 ranks1 "$data" training.micro_batch_size=4 || { tail -n 40 "$results/ranks1.log"; return 1; }
  for layout in "2 tp2 parallel.tensor=2 parallel.sequence=true" "2 dp2 parallel.zero_stage=1" "2 pp2 parallel.pipeline=2" \
    "4 tp2_pp2 parallel.tensor=2 parallel.pipeline=2" "8 tp2_pp2_dp2 parallel.tensor=2 parallel.pipeline=2 parallel.zero_stage=1"; do
    read -r ranks name layout <<<"$layout"
    # shellcheck disable=SC2086  # several settings
    if ! train_on_gpu "$ranks" "$name" "$data" training.micro_batch_size=4 $layout; then
      tail -n 40 "$results/$name.log"
      echo "FAILED   $ranks ranks, $name"
      failed=1
      continue
    fi
    paste <(losses ranks1) <(losses "$name") | awk -v name="$name" -v ranks="$ranks" -v limit="$tolerance" '
      NF != 2 { short = 1 }
      { d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d }
      END {
        bad = short || NR != 20 || worst > limit
        printf "%s %s ranks, %s: %d steps, losses differ from one rank by %.1e (limit %.0e)\n", bad ? "FAILED  " : "ok      ", ranks, name, NR, worst, limit
        exit bad
      }' || failed=1
  done
  return $failed
}

part_sanitizer() {
  need_gpu
  local tool sanitizer failed=0
  sanitizer="$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer || true)"
  if [ -z "$sanitizer" ]; then
    echo "skipped: no compute-sanitizer on this machine"
    return 0
  fi
  for tool in memcheck racecheck synccheck; do
    local code=0
    limited 150 "$sanitizer" --tool "$tool" --error-exitcode 9 "$build/tests/test_kernels" "--gtest_filter=*Cuda*:*cuda*" \
      >"$results/$tool.log" 2>&1 || code=$?
    case $code in
      0) echo "ok       $tool: $(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$results/$tool.log" | tail -n 1)" ;;
      124 | 137) echo "partly   $tool: out of time after $(grep -c '\[       OK' "$results/$tool.log") tests, $(grep -c '=== ERROR\|=== Error\|hazard' "$results/$tool.log" || true) findings" ;;
      *) echo "FAILED   $tool (exit code $code)" && tail -n 40 "$results/$tool.log" && failed=1 ;;
    esac
  done
  return $failed
}

# bench_folder: where programs of tests/bench are, in a build or a pack.
bench_folder() { printf '%s' "$build/tests/bench"; }

part_kernels() {
  need_gpu
  local bench found=false failed=0
  for bench in "$(bench_folder)"/cuda_*; do
    [ -x "$bench" ] || continue
    found=true
    limited 150 "$bench" | tee "$results/$(basename "$bench").txt" || failed=1
  done
  if ! $found; then
    echo "FAILED   no program cuda_* in $(bench_folder)"
    failed=1
  fi
  return $failed
}

part_train() {
  need_gpu
  local precision failed=0
  for precision in bf16 fp32; do
    echo "GPT-2 124M, $precision, 8 samples of 1024 tokens, 20 steps:"
    echo 20 | limited 120 "$(bench_folder)/train_bench" 8 1024 5 model.family=gpt2 model.num_layers=12 model.hidden_size=768 \
      model.num_heads=12 model.vocab_size=50257 model.max_positions=1024 training.seq_length=1024 training.micro_batch_size=8 \
      training.global_batch_size=8 "training.precision=$precision" device.type=cuda | tee "$results/train_$precision.txt" || failed=1
  done
  if python3 -c 'import sys, torch, transformers; sys.exit(not torch.cuda.is_available())' 2>/dev/null &&
    python3 tests/bench/compare_torch.py --help | grep -q -- --device; then
    limited 240 python3 tests/bench/compare_torch.py --device cuda --program "$(bench_folder)/train_bench" --build "$build" \
      --output "$results/compare_torch.json" || failed=1
  else
    echo "skipped: no PyTorch and Transformers with CUDA to compare with"
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

part_faults() {
  need_gpu
  local data failed=0 launcher victim code=0 begin
  data="$(corpus)" || return 1
  local train=("$build/tessera" train configs/llama_tiny.yaml "data.path=$data" training.steps=100000
    "logging.dir=$results/faults" checkpoint.every=0 device.type=cuda)
  refused no_device "no .*device|no GPU" env CUDA_VISIBLE_DEVICES= "${train[@]}" || failed=1
  refused no_such_device "device" "${train[@]}" device.index=99 || failed=1
  refused too_large "memory" "${train[@]}" model.hidden_size=65536 model.ffn_hidden_size=262144 || failed=1

  begin=$SECONDS
  rm -rf "$results/faults"
  "$build/tessera" launch --num_processes 2 tests/gpu/rank.sh "${train[@]}" device.index=0 parallel.timeout_s=30 \
    >"$results/lost_rank.log" 2>&1 &
  launcher=$!
  while [ "$(losses faults 2>/dev/null | wc -l)" -lt 3 ] && kill -0 "$launcher" 2>/dev/null && [ $((SECONDS - begin)) -lt 90 ]; do sleep 1; done
  victim="$(pgrep -P "$launcher" | tail -n 1 || true)"
  [ -z "$victim" ] || kill -KILL "$victim"
  begin=$SECONDS
  while kill -0 "$launcher" 2>/dev/null && [ $((SECONDS - begin)) -lt 90 ]; do sleep 1; done
  kill -KILL "$launcher" 2>/dev/null || true
  wait "$launcher" || code=$?
  if [ -n "$victim" ] && [ $code -ne 0 ] && [ $code -ne 137 ] && grep -q 'rank [01]' "$results/lost_rank.log"; then
    echo "ok       lost_rank: the launcher ended $((SECONDS - begin)) s after a rank was killed: $(grep 'rank [01]' "$results/lost_rank.log" | tail -n 1)"
  else
    echo "FAILED   lost_rank: exit code $code"
    tail -n 20 "$results/lost_rank.log"
    failed=1
  fi
  return $failed
}
