"""Kubernetes' and Compute Engine's answers over HTTP, in the form that their references give them.

A server on this host answers all requests.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.parse

import pytest

from pycollective.cluster import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    gce,
    kubernetes,
    rest,
)
from pycollective.cluster.membership import membership_of


class Api:
    """A server that gives answers by path and records the requests.

    An answer is content, (status, content), or a function from the query to one of these.
    Content is bytes, or an object that the server sends as JSON.
    """

    def __init__(self, tls=None):
        self.answers, self.asked = {}, []
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                url = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(url.query))
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                api.asked.append((self.command, url.path, query, dict(self.headers), body))
                answer = api.answers.get(url.path, (404, NOT_FOUND))
                answer = answer(query) if callable(answer) else answer
                status, found = answer if isinstance(answer, tuple) else (200, answer)
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        # A client that refuses the certificate leaves an error here, which the tests ignore.
        self.server.handle_error = lambda *words: None
        self.port = self.server.server_address[1]
        if tls is not None:
            self.server.socket = tls.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    @contextlib.contextmanager
    def answering(self):
        self.thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()


NOT_FOUND = {
    "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
    "message": "the server could not find the requested resource", "reason": "NotFound",
    "details": {}, "code": 404,
}  # fmt: skip


# Kubernetes ---------------------------------------------------------------------------------------


def pod(name, number, phase="Running", **status):
    """A pod as the API describes it, without unused fields."""
    return {
        "metadata": {
            "name": name,
            "generateName": name[:-5],
            "namespace": "training",
            "uid": f"5b6f7f0e-0000-4000-8000-{number:012d}",
            "resourceVersion": str(70_000 + number),
            "creationTimestamp": "2026-11-01T08:00:00Z",
            "labels": {"batch.kubernetes.io/job-name": "train", "job-name": "train"},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": "train",
                    "uid": "0d1c7a52-0000-4000-8000-000000000000",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "containers": [
                {
                    "name": "worker",
                    "image": "registry.example/train:1",
                    "ports": [{"containerPort": 8470, "protocol": "TCP"}],
                    "resources": {},
                }
            ],
            "nodeName": f"node-{number}",
            "restartPolicy": "Never",
        },
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": "True"}],
            "hostIP": f"10.128.0.{number}",
            "hostIPs": [{"ip": f"10.128.0.{number}"}],
            "podIP": f"10.4.{number}.7",
            "podIPs": [{"ip": f"10.4.{number}.7"}],
            "qosClass": "BestEffort",
            **status,
        },
    }


def pods(*items, **metadata):
    more = {"resourceVersion": "70100", **metadata}
    return {"kind": "PodList", "apiVersion": "v1", "metadata": more, "items": list(items)}


def status(code, reason, message):
    return code, {**NOT_FOUND, "code": code, "reason": reason, "message": message}


FORBIDDEN = status(
    403,
    "Forbidden",
    'pods is forbidden: User "system:serviceaccount:training:default" cannot list resource "pods" in '
    'API group "" at the cluster scope',
)
EVERYWHERE, IN_NAMESPACE = "/api/v1/pods", "/api/v1/namespaces/training/pods"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("api")
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=api"
    )
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.crt"]
    subprocess.run([*words.split(), *more], cwd=folder, check=True, capture_output=True, timeout=30)
    return folder


@pytest.fixture
def cluster(certificate, monkeypatch, tmp_path):
    """Return an API server that this process finds as in a pod."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "ca.crt", certificate / "key.pem")
    shutil.copy(certificate / "ca.crt", tmp_path)
    (tmp_path / "token").write_text("eyJ.first.token\n")
    (tmp_path / "namespace").write_text("training")
    monkeypatch.setattr(kubernetes, "_SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with Api(context).answering() as api:
        api.account = tmp_path
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        yield api


def resolver():
    return KubernetesClusterResolver({"worker": ["job-name=train"]})


def test_kubernetes_pods_give_their_addresses_and_new_tokens_are_read(cluster):
    cluster.answers[EVERYWHERE] = pods(pod("train-1-x7k2p", 2), pod("train-0-b9c4d", 1))
    found = resolver()
    assert found.cluster_spec() == {"worker": ["10.4.1.7:8470", "10.4.2.7:8470"]}
    ((method, _, query, headers, body),) = cluster.asked
    assert (method, query["labelSelector"], body) == ("GET", "job-name=train", None)
    assert headers["Authorization"] == "Bearer eyJ.first.token"
    (cluster.account / "token").write_text("eyJ.second.token")  # Kubernetes replaces tokens
    found.task_type, found.task_id = "worker", 1
    member = membership_of(found)
    assert (member.source, member.rank, member.size) == ("Kubernetes", 1, 2)
    assert cluster.asked[-1][3]["Authorization"] == "Bearer eyJ.second.token"


@pytest.mark.parametrize("way", ["hostNetwork", "hostPort"])
def test_kubernetes_pod_with_a_port_of_its_host_has_the_hosts_address(cluster, way):
    found = pod("train-0-b9c4d", 1)
    if way == "hostNetwork":
        found["spec"]["hostNetwork"] = True
    else:
        found["spec"]["containers"][0]["ports"][0]["hostPort"] = 8470
    cluster.answers[EVERYWHERE] = pods(found)
    assert resolver().cluster_spec() == {"worker": ["10.128.0.1:8470"]}


def test_kubernetes_pod_with_ipv6_and_without_ports_has_the_default_port(cluster):
    found = pod("train-0-b9c4d", 1, podIP="fd00:10::5")
    del found["spec"]["containers"][0]["ports"]
    cluster.answers[EVERYWHERE] = pods(found)
    assert resolver().cluster_spec() == {"worker": ["[fd00:10::5]:8470"]}


def test_kubernetes_pages_of_pods_are_all_read(cluster):
    """The resolver reads all pages; it starts again if the list has changed too much."""
    first = pods(pod("train-0-aaaaa", 1), **{"continue": "abc", "remainingItemCount": 1})

    def answer(query):
        if query.get("continue") == "abc":
            return pods(pod("train-1-bbbbb", 2))
        return first

    cluster.answers[EVERYWHERE] = answer
    assert resolver().cluster_spec().num_tasks("worker") == 2
    assert [asked[2].get("limit") for asked in cluster.asked] == ["500", "500"]

    def expired(query):
        if "continue" in query:
            return status(410, "Expired", "The provided continue parameter is too old")
        return first if "limit" in query else pods(*(pod(f"train-{i}-ccccc", i) for i in range(3)))

    cluster.answers[EVERYWHERE] = expired
    assert resolver().cluster_spec().num_tasks("worker") == 3
    cluster.answers[EVERYWHERE] = status(410, "Expired", "too old resource version")
    with pytest.raises(RuntimeError, match="Kubernetes answers 410: too old resource version"):
        resolver().cluster_spec()


def test_kubernetes_list_of_all_namespaces_forbidden_reads_the_own_namespace(cluster):
    cluster.answers[EVERYWHERE] = FORBIDDEN
    cluster.answers[IN_NAMESPACE] = pods(pod("train-0-aaaaa", 1))
    assert resolver().cluster_spec() == {"worker": ["10.4.1.7:8470"]}
    cluster.answers[IN_NAMESPACE] = FORBIDDEN
    with pytest.raises(
        RuntimeError,
        match='Kubernetes answers 403: pods is forbidden: User "system:serviceaccount:',
    ):
        resolver().cluster_spec()


DELETED = {**pod("train-0-aaaaa", 1)}
DELETED["metadata"] = {**DELETED["metadata"], "deletionTimestamp": "2026-11-01T09:00:00Z"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            pods(pod("train-0-aaaaa", 1), pod("train-1-bbbbb", 2, "Pending", podIP="", hostIP="")),
            'Pod "train-1-bbbbb" is not running; phase: "Pending"',
        ),
        (pods(pod("train-0-aaaaa", 1, "Succeeded")), 'is not running; phase: "Succeeded"'),
        (pods(pod("train-0-aaaaa", 1, "Failed")), 'is not running; phase: "Failed"'),
        (
            pods(pod("train-0-aaaaa", 1, podIP=None, hostIP=None)),
            'Pod "train-0-aaaaa" has no address',
        ),
        (pods(DELETED), 'Pod "train-0-aaaaa" is being deleted'),
        (pods(), "No pod has the labels 'job-name=train'"),
        (status(401, "Unauthorized", "Unauthorized"), "Kubernetes answers 401: Unauthorized"),
        ((404, NOT_FOUND), "answers 404: the server could not find the requested resource"),
        ((500, b"<html>"), "Kubernetes answers 500: Internal Server Error"),
        ((503, b"[1]"), "Kubernetes answers 503: Service Unavailable"),
        ((302, {}), "Kubernetes answers 302: Found"),  # the token is sent to no other server
        (
            (200, b"<html>a proxy's page"),
            "did not answer with a JSON object: b'<html>a proxy's page'",
        ),
        ((200, b"[]"), r"did not answer with a JSON object: b'\[\]'"),
    ],
)
def test_kubernetes_answer_without_usable_pods_raises(cluster, answer, message):
    cluster.answers[EVERYWHERE] = answer
    with pytest.raises(RuntimeError, match=message.replace("'<html>a proxy's page'", ".<html>a")):
        resolver().cluster_spec()
    assert not any(asked[1] == "/elsewhere" for asked in cluster.asked)


