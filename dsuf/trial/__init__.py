"""A fleet on loopback, to try one: nodes, Redis and a balancer as child processes of one command.

Imports `config` and `errors`; nodes are processes of their own, as everywhere. Redis and balancer are those that the
machine has: nothing here takes their place.

- Nodes 1 to N listen on the balancer's port plus their number, and for peers a hundred above that.
- Everything ends with the command, even if that is killed, and the command with the first thing that ends by itself: a
  try should not go on with half of it missing unnoticed. Who wants to see what a lost node does kills it by hand, with
  `--lenient`.
"""
