"""Replies in the model's own markup, for scripts of the scripted engine."""

from collections.abc import Mapping

_MARK = "｜DSML｜"
# Stands in every prompt that declares tools; the client's side request for a title declares none.
WITH_TOOLS = "Available Tool Schemas"


def call(tool: str, arguments: Mapping[str, str]) -> str:
    """A call of `tool`, spelled as the renderer spells it."""
    rows = "".join(
        f'<{_MARK} parameter name="{name}" string="true">{value}</{_MARK} parameter>\n'
        for name, value in arguments.items()
    )
    return f'\n\n<{_MARK} calls>\n<{_MARK} invoke name="{tool}">\n{rows}</{_MARK} invoke>\n</{_MARK} calls>'
