"""A callback goes to the very address that was checked, in the name that was asked for, and nowhere else."""
from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from tasks import deliver_webhook, egress
from tasks.egress import Unanswered
from tests import misbehaving
from tests import receiver as receivers
from tests.conftest import World, one_database
from tests.misbehaving import endless, over_tls, says
from tests.outgoing import (
    PUBLIC, another_delivery, attempt_of, connections, listener, name_server, nobody_came, trusted,
)
from tests.receiver import Receiver
from tests.running import finish

NOBODY = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
STALLED = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@one_database
@pytest.mark.parametrize("answer,status", [
    ([PUBLIC], 202), (["127.0.0.1"], 422), ([PUBLIC, "10.0.0.1"], 422), (["10.0.0.1", PUBLIC], 422),
    ([PUBLIC, "93.184.216.35"], 202), (NOBODY, 202), (STALLED, 202),
])
def test_a_name_is_refused_when_it_points_to_a_refused_address(
    api: FlaskClient, world: World, monkeypatch: Any, answer: Any, status: int,
) -> None:
    asked = name_server(monkeypatch, receiver_example=[answer])
    assert api.post("/jobs", json={"n": 5, "callback_url": "http://receiver.example/"}).status_code == status
    assert asked == ["receiver.example"]


@one_database
def test_a_name_that_points_inside_by_the_time_of_delivery_is_refused(
    api: FlaskClient, world: World, monkeypatch: Any,
) -> None:
    name_server(monkeypatch, receiver_example=[[PUBLIC], ["127.0.0.1"]])
    with listener() as waiting, connections(monkeypatch, world) as made:
        delivery_id = finish(api, f"http://receiver.example:{waiting.getsockname()[1]}/")
        assert deliver_webhook.run_once(delivery_id).state == "refused"
        assert made == [] and nobody_came(waiting)
    assert attempt_of(world, delivery_id) == (None, "refused: 127.0.0.0/8 is Loopback (RFC1122)")


@one_database
def test_a_name_that_changes_after_the_check_changes_nothing(
    api: FlaskClient, world: World, monkeypatch: Any,
) -> None:
    asked = name_server(monkeypatch, receiver_example=[[PUBLIC], [PUBLIC], ["127.0.0.1"]])
    delivery_id = finish(api, "http://receiver.example/")
    with connections(monkeypatch, world) as made:
        assert deliver_webhook.run_once(delivery_id).state == "pending"
    assert made == [(PUBLIC, 80)] and len(asked) == 2  # once when submitted, once for the attempt
    assert attempt_of(world, delivery_id) == (None, "no connection: network is unreachable")


@one_database
def test_the_connection_goes_to_the_checked_address_in_the_name_of_the_receiver(
    world: World, monkeypatch: Any, tmp_path: Path,
) -> None:
    """Also when the name would by now lead elsewhere; TLS and the Host header speak of the name alone."""
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    asked = name_server(monkeypatch, receiver_example=[["127.0.0.1"], ["127.0.0.2"]])
    file, names, hosts = misbehaving.certificate(tmp_path, "receiver.example"), list[str | None](), list[bytes]()

    def play(connection: socket.socket, over: Any) -> None:
        hosts.extend(line for line in misbehaving.read_request(connection) if line.startswith(b"Host:"))
        connection.sendall(b"HTTP/1.1 204 x\r\nConnection: close\r\n\r\n")

    with misbehaving.server(over_tls(file, play, names)) as port, trusted(file):
        with connections(monkeypatch, world) as made:
            assert egress.post(f"https://receiver.example:{port}/", b"{}", {}, 5.0).code == 204
    assert made == [("127.0.0.1", port)] and asked == ["receiver.example"]
    assert names == ["receiver.example"] and hosts == [b"Host: receiver.example:%d" % port]


@one_database
def test_the_certificate_must_be_that_of_the_name(world: World, monkeypatch: Any, tmp_path: Path) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    name_server(monkeypatch, receiver_example=[["127.0.0.1"]])
    file = misbehaving.certificate(tmp_path, "elsewhere.example")
    with misbehaving.server(over_tls(file, says(b"HTTP/1.1 204 x\r\n\r\n"))) as port, trusted(file):
        with pytest.raises(Unanswered, match="^certificate not accepted: hostname mismatch$"):
            egress.post(f"https://receiver.example:{port}/", b"{}", {}, 5.0)


@one_database
def test_the_next_address_of_a_name_is_tried(world: World, monkeypatch: Any, receiver: Receiver) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    name_server(monkeypatch, receiver_example=[["127.0.0.2", "127.0.0.1"]])
    assert egress.post(f"http://receiver.example:{receiver.port}/", b"{}", {}, 5.0).code == 204


# --- redirects ---


@one_database
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_never_followed_and_no_success(
    api: FlaskClient, world: World, monkeypatch: Any, receiver: Receiver, code: int,
) -> None:
    known = finish(api, f"http://{PUBLIC}/")
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    with listener("127.0.0.1") as elsewhere:
        for target in (f"http://127.0.0.1:{elsewhere.getsockname()[1]}/", f"{receiver.url}/again", "/again", "//[::1"):
            receiver.respond = receivers.status(code, Location=target)
            after = deliver_webhook.run_once(another_delivery(world, known, f"{receiver.url}/hook"))
            assert (after.state, after.last_response) == ("pending", code), target
        assert nobody_came(elsewhere)
    assert {hook.path for hook in receiver.hooks} == {"/hook"} and len(receiver.hooks) == 4


@one_database
def test_no_more_is_read_of_a_redirect_than_of_any_answer(world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.0/8")
    redirect = endless(b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:1/\r\n\r\n", b"x" * 65536)
    with misbehaving.server(redirect) as port:
        answer = egress.post(f"http://127.0.0.1:{port}/", b"{}", {}, 10.0)
    assert (answer.code, len(answer.excerpt)) == (302, egress.MAX_ANSWER_BYTES)


# --- the environment ---

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@one_database
@pytest.mark.parametrize("no_proxy", [None, "", "example.com"])
def test_proxies_of_the_environment_are_ignored(
    world: World, monkeypatch: Any, receiver: Receiver, no_proxy: str | None,
) -> None:
    with listener("127.0.0.1") as proxy, connections(monkeypatch, world) as made:
        for name in PROXIES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}/")
        if no_proxy is not None:
            monkeypatch.setenv("NO_PROXY", no_proxy)
            monkeypatch.setenv("no_proxy", no_proxy)
        egress.forget()
        assert egress.post(receiver.url, b"{}", {}, 5.0).code == 204
        with pytest.raises(Unanswered):
            egress.post(receiver.url.replace("http:", "https:"), b"{}", {}, 5.0)
        assert nobody_came(proxy) and {address[1] for address in made} == {receiver.port}


@one_database
def test_no_password_of_the_machine_and_no_cookie_is_sent(
    world: World, monkeypatch: Any, receiver: Receiver, tmp_path: Path,
) -> None:
    for file in (tmp_path / ".netrc", tmp_path / "_netrc"):
        file.write_text("machine 127.0.0.1 login me password secret\ndefault login me password secret\n")
        os.chmod(file, 0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    receiver.respond = receivers.status(204, Set_Cookie="a=b; Path=/")
    for _ in range(2):
        egress.post(receiver.url, b"{}", {}, 5.0)
    for hook in receiver.hooks:
        assert not {"cookie", "authorization", "proxy-authorization"} & hook.headers.keys()
        assert hook.headers["accept-encoding"] == "identity"
    assert len(receiver.hooks) == 2
