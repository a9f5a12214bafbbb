# A part of tests/gpu/run_all.sh, as those of parts.sh are, which come first.
# shellcheck shell=bash disable=SC2154

# offload_bench NAME BATCH SEQ STEPS SETTING...: train_bench with these settings, what it prints in offload_NAME.txt.
offload_bench() {
  local name="$1" batch="$2" seq="$3" steps="$4"
  shift 4
  echo "$name: $*"
  echo "$steps" | limited 200 "$(bench_folder)/train_bench" "$batch" "$seq" 2 "$@" "model.max_positions=$seq" \
    "training.seq_length=$seq" "training.global_batch_size=$batch" "device.type=$device" | tee "$results/offload_$name.txt"
}

# What lies in host memory: what XL's step costs with the optimizer there, and a model of 7B on one GPU.
part_offload() {
  need_gpu
  local failed=0 name where seq=1024 batch=32 micro=8 steps=5
  local xl=(model.family=gpt2 model.num_layers=48 model.hidden_size=1600 model.num_heads=25 model.vocab_size=50257)
  local llama=(model.family=llama model.num_layers=32 model.hidden_size=4096 model.num_heads=32 model.ffn_hidden_size=11008 model.vocab_size=32000)
  if rehearsing; then
    seq=32 batch=4 micro=1 steps=2
    xl=(model.family=gpt2 model.num_layers=2 model.hidden_size=64 model.num_heads=2 model.vocab_size=257)
    llama=(model.family=llama "${xl[@]:1}")
  fi
  local everything=(parallel.zero_stage=3 offload.optimizer=cpu offload.gradients=cpu offload.parameters=cpu)
  for name in plain optimizer; do
    where=none
    [ $name = plain ] || where=cpu
    offload_bench "xl_$name" $batch $seq $steps "${xl[@]}" "training.micro_batch_size=$micro" training.precision=bf16 \
      "offload.optimizer=$where" || failed=1
  done
  offload_bench 7b $((batch / 4)) $seq $steps "${llama[@]}" training.micro_batch_size=1 training.precision=bf16 \
    "${everything[@]}" training.recompute=full offload.activations=cpu || failed=1
  if [ $failed -eq 0 ]; then echo "ok       offload"; else echo "FAILED   offload"; fi
  return $failed
}
