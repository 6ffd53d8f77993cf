"""Connections to Redis: one server, what Sentinels say is the master, or a cluster. No retries of its own."""

from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from dsuf.kv.directory.address import RedisAddress

_CONNECTIONS = 8


class RedisClient:
    """The connections that a node has to `address`; each call of `redis` ends after about `call_s`.

    Whichever of the library's three clients `redis` is, the commands that are used are the same on all.
    """

    def __init__(self, address: RedisAddress, call_s: float) -> None:
        self.address = address
        self._sentinels: list[Any] = []
        self.redis: Any = self._make_client(call_s)

    async def close(self) -> None:
        """End all connections."""
        for client in (self.redis, *self._sentinels):
            await client.aclose()
        if self.address.kind == "cluster":  # the client closes nothing while it looks for the cluster's nodes anew
            for nodes in ("nodes_cache", "startup_nodes"):
                await self.redis.nodes_manager.aclose(nodes)

    def _make_client(self, call_s: float) -> Any:
        address, options = self.address, self._options(call_s)
        login: dict[str, Any] = {"username": address.user, "password": address.password}
        if address.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in address.hosts]
            return RedisCluster(startup_nodes=nodes, **login, **options)
        login |= {"db": address.database, "max_connections": _CONNECTIONS}
        if address.kind == "sentinel":
            asked = {**options, "username": address.sentinel_user, "password": address.sentinel_password}
            make_sentinel: Any = Sentinel  # without types in the library
            sentinel = make_sentinel(address.hosts, sentinel_kwargs=asked, **login, **options)
            self._sentinels = sentinel.sentinels
            return sentinel.master_for(address.service)
        [(host, port)] = address.hosts
        return Redis(host=host, port=port, **login, **options)

    def _options(self, call_s: float) -> dict[str, Any]:
        """What all connections share. What the library would retry has its own order and its own waits with us."""
        options: dict[str, Any] = {
            "socket_timeout": call_s, "socket_connect_timeout": call_s, "socket_keepalive": True, "protocol": 2,
            "retry": Retry(NoBackoff(), 0), "driver_info": None,
        }  # fmt: skip
        if self.address.tls:
            options |= {
                "ssl": True, "ssl_ca_certs": self.address.ca_file, "ssl_certfile": self.address.cert_file,
                "ssl_keyfile": self.address.key_file, "ssl_check_hostname": self.address.check_host,
            }  # fmt: skip
        return options
