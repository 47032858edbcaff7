#!/bin/sh
# The SuperExec starts the server's app of each run. It outlives a SuperLink that starts again.
# Runs are written below the folder of the federation.
set -eu
umask 077
cd "$(dirname "$0")/.."
. ./environment.sh
export FLWR_HOME="$PWD/server/flwr"
exec flower-superexec --runtime-api-address 127.0.0.1:{{port}} --insecure
