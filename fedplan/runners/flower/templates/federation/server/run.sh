#!/bin/sh
# Runs study.toml in run/; continues the run if there is one.
set -eu
umask 077
cd "$(dirname "$0")/.."
. ./environment.sh
exec fedplan run study.toml --runner flower --output run --resume
