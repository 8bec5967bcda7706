#!/bin/sh
# Makes the keys of deploy/compose.yaml, in deploy/demo/keys: once, and never again.
#
# The folder is closed to other users of this machine.  Its files can be read by all, because the
# containers that mount them run as other users.
set -eu
folder=$(dirname "$0")/keys
users=40
if [ -e "$folder" ]; then
  echo "$folder exists: remove it to make new keys" >&2
  exit 1
fi

key() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }

umask 022
mkdir -m 700 "$folder"
operator=$(key) viewer=$(key) gateway=$(key)
{
  echo "- {name: operator, role: operator, key: \"$operator\"}"
  echo "- {name: prometheus, role: viewer, key: \"$viewer\"}"
  echo "- {name: gateway-1, role: gateway, key: \"$gateway\"}"
} > "$folder/keys.yaml"
list=
n=0
while [ "$n" -lt "$users" ]; do
  user=$(key)
  echo "- {name: user-$n, role: client, key: \"$user\"}" >> "$folder/keys.yaml"
  list="$list${list:+, }\"$user\""
  n=$((n + 1))
done
echo "[$list]" > "$folder/users.json"
printf %s "$viewer" > "$folder/viewer_key"
# docker compose reads this file: --env-file deploy/demo/keys/env
{
  echo "SERVANDA_GATEWAY_KEY=$gateway"
  echo "SERVANDA_ADMIN_KEY=$operator"
} > "$folder/env"
echo "wrote $folder"
