#!/bin/sh
# The SuperLink carries the messages. Only this machine reaches it: sites come through the proxy.
set -eu
umask 077
cd "$(dirname "$0")"
. ../environment.sh
exec fedplan server link --server .
