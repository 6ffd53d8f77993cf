"""The OpenAPI document, made of types that say what goes over the wire.

`document` puts together what the modules beside it hold: a protocol each, `server` for the rest, `shared` for what they
have in common. Bodies of requests are read by the vendor's library, which has no such types to give; these say what it
takes, and tests hold them against what it does: every reply of a server must fit its type, and requests that fit must
never be more than refused. Fields that are accepted and ignored are not listed; unknown ones are allowed everywhere.
"""
