#!/bin/sh
# The node of the site {{site}}: ./supernode.sh DATA, or with DATA in the environment.
#
# DATA is where its rows are. MORE says more of the node: resident=false, limit_rounds=100,
# limit_bytes=1000000, limit_epsilon=2.0, limit_delta=1e-6, dataset="rows", and traits of this site, such as
# ward="3". Limits hold for a dataset over all studies. PORT is for its own processes.
set -eu
umask 077
here=$(cd "$(dirname "$0")" && pwd)
data=${1:-${DATA:-}}
[ -n "$data" ] || { echo "supernode.sh: say where the data is: ./supernode.sh DATA" >&2; exit 2; }
[ -e "$data" ] || { echo "supernode.sh: there is no $data: say where the data is" >&2; exit 2; }
case $data in
/*) ;;
*) data=$PWD/$data ;;
esac
case $here$data in
*[\"\\]*) echo "supernode.sh: a path has a quote or a backslash: $here $data" >&2; exit 2 ;;
esac
. "$here/environment.sh"
export FLWR_HOME="$here/flwr"
exec flower-supernode --superlink 127.0.0.1:{{port}} --insecure \
    --host 127.0.0.1 --port "${PORT:-{{own}}}" \
    --node-config "name=\"{{site}}\" home=\"$here/home\" data=\"$data\" ${MORE:-}"