def test_kubernetes_pod_without_token_certificate_or_variables_raises(cluster, monkeypatch):
    (cluster.account / "token").unlink()
    with pytest.raises(
        RuntimeError, match=r"token cannot be read \(No such file .*automountService"
    ):
        resolver().cluster_spec()
    (cluster.account / "ca.crt").write_text("no certificate")
    with pytest.raises(RuntimeError, match=r"ca.crt, Kubernetes' authority, cannot be used"):
        resolver().cluster_spec()
    assert cluster.asked == []
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT")
    with pytest.raises(ImportError, match="The Kubernetes Python client must be installed"):
        resolver()
    with pytest.raises(ImportError, match="The Kubernetes Python client must be installed"):
        KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER)


def test_kubernetes_api_with_a_foreign_certificate_gets_no_token(cluster, tmp_path_factory):
    """The token is not sent to a server without a certificate of the cluster's authority."""
    folder = tmp_path_factory.mktemp("other")
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    )
    more = ["-keyout", "key.pem", "-out", "ca.crt"]
    subprocess.run([*words.split(), *more], cwd=folder, check=True, capture_output=True, timeout=30)
    shutil.copy(folder / "ca.crt", cluster.account)
    with pytest.raises(
        RuntimeError, match="Kubernetes cannot be reached at 127.0.0.1:.*CERTIFICATE"
    ):
        resolver().cluster_spec()
    assert cluster.asked == []


