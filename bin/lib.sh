# Shared by the commands in bin/: makes the checkout's own Python environment on first use. Sourced, never run.
#
#   DSUF_PYTHON=/path/python3   the interpreter to build the environment with
#   DSUF_NO_SETUP=1             no environment: use that interpreter (else python3) and what is installed there
#
# An environment in .venv is stamped with the digest of the lock file it was made from. A matching stamp costs some
# milliseconds; anything else installs again. One process installs at a time. What an installation that was cut short
# left behind is not used, since half a package can look installed: a new environment is made beside it, in .venv.new,
# and takes its place once it is whole, so that a server which still runs in the old one finds its files up to then.

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

install_lock() { # install_lock FOLDER NAME LOCK
  local started=$SECONDS
  say "$2: installing $(grep -c '^[a-z].*==' "$3") locked packages into .venv"
  touch "$1/.installing"
  # Wheels only, every one checked against the lock: nothing is compiled, nothing else can get in.
  with_ticker "setup: $2: installing" "$1/bin/python" -m pip install -qq --no-input --no-deps \
    --disable-pip-version-check --require-hashes --only-binary :all: --requirement "$3" ||
    fail 1 "installation failed (see above): is a package index within reach? Run the command again to retry"
  rm "$1/.installing"
  say "$2: ready after $((SECONDS - started)) s"
}

install() { # install PYTHON NAME LOCK: into .venv if that is whole, else into a new one that takes its place
  if [ ! -e "$venv/.installing" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    install_lock "$venv" "$2" "$3"
    return
  fi
  say "creating .venv with $("$1" --version): some 100 MB to download, more for a GPU or for development"
  rm -rf "$venv.new" "$venv.old"
  "$1" -m venv --prompt .venv "$venv.new" || fail 1 "could not create $venv.new"
  install_lock "$venv.new" "$2" "$3"
  rename_within "$venv.new" "$venv"
  if [ -e "$venv" ]; then mv "$venv" "$venv.old"; fi
  mv "$venv.new" "$venv"
  rm -rf "$venv.old"
}

# rename_within FOLDER PATH: the scripts in FOLDER, an environment, name it; now they name PATH.
rename_within() {
  "$1/bin/python" - "$1" "$2" <<'EOF'
import pathlib, sys
folder, path = sys.argv[1:]
for file in (*pathlib.Path(folder, "bin").iterdir(), pathlib.Path(folder, "pyvenv.cfg")):
    content = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
    if folder.encode() in content:
        file.write_bytes(content.replace(folder.encode(), path.encode()))
EOF
}

# Which packages this machine's commands run with: a GPU that its driver lists asks for those of CUDA besides.
pick_lock() {
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    printf cuda
  else
    printf base
  fi
}

asks_for_help() { # asks_for_help ARGUMENT...
  local argument
  for argument; do
    case $argument in -h | --help) return 0 ;; esac
  done
  return 1
}

# set_up base|dev|cuda: afterwards $python runs with that lock's packages.
set_up() {
  if [ -n "${DSUF_NO_SETUP:-}" ]; then
    python=${DSUF_PYTHON:-python3}
    return
  fi
  local lock found digest
  lock=$(name_lock "$1")
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
    install "$found" "$1" "$lock"
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

name_lock() { # name_lock base|dev|cuda
  case $1 in
  base) printf %s "$root/requirements.lock" ;;
  *) printf %s "$root/requirements-$1.lock" ;;
  esac
}

is_ready() { # is_ready base|dev|cuda: nothing would be installed
  python=$venv/bin/python
  [ -n "${DSUF_NO_SETUP:-}" ] || is_stamped "$1" "$(sha256sum <"$(name_lock "$1")")"
}

is_stamped() { # is_stamped NAME DIGEST; the interpreter is tried too: an upgrade of the system can change it beneath us
  [ ! -e "$venv/.installing" ] && [ "$(cat "$venv/.stamp-$1" 2>/dev/null)" = "$2" ] &&
    "$python" -c 'import pip' 2>/dev/null
}
