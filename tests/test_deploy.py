"""What deploy/ ships is what its tools accept, and it speaks of metrics, flags and ports that exist.

Bug classes: a manifest with a misspelt field (which Kubernetes drops in silence), a board or alert on a metric that was
renamed (which shows "no data" for ever), a probe on a route that is gone, a key in a file. Docker and a cluster are not
needed: hadolint, yamllint, the Kubernetes API's schemas and a PromQL parser come from the package registry.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sglang_dspark.serving.metrics import EXTRA_LABELS, METRICS
from sglang_dspark.settings.flags import FLAGS

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILES = sorted(p for p in DEPLOY.glob("Dockerfile.*") if p.suffix != ".dockerignore")
BOARD = json.loads((DEPLOY / "grafana/dashboards/dspark.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())


def tool(name: str) -> str:
    """A program that the test extra installs beside Python."""
    path = Path(sys.executable).with_name(name)
    return (
        str(path)
        if path.exists()
        else shutil.which(name) or pytest.fail(f"{name} is not installed: pip install .[test]")
    )


def documents() -> list[dict]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def test_the_dockerfiles_are_as_hadolint_wants_them():
    done = subprocess.run(
        [tool("hadolint"), "-c", DEPLOY / ".hadolint.yaml", *DOCKERFILES], capture_output=True, text=True, check=False
    )
    assert len(DOCKERFILES) == 2 and done.returncode == 0, done.stdout + done.stderr


def test_every_yaml_file_is_as_yamllint_wants_it():
    done = subprocess.run(
        [tool("yamllint"), "--strict", "-c", DEPLOY / ".yamllint", DEPLOY], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_manifest_is_valid_under_the_kubernetes_schemas():
    import kubernetes_validate

    found = documents()
    for document in found:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", "Role"} <= {d["kind"] for d in found}


def test_a_misspelt_field_would_be_seen():
    import kubernetes_validate

    (server,) = [d for d in documents() if d["metadata"]["name"] == "sglang-dspark" and d["kind"] == "Deployment"]
    container = server["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(server, kubernetes_validate.latest_version(), strict=True)


def test_the_images_are_of_the_engine_version_that_is_pinned():
    pinned = re.search(r'"sglang==([\d.]+)"', (DEPLOY.parent / "pyproject.toml").read_text()).group(1)
    assert f"FROM lmsysorg/sglang:v{pinned}\n" in (DEPLOY / "Dockerfile.cuda").read_text()


def test_an_image_gets_every_folder_that_the_package_needs():
    folders = ("sglang_dspark", "kernels", "scheduler", "pyproject.toml", "README.md", "LICENSE")
    for dockerfile in DOCKERFILES:
        ignored = dockerfile.with_name(dockerfile.name + ".dockerignore").read_text().splitlines()
        assert all(f"!{name}" in ignored and (DEPLOY.parent / name).exists() for name in folders)
        assert all(name in dockerfile.read_text() for name in folders)


def flags_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_servers_are_started_with_flags_that_exist():
    from sglang_dspark.commands.preflight import make_parser

    known = set(make_parser()._option_string_actions) | {flag.option for flag in FLAGS}
    used = set()
    for document in documents():
        for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            if container["name"] == "server":
                used |= flags_of(container["args"])
    for service in compose()["services"].values():
        if "sglang-dspark" in service["image"]:
            used |= flags_of(" ".join(service["command"]).split())
    assert "--admin-api-key" in used and used <= known, used - known


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_mounts_what_exists_and_names_what_it_declares():
    described = compose()
    for service in described["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in described["volumes"], source
        assert set(service.get("secrets", [])) <= set(described["secrets"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "published beyond this machine"
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_no_key_is_written_in_any_file():
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            for value in re.findall(r"--(?:admin-)?api-key[= ]+(\S+)", path.read_text()):
                assert value.startswith(("$(", '"$$(')), (path, value)
    ignored = (DEPLOY / ".gitignore").read_text().split()
    assert {secret["file"].removeprefix("./") for secret in compose()["secrets"].values()} <= set(ignored)


def test_readiness_is_generation_and_there_is_time_to_drain():
    (server,) = [d for d in documents() if d["metadata"]["name"] == "sglang-dspark" and d["kind"] == "Deployment"]
    pod = server["spec"]["template"]["spec"]
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health_generate"
    assert server["spec"]["replicas"] > 1 and pod["terminationGracePeriodSeconds"] >= 300


def test_selectors_find_the_pods_they_mean():
    pods = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"]
        for d in documents()
        if d["kind"] == "Deployment"
    }
    for document in documents():
        spec = document.get("spec", {})
        selector = (
            spec.get("selector") if document["kind"] in ("Service", "PodDisruptionBudget") else spec.get("podSelector")
        )
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= labels.items() for labels in pods.values()), document["metadata"]["name"]
    (router,) = [d for d in documents() if d["kind"] == "Deployment" and "router" in d["metadata"]["name"]]
    arguments = router["spec"]["template"]["spec"]["containers"][0]["args"]
    start = arguments.index("--selector") + 1
    assert dict(word.split("=") for word in arguments[start : start + 2]) == pods["sglang-dspark"]


# ---- metrics ---------------------------------------------------------------------------------------------------------

OURS = {metric.name: metric for metric in METRICS}
SGLANG = (
    Path(__import__("importlib.util").util.find_spec("sglang").origin).parent / "srt/observability/metrics_collector.py"
)


def expressions() -> list[str]:
    """Every PromQL expression of board and rules, with Grafana's variables filled in."""
    queries = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    queries += [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    return [q.replace("$__rate_interval", "5m").replace("$model", "m").replace("$instance", "i") for q in queries]


def selectors(expression) -> list:
    """All vector selectors below a parsed expression."""
    import promql_parser

    found, todo = [], [expression]
    while todo:
        node = todo.pop()
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
            child = getattr(node, name, None)
            if child is not None:
                todo.append(child)
        todo += list(getattr(node, "args", None) or [])
    return found


def base_name(name: str) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        if name.endswith(suffix) and OURS.get(name.removesuffix(suffix), METRICS[0]).kind == "histogram":
            return name.removesuffix(suffix)
    return name


def labels_of(name: str) -> set[str]:
    metric = OURS[base_name(name)]
    own = {metric.label} if metric.label else set()
    return own | set(EXTRA_LABELS.get(metric.name, ())) | {"model_name", "dp_rank", "instance", "le"}


def test_board_and_rules_speak_of_metrics_and_labels_that_exist():
    import promql_parser

    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    engine, seen = SGLANG.read_text(), set()
    for query in expressions():
        found = selectors(promql_parser.parse(query))
        assert found, query
        for selector in found:
            if selector.name.startswith("sglang:"):
                assert f'"{re.sub("_bucket$", "", selector.name)}"' in engine, selector.name
            elif selector.name not in recorded:
                assert base_name(selector.name) in OURS, selector.name
                assert {m.name for m in selector.matchers.matchers} <= labels_of(selector.name), query
                seen.add(base_name(selector.name))
    grouped = {
        label
        for query in expressions()
        for group in re.findall(r"by \(([^)]*)\)", query)
        for label in re.split(r",\s*", group)
    }
    assert grouped <= {m.label for m in METRICS if m.label} | {
        "model_name",
        "instance",
        "le",
        "kind",
        "verify_mode",
        "accept_rule",
        "window_policy",
    }
    assert len(seen) >= len(METRICS) - 2, set(OURS) - seen


def test_a_renamed_metric_would_be_seen():
    import promql_parser

    (selector,) = selectors(promql_parser.parse("sum(rate(dspark_windows_sum[5m]))"))
    assert base_name(selector.name) not in OURS


def test_the_board_has_distinct_panels_that_do_not_overlap_and_reads_its_own_data_source():
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {source["uid"] for source in sources}
    assert (
        len({panel["id"] for panel in BOARD["panels"]})
        == len({panel["title"] for panel in BOARD["panels"]})
        == len(BOARD["panels"])
    )
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for g in [panel["gridPos"]]
        for x in range(g["x"], g["x"] + g["w"])
        for y in range(g["y"], g["y"] + g["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_every_alert_says_what_it_means_and_waits_before_it_calls():
    alerts = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert alert["annotations"]["summary"].endswith(".") and alert["for"] and alert["labels"]["severity"]