def test_kubernetes_api_that_does_not_answer_raises(cluster, monkeypatch):
    cluster.server.shutdown()
    cluster.server.socket.close()
    with pytest.raises(RuntimeError, match="cannot be reached at 127.0.0.1:.*Connection refused"):
        resolver().cluster_spec()
    monkeypatch.setattr(rest, "SECONDS", 0.1)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(silent.getsockname()[1]))
        with pytest.raises(RuntimeError, match="cannot be reached at 127.0.0.1:.*timed out"):
            resolver().cluster_spec()


def test_kubernetes_installed_client_error_is_reported():
    class Client:
        def list_pod_for_all_namespaces(self, label_selector):
            raise OSError("Max retries exceeded")

    found = KubernetesClusterResolver({"worker": ["a=b"]}, override_client=Client())
    with pytest.raises(RuntimeError, match="asked for the pods with 'a=b': Max retries exceeded"):
        found.cluster_spec()


@pytest.mark.slow
def test_kubernetes_real_client_gives_the_same_addresses(cluster, monkeypatch):
    """The package `kubernetes` reads the same answers."""
    monkeypatch.delitem(sys.modules, "kubernetes")
    client = pytest.importorskip("kubernetes").client
    configuration = client.Configuration(
        host=f"https://127.0.0.1:{cluster.port}", api_key={"authorization": "Bearer eyJ"}
    )
    configuration.ssl_ca_cert = str(cluster.account / "ca.crt")
    api = client.CoreV1Api(client.ApiClient(configuration))
    cluster.answers[EVERYWHERE] = pods(pod("train-1-x7k2p", 2), pod("train-0-b9c4d", 1))
    found = KubernetesClusterResolver({"worker": ["job-name=train"]}, override_client=api)
    assert found.cluster_spec() == {"worker": ["10.4.1.7:8470", "10.4.2.7:8470"]}
    for answer, message in (
        (FORBIDDEN, "asked for the pods with 'job-name=train': .*403"),
        (pods(DELETED), "is being deleted"),
    ):
        cluster.answers[EVERYWHERE] = answer
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            found.cluster_spec()


