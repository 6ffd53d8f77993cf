"""What a campaign did and what went wrong in it."""

from collections import Counter

FAULTS_KEPT = 50


class Tally:
    """Counts of what was done, by name, and the first faults in words."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.fault_count = 0
        self.faults: list[str] = []
        self.answers: dict[str, str] = {}  # the first reply to each prompt that must always have the same
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def count(self, name: str) -> None:
        """`name` was done as it should."""
        self.done[name] += 1

    def fault(self, name: str, what: str) -> None:
        """`name` went wrong: `what`."""
        self.fault_count += 1
        if len(self.faults) < FAULTS_KEPT:
            self.faults.append(f"{name}: {what}")

    def check_usage(self, name: str, usage: dict[str, object]) -> None:
        """Count the tokens of a whole reply, whose prompt tokens must add up by source."""
        details = usage.get("prompt_tokens_details")
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not (isinstance(details, dict) and isinstance(prompt, int) and isinstance(completion, int)):
            self.fault(name, f"usage is not whole: {usage}")
            return
        sources = sum(details[f"{source}_tokens"] for source in ("device", "host", "peer", "computed"))
        if sources != prompt:
            self.fault(name, f"sources add up to {sources}, not to {prompt}")
        self.prompt_tokens += prompt
        self.completion_tokens += completion
