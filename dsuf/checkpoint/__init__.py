"""The released checkpoint: its config, the tensors that must be there, reading, checking and fetching them.

Imports `types`, `config`, `errors`, `observe`. Knows nothing of how a tensor is used; the Engram hash is here because
it follows from configuration and tokenizer alone. A view handed out stays valid as long as somebody holds it, whatever
becomes of the `Checkpoint`. `released/` holds DeepSeek's own configuration and tokenizer; `synthetic` makes random
weights for any configuration, and a model for tests and benchmarks that need no meaning.
"""
