"""A fleet on loopback, to try one: nodes, Redis and a balancer as child processes of one command.

Imports `config`, `errors` and `welcome`; nodes are processes of their own, as everywhere. Redis and balancer are those
that the machine has: nothing here takes their place.

- Nodes 1 to N listen on the balancer's port plus their number, and for peers a hundred above that.
- Everything ends with the command, even if that is killed.
- Who tries a fleet kills a node to see what happens: a node or Redis that ends is told in a line and started again
  where it was, after a second and then later, as under a supervisor. What ends again after three starts within a minute
  stays away. The command ends with its balancer, with the last node that answers clients, or, `--strict`, with the
  first thing that ends.
"""
