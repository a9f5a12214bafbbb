#!/usr/bin/env bash
# Installs the system packages Tessera is built from; only what is missing. --tests adds what the tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

usage() {
  cat <<'TEXT'
usage: scripts/install_deps.sh [--tests] [--fuzz] [--cuda] [--dry-run]
  --tests    also GoogleTest, Boost.Context, clang-format and ccache
  --fuzz     also clang with libFuzzer, for tests/fuzz.sh
  --cuda     also the headers of cudnn-frontend (from PyPI, into ~/.cache/tessera); says what else of CUDA is missing
  --dry-run  only say what would be installed
TEXT
}

with_tests=false
with_fuzz=false
with_cuda=false
dry_run=false
for argument in "$@"; do
  case "$argument" in
    --tests) with_tests=true ;;
    --fuzz) with_fuzz=true ;;
    --cuda) with_cuda=true ;;
    --dry-run) dry_run=true ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done

# The names are the same on Debian 12 and Ubuntu 24.04.
libraries=(libdnnl-dev libgloo-dev libssl-dev libyaml-cpp-dev libspdlog-dev libcli11-dev nlohmann-json3-dev zlib1g-dev
  libzstd-dev libcpp-httplib-dev)
tools=(cmake:cmake ninja:ninja-build g++:g++) # program:package
if $with_tests; then
  libraries+=(libgtest-dev libboost-context-dev)
  tools+=(clang-format-14:clang-format-14 ccache:ccache)
fi
if $with_fuzz; then
  libraries+=(libclang-rt-dev)
  tools+=(clang++:clang)
fi

# A Python is good enough when it can make virtual environments and has its C headers.
python_is_complete() {
  "$(python_command)" - <<'TEXT' >/dev/null 2>&1
import ensurepip, os, sys, sysconfig, venv
sys.exit(sys.version_info < (3, 9) or not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
TEXT
}

everything() {
  local tool
  printf '%s ' "${libraries[@]}"
  for tool in "${tools[@]}"; do printf '%s ' "${tool#*:}"; done
  printf 'python3 python3-venv python3-dev'
}

distribution="an unknown system"
if [ -r /etc/os-release ]; then
  distribution="$(. /etc/os-release && printf '%s' "${PRETTY_NAME:-$ID}")"
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  die "this script installs with apt (Debian 12, Ubuntu 24.04), which $distribution does not have.
Install by hand what these Debian packages hold, then build with CMake: $(everything)"
fi

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing=()
for tool in "${tools[@]}"; do
  command -v "${tool%%:*}" >/dev/null || missing+=("${tool#*:}")
done
for package in "${libraries[@]}"; do
  installed "$package" || missing+=("$package")
done
if ! python_is_complete; then
  if [ -n "${PYTHON:-}" ]; then
    die "PYTHON=$PYTHON is not a Python >= 3.9 with venv, ensurepip and C headers; unset PYTHON to use Debian's"
  fi
  for package in python3 python3-venv python3-dev; do
    installed "$package" || missing+=("$package")
  done
fi

# What a build with -DTESSERA_CUDA=ON needs: the toolkit, cuDNN and NCCL come from NVIDIA, by hand; headers come here.
prepare_cuda() {
  local version folder making
  version="$(cat scripts/cudnn_frontend_version.txt)"
  folder="${XDG_CACHE_HOME:-$HOME/.cache}/tessera/cudnn_frontend-$version"
  command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] ||
    note "nvcc is missing: install NVIDIA's CUDA toolkit 12.4 or later, cuDNN 9 and NCCL 2 (https://developer.nvidia.com/cuda-downloads)"
  if [ -f "$folder/include/cudnn_frontend.h" ]; then
    note "cudnn-frontend $version: $folder"
    return
  fi
  if $dry_run; then
    note "to be put into $folder: the headers of nvidia-cudnn-frontend $version"
    return
  fi
  mkdir -p "$(dirname "$folder")"
  making="$(mktemp -d "$(dirname "$folder")/making-cudnn_frontend-XXXXXX")"
  new_venv "$making/venv"
  if ! "$making/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --target "$making/package" "nvidia-cudnn-frontend==$version" </dev/null; then
    rm -rf "$making"
    die "pip could not install nvidia-cudnn-frontend $version, whose headers the CUDA backend needs"
  fi
  mkdir "$making/headers"
  mv "$making/package/include" "$making/headers/include"
  mv -T "$making/headers" "$folder" 2>/dev/null || [ -f "$folder/include/cudnn_frontend.h" ]
  rm -rf "$making"
  note "cudnn-frontend $version: put into $folder"
}

install_missing() {
  if [ ${#missing[@]} -eq 0 ]; then
    note "system packages: nothing to install"
    return
  fi
  note "to be installed with apt: ${missing[*]}"
  if $dry_run; then return; fi

  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      die "installing needs root, and there is no sudo. As root, run: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  as_root+=(env DEBIAN_FRONTEND=noninteractive)

  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null ||
    die "apt could not install: ${missing[*]} (on $distribution; Tessera is known to build on Debian 12 and Ubuntu 24.04)"
  if ! python_is_complete; then
    die "$(command -v "$(python_command)") is still not a Python >= 3.9 with venv and C headers. Another python3 comes first on PATH; set PYTHON=/usr/bin/python3"
  fi
  note "installed"
}

install_missing
if $with_cuda; then prepare_cuda; fi
