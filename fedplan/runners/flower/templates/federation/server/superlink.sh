#!/bin/sh
# The SuperLink carries the messages. Only this machine reaches it: sites come through the proxy.
set -eu
umask 077
cd "$(dirname "$0")"
. ../environment.sh
export FLWR_HOME="$PWD/flwr"
exec flower-superlink --host 127.0.0.1 --port {{inner}} \
    --ssl-ca-certfile ../ca.crt --ssl-certfile ../server.crt --ssl-keyfile ../server.key \
    --enable-supernode-auth --isolation process --database state.db \
    --disable-runtime-dependency-installation
