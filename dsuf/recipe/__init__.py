"""Text to tokens and back, in the model's format: a thin layer over `deepseek_recipe` and `tokenizers`.

`vocabulary` loads a checkpoint's tokenizer; `names` are the model names served; `conversion` is a request body as the
library reads it, and `completion` that of a raw text, for which the library has no type; `render` makes a prompt and
resolved sampling of it; `forms` say how the replies of each protocol are written; `reader` turns token ids into events
of the client's protocol, and `tail` keeps it from losing what a reply that ends within a character leaves in the
library; `constraints`, `grammar` and `masks` keep tokens to what the request says of the output. Rendering, parsing of
reasoning and calls, stop strings and UTF-8 are the library's; its behaviour is the contract, kept by tests. `render` is
plain CPU work, meant for a thread.

May import: `types`, `errors`, `observe`. This is the only layer that imports `deepseek_recipe`.
"""
