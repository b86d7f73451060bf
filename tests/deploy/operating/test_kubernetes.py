"""The manifests are what Kubernetes' API takes, name each other rightly, and name what the server
has: flags, ports, probes, metrics, times."""

from __future__ import annotations

import copy
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from absl import flags
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.config import SchedulerConfig
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.settings import Settings
from jaxserve.server import server as runner
from jaxserve.server.access.options import KEYS_VARIABLE
from jaxserve.server.http.options import HttpSettings
from jaxserve.server.requests.templates.chat_template import load_chat_template
from jaxserve.server.server import Server
from jaxserve.server.startup import launch
from tests.deploy.operating.custom_resources import PICKER, SCHEMAS
from tests.server.fake_engine import INFO, FakeEngine

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = {path.name: list(yaml.safe_load_all(path.read_text())) for path in FOLDER.glob("*.yaml")}
DOCUMENTS = [
    pytest.param(document, id=f"{name}: {document['kind']} {document['metadata']['name']}")
    for name, documents in FILES.items()
    for document in documents
]
OLDEST = "1.30"  # where a container may sleep before it is stopped


def one(file: str, kind: str, name: str = "jaxserve") -> Any:
    found = [d for d in FILES[file] if d["kind"] == kind and d["metadata"]["name"] == name]
    assert len(found) == 1, f"{file} has {len(found)} {kind} {name}"
    return found[0]


SERVER = one("deployment.yaml", "Deployment")["spec"]["template"]
PICKER_POD = one("gateway.yaml", "Deployment", "jaxserve-picker")["spec"]["template"]
RAY = one("ray.yaml", "RayService")["spec"]
RAY_PODS = [
    RAY["rayClusterConfig"]["headGroupSpec"]["template"],
    *(group["template"] for group in RAY["rayClusterConfig"]["workerGroupSpecs"]),
]
PODS = [SERVER, PICKER_POD, *RAY_PODS]


def check(document: dict[str, Any], version: str) -> None:
    """Raises jsonschema.ValidationError for what the API would not take."""
    if document["kind"] in SCHEMAS:
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    else:
        kubernetes_validate.validate(document, version, strict=True)


def container(pod: dict[str, Any]) -> Any:
    (only,) = pod["spec"]["containers"]
    return only


def ports(pod: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(pod)["ports"]}


