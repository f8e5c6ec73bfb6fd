"""Where callbacks may not go: refused when submitted, and again at delivery, before anything is connected to."""
from __future__ import annotations

import ipaddress
import random
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import addresses, schema
from tasks import deliver_webhook
from tests.conftest import World, one_database
from tests.outgoing import (
    PUBLIC, another_delivery, attempt_of, connections, is_readable, listener, name_server, nobody_came,
)
from tests.running import finish

LOOPBACK = [
    "127.0.0.1", "127.0.0.2", "127.255.255.255",
    "2130706433", "017700000001", "0x7f000001", "0X7F000001", "0x7f.0x0.0x0.0x1", "0x7f.0.0.1", "0177.0.0.1",
    "0177.0.0.01", "00000177.0.0.1", "0x7f.1", "0x7F.0.01", "0177.1", "127.1", "127.0.1", "127.0.0x1", "127.0.0.1.",
    "0", "0.0.0.0", "00", "0x0", "0.0",
    "①②⑦.0.0.1", "１２７.０.０.１", "１２７．０．０．１", "127。0。0。1", "127｡0｡0｡1", "①２7。0x0.1", "２１３０７０６４３３",
    "[::]", "[::1]", "[0:0:0:0:0:0:0:1]", "[0000::0001]", "[::0.0.0.1]",
]
CARRIED = [  # the address of one network in that of another
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]", "[::127.0.0.1]", "[::7f00:1]",
    "[::ffff:0:127.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b::a00:5]", "[64:ff9b:1::7f00:1]",
    "[64:ff9b:1:7f00:0:100::]", "[64:ff9b:1:ffff::1]", "[2002:7f00:1::]", "[2002:7f00:1::1]", "[2002:a9fe:a9fe::]",
    "[2001:0:7f00:1::]", "[2001:0:5db8:d822:0:0:80ff:fffe]", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]",
    f"[::ffff:{PUBLIC}]", f"[::{PUBLIC}]", f"[64:ff9b::{PUBLIC}]", "[2002:5db8:d822::1]", "[2001:0:5db8:d822::1]",
]
INSIDE = [
    "10.0.0.5", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255", "169.254.1.1",
    "[fe80::1]", "[febf::1]", "[fc00::1]", "[fd12:3456::1]", "[fec0::1]", "[feff::1]",
]
METADATA = [
    "169.254.169.254", "169.254.170.2", "[fd00:ec2::254]", "[fd20:ce::254]", "168.63.129.16", "100.100.100.200",
    "192.0.0.192", "2852039166", "0xa9fea9fe", "metadata.google.internal", "metadata.google.internal.",
]
NO_HOST = [  # nobody has such an address
    "198.18.0.1", "198.19.255.255", "192.0.2.1", "198.51.100.1", "203.0.113.1", "[2001:db8::1]", "[3fff::1]",
    "[2001:2::1]", "192.0.0.1", "192.88.99.1", "224.0.0.1", "239.255.255.250", "[ff02::1]", "[ff0e::1]", "[ff05::1:3]",
    "255.255.255.255", "240.0.0.1", "254.1.1.1", "0.1.2.3", "[100::1]", "[5f00::1]", "[4000::1]", "[200::1]",
]
ZONES = [
    "[fe80::1%25eth0]", "[fe80::1%eth0]", "[::1%251]", "[::1%lo]", "[2606:2800:220:1::1%25eth0]", "127.0.0.1%25lo",
]
NAMES = [
    "localhost", "LocalHost", "localhost.", "a.localhost", "a.b.localhost.", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "ｌｏｃａｌｈｏｓｔ", "localhost。",
    "inside.example", "both.example", "both6.example", "mapped.example", "scoped.example", "bücher.example",
]
ANSWERS = {
    "metadata_google_internal": [["169.254.169.254"]], "metadata_google_internal_": [["169.254.169.254"]],
    "inside_example": [["10.0.0.1"]], "both_example": [[PUBLIC, "127.0.0.1"]],
    "both6_example": [[PUBLIC, "fd00::1"]], "mapped_example": [["::ffff:127.0.0.1"]],
    "scoped_example": [["fe80::1%1"]], "xn--bcher-kva_example": [["127.0.0.1"]],
}
HOSTS = {
    "loopback": LOOPBACK, "carried": CARRIED, "inside": INSIDE, "metadata": METADATA, "no host": NO_HOST,
    "zones": ZONES, "names": NAMES,
}
FORMS = {
    "user info": [
        "http://user:pw@{public}/", "http://user@{public}/", "http://@{public}/", "http://:@{public}/",
        "http://good.example@127.0.0.1:{port}/", "http://127.0.0.1:{port}@{public}/", "http://a@b@{public}/",
        "http://good.example%40127.0.0.1:{port}/", "http://good.example＠127.0.0.1:{port}/",
    ],
    "backslashes": [
        "http://{public}\\@127.0.0.1:{port}/", "http://127.0.0.1:{port}\\@{public}/", "http:\\\\127.0.0.1:{port}\\",
        "http:/\\127.0.0.1:{port}/", "http://{public}\\.example/", "http://{public}\\/", "\\\\127.0.0.1:{port}\\x",
    ],
    "fragments": [
        "http://{public}/#fragment", "http://{public}/#", "http://{public}#@127.0.0.1:{port}/",
        "http://127.0.0.1:{port}#@{public}/", "http://{public}?x#y",
    ],
    "control characters": [
        "http://{public}/\r\nX: y", "http://{public}/\n", "http://{public}/a\tb", "ht\ttp://{public}/",
        "http://{public}/\x7f", "http://{public}/ x", " http://{public}/", "http://{public}/ ", "\thttp://{public}/",
        "http://127.0.0.1\t:{port}/",
        "http://127.0.0.\n1:{port}/", "http://{public}\r.example/", "http://{public}/\x1b[31m", "\x01http://{public}/",
    ],
    "ports": [
        "http://{public}:0/", "http://{public}:65536/", "http://{public}:99999999999999999999/", "http://{public}:-1/",
        "http://{public}:+80/", "http://{public}:http/", "http://{public}:8o/", "http://{public}:８０/",
        "http://{public}:/", "http://127.0.0.1:/", "https://{public}:/", "http://{public}:80:80/",
        "http://[::1]:{port}:80/", "http://{public}: 80/", "http://{public}:0x50/", "http://[2606:2800:220:1::1]x:80/",
    ],
    "schemes": [
        "ftp://{public}/", "file:///etc/passwd", "gopher://{public}/", "ws://{public}/", "wss://{public}/",
        "HTTPX://{public}/", "javascript:alert(1)", "data:,x", "dict://127.0.0.1:{port}/", "unix:///tmp/x",
        "http+unix://%2ftmp%2fx/", "ldap://{public}",
    ],
    "no host": [
        "", "x", "/x", "//{public}/", "http:", "http:/", "http://", "http:///x", "http://?x", "http:{public}",
        "http://:80/", "http://./", "http://../", "http://a..example/", "http://.example/",
        "http://[]/", "http://[::1", "http://::1/",
        "http://[127.0.0.1]/", "http://[v1.x]/", "http://%31%32%37.0.0.1/", "http://-.example-/", "http://a b.example/",
    ],
    "length": [
        "http://{public}/" + "x" * 2048, "http://" + "a" * 64 + ".example/", "http://" + "a." * 130 + "example/",
    ],
}
REFUSED = {
    **{kind: [f"{scheme}://{host}:{{port}}/" for host in hosts for scheme in ("http", "https")]
       for kind, hosts in HOSTS.items()},
    **{f"form: {kind}": urls for kind, urls in FORMS.items()},
}