# Compute Engine -----------------------------------------------------------------------------------

ZONE = "/projects/my-project/zones/europe-west4-a"
LIST = f"{ZONE}/instanceGroups/trainers/listInstances"
TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"
SITE = "https://www.googleapis.com/compute/v1"


def instance(name, address):
    return {
        "kind": "compute#instance",
        "id": "4711",
        "name": name,
        "zone": f"{SITE}/projects/my-project/zones/europe-west4-a",
        "status": "RUNNING",
        "networkInterfaces": [
            {
                "kind": "compute#networkInterface",
                "name": "nic0",
                "networkIP": address,
                "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "natIP": "203.0.113.9"}],
            }
        ],
    }


def listed(*names, **more):
    return {
        "kind": "compute#instanceGroupsListInstances",
        "id": "projects/my-project/zones/europe-west4-a/instanceGroups/trainers/listInstances",
        "items": [
            {"instance": f"{SITE}{ZONE}/instances/{name}", "status": "RUNNING", "namedPorts": []}
            for name in names
        ],
        "selfLink": f"{SITE}{LIST}",
        **more,
    }


def failure(code, message, reason):
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return code, {"error": {"code": code, "message": message, "errors": errors}}


@pytest.fixture
def engine(monkeypatch):
    """Return a server that is both Compute Engine and an instance's metadata server."""
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with Api().answering() as api:
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{api.port}")
        monkeypatch.setattr(gce, "_API", f"http://127.0.0.1:{api.port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        api.answers[TOKEN] = {"access_token": "ya29.t", "expires_in": 3599, "token_type": "Bearer"}
        api.answers[LIST] = listed("trainer-b", "trainer-a")
        for name, address in (("trainer-a", "10.164.0.2"), ("trainer-b", "10.164.0.10")):
            api.answers[f"{ZONE}/instances/{name}"] = instance(name, address)
        yield api


def group():
    return GCEClusterResolver("my-project", "europe-west4-a", "trainers", 8470, task_id=1)


def test_compute_engine_instances_give_their_addresses(engine):
    found = group()
    assert found.cluster_spec() == {"worker": ["10.164.0.10:8470", "10.164.0.2:8470"]}
    token, *asked = engine.asked
    assert token[3]["Metadata-Flavor"] == "Google"
    assert [words[1] for words in asked] == [
        LIST,
        f"{ZONE}/instances/trainer-b",
        f"{ZONE}/instances/trainer-a",
    ]
    method, _, query, _, body = asked[0]
    assert (method, query, body) == ("POST", {"orderBy": "name"}, {"instanceState": "RUNNING"})
    assert all(words[3]["Authorization"] == "Bearer ya29.t" for words in asked)
    assert "Authorization" not in token[3]
    assert membership_of(found).rank == 1


def test_compute_engine_pages_of_instances_are_all_read(engine):
    engine.answers[LIST] = lambda query: (
        listed("trainer-a") if query.get("pageToken") == "CAE" else listed(nextPageToken="CAE")
    )
    assert group().cluster_spec() == {"worker": ["10.164.0.2:8470"]}


def test_compute_engine_group_without_instances_has_no_tasks(engine):
    engine.answers[LIST] = {"kind": "compute#instanceGroupsListInstances"}
    assert group().cluster_spec() == {"worker": []}
    with pytest.raises(ValueError, match="GCE: The `task_id` 1 exceeds .*There are none"):
        membership_of(group())


def test_compute_engine_expired_token_is_requested_again(engine):
    engine.answers[TOKEN]["expires_in"] = 30
    group().cluster_spec()
    assert [words[1] for words in engine.asked].count(TOKEN) == 3


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (
            LIST,
            failure(403, "Request had insufficient authentication scopes.", "insufficientPermissions"),
            "Compute Engine answers 403: Request had insufficient authentication scopes.",
        ),
        (
            LIST,
            failure(404, "The resource 'projects/my-project/zones/europe-west4-a/instanceGroups/"
                    "trainers' was not found", "notFound"),
            "answers 404: The resource .*trainers' was not found",
        ),
        (
            f"{ZONE}/instances/trainer-a",
            failure(404, "The resource 'trainer-a' was not found", "notFound"),
            "Compute Engine answers 404: The resource 'trainer-a' was not found",
        ),
        (f"{ZONE}/instances/trainer-a", {"name": "trainer-a", "networkInterfaces": []},
         "Instance 'trainer-a' has no address in a network"),
        (TOKEN, (404, b"<html>"), "The metadata server answers 404: Not Found"),
        (TOKEN, {"error": "no account"}, "gives no token: give the instance a service account"),
        (TOKEN, b"token", "The metadata server at 127.0.0.1:.* did not answer with a JSON object"),
    ],
)  # fmt: skip
def test_compute_engine_answer_without_instances_raises(engine, path, answer, message):
    engine.answers[path] = answer
    with pytest.raises(RuntimeError, match=message):
        group().cluster_spec()
    with pytest.raises(ValueError, match=f"GCE: .*{message}"):
        membership_of(group())


