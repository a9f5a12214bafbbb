# Helpers shared by the shell scripts; source it after `set -euo pipefail`.

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
note() { printf '   %s\n' "$*"; }
die() {
  printf '\nerror: %s\n' "$*" >&2
  exit 1
}

# seconds SINCE: "3 min 07 s" since the value of $SECONDS given.
elapsed() {
  local total=$((SECONDS - $1))
  printf '%d min %02d s' $((total / 60)) $((total % 60))
}

# hash_of PATH...: one hash over the names and contents of files and folders; build leftovers do not count.
hash_of() {
  local path
  for path in "$@"; do
    [ -e "$path" ] && find "$path" -name __pycache__ -prune -o -type f -print0
  done | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16
}

# The Python everything is built for: $PYTHON, else the first python3.
python_command() { printf '%s' "${PYTHON:-python3}"; }

# new_venv FOLDER: an empty virtual environment, independent of variables that would redirect Python.
new_venv() {
  env -u PYTHONHOME -u PYTHONPATH "$(python_command)" -m venv "$1" ||
    die "could not create the virtual environment $1; run scripts/install_deps.sh, or set PYTHON to a Python >= 3.9 with venv"
}
