"""HTTP in, server-sent events out: four protocols that generate, and the routes that operate a node.

The way of a request: `server` routes it; `guard` gives it an id, checks the key, and turns every error into the
envelope of its protocol; `body` reads it under limits; `recipe` makes a prompt of it, in a thread; the scheduler
(`types.Submit`) gives a ticket; `relay` feeds the ticket's tokens to the reader and `sse` writes what comes out. A
whole reply is the fold of the same events. `chat`, `messages`, `responses` and `completions` hold what differs between
the protocols.

Decided here:

- The end of the client's stream, by FIN, half-close or RST, means that it has left: the connection is aborted and the
  turn cancelled at once, whatever the turn is doing. (Half-closing clients that still read are not served; none of the
  clients we know is one.)
- Tokens are read and pushed to their client within the step that gave them: no task wakes for them, as long as the
  client takes what it gets. One that does not is waited for by its own task, and what it has not read stays with the
  ticket. All that a step gives to all streams is written together, behind the reading (`outbox`).
- An event stream gets a comment after each interval of silence. A whole reply gets none, so that its status is true.
- A content type that says "not JSON" is refused with 415; a missing one and the one that curl sends by itself are not.

May import: `types`, `errors`, `observe`, `recipe`, `web`. This is the only layer that imports aiohttp.
"""
