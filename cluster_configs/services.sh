# Sourced by the scripts beside it: services that live as long as one command.
#
# Each service is a session of its own, so that Ctrl-C reaches the command alone
# and what a service has started can be ended with it.

set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -d $checkout/.venv/bin ]]; then
  PATH=$checkout/.venv/bin:$PATH
fi

folder=$(mktemp -d "/tmp/$(basename "$0" .sh)-XXXXXX") # Short: paths of sockets may have 107 characters.
service_pids=()
keep_folder=

say() { echo "$(basename "$0"): $*" >&2; }

die() {
  say "$*"
  exit 1
}

need() { # need PROGRAM: a program that must be there
  command -v "$1" >/dev/null || die "$1 is not on the PATH; run 'make install' in $checkout, or activate your environment"
}

answers() { # answers HOST PORT: whether something listens there
  (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null
}

start() { # start NAME LINE COMMAND...: return once its output has LINE
  local name=$1 line=$2 log=$folder/$1.log
  shift 2
  : >"$log"
  setsid "$@" >"$log" 2>&1 </dev/null &
  local pid=$! deadline=$((SECONDS + 90))
  service_pids=("$pid" "${service_pids[@]}")
  until grep -q "$line" "$log"; do
    if ! kill -0 "$pid" 2>/dev/null || ((SECONDS > deadline)); then
      tail -n 20 "$log" >&2
      keep_folder=yes
      die "$name did not start; its logs stay in $folder"
    fi
    sleep 0.2
  done
}

stop() { # stop PID: end a service and what it started
  local deadline=$((SECONDS + 20))
  kill -TERM "$1" 2>/dev/null || true
  while kill -0 "$1" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.1; done
  kill -KILL -- "-$1" 2>/dev/null || true
  wait "$1" 2>/dev/null || true
}

stop_all() {
  local pid
  for pid in "${service_pids[@]}"; do stop "$pid"; done
  [[ -n $keep_folder ]] || rm -rf "$folder"
}

run() { # run [COMMAND...]: the command; without one, until Ctrl-C
  if (($#)); then
    "$@"
  else
    say "until Ctrl-C"
    sleep infinity &
    service_pids=("$!" "${service_pids[@]}")
    wait "$!"
  fi
}

trap 'exit 130' INT
trap 'exit 143' TERM
trap stop_all EXIT
