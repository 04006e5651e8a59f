"""A real control plane on loopback: etcd and kube-apiserver, without kubelets and controllers.

So nothing turns a Deployment into pods, and nothing runs a pod: tests create pods and write their status.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import secrets
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from tests.kube.binaries import Binaries
from tests.kube.certificates import Authority, write_service_account_keys
from tests.support.ports import free_ports

CRDS = Path(__file__).parent / "crds"
START_SECONDS = 120.0
ATTEMPTS = 5  # another process may take a free port between its choice and its use

ADMIN = "admin"


class ControlPlaneError(RuntimeError):
    """The control plane did not start; the message ends with the log."""


class Refused(AssertionError):
    """kubectl or helm failed. `stderr` is what it said."""

    def __init__(self, command: list[str], stderr: str) -> None:
        super().__init__(f"{' '.join(command)}\n{stderr}")
        self.stderr = stderr


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the token file: system:masters, or a service account's own token."""

    name: str
    token: str


class Process:
    """A child with its log in a file."""

    def __init__(self, command: list[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                [str(part) for part in command],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=env,
            )

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self, signum: int = signal.SIGKILL) -> None:
        if self.running:
            self._child.send_signal(signum)
        self._child.wait(timeout=30)


class ControlPlane:
    """One cluster. `start`, then `kubectl` and `helm` as an administrator; `stop` ends and forgets it.

    directory: keeps certificates, logs, kubeconfigs and etcd's data.
    """

    def __init__(self, binaries: Binaries, directory: Path) -> None:
        self.binaries = binaries
        self.directory = directory
        self.authority = Authority(directory)
        self.admin = Account(ADMIN, secrets.token_hex(16))
        self.kubeconfig = directory / "admin.kubeconfig"
        self.port = 0
        self._etcd: Process | None = None
        self._api: Process | None = None
        self._etcd_url = ""
        self._service_account_key = write_service_account_keys(directory)
        self._tokens = directory / "tokens.csv"
        with self._tokens.open("w") as file:
            csv.writer(file).writerow([self.admin.token, ADMIN, ADMIN, "system:masters"])
        self._tokens.chmod(0o600)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._start_etcd()
        self._choose_port_and_start_api()
        self.kubeconfig.write_text(self.kubeconfig_for(self.admin))
        self._install_crds()

    def stop(self) -> None:
        for process in (self._api, self._etcd):
            if process is not None:
                process.stop()

    # The API server alone, for tests of what happens while it is away

    def kill_api_server(self) -> None:
        assert self._api is not None
        self._api.stop()

    def restart_api_server(self) -> None:
        """On the same port and the same data. Blocks until it is ready."""
        self.kill_api_server()
        self._api = self._launch_api()
        self._await_api()

    # Clients

    def kubeconfig_for(self, account: Account, namespace: str = "default") -> str:
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {
                        "name": "test",
                        "cluster": {
                            "server": self.url,
                            "certificate-authority": str(self.authority.certificate),
                        },
                    }
                ],
                "users": [{"name": account.name, "user": {"token": account.token}}],
                "contexts": [
                    {
                        "name": "test",
                        "context": {"cluster": "test", "user": account.name, "namespace": namespace},
                    }
                ],
                "current-context": "test",
            }
        )

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl as the administrator. Raises Refused when it fails."""
        return self._run([str(self.binaries.kubectl), *arguments], input)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def helm(self, *arguments: str, input: str | None = None) -> str:
        """Run helm as the administrator. Raises Refused when it fails."""
        return self._run([str(self.binaries.helm), *arguments], input)

    def _run(self, command: list[str], input: str | None) -> str:
        home = self.directory / "home"
        home.mkdir(exist_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(command, input=input, capture_output=True, text=True, env=env, timeout=120)
        if done.returncode:
            raise Refused(command, done.stderr)
        return done.stdout

    @contextlib.contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A namespace with the account that a controller would have made in it."""
        unique = f"{name}-{secrets.token_hex(3)}"
        self.kubectl("create", "namespace", unique)
        self.kubectl("create", "serviceaccount", "default", "-n", unique)
        yield unique
        # Nothing finishes a namespace's end here; what matters is that its name is not used again.
        self.kubectl("delete", "namespace", unique, "--wait=false")

    # Starting

    def _start_etcd(self) -> None:
        for _ in range(ATTEMPTS):
            client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
            self._etcd_url = client
            self._etcd = Process(
                [
                    self.binaries.etcd,
                    f"--data-dir={self.directory / 'etcd'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}",
                    # Nothing here survives the machine anyway.
                    "--unsafe-no-fsync",
                    "--log-level=warn",
                ],
                self.directory / "etcd.log",
            )
            if _answers(f"{client}/health", self._etcd):
                return
            self._etcd.stop()
        raise ControlPlaneError(f"etcd did not start:\n{self._etcd.tail() if self._etcd else ''}")

    def _choose_port_and_start_api(self) -> None:
        for _ in range(ATTEMPTS):
            (self.port,) = free_ports(1)
            self._api = self._launch_api()
            with contextlib.suppress(ControlPlaneError):
                self._await_api()
                return
            if "address already in use" not in self._api.tail():
                break
        raise ControlPlaneError(f"kube-apiserver did not start:\n{self._api.tail() if self._api else ''}")

    def _launch_api(self) -> Process:
        serving = self.authority.issue("kube-apiserver", ["127.0.0.1"])
        return Process(
            [
                self.binaries.kube_apiserver,
                f"--etcd-servers={self._etcd_url}",
                "--bind-address=127.0.0.1",
                f"--secure-port={self.port}",
                f"--tls-cert-file={serving.certificate}",
                f"--tls-private-key-file={serving.key}",
                f"--token-auth-file={self._tokens}",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.test",
                f"--service-account-key-file={self._service_account_key}",
                f"--service-account-signing-key-file={self._service_account_key}",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--endpoint-reconciler-type=none",
                "--allow-privileged=false",
                f"--cert-dir={self.directory / 'apiserver'}",
                # Otherwise a killed server's watches last for minutes on the next one's clock.
                "--min-request-timeout=300",
            ],
            self.directory / "kube-apiserver.log",
        )

    def _await_api(self) -> None:
        assert self._api is not None
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        # From 3.13 on, Python wants more of a certificate than some clusters, and this one, have.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not _answers(f"{self.url}/readyz", self._api, context, self.admin.token):
            raise ControlPlaneError(f"kube-apiserver is not ready:\n{self._api.tail()}")

    def _install_crds(self) -> None:
        self.kubectl("apply", "-f", str(CRDS))
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")


def _answers(url: str, process: Process, context: ssl.SSLContext | None = None, token: str = "") -> bool:
    """Ask until the answer is 200; False when the process ends first or START_SECONDS have passed."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    deadline = time.monotonic() + START_SECONDS
    while process.running and time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError):
            response: IO[bytes]
            with urllib.request.urlopen(request, timeout=5, context=context) as response:
                response.read()
                return True
        time.sleep(0.1)
    return False
