"""Who in the fleet keeps which beginnings of prompts: in memory on each node, told from node to node through Redis.

Imports `kv`, `types`, `errors` and `observe`; only `redis_board` and `redis_client` import redis.

    arena -> shelf -> fleet -> board (Redis) -> fleet of another node -> book -> find(trace)

- *A hint, never a promise.* What is found here is asked for at its holder, which looks into its own arena; whatever the
  directory has wrong costs a question. So nothing here waits: `find` reads memory, and a turn never waits for Redis.
- *An entry* is a prefix: a chain digest over whole pages, or a commit point behind one, as a digest of what it needs of
  a prompt. Digests cover fingerprint, salt, page size, tokens and pictures. Of whole pages each eighth one is told and
  the last one of each branch. A holder is a node in one of its boots.
- *What is coming* is told before it is there: from the moment on at which a turn is let in until what it leaves behind
  is kept, an entry says that a node works on its prompt. So the next turn, which may come to another node the moment
  the reply ends, knows whom to ask, however busy that node is. It stands for no length: the reply is not known yet.
- *One writer a record.* A node keeps its entries in one Redis hash, with a number that each change makes one larger.
  Change, number and announcement are one script, so whoever has number n and hears of n + 1 is up to date. Who hears of
  a later one reads the hash. A beat, each second, tells the number too: what is lost is missed at the next beat.
- *What Redis lost* the writer sees, since each write says which number must be there. Then it writes all anew: after a
  restart without data, after a fail-over that lost the last writes.
- *Time* is the reader's own: a holder goes when nothing was heard of it for a time in which others, or the reader's own
  beats, were heard. So neither wall clocks matter nor a Redis that is gone, nor a process that was stopped: what is
  known then stays. A node that leaves says so.
- *Two boots of one node.* One that begins takes the place of those before it. If the older one is heard again there are
  two processes of one name: both are kept, both say so.
- *Redis* gone, slow, read-only: changes wait, bounded; `health` says so. That is no reason not to serve.
"""
