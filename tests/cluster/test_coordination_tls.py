"""JAX's coordination service: who can reach it, and processes that authenticate each other."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import process_group
import pytest

from jaxtrain.cluster.join import BIND_ADDRESS, TLS_FILES, ProcessPlace, free_port, join, uses_tls

NEWER = jax.__version_info__ >= (0, 12)

WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
from jaxtrain.cluster.join import ProcessPlace, join
assert join(ProcessPlace(sys.argv[1], 2, int(sys.argv[2])))
print(jax.process_count(), jax.process_index(), flush=True)
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What JAX is asked for."""
    given: list[dict[str, Any]] = []

    def initialize(coordinator=None, mtls_cert_file=None, **options):
        given.append({"coordinator": coordinator, **options})

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in (BIND_ADDRESS, *TLS_FILES):
        monkeypatch.delenv(name, raising=False)
    return given


def test_processes_of_one_machine_meet_where_no_other_machine_reaches_them(
    asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in ("127.0.0.1", "localhost", "node0", "10.0.0.7"):
        assert join(ProcessPlace(f"{host}:8476", 2, 1))
    monkeypatch.setenv(BIND_ADDRESS, "0.0.0.0:8476")
    assert join(ProcessPlace("127.0.0.1:8476", 2, 1))
    at = [each["coordinator_bind_address"] for each in asked]
    assert at == ["127.0.0.1:8476", "localhost:8476", None, None, None]


def test_files_that_would_leave_the_service_open_are_refused(
    asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ProcessPlace("node0:8476", 2, 1)
    (tmp_path / "cert").touch()
    monkeypatch.setenv(TLS_FILES[0], str(tmp_path / "cert"))
    monkeypatch.setenv(TLS_FILES[1], str(tmp_path / "absent"))
    with pytest.raises(ValueError) as refused:
        join(place)
    said = str(refused.value)
    assert f"{TLS_FILES[2]} is not set" in said and "absent cannot be read" in said and not asked
    for name in TLS_FILES:
        monkeypatch.setenv(name, str(tmp_path / "cert"))
    assert join(place) and len(asked) == 1
    monkeypatch.setattr(jax.distributed, "initialize", lambda coordinator, **options: None)
    with pytest.raises(ValueError, match="this JAX has no mutual TLS; use JAX"):
        join(place)
    assert not uses_tls({}) and not uses_tls(dict.fromkeys(TLS_FILES, ""))


def certificates(folder: Path) -> dict[str, str]:
    """A certificate for 127.0.0.1 that signs itself, as the files that JAX reads."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [*request, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return dict(zip(TLS_FILES, map(str, (cert, key, cert)), strict=True))


def answer(port: int, files: dict[str, str], *, shows_its_own: bool) -> bytes:
    """What the service says first to one that trusts it, with a certificate or without."""
    cert, key, authority = (files[name] for name in TLS_FILES)
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols(["h2"])
    if shows_its_own:
        context.load_cert_chain(cert, key)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return secure.recv(9)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")
@pytest.mark.skipif(not NEWER, reason="this JAX has no mutual TLS")
def test_two_processes_meet_by_certificates(tmp_path: Path) -> None:
    """And to one without a certificate the service says nothing."""
    files, address = certificates(tmp_path), f"127.0.0.1:{free_port()}"
    environ = process_group.bare_environment(tmp_path) | files

    def start(index: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(index)],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    started = [start(0)]
    try:
        shown = ""
        for _ in range(600):
            try:
                shown = ssl.get_server_certificate(("127.0.0.1", int(address.split(":")[1])))
                break
            except OSError:
                assert started[0].poll() is None
                time.sleep(0.1)
        assert shown == Path(files[TLS_FILES[0]]).read_text()
        port = int(address.rpartition(":")[2])
        assert answer(port, files, shows_its_own=True)
        assert not answer(port, files, shows_its_own=False)
        started.append(start(1))
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [text.splitlines()[-1] for text in said] == ["2 0", "2 1"], said
