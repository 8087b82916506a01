#!/usr/bin/env bash
# Two Ray nodes on this machine, which talk over loopback, while a command runs:
#
#     cluster_configs/two_nodes.sh python examples/minimal.py
#
# Without a command they stay until Ctrl-C. Not for a machine that others can reach: Ray
# listens on all its addresses, and asks for no password. Settings, from the environment:
#
#     NUM_CPUS, NUM_GPUS  of each node (2 and 0)
#     PORT                the first of 100 ports (26100)
source "$(dirname "${BASH_SOURCE[0]}")/services.sh"

port=${PORT:-26100}
head=127.0.0.2 # Not 127.0.0.1: Ray takes that for "find out my address".
second=127.0.0.3

need ray
answers "$head" "$port" && die "port $port is in use; set PORT to the first of 100 free ones"

export RAY_ADDRESS=$head:$port
# A token left by another Ray on this machine would be asked for.
export RAY_AUTH_MODE=disabled
# Nodes that end are to end at once; a cluster's nodes drain first, see README.md.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-0}

node() { # node NAME ADDRESS FIRST_PORT OPTION...: start one
  local name=$1 address=$2 first=$3
  shift 3
  start "$name" "Ray runtime started" ray start --block --disable-usage-stats --log-style=record \
    --node-ip-address="$address" --num-cpus="${NUM_CPUS:-2}" --num-gpus="${NUM_GPUS:-0}" \
    --object-store-memory=200000000 \
    --node-manager-port="$((first + 1))" --object-manager-port="$((first + 2))" \
    --runtime-env-agent-port="$((first + 3))" --metrics-export-port="$((first + 4))" \
    --dashboard-agent-grpc-port="$((first + 5))" --dashboard-agent-listen-port="$((first + 6))" \
    --min-worker-port="$((first + 10))" --max-worker-port="$((first + 49))" "$@"
}

node head "$head" "$port" --head --port="$port" --include-dashboard=false --temp-dir="$folder"
node second "$second" "$((port + 50))" --address="$RAY_ADDRESS"
say "RAY_ADDRESS=$RAY_ADDRESS, RAY_AUTH_MODE=disabled"
run "$@"
