#!/bin/sh
# Keep a command running: ./keep.sh COMMAND...
#
# 5 seconds after it ends it starts again, however it ended: for up to a minute after a crash the
# server still takes a node for present, and refuses it. TERM or INT ends the command, all that it
# started, and this script.
[ $# -gt 0 ] || { echo "keep.sh: say a command to keep running" >&2; exit 2; }

# In a session of its own, a command can be ended with all that it started.
command -v setsid >/dev/null && apart=setsid || apart=
child=

tell() { # a signal to the command; 0 asks whether it is there
    [ -n "$child" ] && kill -s "$1" -- "${apart:+-}$child" 2>/dev/null
}

finish() {
    trap '' TERM INT
    tell TERM
    left=20 # an open log stream makes a SuperLink wait for ever
    while [ $left -gt 0 ] && tell 0; do
        sleep 1
        left=$((left - 1))
    done
    tell KILL
    exit 0
}
trap finish TERM INT

while :; do
    $apart "$@" &
    child=$!
    wait "$child"
    echo "keep.sh: $1 ended with $?; it starts again in 5 s" >&2
    sleep 5 &
    wait $!
    tell KILL # what it left behind may hold its port
done
