# Sourced by the other scripts: makes or reuses a virtual environment and installs kvjax with the given extras.
#
#   PYTHON  interpreter to use instead of python3; its environment is .venv-X.Y instead of .venv
#   VENV    folder of the environment, whatever the interpreter

fail() { echo "error: $*" >&2; exit 1; }

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

choose_python() {
  if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || fail "PYTHON=$PYTHON does not run or is older than 3.11: name a Python 3.11 or newer."
    return
  fi
  for PYTHON in python3 python3.13 python3.12 python3.11; do
    usable "$PYTHON" && return
  done
  fail "kvjax needs Python 3.11 or newer: install one, or name it with PYTHON=/path/to/python3."
}

setup() { # setup EXTRAS, e.g. setup test,dev; leaves the environment's folder in VENV
  local chosen=${PYTHON:-} stamp wanted
  choose_python
  if [ -z "${VENV:-}" ]; then
    VENV=.venv
    [ -z "$chosen" ] || VENV=.venv-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  fi
  if [ ! -x "$VENV/bin/python" ]; then
    echo "making $VENV with $("$PYTHON" --version)" >&2
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot make a virtual environment: install its venv module."
  fi
  stamp="$VENV/.kvjax-${1:-core}"
  wanted=$(cksum < pyproject.toml)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing kvjax${1:+[$1]} into $VENV (a minute or two, once)" >&2
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check -e ".${1:+[$1]}" ||
      fail "pip could not install kvjax and what it needs; its message is above."
    echo "$wanted" > "$stamp"
  fi
}
