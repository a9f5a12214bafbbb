# What tests/run.sh and .ci/run share: one folder of results, written by the functions below. Needs common.sh, and
# $results naming the folder. tests/count_results.py adds it up.

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

# run_gtest BINARY PREFIX: one C++ test program; a failing one's log is shown in full.
run_gtest() {
  local name log code=0 begin=$SECONDS
  name="$2$(basename "$1")"
  log="$results/$name.log"
  # In a subshell of its own, whose complaint about a crash goes to the log as well.
  (timeout --kill-after=10 1200 "$1" "--gtest_output=json:$results/$name.gtest.json" </dev/null) >"$log" 2>&1 || code=$?
  if [ $code -eq 0 ]; then
    note "ok       $name ($(grep -oE '[0-9]+ tests? from' "$log" | tail -n 1 | grep -oE '^[0-9]+ tests?' || echo '?'), $((SECONDS - begin)) s)"
    return
  fi
  note "FAILED   $name (exit code $code$([ $code -eq 124 ] && echo ', out of time')):"
  sed '/^\[ RUN /{N;/\n\[  *OK \]/d}' "$log" # all but the tests that passed
  # A crash leaves no report, and a sanitizer's complaint at exit leaves one without failures: count one of our own.
  if [ $code -ne 1 ] || [ ! -s "$results/$name.gtest.json" ] || ! grep -q '"failures": \[' "$results/$name.gtest.json"; then
    echo failed >"$results/$name.status"
  fi
}

# run_gtests BUILD PREFIX: every C++ test program of a build folder.
run_gtests() {
  local binary found=false
  for binary in "$1"/tests/test_*; do
    [ -f "$binary" ] && [ -x "$binary" ] || continue
    found=true
    run_gtest "$binary" "$2"
  done
  if ! $found; then
    note "FAILED   no C++ test program in $1/tests"
    echo failed >"$results/$2no-tests.status"
  fi
}

# run_sanitized PRESET: builds a sanitizer preset and runs the C++ tests in it.
run_sanitized() {
  say "C++ tests under the '$1' preset"
  if ! cmake --preset "$1" -DTESSERA_PYTHON=OFF >"$results/$1-configure.log" 2>&1 ||
    ! cmake --build --preset "$1" >"$results/$1-build.log" 2>&1; then
    cat "$results/$1-configure.log"
    [ ! -e "$results/$1-build.log" ] || tail -n 200 "$results/$1-build.log"
    note "FAILED   the '$1' build"
    echo failed >"$results/$1-build.status"
    return
  fi
  ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
    LSAN_OPTIONS="suppressions=$PWD/tests/leaks_of_others.txt:print_suppressions=0" run_gtests "build/$1" "$1-"
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
