#!/usr/bin/env bash
# An S3 server (SeaweedFS) on loopback with an empty bucket "runs", while a command runs:
#
#     cluster_configs/lab_s3.sh cluster_configs/two_nodes.sh python train.py
#
# with storage_path="s3://runs/anything" in train.py: the command finds endpoint and
# credentials in its environment. Without a command the server stays until Ctrl-C.
# Settings, from the environment:
#
#     S3_DATA  folder for the data, kept afterwards (none: it is deleted)
#     S3_PORT  the first of 5 ports, each also used 10,000 above (18330)
source "$(dirname "${BASH_SOURCE[0]}")/services.sh"

port=${S3_PORT:-18330}
data=${S3_DATA:-$folder/data}

need weed
answers 127.0.0.1 "$port" && die "port $port is in use; set S3_PORT to the first of 5 free ones"
mkdir -p "$data"

remove_sockets() { # The server leaves some behind, in a place that cannot be chosen.
  local each
  for each in 0 1 2 3 4; do
    rm -f /tmp/seaweedfs-*-{$((port + each)),$((port + each + 10000))}.sock
  done
}
trap 'stop_all; remove_sockets' EXIT

export AWS_ACCESS_KEY_ID=lab AWS_SECRET_ACCESS_KEY=lab-secret AWS_REGION=us-east-1
export AWS_ENDPOINT_URL=http://127.0.0.1:$port
unset AWS_SESSION_TOKEN AWS_PROFILE

start s3 "created bucket\|bucket .* already exists" weed -logtostderr=true mini \
  -dir="$data" -bucket=runs -ip=127.0.0.1 -ip.bind=127.0.0.1 \
  -s3.port="$port" -master.port="$((port + 1))" -volume.port="$((port + 2))" \
  -filer.port="$((port + 3))" -admin.port="$((port + 4))" \
  -s3.port.iceberg=0 -s3.port.lance=0 -admin.ui=false -webdav=false -master.telemetry=false
say "AWS_ENDPOINT_URL=$AWS_ENDPOINT_URL AWS_ACCESS_KEY_ID=lab AWS_SECRET_ACCESS_KEY=lab-secret AWS_REGION=us-east-1"
run "$@"
