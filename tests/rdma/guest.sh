#!/bin/bash
# What runs as the test machine's only program: network, soft-RoCE, the shared folders, then /exchange/command.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t proc none /proc
mount -t sysfs none /sys
mkdir -p /dev/shm
mount -t tmpfs none /dev/shm
mount -t tmpfs none /tmp
mount -t tmpfs none /run

given() { tr ' ' '\n' </proc/cmdline | sed -n "s/^dsuf.$1=//p"; }
number=$(given node) nodes=$(given nodes)
address=10.77.0.$((number + 1))

modprobe -q -a virtio_net virtio_rng 9pnet_virtio 9p ib_uverbs rdma_rxe
shared=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o "$shared,cache=none" exchange /exchange
mount -t 9p -o "$shared,cache=loose,ro" project /project

# The usual queue drops packets that waited a few milliseconds, which on an emulated link is nothing unusual; soft-RoCE
# pays for each loss with a time-out. A long plain queue drops none.
echo pfifo_fast >/proc/sys/net/core/default_qdisc
echo 20000 >/proc/sys/net/core/netdev_max_backlog
card=$(ls /sys/class/net | grep -v '^lo$' | head -n 1)
ip link set lo up
ip link set "$card" mtu 9000 txqueuelen 20000
ip address add "$address/24" dev "$card"
ip link set "$card" up
ulimit -l unlimited
rdma link add rxe0 type rxe netdev "$card"

# Without udev the kernel's own names have to do: the library looks for /dev/infiniband.
mkdir -p /dev/infiniband
for device in /sys/class/infiniband_verbs/uverbs*; do
  [ -e "$device/dev" ] && [ ! -e "/dev/infiniband/${device##*/}" ] &&
    IFS=: read -r major minor <"$device/dev" && mknod "/dev/infiniband/${device##*/}" c "$major" "$minor"
done

await() { # await FILE: until the other machine has written it, a minute or two at most
  for _ in $(seq 600); do [ -e "$1" ] && return; sleep 0.2; done
}
cut -d' ' -f1 /proc/uptime >"/exchange/ready.$number"
[ "$nodes" = 2 ] && await "/exchange/ready.$((1 - number))"

export DSUF_NODE=$number DSUF_NODES=$nodes DSUF_CARD=$card DSUF_ADDRESS=$address
export DSUF_OTHER=10.77.0.$((nodes == 2 ? 2 - number : number + 1))
export PYTHONPATH=/project:/wheels PYTHONPYCACHEPREFIX=/tmp/compiled PYTHONUNBUFFERED=1
cd /tmp
bash /exchange/command >"/exchange/output.$number" 2>&1 </dev/null
echo $? >"/exchange/.ended.$number"
mv "/exchange/.ended.$number" "/exchange/ended.$number"
sync
# The other one may still be talking to this one.
[ "$nodes" = 2 ] && await "/exchange/ended.$((1 - number))"
echo o >/proc/sysrq-trigger
sleep 10
