#!/bin/sh
# The run of study.toml, in run/: begun if nothing is there, gone on with if something is.
set -eu
umask 077
cd "$(dirname "$0")/.."
. ./environment.sh
exec fedplan run study.toml --runner flower --output run --resume
