"""The CUDA side: kernels compiled from `kernels/`, their parameters, and the one place that launches them.

So far the tool chain and single kernels; no engine is built from them yet. Imports `types`, `config`, `errors`,
`observe` and `checkpoint`; never `reference`, which tests alone compare with. cuda-python is optional: without it,
without a driver or without nvcc a command says in one line what is missing.
"""
