"""Making a schedule that goes wrong as small as it gets: every part that it goes wrong without is left out."""

from collections.abc import Callable, Iterator

import msgspec

from tests.turns.schedule import Client, Schedule, Setting, Visit

TRIALS = 300

Wrong = Callable[[Schedule], bool]


def shrink(schedule: Schedule, goes_wrong: Wrong, trials: int = TRIALS) -> Schedule:
    """The smallest schedule found that still goes wrong, after at most `trials` runs."""
    while True:
        for smaller in _smaller(schedule):
            if not trials:
                return schedule
            trials -= 1
            if goes_wrong(smaller):
                schedule = smaller
                break
        else:
            return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with one part less, or a simpler one; each client's last visits go before its first."""
    for field in ("meddlings", "faults", "clients"):
        parts = getattr(schedule, field)
        for i in range(len(parts)):
            yield msgspec.structs.replace(schedule, **{field: parts[:i] + parts[i + 1 :]})
    if schedule.stops_at_s is not None:
        yield msgspec.structs.replace(schedule, stops_at_s=None)
    for i, client in enumerate(schedule.clients):
        for simpler in _simpler_clients(client):
            clients = (*schedule.clients[:i], simpler, *schedule.clients[i + 1 :])
            yield msgspec.structs.replace(schedule, clients=clients)
    plain = Setting()
    for field in (
        "hands_over", "audits", "unsteady_s", "drafts", "stop_every", "replay_tokens", "blocks", "pages",
        "chunk_tokens",
    ):  # fmt: skip
        if getattr(schedule.setting, field) != getattr(plain, field):
            setting = msgspec.structs.replace(schedule.setting, **{field: getattr(plain, field)})
            yield msgspec.structs.replace(schedule, setting=setting)


def _simpler_clients(client: Client) -> Iterator[Client]:
    if len(client.visits) > 1:
        yield msgspec.structs.replace(client, visits=client.visits[:-1])
    for field, plain in (("salt", ""), ("tenant", ""), ("priority", 0), ("at_s", 0.0)):
        if getattr(client, field) != plain:
            yield msgspec.structs.replace(client, **{field: plain})
    for i, visit in enumerate(client.visits):
        for simpler in _simpler_visits(visit):
            yield msgspec.structs.replace(client, visits=(*client.visits[:i], simpler, *client.visits[i + 1 :]))


def _simpler_visits(visit: Visit) -> Iterator[Visit]:
    for field, plain in (
        ("timeout_s", None), ("leaves_after_s", None), ("leaves_after_results", None), ("temperature", 0.0),
        ("pause_s", 0.0), ("own_tokens", 1), ("max_tokens", 1),
    ):  # fmt: skip
        if getattr(visit, field) != plain:
            yield msgspec.structs.replace(visit, **{field: plain})
    if visit.kept_tokens:
        yield msgspec.structs.replace(visit, kept_tokens=visit.kept_tokens // 2)
