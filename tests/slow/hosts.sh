#!/usr/bin/env bash
# Two hosts, h0 and h1, in the namespaces of this process, until its standard input ends:
#   unshare --net --mount --uts --pid ... bash hosts.sh ADDRESS ADDRESS
set -eu
mount -t tmpfs none /run
mkdir /run/netns
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
for host in h0 h1; do
  ip netns add $host
  ip link add to-$host type veth peer name eth0 netns $host
  ip link set to-$host master bridge up
  ip -n $host link set lo up
  ip -n $host addr add "$1/24" dev eth0
  ip -n $host link set eth0 up
  shift
done
echo ready
read -r _
