#!/usr/bin/env bash
# Two hosts, h0 and h1, in the namespaces of this process, until its standard input ends:
#   unshare --net --mount --uts --pid ... bash hosts.sh
set -eu
mount -t tmpfs none /run
mkdir /run/netns
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
printf '%s\n' '127.0.0.1 localhost' '10.78.0.1 h0' '10.78.0.2 h1' >/run/hosts
mount --bind /run/hosts /etc/hosts
for number in 1 2; do
  host=h$((number - 1))
  ip netns add $host
  ip link add to-$host type veth peer name eth0 netns $host
  ip link set to-$host master bridge up
  ip -n $host link set lo up
  ip -n $host addr add 10.78.0.$number/24 dev eth0
  ip -n $host link set eth0 up
done
echo ready
read -r _
