"""What Helm makes of the chart; needs helm, and for Envoy's configuration a real Envoy."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.generate import manifests
from picker.policy import load_policy
from picker.pool.kube.leader_mark import LEADER_LABEL
from picker.settings import load_settings
from tests.kube.binaries import Binaries
from tests.kube.chart import CHART, EXAMPLES, MANIFESTS, BadValues, Rendered, Renderer

pytestmark = pytest.mark.kube

NAMES = [path.stem for path in EXAMPLES]
STANDALONE = "mode=standalone"
FILES = ("tls.mode=files", "tls.secretName=cert")


@pytest.fixture(scope="module")
def render(binaries: Binaries) -> Renderer:
    return Renderer(binaries.helm)


@pytest.mark.parametrize("example", NAMES)
def test_lint(binaries: Binaries, example: str) -> None:
    command = [
        str(binaries.helm),
        "lint",
        "--strict",
        "--quiet",
        str(CHART),
        f"--values={CHART / 'examples' / example}.yaml",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["replicaz=2"], "replicaz"),
        (["gateway.provider=nginx"], "gateway/provider"),
        (["inferencePool.targetPorts={1,2,3,4,5,6,7,8,9}"], "targetPorts"),
        (
            ["policy.models.m.policy_classes[0].max_queue_wait=90", "timeouts.queueWait=60"],
            "lets a request wait 90 s",
        ),
        (["settings.queue.max_wait=61.5", "timeouts.queueWait=61"], "lets a request wait 62 s"),
        (["policy.a=1", "policyConfigMap=mine"], "two sources"),
        (["shadow=true", "gateway.provider=istio"], "shadow needs"),
        (["httpRoute.weight=5"], "needs httpRoute.stableService"),
        (
            ["httpRoute.weight=5", "httpRoute.stableService=s", "gateway.provider=envoy-gateway"],
            "matchHeaders",
        ),
        (["gateway.provider=envoy-gateway", "inferencePool.targetPorts={1,2}"], "one port of each pod"),
        (["tls.mode=files"], "needs tls.secretName"),
        (["tls.clientCaConfigMap=ca"], r"tls\.clientCaConfigMap needs tls\.mode files"),
        (["tls.clientCaConfigMap=ca", "tls.mode=off"], r"tls\.clientCaConfigMap needs tls\.mode files"),
        ([*FILES, "tls.clientCaConfigMap=ca", "gateway.provider=istio"], "shows no certificate"),
        (["mode=standalone", "tls.mode=self-signed"], "in plain text"),
        (["mode=standalone", *FILES], "in plain text"),
        (["gateway.provider=envoy-gateway", "tls.mode=self-signed"], "verifies"),
        (["gateway.provider=envoy-gateway", *FILES], r"needs tls\.caConfigMap"),
        (["tls.caConfigMap=ca"], r"tls\.caConfigMap is for"),
        # Without its response stream Envoy Gateway would tell of no completion.
        (["gateway.observeResponses=false"], "observeResponses"),
    ],
)
def test_values_that_cannot_work_are_refused(render: Renderer, flags: list[str], error: str) -> None:
    with pytest.raises(BadValues, match=error):
        render(*flags)


def test_a_wait_without_bound_needs_a_timeout_of_its_own(render: Renderer) -> None:
    unbounded = {"settings": {"queue": {"max_wait": None}}}
    with pytest.raises(BadValues, match=r"set timeouts\.queueWait"):
        render(values=unbounded)
    assert render(values=unbounded | {"timeouts": {"queueWait": 5}})


def test_a_class_that_sets_no_wait_has_that_of_the_settings(render: Renderer) -> None:
    def messages(*flags: str, **options: Any) -> str:
        values = {"policy": {"policy_classes": [{"name": "a", "quantum": 1, **options}]}}
        rendered = render(STANDALONE, "timeouts.response=1", *flags, values=values)
        timeout: str = _ext_proc(rendered)["message_timeout"]
        return timeout

    assert messages() == messages(max_queue_wait=None) == messages("settings.queue.max_wait=60")
    assert messages() == messages(max_queue_wait=60) != messages(max_queue_wait=61)
    assert messages(max_queue_wait=None) != messages("settings.queue.max_wait=61", max_queue_wait=None)


def _ext_proc(rendered: Rendered) -> Any:
    listener = rendered.envoy["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0]["typed_config"]


# Settings


@pytest.mark.parametrize("example", NAMES)
def test_the_settings_are_settings(render: Renderer, tmp_path: Path, example: str) -> None:
    settings = _settings(render(examples=[example]), tmp_path)
    assert settings.pool.kubernetes.name
    assert settings.pool.kubernetes.namespace == "serving"


def test_settings_follow_the_values(render: Renderer, tmp_path: Path) -> None:
    settings = _settings(
        render(
            "replicas=2",
            "nodeTaints=true",
            "tls.mode=files",
            "tls.secretName=cert",
            "tls.clientCaConfigMap=ca",
            "admin.tokenSecret=token",
            "ports.extProc=1234",
            "inferencePool.name=llama",
            "settings.kvcache.max_blocks=12000000",
            "settings.queue.max_wait=45",
            "policy.policy_classes[0].quantum=1",
        ),
        tmp_path,
    )
    assert settings.pool.kubernetes.name == "llama"
    assert settings.pool.kubernetes.leader_election
    assert settings.pool.kubernetes.node_taints
    assert settings.extproc.port == 1234
    assert settings.extproc.tls.mode == "files"
    assert settings.kvcache.max_blocks == 12_000_000  # and not 1.2e+07, which is text to a YAML reader
    assert settings.queue.max_wait == 45
    assert settings.queue.drain_grace == 120


def test_every_file_that_the_settings_name_is_mounted(render: Renderer, tmp_path: Path) -> None:
    rendered = render(
        "tls.mode=files",
        "tls.secretName=cert",
        "tls.clientCaConfigMap=ca",
        "admin.tokenSecret=token",
        "policyConfigMap=mine",
    )
    settings = _settings(rendered, tmp_path)
    mounts = {Path(mount["mountPath"]) for mount in rendered.container("picker")["volumeMounts"]}
    tls = settings.extproc.tls
    for path in (
        settings.policy.file,
        tls.cert_file,
        tls.key_file,
        tls.client_ca_file,
        settings.admin.token_file,
    ):
        assert path is not None
        assert path.parent in mounts


def test_large_numbers_in_a_policy_stay_integers(render: Renderer) -> None:
    policy = {
        "default_policy_family": "f",
        "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "b"}],
        "policy_classes": [{"name": "a", "policy_family": "f", "cache_bucket": "b", "quantum": 123_456_789}],
    }
    rendered = render(values={"policy": policy})
    text = rendered.one("ConfigMap", "-policy")["data"]["policy.yaml"]
    assert load_policy(text).profile("m").classes[0].quantum == 123_456_789


def test_tls_is_what_the_proxy_expects(render: Renderer, tmp_path: Path) -> None:
    for flags, mode in {
        (): "self-signed",
        ("gateway.provider=istio",): "self-signed",
        ("gateway.provider=envoy-gateway",): "off",
        (STANDALONE,): "off",
        ("tls.mode=off",): "off",
    }.items():
        assert _settings(render(*flags), tmp_path).extproc.tls.mode == mode


def test_envoy_gateway_verifies_the_certificate_that_picker_shows(render: Renderer, tmp_path: Path) -> None:
    provider = "gateway.provider=envoy-gateway"
    assert not render(provider).all("BackendTLSPolicy")
    rendered = render(provider, *FILES, "tls.caConfigMap=ca")
    assert _settings(rendered, tmp_path).extproc.tls.mode == "files"
    [backend] = rendered.one("EnvoyExtensionPolicy")["spec"]["extProc"][0]["backendRefs"]
    policy = rendered.one("BackendTLSPolicy")["spec"]
    assert [target["name"] for target in policy["targetRefs"]] == [backend["name"]]
    assert policy["validation"] == {
        "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "ca"}],
        "hostname": f"{backend['name']}.serving.svc",
    }


def test_envoy_gateway_shows_picker_every_response(render: Renderer) -> None:
    """It has no access log for Picker, which would else never learn that a request is over."""
    [ext_proc] = render("gateway.provider=envoy-gateway").one("EnvoyExtensionPolicy")["spec"]["extProc"]
    assert ext_proc["processingMode"]["response"] == {"body": "FullDuplexStreamed"}


# What replaces the pods


def test_a_change_of_settings_replaces_the_pods(render: Renderer) -> None:
    assert render().pod != render("settings.log.level=debug").pod


def test_a_change_of_policy_replaces_the_pods_only_when_asked(render: Renderer) -> None:
    def pod(quantum: int, *flags: str) -> Any:
        return render(f"policy.policy_classes[0].quantum={quantum}", *flags).pod

    assert pod(1) == pod(2)
    assert pod(1, "policyReload=roll") != pod(2, "policyReload=roll")


def test_a_change_of_the_envoy_configuration_replaces_the_pods(render: Renderer) -> None:
    assert render(STANDALONE).pod != render(STANDALONE, "timeouts.response=7").pod


# Pods


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_containers_are_locked_down(render: Renderer, mode: str) -> None:
    spec = render(f"mode={mode}").pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]
        assert "memory" in container["resources"]["limits"]


def test_liveness_does_not_ask_for_readiness(render: Renderer) -> None:
    """C53: a follower of a leader election is alive."""
    health = {"port": 9003}
    for replicas, readiness in (1, "readiness"), (2, "standby"):
        picker = render(f"replicas={replicas}").container("picker")
        assert picker["livenessProbe"]["grpc"] == health | {"service": "liveness"}
        assert picker["startupProbe"]["grpc"] == health | {"service": "liveness"}
        assert picker["readinessProbe"]["grpc"] == health | {"service": readiness}


def test_the_grace_period_is_longer_than_the_drain(render: Renderer, tmp_path: Path) -> None:
    rendered = render("drainSeconds=77")
    assert _settings(rendered, tmp_path).queue.drain_grace == 77
    assert rendered.pod["spec"]["terminationGracePeriodSeconds"] > 77
    assert not _settings(rendered, tmp_path).queue.drain_after_gateway
    assert _settings(render(STANDALONE), tmp_path).queue.drain_after_gateway


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_version_that_does_not_become_ready_takes_no_pod_down(render: Renderer, replicas: int) -> None:
    rendered = render(f"replicas={replicas}")
    assert rendered.one("Deployment")["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
    }


def test_the_service_selects_the_pod_that_leads(render: Renderer) -> None:
    """The same one before and after replicas are added: a pod of one replica has what a leader gives itself."""
    alone, elected = render(), render("replicas=2")
    assert alone.one("Service")["spec"] == elected.one("Service")["spec"]
    label = {LEADER_LABEL: "true"}.items()
    assert label <= alone.one("Service")["spec"]["selector"].items()
    assert label <= alone.pod["metadata"]["labels"].items()
    assert LEADER_LABEL not in elected.pod["metadata"]["labels"]
    assert LEADER_LABEL not in elected.one("Deployment")["spec"]["selector"]["matchLabels"]
    names = {entry["name"]: entry for entry in elected.container("picker")["env"]}
    own = {"fieldRef": {"fieldPath": "metadata.name"}}
    assert names["PICKER_POOL__KUBERNETES__POD"]["valueFrom"] == own
    assert load_settings(environ={"PICKER_POOL__KUBERNETES__POD": "me"}).pool.kubernetes.pod == "me"


def test_followers_are_scraped_too(render: Renderer) -> None:
    rendered = render("replicas=2", "serviceMonitor.enabled=true")
    wanted = rendered.one("ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    [service] = [each for each in rendered.all("Service") if wanted <= each["metadata"]["labels"].items()]
    assert service["spec"]["selector"].items() <= rendered.pod["metadata"]["labels"].items()
    [endpoint] = rendered.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


def test_a_disruption_budget_where_there_are_several(render: Renderer) -> None:
    kind = "PodDisruptionBudget"
    assert not render().all(kind)
    budget = render("replicas=3").one(kind)
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_labels_select_the_pods(render: Renderer) -> None:
    rendered = render(
        "networkPolicy.enabled=true",
        "podDisruptionBudget.enabled=true",
        "podMonitoring.enabled=true",
        STANDALONE,
    )
    labels = rendered.pod["metadata"]["labels"].items()
    selectors = [
        rendered.one("Deployment")["spec"]["selector"]["matchLabels"],
        rendered.one("Service")["spec"]["selector"],
        rendered.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        rendered.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        rendered.one("PodMonitoring")["spec"]["selector"]["matchLabels"],
        *(
            entry["labelSelector"]["matchLabels"]
            for entry in rendered.pod["spec"]["topologySpreadConstraints"]
        ),
    ]
    for selector in selectors:
        assert selector.items() <= labels


def test_ports_have_names_that_services_and_policies_use(render: Renderer) -> None:
    for mode in ("gateway", "standalone"):
        rendered = render(f"mode={mode}", "networkPolicy.enabled=true", "podMonitoring.enabled=true")
        names = {port["name"] for entry in rendered.pod["spec"]["containers"] for port in entry["ports"]}
        used = {port["targetPort"] for port in rendered.one("Service")["spec"]["ports"]}
        for rule in rendered.one("NetworkPolicy")["spec"]["ingress"]:
            used |= {port["port"] for port in rule["ports"]}
        used |= {endpoint["port"] for endpoint in rendered.one("PodMonitoring")["spec"]["endpoints"]}
        assert used <= names


def _egress(rendered: Rendered) -> list[Any]:
    rules: list[Any] = rendered.one("NetworkPolicy")["spec"]["egress"]
    return rules


def test_the_network_policy_lets_through_what_else_an_operator_names(render: Renderer) -> None:
    collector = {"ports": [{"protocol": "TCP", "port": 4317}], "to": [{"namespaceSelector": {}}]}
    without = _egress(render("networkPolicy.enabled=true"))
    values = {"networkPolicy": {"enabled": True, "egress": [collector]}}
    assert _egress(render(values=values)) == [*without, collector]


def test_the_network_policy_has_the_event_ports_of_every_rank(render: Renderer) -> None:
    """Rank r publishes at the events port plus r."""
    engines, *_ = _egress(render("networkPolicy.enabled=true", "inferencePool.targetPorts={8000,8001,8002}"))
    ports = {port for entry in engines["ports"] for port in range(entry["port"], entry.get("endPort", 0) + 1)}
    assert {5557, 5558, 5559} <= ports
    alone, *_ = _egress(render("networkPolicy.enabled=true"))
    assert [entry["port"] for entry in alone["ports"]] == [8000, 5557, 5558]
    assert not any("endPort" in entry for entry in alone["ports"])


# Providers


def test_objects_of_each_provider(render: Renderer) -> None:
    base = render("httpRoute.create=true").kinds()
    assert "InferencePool" in base
    for provider, kinds in {
        "envoy-gateway": {"EnvoyExtensionPolicy", "BackendTrafficPolicy", "ClientTrafficPolicy"},
        "envoy-ai-gateway": {"ClientTrafficPolicy"},
        "istio": {"DestinationRule", "EnvoyFilter"},
        "kgateway": {"TrafficPolicy"},
        "gke": {"HealthCheckPolicy", "GCPBackendPolicy"},
    }.items():
        assert render("httpRoute.create=true", f"gateway.provider={provider}").kinds() - base == kinds


@pytest.mark.parametrize("provider", ["envoy-gateway", "envoy-ai-gateway", "istio", "kgateway", "gke"])
def test_the_proxy_waits_longer_than_the_queue(render: Renderer, provider: str) -> None:
    """C13: whatever a proxy calls its idle timeout, it is above the longest wait and the longest response together."""
    rendered = render(
        f"gateway.provider={provider}",
        "policy.policy_classes[0].max_queue_wait=500",
        "timeouts.response=1000",
    )
    idle = {
        "envoy-gateway": lambda: rendered.one("ClientTrafficPolicy")["spec"]["timeout"]["http"][
            "streamIdleTimeout"
        ],
        "envoy-ai-gateway": lambda: rendered.one("ClientTrafficPolicy")["spec"]["timeout"]["http"][
            "streamIdleTimeout"
        ],
        "istio": lambda: rendered.one("EnvoyFilter")["spec"]["configPatches"][0]["patch"]["value"][
            "typed_config"
        ]["stream_idle_timeout"],
        "kgateway": lambda: rendered.one("TrafficPolicy")["spec"]["timeouts"]["streamIdle"],
        "gke": lambda: rendered.one("GCPBackendPolicy")["spec"]["default"]["timeoutSec"],
    }[provider]()
    assert int(str(idle).removesuffix("s")) > 1500


def test_shadow_mode_leaves_the_choice_to_the_proxy(render: Renderer) -> None:
    flags = ("gateway.provider=envoy-gateway", "httpRoute.create=true")
    policy = "BackendTrafficPolicy"
    assert "endpointOverride" in render(*flags).one(policy)["spec"]["loadBalancer"]
    assert "endpointOverride" not in render(*flags, "shadow=true").one(policy)["spec"]["loadBalancer"]
    clusters = {
        entry["name"]: entry
        for entry in render(STANDALONE, "shadow=true").envoy["static_resources"]["clusters"]
    }
    assert clusters["engines"]["type"] == "STRICT_DNS"


def test_canary_by_weight_and_by_header(render: Renderer) -> None:
    weighted = render("httpRoute.create=true", "httpRoute.weight=5", "httpRoute.stableService=old").one(
        "HTTPRoute"
    )
    assert [entry["weight"] for entry in weighted["spec"]["rules"][0]["backendRefs"]] == [5, 95]
    by_header = render("httpRoute.create=true", "httpRoute.matchHeaders.x-canary=yes").one("HTTPRoute")
    assert by_header["spec"]["rules"][0]["matches"][0]["headers"] == [{"name": "x-canary", "value": "yes"}]


# Envoy


def test_envoy_as_the_design_says(render: Renderer) -> None:
    rendered = render(STANDALONE, "policy.policy_classes[0].max_queue_wait=500", "timeouts.response=1000")
    listener = rendered.envoy["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    ext_proc = manager["http_filters"][0]["typed_config"]
    assert ext_proc["processing_mode"] == {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SKIP",
        "response_body_mode": "NONE",
        "response_trailer_mode": "SKIP",
    }
    assert not ext_proc["failure_mode_allow"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    assert route["timeout"] == "1000s"
    for text in (manager["stream_idle_timeout"], route["idle_timeout"], ext_proc["message_timeout"]):
        assert int(text.removesuffix("s")) > 1500
    removed = manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"]
    assert {entry.get("remove") for entry in removed} >= {"x-gateway-destination-endpoint"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:envoy_data_plane")
def test_envoy_asks_picker_as_the_demo_does(render: Renderer) -> None:
    """The same conversation, whether the configuration comes from the chart or from picker.simulation."""
    from picker.simulation.envoy_config import EnvoyOptions, bootstrap  # takes two seconds to import

    def conversation(config: Any) -> Any:
        [chain] = config["staticResources"]["listeners"][0]["filterChains"]
        manager = chain["filters"][0]["typedConfig"]
        [early] = manager["earlyHeaderMutationExtensions"]
        [log] = manager["accessLog"]
        ext_proc = manager["httpFilters"][0]["typedConfig"]
        return {
            "mode": {key: value for key, value in ext_proc["processingMode"].items() if value != "NONE"},
            "ingress": early["typedConfig"]["mutations"],
            "joined by": log["typedConfig"]["additionalRequestHeadersToLog"],
            "receives": ext_proc["metadataOptions"]["receivingNamespaces"],
        }

    demo = json.loads(bootstrap(EnvoyOptions(picker=("127.0.0.1", 1))).to_json())
    assert conversation(_camel(render(STANDALONE).envoy)) == conversation(demo)


@pytest.mark.parametrize("workers", [1, 3])
def test_envoy_opens_more_connections_where_several_processes_share_them(
    render: Renderer, workers: int
) -> None:
    clusters = render(STANDALONE, f"settings.extproc.workers={workers}").envoy["static_resources"]["clusters"]
    [picker] = [each for each in clusters if each["name"] == "picker"]
    [options] = picker["typed_extension_protocol_options"].values()
    limit = options["explicit_http_config"]["http2_protocol_options"].get("max_concurrent_streams")
    assert limit == (32 if workers > 1 else None)


@pytest.mark.parametrize("mode", ["gateway", "standalone"])
def test_the_pool_suits_every_release_of_its_crd(render: Renderer, mode: str) -> None:
    """The first ones want an endpoint picker in any case, and do not know `appProtocol`."""
    spec = render(f"mode={mode}").one("InferencePool")["spec"]
    assert spec["endpointPickerRef"]["name"]
    assert "appProtocol" not in spec
    h2c = render(f"mode={mode}", "inferencePool.appProtocol=kubernetes.io/h2c").one("InferencePool")["spec"]
    assert h2c["appProtocol"] == "kubernetes.io/h2c"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["shadow=true"],
        ["shadow=true", "inferencePool.targetPorts={8000,8001}"],
        ["inferencePool.appProtocol=kubernetes.io/h2c"],
        ["timeouts.response=86400"],
        ["listenAddress=::"],
    ],
)
def test_envoy_accepts_its_configuration(
    render: Renderer, tmp_path: Path, envoy: str, flags: list[str]
) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(render(STANDALONE, *flags).envoy))
    command = [
        envoy,
        "--mode",
        "validate",
        "--config-path",
        str(path),
        "--disable-hot-restart",
        "-l",
        "error",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Plain manifests


def test_manifests_are_what_the_chart_makes(binaries: Binaries) -> None:
    expected = manifests(str(binaries.helm))
    written = {
        path.relative_to(MANIFESTS)
        for name in ("gateway", "standalone")
        for path in (MANIFESTS / name).iterdir()
    }
    assert written == set(expected)
    for path, text in expected.items():
        assert (MANIFESTS / path).read_text() == text, f"{path}: run python -m charts.generate"


def _settings(rendered: Rendered, tmp_path: Path) -> Any:
    path = tmp_path / "settings.yaml"
    path.write_text(rendered.settings)
    return load_settings(path)


def _camel(node: Any) -> Any:
    """Names of fields as protobuf's JSON writes them."""
    if isinstance(node, dict):
        return {
            re.sub(r"_(\w)", lambda found: found[1].upper(), key): _camel(value)
            for key, value in node.items()
        }
    return [_camel(value) for value in node] if isinstance(node, list) else node
