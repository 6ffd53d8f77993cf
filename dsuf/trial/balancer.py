"""The balancer's configuration: any node answers any turn, and what the balancer says itself has the form of a node's
errors."""

import json
from collections.abc import Iterator, Sequence

TEXTS = {
    500: ("api_error", "internal error"),
    502: ("api_error", "the node that had the request broke off"),
    503: ("overloaded_error", "no node can take the request now"),
    504: ("timeout_error", "the node that had the request did not answer in time"),
}
"""By status, type and text of what HAProxy answers in place of a node. What is no HTTP at all gets its own page, before
any of this is looked at."""

_RETRY_AFTER_S = 1
_CONFIGURATION = """\
defaults
  mode http
  option http-no-delay
  option redispatch
  option abortonclose
  timeout connect 2s
  timeout client 3600s
  timeout server 3600s
  retries 3
  retry-on conn-failure empty-response response-timeout 503
{errors}
global
  tune.bufsize 1048576
frontend clients
  bind {host}:{port}
  default_backend nodes
backend nodes
  balance roundrobin
  option httpchk
  http-check send meth GET uri /readyz
  http-check expect ! string "draining" error-status L7OKC
  http-check expect status 200
  timeout check 3s
  default-server inter 300ms fall 3 rise 1 on-marked-down shutdown-sessions
{servers}
"""


def describe_balancer(host: str, port: int, servers: Sequence[str]) -> str:
    """A configuration of HAProxy on `host`:`port` before `servers`, each of a name and an address."""
    lines = "\n".join(f"  server {server} check" for server in servers)
    return _CONFIGURATION.format(host=host, port=port, servers=lines, errors="\n".join(describe_errors()))


def describe_errors() -> Iterator[str]:
    """The lines with what HAProxy answers itself, in the shape of OpenAI's errors: it does not know the protocol."""
    for status, (kind, text) in TEXTS.items():
        body = json.dumps({"error": {"message": text, "type": kind, "param": None, "code": kind}})
        retry = f" hdr retry-after {_RETRY_AFTER_S}" if status == 503 else ""
        yield f"  http-error status {status} content-type application/json string '{body}'{retry}"
