#!/bin/sh
# The site {{site}} takes part: its node, and the process that answers what was approved here.
set -eu
umask 077
cd "$(dirname "$0")"
. ./environment.sh
exec fedplan site serve