def test_compute_engine_metadata_server_that_does_not_answer_raises(engine, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")
    with pytest.raises(
        RuntimeError, match="The metadata server cannot be reached at 127.0.0.1:1: "
    ):
        group().cluster_spec()


def test_compute_engine_from_another_machine_needs_googles_client(engine, monkeypatch, tmp_path):
    product = tmp_path / "product_name"
    monkeypatch.setattr(gce, "_PRODUCT", product)
    with pytest.raises(ImportError, match="googleapiclient must be installed"):
        GCEClusterResolver("p", "z", "g", 1, credentials="mine")
    monkeypatch.delenv("GCE_METADATA_IP")
    for text in (None, "Standard PC"):
        if text:
            product.write_text(text)
        with pytest.raises(ImportError, match="googleapiclient must be installed"):
            group()
    product.write_text("Google Compute Engine\n")
    assert group().task_type == "worker"


@pytest.mark.slow
def test_compute_engine_googles_client_gives_the_same_addresses(engine, monkeypatch):
    """`google-api-python-client` reads the same answers, in pages."""
    monkeypatch.delitem(sys.modules, "googleapiclient.discovery")
    discovery = pytest.importorskip("googleapiclient.discovery")
    credentials = pytest.importorskip("google.auth.credentials").AnonymousCredentials()
    service = discovery.build(
        "compute", "v1", credentials=credentials, client_options={"api_endpoint": gce._API}
    )
    engine.answers.update({f"/compute/v1{path}": a for path, a in list(engine.answers.items())})
    engine.answers[LIST] = engine.answers[f"/compute/v1{LIST}"] = lambda query: (
        listed("trainer-a") if "pageToken" in query else listed("trainer-b", nextPageToken="CAE")
    )
    found = GCEClusterResolver("my-project", "europe-west4-a", "trainers", 8470, service=service)
    assert found.cluster_spec() == {"worker": ["10.164.0.10:8470", "10.164.0.2:8470"]}
    engine.answers[LIST] = engine.answers[f"/compute/v1{LIST}"] = failure(403, "No scope.", "no")
    with pytest.raises(RuntimeError, match="Compute Engine cannot be asked: .*403.*No scope."):
        found.cluster_spec()
