#!/usr/bin/env bash
# From a fresh clone to a trained transformer: installs, builds, trains on the Python standard library's sources,
# evaluates, plots and writes some text of its own. Run it again and it takes up what is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

usage() {
  cat <<'TEXT'
usage: examples/quickstart.sh [--restart] [section.key=value ...]
  --restart            forget the earlier run and train from the beginning
  section.key=value    passed on to `tessera train`, e.g. training.steps=50
TEXT
}

config=configs/quickstart.yaml
run=runs/quickstart
data=data/quickstart
restart=false
overrides=()
for argument in "$@"; do
  case "$argument" in
    --restart) restart=true ;;
    -h | --help) usage; exit 0 ;;
    *.*=*) overrides+=("$argument") ;;
    *) usage >&2; exit 2 ;;
  esac
done
begin=$SECONDS

say "1/6 Installing and building"
note "system packages with apt (what is missing of a compiler, CMake, ninja, oneDNN, yaml-cpp, spdlog, CLI11, nlohmann-json, zlib, Python)"
note "Python packages with pip into .venv (tessera built from this clone, matplotlib); nothing else is touched"
# For the GPU, where there is one and its compiler.
export TESSERA_CUDA=OFF
if nvidia-smi -L >/dev/null 2>&1; then
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    TESSERA_CUDA=auto
    note "a GPU and nvcc are here: building with CUDA, which takes some minutes more"
  else
    note "a GPU is here, but no nvcc: building for the CPU (docs/guides/cuda.md)"
  fi
fi
if [ "$TESSERA_CUDA" = auto ]; then scripts/install_deps.sh --cuda; else scripts/install_deps.sh; fi

stamp=.venv/tessera.stamp
wanted="$(hash_of CMakeLists.txt pyproject.toml cmake include kernels src python) $TESSERA_CUDA $("$(python_command)" -VV | tr '\n' ' ')"
if [ -x .venv/bin/tessera ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  note ".venv: up to date, nothing to build"
else
  [ -x .venv/bin/python ] || new_venv .venv
  rm -f "$stamp"
  note "building; the first time takes some minutes (log: build/quickstart.log)"
  mkdir -p build
  if ! .venv/bin/python -m pip install --disable-pip-version-check --verbose '.[plot]' </dev/null >build/quickstart.log 2>&1; then
    tail -n 60 build/quickstart.log
    die "the build failed; the whole log is in build/quickstart.log"
  fi
  printf '%s' "$wanted" >"$stamp"
  note "built in $(elapsed $begin)"
fi
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHONPATH PYTHONHOME TESSERA_CUDA
training=$SECONDS

say "2/6 Making the corpus"
corpus_stamp="$data/corpus.stamp"
corpus_wanted="$(hash_of python/tessera/data/corpus.py src/data) $(python -c 'import sys, sysconfig; print(sys.version, sysconfig.get_paths()["stdlib"])' | tr '\n' ' ')"
if [ -f "$corpus_stamp" ] && [ "$(cat "$corpus_stamp")" = "$corpus_wanted" ]; then
  note "$data: there already"
else
  rm -f "$corpus_stamp"
  note "$(python -m tessera.data.corpus make "$data/corpus.jsonl")"
  tessera preprocess --input "$data/corpus.jsonl" --json-keys text --append-eod --overwrite --tokenizer-type bytes \
    --workers "$(nproc)" --output-prefix "$data/corpus"
  split="$(sed -n 's/^.*[ {]split: *"\([0-9.,]*\)".*$/\1/p' "$config")"
  [ -n "$split" ] || die "$config names no data.split"
  python -m tessera.data.corpus baseline "$data/corpus.jsonl" --split "$split" >"$data/baseline.json"
  printf '%s' "$corpus_wanted" >"$corpus_stamp"
fi

say "3/6 Training ($config)"
if $restart; then
  note "--restart: removing $run"
  rm -rf "$run"
fi
if [ -f "$run/metrics.jsonl" ]; then
  note "$run is there: going on from its last checkpoint (--restart begins anew)"
fi
tessera train "$config" ${overrides[@]+"${overrides[@]}"}

say "4/6 What it has learned"
python - "$run/metrics.jsonl" "$data/baseline.json" <<'TEXT'
import json, sys

evaluations = [record for record in map(json.loads, open(sys.argv[1])) if "eval_loss" in record]
baseline = json.load(open(sys.argv[2]))
if not evaluations:
    sys.exit("error: the run holds no evaluation")
loss = evaluations[-1]["eval_loss"]
print(f"   validation loss {loss:.3f} nats per byte after step {evaluations[-1]['step']}")
print(f"   for comparison, from the same data: byte frequencies {baseline['unigram']:.3f}, byte pairs {baseline['bigram']:.3f}")
if loss >= baseline["bigram"]:
    sys.exit("error: the model predicts no better than byte pairs do; it needs more steps")
TEXT

say "5/6 Its loss curve"
tessera plot "$run"

say "6/6 Some text written by the model"
tessera generate "$run" --prompt 'def read_file(path):' --max-new-tokens 240 --temperature 0.7 --top-k 40 --seed 1

say "Done in $(elapsed $begin), of which $(elapsed $training) after installation"
cat <<TEXT
   checkpoint   $run/checkpoints
   loss curve   $run/loss.png
   every step   $run/metrics.jsonl

   Next, after: source .venv/bin/activate
     tessera generate $run --prompt 'import '
     tessera train $config training.steps=2000 logging.dir=runs/longer
     tessera convert --from tessera $run --to hf $run/hf
TEXT
