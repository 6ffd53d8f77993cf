"""`dsuf repro`: the one prompt by which this server wants to be measured, asked again and again, at any server.

`command` reads arguments and prints, `connection` speaks HTTP, `figures` makes figures of when what came.

Decided here:

- The client is the standard library's: what is measured should need nothing installed beside it.
- A speed counts what came behind the first event that held text, over the time since that event: the first token's time
  is the prompt's. Tokens are those of the server's `usage`, never guessed from text.
- Steps are the server's too where it tells them (`completion_tokens_details.decode_steps`). Elsewhere each event with
  text counts as a step, which is so for servers that send an event a step; the output says which it was.
- A reply that is no whole HTML page, or was cut off, is a failed check: the speed of noise is of no interest.

Imports `errors`.
"""
