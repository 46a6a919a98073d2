#!/usr/bin/env bash
# Two hosts out of network namespaces, joined by a cable: two_hosts.sh up|down NAME. Needs root and iproute2.
# NAME-0 is 10.77.0.1, NAME-1 is 10.77.0.2; neither sees any other network. Run something on one: ip netns exec NAME-0 ...
set -euo pipefail
action=$1 name=$2

if [[ $action == down ]]; then
    for host in 0 1; do
        ip netns del "$name-$host" 2>/dev/null || true # the cable goes with its end
    done
    exit
fi
for host in 0 1; do
    ip netns add "$name-$host"
    ip -n "$name-$host" link set lo up
done
ip -n "$name-0" link add eth0 type veth peer name eth0 netns "$name-1"
for host in 0 1; do
    ip -n "$name-$host" address add "10.77.0.$((host + 1))/24" dev eth0
    ip -n "$name-$host" link set eth0 up
done
