"""The released checkpoint: its config, the tensors that must be there, and reading them from disk.

Imports `types`, `config`, `errors`, `observe`. Knows nothing of how a tensor is used.
"""
