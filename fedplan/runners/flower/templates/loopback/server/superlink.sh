#!/bin/sh
# The SuperLink carries the messages. Without TLS and keys it is for this machine alone.
set -eu
umask 077
cd "$(dirname "$0")"
. ../environment.sh
export FLWR_HOME="$PWD/flwr"
exec flower-superlink --host 127.0.0.1 --port {{port}} --insecure \
    --isolation process --database state.db --disable-runtime-dependency-installation
