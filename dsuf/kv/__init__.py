"""Session caches that outlive their turn: who has which page, where copies are kept, how a prompt finds them.

Imports `types`, `errors` and `observe`; the engine comes in as the protocol of `types`.

    prompt -> trace -> prefix (tree) -> attach.choose -> pages (device) | arena (host) | a giver -> loader -> engine
    engine -> keeper -> arena -> giver | the next prompt

- *Pages.* An engine's rows lie in pages, which are given out here. A whole page that came back computed can be shared
  by reference count; what nobody holds stays findable until its room is needed, least recently used first, and of a
  sequence the last pages first. The page in which a turn goes on is its own.
- *Commit points* are what an exact resume needs: whole pages, the rows of the begun page, and the engine's state. They
  are kept in one host buffer of blocks of a page's size. Whole pages are kept once, however many commit points stand on
  them. They are made at the end of a prompt and of a turn; in exact mode, where pages without a state are of no use,
  also at the chunk end before the prompt's end and on the way, each half again as long as the one before.
- *A prompt's beginning* comes from where the least is left to compute: a commit point, or, where the engine replays,
  all whole pages that are known but for one window. Page by page the device comes before the host. Positions are reused
  in whole pages, or up to a commit point and the few last positions that its state can spare. At least one token of the
  prompt is computed. Behind a replayed window rows are close to those of a cold run, not equal; of two such copies of a
  page the first one is kept. In exact mode all copies are equal.
- *A hash finds, contents decide.* Pages are in a tree by what they hold under what stands before them; fingerprint,
  salt and page size are its roots. Digests only lead to a node, whose tokens and pictures are compared.
- *Write, then publish.* Blocks are filled where nobody sees them. A copy has a checksum a page and one for its state,
  verified whenever it is used. What failed once is withdrawn, with all that stands on it, and the turn goes on with the
  next best source. Where a failed turn may have computed on something bad, what it made of that is found no more.
- *Nothing is freed while somebody may read or write it.* A call that was given up still takes effect: what it touches
  comes back when it has ended. Readers hold leases. Blocks have generations for readers that do not ask.
- *Room* is made by the commit point that saves the least computed tokens a block, counting only what would not be saved
  or held without it; uses count, and age by a rising floor. The budget counts blocks; tokens and digests take about
  2 kB a page beside it.
- *Order.* Calls to the engine take effect as they are made, so a state is asked for when `commit` is called, and copied
  later, beside the steps. What a turn leaves behind is copied in order, since each copy stands on the one before. The
  next turn of a conversation waits a moment for it; one on another node too, which finds in the directory that a turn
  is here whose prompt it goes on from, and asks. The giver waits as long as the asker said, some of what computing
  would take there, and then offers what there is.
- *Hand-off.* A prompt that one engine computes and another goes on from moves as offers under leases, by chunks while
  prefill goes on. A peer will speak the same protocol; here it is within the process.
"""