def urls(kind: str, port: int) -> list[str]:
    return [url.replace("{public}", PUBLIC).replace("{port}", str(port)) for url in REFUSED[kind]]


@one_database
@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_at_submission(api: FlaskClient, world: World, monkeypatch: Any, kind: str) -> None:
    name_server(monkeypatch, **ANSWERS)
    for url in urls(kind, 8141):
        answer = api.post("/jobs", json={"n": 5, "callback_url": url}, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 422, url
        (flaw,) = answer.json["errors"]
        assert flaw["pointer"] == "#/callback_url" and is_readable(flaw["detail"]), (url, flaw)
    assert [name for name in schema.metadata.tables if world.count(name)] == []


@one_database
@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_at_delivery_and_nothing_is_connected_to(
    api: FlaskClient, world: World, monkeypatch: Any, kind: str,
) -> None:
    known = finish(api, f"http://{PUBLIC}/")
    name_server(monkeypatch, **ANSWERS)
    with listener() as waiting, connections(monkeypatch, world) as made:
        for url in urls(kind, waiting.getsockname()[1]):
            delivery_id = another_delivery(world, known, url)
            assert deliver_webhook.run_once(delivery_id).state == "refused", url
            code, reason = attempt_of(world, delivery_id)
            assert code is None and reason.startswith("refused: ") and is_readable(reason), (url, reason)
        assert made == [] and nobody_came(waiting)
    assert world.count("outbox", "task = 'deliver_webhook'") == 1  # that of the known one: none is tried again


@one_database
def test_an_address_that_was_allowed_at_submission_is_refused_at_delivery(
    api: FlaskClient, world: World, monkeypatch: Any,
) -> None:
    with listener("127.0.0.1") as waiting:
        port = waiting.getsockname()[1]
        world.set(CALLBACK_ALLOW=f"127.0.0.1:{port}")
        delivery_id = finish(api, f"http://127.0.0.1:{port}/")
        world.set(CALLBACK_ALLOW="")
        with connections(monkeypatch, world) as made:
            assert deliver_webhook.run_once(delivery_id).state == "refused"
            assert made == [] and nobody_came(waiting)
    (row,) = api.get(f"/jobs/{world.sql('SELECT id FROM jobs')[0][0]}/deliveries").json["deliveries"]
    assert (row["attempt"], row["response_code"]) == (1, None)
    assert row["error"] == "refused: 127.0.0.0/8 is Loopback (RFC1122)"


@one_database
def test_a_nul_never_gets_into_an_address(api: FlaskClient, world: World, monkeypatch: Any) -> None:
    url = f"http://{PUBLIC}/\0"
    assert api.post("/jobs", json={"n": 5, "callback_url": url}).status_code == 400  # as everywhere in a body
    delivery_id = another_delivery(world, finish(api, f"http://{PUBLIC}/"), url)
    with connections(monkeypatch, world) as made:
        assert deliver_webhook.run_once(delivery_id).state == "refused" and made == []


@one_database
@pytest.mark.parametrize("allow,url", [
    ("", f"http://{PUBLIC}/"), ("", f"HTTPS://{PUBLIC}:8443/x?y=z"), ("", "http://[2606:2800:220:1::1]/"),
    ("", f"http://{PUBLIC}:65535/a\\b"), ("", "http://bücher.example/ü?é"), ("", "http://receiver.example./"),
    ("127.0.0.1:9000", "http://127.0.0.1:9000/"), ("[::1]:9000", "http://[::1]:9000/"),
    ("10.0.0.0/8", "http://10.1.2.3:4567/"), ("localhost:9000", "http://localhost:9000/"),
    ("127.0.0.0/8,::1/128", "http://a.localhost:9000/"), ("64:ff9b::/96", "http://[64:ff9b::102:304]/"),
])
def test_addresses_that_are_taken(api: FlaskClient, world: World, monkeypatch: Any, allow: str, url: str) -> None:
    world.set(CALLBACK_ALLOW=allow)
    name_server(monkeypatch)
    assert api.post("/jobs", json={"n": 5, "callback_url": url}).status_code == 202


@one_database
@pytest.mark.parametrize("allow,opened,closed", [
    ("127.0.0.1:8141", ["127.0.0.1:8141"], [
        "127.0.0.1", "127.0.0.1:80", "127.0.0.1:8140", "127.0.0.1:8142", "127.0.0.2:8141", "localhost:8141",
        "[::1]:8141", "[::ffff:127.0.0.1]:8141", "[::ffff:7f00:1]:8141", "127.1:8141", "0x7f000001:8141",
        "127.0.0.1.:8141", "0.0.0.0:8141", "①②⑦.0.0.1:8141", "here.example:8141", "127.0.0.1:08142"]),
    ("127.0.0.1:80", ["127.0.0.1", "127.0.0.1:80"], ["127.0.0.1:0", "127.0.0.1:", "127.0.0.1:443"]),
    ("10.1.0.0/16", ["10.1.0.0", "10.1.255.255:9000"], [
        "10.0.255.255", "10.2.0.0", "[::ffff:10.1.0.1]", "[64:ff9b::a01:1]", "[2002:a01:1::]", "[::10.1.0.1]"]),
    ("[::1]:8141", ["[::1]:8141"], ["[::1]", "[::]:8141", "[::2]:8141", "127.0.0.1:8141", "localhost:8141"]),
    ("localhost:8141", ["localhost:8141", "LOCALHOST:8141"], [
        "localhost", "localhost.:8141", "a.localhost:8141", "127.0.0.1:8141", "[::1]:8141", "here.example:8141"]),
])
def test_exactly_what_callback_allow_names_is_opened(
    api: FlaskClient, world: World, monkeypatch: Any, allow: str, opened: list[str], closed: list[str],
) -> None:
    name_server(monkeypatch, here_example=[["127.0.0.1"]])
    known = finish(api, f"http://{PUBLIC}/")
    world.set(CALLBACK_ALLOW=allow)
    for origin in opened:
        assert api.post("/jobs", json={"n": 5, "callback_url": f"http://{origin}/"}).status_code == 202, origin
    with connections(monkeypatch, world) as made:
        for origin in closed:
            url = f"http://{origin}/"
            assert api.post("/jobs", json={"n": 5, "callback_url": url}).status_code == 422, origin
            assert deliver_webhook.run_once(another_delivery(world, known, url)).state == "refused", origin
        assert made == []


@one_database
def test_what_opens_one_port_opens_no_other_of_that_host_to_a_connection(world: World) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:8141,localhost:8142")
    for opened in ("127.0.0.1:8141", "localhost:8142"):
        policy, host = addresses.policy_for(f"http://{opened}/"), opened.split(":")[0]
        policy.check_url(f"http://{opened}/")
        with pytest.raises(addresses.SSRFGuardError):
            policy.check_url(f"http://{host}:8143/")


# --- the registries, written down a second time ---

SPECIAL = [ipaddress.ip_network(network) for network in """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 168.63.129.16/32 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24
    192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15
    198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4
    ::/3 2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48 3fff::/20 4000::/2 8000::/1
""".split()]


def near(network: Any) -> list[Any]:
    """Both ends of a block, and their neighbours."""
    first, last, kind = int(network[0]), int(network[-1]), type(network[0])
    steps = (first - 1, first, first + 1, last - 1, last, last + 1)
    return [kind(number) for number in steps if 0 <= number < 2**network.max_prefixlen]


def samples() -> set[Any]:
    chance = random.Random(5)
    blocks = [*SPECIAL, *(block.network for block in addresses.DEFAULT_DENIED.blocks)]
    within = [network[chance.randrange(network.num_addresses)] for network in blocks for _ in range(20)]
    anywhere = [ipaddress.IPv4Address(chance.getrandbits(32)) for _ in range(4000)]
    anywhere6 = [ipaddress.IPv6Address(chance.getrandbits(125) | 1 << 125) for _ in range(4000)]
    return {*within, *anywhere, *anywhere6, *(address for network in blocks for address in near(network))}


def test_every_address_that_is_open_is_a_global_unicast_address_and_the_others_are_not() -> None:
    policy = addresses.policy_for(f"http://{PUBLIC}/")
    for address in samples():
        special = any(address.version == network.version and address in network for network in SPECIAL)
        assert policy.permits_address(address) is not special, address
        if not special:
            assert address.is_global and not (address.is_multicast or address.is_reserved), address
