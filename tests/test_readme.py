"""The readme's claims that a machine can check: figures stand in a result file, named files exist."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_figures_stand_in_the_results() -> None:
    """Each row of the table "Measured" is a row of the result file, rounded; and no row of the file is left out."""
    section = README.partition("## Measured")[2].partition("\n## ")[0]
    told = re.findall(r"^\| ([a-z, ]+) \| (\d+) \| (\d+) \|$", section, re.MULTILINE)
    rows = json.loads((ROOT / "bench" / "results" / "reference.json").read_text())["rows"]
    assert told == [(row["what"], str(row["rows"]), f"{row['tokens_per_s']:.0f}") for row in rows]


def test_named_files_exist() -> None:
    """Paths in code quotes and links are in the checkout."""
    named = [*re.findall(r"[`(]((?:docs|bench|bin|dsuf|tests)/[\w./-]*\w)", README), "CONTRIBUTING.md", "LICENSE"]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_is_in_the_readme() -> None:
    """Each script of bin/ that a user runs is named."""
    scripts = {path.name for path in (ROOT / "bin").iterdir()} - {"lib.sh"}
    assert {name for name in scripts if f"bin/{name}" not in README} == set()
