"""Training of the small model that ships with the code; a development tool, and the only place that uses PyTorch.

May import `checkpoint`, `reference` and `recipe` of the product. Nothing of the product imports it.
"""
