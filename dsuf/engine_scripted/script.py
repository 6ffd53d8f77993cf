"""The file from which the scripted engine answers: its rules, and which of them fits a prompt."""

from pathlib import Path
from typing import Literal

import msgspec

from dsuf.errors import CommandError

NO_RULE = "The script has no rule for this prompt."


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to answer a turn; the package says what the fields mean."""

    match: str | tuple[str, ...] = ()
    absent: str | tuple[str, ...] = ()
    turn: int | None = None
    times: int | None = None
    reasoning: str | None = None
    reply: str = ""
    ids: tuple[int, ...] | None = None
    finish: Literal["stop", "length"] = "stop"
    tokens_per_step: int = 1
    prefill_s_per_token: float = 0.0
    step_s: float = 0.0
    fail_at_step: int | None = None
    hang_at_step: int | None = None
    hang_s: float = 3600.0

    def fits(self, prompt: str) -> bool:
        """Whether the decoded `prompt` holds what the rule wants and nothing that it excludes."""
        return all(text in prompt for text in _texts(self.match)) and not any(
            text in prompt for text in _texts(self.absent)
        )


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoded script file."""

    rules: tuple[Rule, ...]


def load_script(path: Path) -> Script:
    """Read a script; raises `CommandError` that says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except OSError as error:
        raise CommandError(f"script: cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CommandError(f"script: {path}: {error}") from error


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """One or several texts as a tuple."""
    return (value,) if isinstance(value, str) else value
