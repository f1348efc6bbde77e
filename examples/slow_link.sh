#!/bin/sh
# Run a command whose processes talk to each other over a slow link: examples/slow_link.sh 100mbit torchrun --nproc_per_node=2 train.py
# All that they send shares the link. Needs Linux with iproute2 and util-linux; root only where user namespaces are not allowed.
rate=$1
shift
export BAGUA_REF_SHARED_MEMORY=0 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
unshare -Urn true 2>/dev/null && flags=-Urn || flags=-n
exec unshare $flags sh -ec 'ip link set lo up
tc qdisc add dev lo root tbf rate "$0" burst 256kb latency 50ms
exec "$@"' "$rate" "$@"
