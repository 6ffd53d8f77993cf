#!/bin/busybox sh
# First program of the test machine: load what reads the disk, and go on from there.
/bin/busybox mount -t devtmpfs dev /dev
# In the order of their needs; what failed for want of another gets a second try.
for round in 1 2; do
  for module in /modules/*.ko; do /bin/busybox insmod "$module" 2>/dev/null; done
done
tries=0
until [ -b /dev/vda ] || [ $tries -ge 100 ]; do
  /bin/busybox usleep 50000
  tries=$((tries + 1))
done
/bin/busybox mount -t ext4 -o noatime,nobarrier /dev/vda /disk || /bin/busybox mount -t ext4 /dev/vda /disk
/bin/busybox mount --move /dev /disk/dev
exec /bin/busybox switch_root /disk /sbin/guest
