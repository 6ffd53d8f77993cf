"""What the small model learns from: text that is free to use, prompts in the model's real format, answers by rule.

`package` is the file that training reads: tokenizer, filler, word lists and the texts that other programs wrote (the
renderer's preamble on tools, a real client's system text); `bench.nano.pack` makes it from packages of the registries,
`toy` a small one out of the repository alone, for tests. `format` writes conversations as the official renderer does,
without it: the machine that trains has none. A test compares the two. `sample` is a conversation as ids, loss weights
and labels. `answers` are the memorised ones; `needles`, `lines`, `calls`, `shapes`, `sessions`, `objects`, `talks`
and `drills` are the grammars of everything else. `mix` packs samples into batches, `feeder` makes batches in processes
of its own, `checks` are held-back prompts with their true answers.

Decided: a batch is a pure function of package, seed, bucket and number, so neither workers nor interruptions change
what is learned. Words for training and for checks are two lists without a common word; one piece of filler in
thirty-two is kept for checks. Imports numpy, tokenizers and the standard library only, so that it runs where nothing
else of ours does; `client` (a real client) and `toy` (the tokenizer's cut) are for machines with the product on them.
"""
