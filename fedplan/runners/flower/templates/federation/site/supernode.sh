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

# After one broken handshake a SuperNode is deaf and does not end: so it is ended here, and whoever
# keeps this script running starts it again.
told=$(mktemp -d)
mkfifo "$told/log"
flower-supernode --superlink {{address}} --root-certificates "$here/ca.crt" \
    --auth-supernode-private-key "$here/node" --host 127.0.0.1 --port "${PORT:-{{own}}}" \
    --node-config "name=\"{{site}}\" home=\"$here/home\" data=\"$data\" key=\"$here/home.key\" ${MORE:-}" \
    >"$told/log" 2>&1 &
node=$!
while IFS= read -r line; do
    printf '%s\n' "$line"
    case $line in
    *"handshake error detected"*)
        echo "supernode.sh: the line to the server broke; the node is ended in 5 s, to start again" >&2
        (sleep 5 && kill -KILL $node 2>/dev/null) & # it says why before that
        ;;
    esac
done <"$told/log" &
reader=$!
trap 'kill -TERM $node' TERM INT
code=0
wait $node || code=$?
sleep 1 # for its last words
rm -rf "$told"
kill $reader 2>/dev/null || :
exit $code
