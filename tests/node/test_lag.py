"""The event loop stays free while the node is loaded: its lag is measured in the server and printed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.node.process import Process, serving, serving_script


def read_streams(server: Process, prompts: list[str], max_tokens: int) -> None:
    """Read one stream a prompt, all at once, to their ends."""

    def read(prompt: str) -> None:
        with server.stream(prompt, max_tokens=max_tokens) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")

    with ThreadPoolExecutor(len(prompts)) as readers:
        list(readers.map(read, prompts))


def report(server: Process, what: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Print and return the lag as the server measured it."""
    lag: dict[str, float] = server.get("/server_info")["node"]["loop_lag"]
    with capsys.disabled():
        milliseconds = ", ".join(f"{name[:-2]} {lag[name] * 1000:.1f} ms" for name in ("p50_s", "p99_s", "max_s"))
        print(f"\nloop lag, {what}: {milliseconds} over {lag['samples']} samples")
    return lag


def test_lag_with_many_streams(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules: list[dict[str, object]] = [{"reply": "word " * 400, "step_s": 0.006}]
    with serving_script(model_dir, tmp_path, rules, "--max-turns", "32") as server:
        read_streams(server, ["go"] * 32, 300)
        lag = report(server, "32 streams of the scripted engine", capsys)
    assert lag["samples"] > 10
    assert lag["p50_s"] < 0.05 and lag["p99_s"] < 1.0


@pytest.mark.full
def test_lag_while_the_reference_engine_computes(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        read_streams(server, ["Hello"] * 3 + ["long prompt " * 1000], 40)
        lag = report(server, "reference engine, 3 streams and a long prompt", capsys)
    assert lag["samples"] > 25
    assert lag["p50_s"] < 0.05 and lag["p99_s"] < 1.0
