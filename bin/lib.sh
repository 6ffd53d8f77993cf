# Shared by the commands in bin/: makes the checkout's own Python environment on first use. Sourced, never run.
#
#   DSUF_PYTHON=/path/python3   the interpreter to build the environment with
#   DSUF_NO_SETUP=1             no environment: use that interpreter (else python3) and what is installed there
#
# An environment in .venv is stamped with the digest of the lock file it was made from. A matching stamp costs some
# milliseconds; anything else installs again. One process installs at a time, and an installation that was cut short is
# thrown away whole, since half a package can look installed.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

say() { printf 'setup: %s\n' "$*" >&2; }

fail() { # fail EXIT_CODE TEXT
  printf 'dsuf: %s\n' "$2" >&2
  exit "$1"
}

# The interpreter: the first one that is new enough. Debian and Ubuntu ship venv apart from Python.
find_python() {
  local candidate
  for candidate in ${DSUF_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import venv, ensurepip' 2>/dev/null ||
        fail 2 "$candidate has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"
      printf '%s' "$candidate"
      return
    fi
  done
  fail 2 "no Python 3.11 or newer found: install it (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv)"
}

# with_ticker LABEL COMMAND...: run it; say every 30 s that it still runs.
with_ticker() {
  local label=$1 status=0
  shift
  tick "$label" 9>&- &
  ticker=$!
  trap 'kill "$ticker" 2>/dev/null' EXIT
  "$@" || status=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  trap - EXIT
  return "$status"
}

tick() { # tick LABEL: until told to end; the sleep holds no pipe that a reader of our output waits for
  local nap started=$SECONDS
  trap 'kill "$nap" 2>/dev/null; exit' TERM
  while :; do
    sleep 30 >/dev/null 2>&1 &
    nap=$!
    wait "$nap"
    printf '%s ... %d s\n' "$1" $((SECONDS - started)) >&2
  done
}

install_lock() { # install_lock NAME LOCK
  local started=$SECONDS
  say "$1: installing $(grep -c '^[a-z].*==' "$2") locked packages into .venv"
  touch "$venv/.installing"
  # Wheels only, every one checked against the lock: nothing is compiled, nothing else can get in.
  with_ticker "setup: $1: installing" "$venv/bin/python" -m pip install -qq --no-input --no-deps \
    --disable-pip-version-check --require-hashes --only-binary :all: --requirement "$2" ||
    fail 1 "installation failed (see above): is a package index within reach? Run the command again to retry"
  rm "$venv/.installing"
  say "$1: ready after $((SECONDS - started)) s"
}

make_environment() { # make_environment PYTHON
  if [ -e "$venv/.installing" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "creating .venv with $("$1" --version)"
    rm -rf "$venv"
    "$1" -m venv "$venv" || fail 1 "could not create $venv"
  fi
}

# Which packages this machine's commands run with: a GPU that its driver lists asks for those of CUDA besides.
pick_lock() {
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    printf cuda
  else
    printf base
  fi
}

# set_up base|dev|cuda: afterwards $python runs with that lock's packages.
set_up() {
  if [ -n "${DSUF_NO_SETUP:-}" ]; then
    python=${DSUF_PYTHON:-python3}
    return
  fi
  local lock=$root/requirements.lock found digest
  [ "$1" = base ] || lock=$root/requirements-$1.lock
  python=$venv/bin/python
  digest=$(sha256sum <"$lock")
  if is_stamped "$1" "$digest"; then
    link_pyverbs
    return
  fi

  found=$(find_python)
  mkdir -p "$root/.cache"
  exec 9>"$root/.cache/setup.lock"
  flock -n 9 || { say "another command is setting up; waiting for it"; flock 9; }
  if ! is_stamped "$1" "$digest"; then
    make_environment "$found"
    install_lock "$1" "$lock"
    printf '%s\n' "$digest" >"$venv/.stamp-$1"
    # The other locks hold every base package at the same version.
    [ "$1" = base ] || sha256sum <"$root/requirements.lock" >"$venv/.stamp-base"
  fi
  link_pyverbs
  exec 9>&-
}

# RDMA: pyverbs comes from the system (python3-pyverbs), never from an index, and fits the interpreter that it was built
# for. All else of the system's packages stays out of sight.
link_pyverbs() {
  local system=${DSUF_SYSTEM_PACKAGES:-/usr/lib/python3/dist-packages}/pyverbs site
  for site in "$venv"/lib/python3.*/site-packages; do
    if [ -L "$site/pyverbs" ] && [ ! -e "$site/pyverbs" ]; then rm "$site/pyverbs"; fi
    local version=${site#*/lib/python3.}
    if [ ! -e "$site/pyverbs" ] && compgen -G "$system/device.cpython-3${version%%/*}-*.so" >/dev/null; then
      ln -sfn "$system" "$site/pyverbs"
    fi
  done
}

is_stamped() { # is_stamped NAME DIGEST; the interpreter is tried too: an upgrade of the system can change it beneath us
  [ ! -e "$venv/.installing" ] && [ "$(cat "$venv/.stamp-$1" 2>/dev/null)" = "$2" ] &&
    "$python" -c 'import pip' 2>/dev/null
}
