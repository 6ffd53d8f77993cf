"""The deployment files: their own validators accept them, and they name what exists."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dsuf.config import list_settings
from dsuf.observe.fleet import Fleet
from dsuf.observe.metrics import Metrics
from dsuf.trial.balancer import describe_errors

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.33"
MANIFESTS = sorted(path for path in (DEPLOY / "k8s").glob("*.yaml") if path.name != "kustomization.yaml")
ELSEWHERE = {"DSUF_CHECKPOINT"}
"""Variables of the files themselves."""


def run_tool(tool: str, *arguments: str) -> str:
    """What `tool` prints; it has to accept. Skips loudly where it is not installed."""
    path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{tool} is not installed: its configuration was not checked")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def with_loopback(path: Path, folder: Path) -> Path:
    """The configuration with names that this machine can resolve."""
    changed = folder / path.name
    changed.write_text(re.sub(r"\bnode\d:8000", "127.0.0.1:8001", path.read_text()))
    return changed


def test_nginx(tmp_path: Path) -> None:
    """`nginx -t` accepts."""
    changed = with_loopback(DEPLOY / "balancer" / "nginx.conf", tmp_path)
    places = ("-p", str(tmp_path), "-e", "stderr", "-g", f"pid {tmp_path}/pid;")
    said = run_tool("nginx", "-t", *places, "-c", str(changed))
    assert "warn" not in said


def test_haproxy(tmp_path: Path) -> None:
    """`haproxy -c` accepts, without a warning."""
    changed = with_loopback(DEPLOY / "balancer" / "haproxy.cfg", tmp_path)
    assert "WARNING" not in run_tool("haproxy", "-c", "-f", str(changed))


def test_the_balancers_of_files_and_of_a_try_say_the_same() -> None:
    """Their own errors, which clients read."""
    lines = (DEPLOY / "balancer" / "haproxy.cfg").read_text().splitlines()
    assert [line for line in lines if "http-error" in line] == list(describe_errors())


@pytest.mark.parametrize("what", ["config", "rules"])
def test_prometheus(what: str) -> None:
    """`promtool` accepts scrape configuration and alert rules."""
    name = "prometheus.yml" if what == "config" else "alerts.yml"
    run_tool("promtool", "check", what, str(DEPLOY / "prometheus" / name))


def list_objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the manifests."""
    for path in MANIFESTS:
        for number, found in enumerate(yaml.safe_load_all(path.read_text())):
            yield f"{path.name}:{number}", found


@pytest.mark.parametrize(("name", "found"), [pytest.param(name, found, id=name) for name, found in list_objects()])
def test_manifests(name: str, found: dict[str, Any]) -> None:
    """Each object fits the published schema of its kind, which knows no other fields."""
    kubernetes_validate.validate(found, KUBERNETES, strict=True)
    assert found["kind"] == "Namespace" or found["metadata"]["namespace"] == "dsuf"


def test_a_wrong_manifest_is_found() -> None:
    """The schema check can fail."""
    found = next(found for _, found in list_objects() if found["kind"] == "StatefulSet")
    found["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


def test_kustomization_lists_all() -> None:
    """No manifest is forgotten."""
    listed = yaml.safe_load((DEPLOY / "k8s" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in MANIFESTS]


def test_selectors_meet() -> None:
    """Services, budget and policies select pods that exist."""
    objects = [found for _, found in list_objects()]
    labels = [o["spec"]["template"]["metadata"]["labels"] for o in objects if "template" in o.get("spec", {})]
    for found in objects:
        spec = found.get("spec", {})
        wanted = {
            "Service": spec.get("selector"),
            "PodDisruptionBudget": (spec.get("selector") or {}).get("matchLabels"),
            "NetworkPolicy": (spec.get("podSelector") or {}).get("matchLabels"),
        }.get(found["kind"])
        if wanted is not None:
            assert any(wanted.items() <= have.items() for have in labels), found["metadata"]["name"]


def test_compose() -> None:
    """Secrets, dependencies and mounts of the compose file exist."""
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = found["services"]
    for name, service in services.items():
        assert set(service.get("secrets", [])) <= found["secrets"].keys(), name
        assert set(service.get("depends_on", [])) <= services.keys(), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), volume
    hosts = set(re.findall(r"\b(node\d):8000", (DEPLOY / "balancer" / "nginx.conf").read_text()))
    assert hosts == {name for name in services if name.startswith("node")}


def test_settings_exist() -> None:
    """Every `DSUF_…` that a file names is a setting."""
    known = {setting.variable for setting in list_settings()} | ELSEWHERE
    for path in (path for path in DEPLOY.rglob("*") if path.is_file()):
        assert set(re.findall(r"\bDSUF_[A-Z_]*[A-Z]\b", path.read_text())) <= known, path


def test_metrics_exist() -> None:
    """Every metric that alerts and dashboard ask for is one that a node has."""
    metrics = Metrics("model")
    metrics.fleet.watch(Fleet)
    known = set(re.findall(rb"^# TYPE (\S+)", metrics.render(), re.MULTILINE))
    for path in (DEPLOY / "prometheus" / "alerts.yml", DEPLOY / "grafana" / "dsuf.json"):
        for name in re.findall(r"\b(?:dsuf|vllm)[_:][a-z_]+", path.read_text()):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert {name.encode(), base.encode()} & known, (path.name, name)


def test_dashboard() -> None:
    """Panels have places that do not overlap, each a query, and all numbers differ."""
    panels = json.loads((DEPLOY / "grafana" / "dsuf.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        assert panel["targets"] and all(target["expr"] for target in panel["targets"])
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_unit() -> None:
    """systemd accepts the unit, but for the programs that are not installed here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: the unit was not checked")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(DEPLOY / "systemd" / "dsuf.service")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    faults = [line for line in done.stderr.splitlines() if "dsuf.service" in line and "not executable" not in line]
    assert not faults


def test_image_copies_what_exists() -> None:
    """Every path that the Dockerfile copies from the checkout is there, and the lock files are the ones in use."""
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [line.split()[1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert copied and all((ROOT / path).exists() for path in copied)
