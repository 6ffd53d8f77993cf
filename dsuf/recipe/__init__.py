"""Text to tokens and back, in the model's format: a thin layer over `deepseek_recipe` and `tokenizers`.

`vocabulary` loads a checkpoint's tokenizer; `names` are the model names served; `render` turns a request body into a
prompt and resolved sampling; `reader` turns token ids into events of the client's protocol, and `tail` keeps it from
losing what a reply that ends within a character leaves in the library; `constraints`, `grammar` and `masks` keep the
tokens of a reply to what the request says of it. Rendering, parsing of reasoning and calls, stop
strings and UTF-8 are the library's; its behaviour is the contract, kept by tests. `render` is plain CPU work, meant for
a thread.

May import: `types`, `errors`, `observe`. This is the only layer that imports `deepseek_recipe`.
"""