def served(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The config that the server makes of flags, from where the image has its presets."""
    monkeypatch.chdir(ROOT)
    mine = launch.with_model([each.replace("=/app/", "=") for each in arguments])
    launch.parse_flags(["serve.py", *mine], "configs/tiny_cpu.py", values := flags.FlagValues())
    return launch.read_config(values)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = HttpSettings(0, load_chat_template(""), SchedulerConfig(max_rows=16))
    with Server(FakeEngine(), grace_s=0.0, http=settings) as running:
        yield running


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=20) as reply:
        assert reply.status == 200
        return str(reply.read().decode())


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_api_takes_it(document: dict[str, Any], version: str) -> None:
    check(document, version)


@pytest.mark.parametrize("pod", RAY_PODS)
def test_the_api_takes_pods_of_custom_resources(pod: dict[str, Any]) -> None:
    about = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ray"}}
    check({**about, "template": pod}, OLDEST)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_the_api_would_not_take_is_found(document: dict[str, Any]) -> None:
    broken = copy.deepcopy(document)
    broken.get("spec", broken)["replica"] = 2
    with pytest.raises(jsonschema.ValidationError):
        check(broken, OLDEST)


@pytest.mark.parametrize("file", ["deployment.yaml", "gateway.yaml"])
def test_selectors_select_the_pods(file: str) -> None:
    labels = [
        d["spec"]["template"]["metadata"]["labels"]
        for d in FILES[file]
        if d["kind"] == "Deployment"
    ]
    for document in FILES[file]:
        selector = document.get("spec", {}).get("selector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        known = [SERVER["metadata"]["labels"]] if document["kind"] == "InferencePool" else labels
        assert any(wanted.items() <= each.items() for each in known), document["metadata"]["name"]


@pytest.mark.parametrize(
    ("file", "name", "pod"),
    [
        ("deployment.yaml", "jaxserve", SERVER),
        ("gateway.yaml", "jaxserve-picker", PICKER_POD),
    ],
)
def test_services_and_probes_use_ports_that_the_containers_have(
    file: str, name: str, pod: dict[str, Any]
) -> None:
    for port in one(file, "Service", name)["spec"]["ports"]:
        assert ports(pod)[port["targetPort"]] == port["port"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        found = container(pod).get(probe, {})
        if "httpGet" in found:
            assert found["httpGet"]["port"] in ports(pod)
        elif "grpc" in found:
            assert found["grpc"]["port"] in ports(pod).values()


def test_the_server_listens_where_the_manifests_say(monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(container(SERVER)["args"], monkeypatch).server
    assert config.host == "0.0.0.0"
    asked = {"http": config.http_port, "grpc": config.port, "metrics": config.metrics_port}
    assert ports(SERVER) == asked
    annotations = SERVER["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.metrics_port)
    pool = one("gateway.yaml", "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": config.http_port}]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_ask_what_the_server_answers(server: Server, probe: str) -> None:
    get(server, container(SERVER)[probe]["httpGet"]["path"])


def test_whoever_runs_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    grace = served(container(SERVER)["args"], monkeypatch).server.grace_s
    sleep = container(SERVER)["lifecycle"]["preStop"]["sleep"]["seconds"]
    patience = sleep + grace + runner._MAX_FLUSH_S + runner._CLOSE_S
    assert SERVER["spec"]["terminationGracePeriodSeconds"] > patience
    # Nobody is sent there any more once it has not been ready twice.
    readiness = container(SERVER)["readinessProbe"]
    assert sleep >= readiness["periodSeconds"] * readiness["failureThreshold"]
    assert PICKER_POD["spec"]["terminationGracePeriodSeconds"] > patience


@pytest.mark.parametrize("pod", PODS)
def test_nobody_is_root(pod: dict[str, Any]) -> None:
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["runAsUser"] > 0
    own = container(pod)["securityContext"]
    assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}


def test_what_is_written_has_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the file system is read-only."""
    assert container(SERVER)["securityContext"]["readOnlyRootFilesystem"] is True
    config = served(container(SERVER)["args"], monkeypatch)
    mounts = {mount["mountPath"]: mount for mount in container(SERVER)["volumeMounts"]}
    assert not mounts[config.engine.compilation_cache_dir].get("readOnly")
    assert mounts["/" + config.model.path.split("/")[1]]["readOnly"] is True
    assert "/tmp" in mounts and config.server.batch_dir == "" and config.engine.record == ""


@pytest.mark.parametrize("pod", PODS)
def test_mounts_are_of_volumes(pod: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
    assert {mount["name"] for mount in container(pod).get("volumeMounts", [])} == volumes


def test_the_environment_is_what_the_server_and_the_preset_read() -> None:
    assert KEYS_VARIABLE in {each["name"] for each in container(SERVER)["env"]}
    preset = (ROOT / "configs" / "llama_3_8b.py").read_text()
    found = re.search(r"export (\w+)=(\S+)", preset)
    assert found is not None
    for pod in (SERVER, RAY_PODS[-1]):
        assert {"name": found[1], "value": found[2]} in container(pod)["env"]


def test_the_gateway_finds_pool_and_picker() -> None:
    (rule,) = one("gateway.yaml", "HTTPRoute")["spec"]["rules"]
    pool = one("gateway.yaml", "InferencePool")
    group = pool["apiVersion"].partition("/")[0]
    pooled = {"group": group, "kind": "InferencePool", "name": pool["metadata"]["name"]}
    assert rule["backendRefs"] == [pooled]
    objective = one("gateway.yaml", "InferenceObjective", "jaxserve-sheddable")
    assert objective["spec"]["poolRef"] == pooled
    picker = pool["spec"]["endpointPickerRef"]
    offered = one("gateway.yaml", "Service", picker["name"])["spec"]["ports"]
    assert picker["port"]["number"] in {port["port"] for port in offered}
    arguments = container(PICKER_POD)["args"]
    assert f"--pool-name={pooled['name']}" in arguments and f"--pool-group={group}" in arguments


def test_the_picker_has_its_file_and_its_rights() -> None:
    (volume,) = PICKER_POD["spec"]["volumes"]
    (mount,) = container(PICKER_POD)["volumeMounts"]
    (file,) = one("gateway.yaml", "ConfigMap", volume["configMap"]["name"])["data"]
    assert f"--config-file={mount['mountPath']}/{file}" in container(PICKER_POD)["args"]
    account = one("gateway.yaml", "ServiceAccount", PICKER_POD["spec"]["serviceAccountName"])
    binding = one("gateway.yaml", "RoleBinding", "jaxserve-picker")
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]
    role = one("gateway.yaml", "Role", binding["roleRef"]["name"])
    allowed = {
        (g, r) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"]
    }
    watched = {("", "pods")} | {
        (d["apiVersion"].partition("/")[0], f"{d['kind'].lower()}s")
        for d in FILES["gateway.yaml"]
        if d["kind"] in ("InferencePool", "InferenceObjective")
    }
    assert watched <= allowed


def test_the_picker_reads_gauges_that_the_server_exports(server: Server) -> None:
    """As its protocol has them: queued and running requests, the cache's usage from 0 to 1, and
    blocks of K and V by labels. None of them may be missing, or no replica counts as there."""
    (text,) = one("gateway.yaml", "ConfigMap", "jaxserve-picker")["data"].values()
    config = yaml.safe_load(text)
    jsonschema.validate(config, PICKER)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    for profile in config["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= plugins.keys()
    source, extractor = plugins["metrics-data-source"], plugins["core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    labels = one("deployment.yaml", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert engine["name"] == extractor["defaultEngine"] == labels["llm-d.ai/engine-type"]
    page = get(server, source["path"])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    values = {}
    facts = ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "cacheInfoSpec")
    for fact in (*facts, "loraSpec"):
        family = families[engine[fact]]
        (sample,) = family.samples
        assert family.type == "gauge"
        values[fact] = sample
    assert values["queuedRequestsSpec"].value == values["runningRequestsSpec"].value == 0
    assert 0 <= values["kvUsageSpec"].value <= 1
    labels = values["cacheInfoSpec"].labels
    assert int(labels["block_size"]) == INFO.block_size
    assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == INFO.pool_tokens
    assert values["loraSpec"].labels.keys() >= {
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    }


def test_ray_serves_what_the_manifest_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load(RAY["serveConfigV2"])
    plain = yaml.safe_load((ROOT / "configs" / "deploy" / "ray.yaml").read_text())
    assert config["grpc_options"] == plain["grpc_options"]
    (application,), (other,) = config["applications"], plain["applications"]
    for name in ("import_path", "route_prefix"):
        assert application[name] == other[name]
    settings = Settings(**application["args"])
    (group,) = RAY["rayClusterConfig"]["workerGroupSpecs"]
    counts = group["minReplicas"], group["maxReplicas"]
    assert (settings.replicas, settings.max_replicas) == counts
    limits = container(group["template"])["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == settings.num_gpus
    head, mounts = (
        {mount["mountPath"] for mount in container(pod)["volumeMounts"]} for pod in RAY_PODS
    )
    monkeypatch.chdir(ROOT)
    replica = replica_config([each.replace("=/app/", "=") for each in settings.flags])
    assert replica.engine.compilation_cache_dir in mounts
    models = "/" + replica.model.path.split("/")[1]
    assert models in mounts and models in head  # where the ingress may be
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > replica.server.grace_s
    listening = config["http_options"]["port"], config["grpc_options"]["port"]
    assert set(listening) <= set(ports(group["template"]).values())


def test_the_page_names_files_that_are_there() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    named = set(re.findall(r"deploy/kubernetes/[\w.-]+", page))
    assert {f"deploy/kubernetes/{name}" for name in FILES} == named
