"""Session caches between nodes: one node asks another for what it keeps, and copies it into its own arena.

Imports `kv`, `types`, `errors` and `observe`.

    Taker -> PeerGiver -> Link ====== control connection ====== Link -> GiverServer -> LocalGiver -> arena
                  `-----> Mover ===== data connection, or RDMA ====== bytes of the arena

- *Who asks, dials*: of each ordered pair of nodes the one that wants caches holds a control connection to the other,
  and for bytes over TCP a second one, so that answers never wait behind bytes.
- *Nothing is parsed before both sides have proved themselves*, but a hello of at most 512 bytes. Proofs are HMACs of a
  shared secret over everything said so far: protocol version, names and boots of both nodes, and fresh random numbers
  of both. Who dials proves itself first. With TLS and certificates on both sides there need not be a secret: then a
  node's name must stand in its certificate. Without TLS the secret keeps strangers out, but does not hide what is sent.
- *A boot is another node*: every process has its own random one, and what was promised by an earlier one is void.
- *The control connection decides, bytes prove nothing.* An offer is under a lease, whose time the reader counts from
  before it asked; after reading it asks whether the lease held and every block was the one offered, then compares
  checksums. An offer is no more than some pages, so leases need not be renewed.
- *Each request has a number, a deadline and one answer*; late, double and unknown answers are dropped. So many may be
  under way, no more. Cancelling tells the other side. Silence ends a connection: whoever waits hears of it.
- *Destinations belong to the reader until nothing can write them*: over TCP what comes for a pull that was given up is
  thrown away from that moment on; by RDMA the queue pair is destroyed first.
- *RDMA reads, and does nothing else.* The arena is registered once, whole, before anything is in it: whoever has proved
  itself could read all of it. A pull has a queue pair to itself, which its failure costs. Where a lease ends other than
  by who took it, all pairs of that peer are destroyed before the blocks serve others. If the first read of a connection
  fails, there may be no way between the two devices, and TCP is used.
- *Bytes wait for nothing but bytes.* Several reads are always under way, so the sender knows what comes next; the next
  offer is asked for, and begun, while one comes; a socket is read in pieces of half a megabyte, since waking up for
  each packet costs more than copying it. A prompt that is only looked up is neither unpacked nor hashed again: its page
  digests travel with it, and can do no harm, since contents decide.
- *Who refuses whom shows early.* Nodes connect to each new member, and name in readiness those that they or that do not
  accept them.
- *Sources may change while they are sent*: nobody waits for a slow reader, whose lease then ends; it is told so.
"""
