"""Every bad input gets a problem, never HTML, never a 500, and leaves nothing behind: alike on both databases."""
from __future__ import annotations

import io
from typing import Any

import pytest
from flask.testing import FlaskClient

from app.api import problems
from tests.conftest import World, one_database

DEEP = 100_000


def problem(answer: Any, status: int, name: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.content_type == "application/problem+json"
    body = answer.json
    assert body["type"] == f"/problems/{name}" and body["status"] == status
    assert body["title"] and body["detail"] and body["instance"]
    assert "Traceback" not in answer.text and "<" not in answer.text.replace("<=", "")
    return body


MALFORMED = [
    b"", b"x", b'{"a": ' + b"1" * 1001 + b"}",
    b"{", b'{"n": 5', b'{"n": 5}}', b'{"n": NaN}', b'{"n": Infinity}', b'{"n": -Infinity}', b'{"n": 1e999}',
    b'{"n": -1e999}', b'{"n": 5, "n": 5}', b'{"a": {"b": 1, "b": 2}}', b'{"n": "\xff"}', b'\xff\xfe{\x00}\x00',
    '{"n": 5}'.encode("utf-16"), '{"n": 5}'.encode("utf-8-sig"), b'{"text": "\\ud800"}', b'{"\\udc00": 1}',
    b'{"text": "a\\u0000b"}', b'{"a\\u0000b": 1}', b'{"text": "\x00"}', b'{"n": ' + b"9" * 5000 + b"}",
    b"[" * 33 + b"]" * 33, b"[" * DEEP + b"]" * DEEP, b'{"a":' * 33 + b"1" + b"}" * 33, b'{"a":' * DEEP,
    b'"' + b'\\"' * 300_000, b"\"" * 500_001,
    b'{"n": 05}', b'{"n": +5}', b"{'n': 5}", b'{"n": 5,}', b"\xc3\x28", b"nul",
]


@pytest.mark.parametrize("path", ["/jobs", "/notes"])
@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:20]))
def test_what_is_not_strict_json(api: FlaskClient, world: World, path: str, body: bytes) -> None:
    problem(api.post(path, data=body, content_type="application/json"), 400, "malformed-json")
    assert world.count("jobs") == 0 and world.count("notes") == 0


INVALID_JOBS = [
    ("null", "#"), ("[]", "#"), ("[1]", "#"), ('"s"', "#"), ("1", "#"), ("true", "#"), ("{}", "#/n"),
    ('{"n": 5, "a b": 1}', "#/a%20b"),
    ('{"n": -1}', "#/n"), ('{"n": 1000000001}', "#/n"), ('{"n": 99999999999999999999}', "#/n"), ('{"n": true}', "#/n"),
    ('{"n": "5"}', "#/n"), ('{"n": 1.5}', "#/n"), ('{"n": null}', "#/n"), ('{"n": []}', "#/n"),
    ('{"n": 5, "m": 6}', "#/m"), ('{"n": 5, "a/b~c": 6}', "#/a~1b~0c"), ('{"n": 5, "kind": "nope"}', "#/kind"),
    ('{"n": 5, "kind": null}', "#/kind"), ('{"n": 5, "kind": ["primes"]}', "#/kind"),
    ('{"n": 5, "callback_url": 5}', "#/callback_url"), ('{"n": 5, "callback_url": ""}', "#/callback_url"),
    ('{"n": 5, "callback_url": "file:///etc/passwd"}', "#/callback_url"),
    ('{"n": 5, "callback_url": "http://127.0.0.1:9/"}', "#/callback_url"),
    ("[" * 32 + "]" * 32, "#"),
]


@pytest.mark.parametrize("body,pointer", INVALID_JOBS)
def test_a_job_that_is_not_one(api: FlaskClient, world: World, body: str, pointer: str) -> None:
    answer = api.post("/jobs", data=body, content_type="application/json")
    found = problem(answer, 422, "invalid-input")
    assert pointer in [flaw["pointer"] for flaw in found["errors"]]
    assert all(flaw["detail"] for flaw in found["errors"])
    assert world.count("jobs") == 0 and world.count("outbox") == 0


@pytest.mark.parametrize("body,pointer", [
    ("{}", "#/text"), ('{"text": ""}', "#/text"), ('{"text": 5}', "#/text"), ('{"text": null}', "#/text"),
    ('{"text": "' + "x" * 10_001 + '"}', "#/text"), ('{"text": "x", "id": 1}', "#/id"),
    ('{"text": "x", "kind": "primes"}', "#/kind"), ('{"text": "x", "callback_url": "ftp://h/"}', "#/callback_url"),
])
def test_a_note_that_is_not_one(api: FlaskClient, world: World, body: str, pointer: str) -> None:
    answer = api.post("/notes", data=body, content_type="application/json")
    found = problem(answer, 422, "invalid-input")
    assert [flaw["pointer"] for flaw in found["errors"]] == [pointer]
    assert world.count("notes") == 0


def test_the_longest_note_of_wide_characters_is_kept(api: FlaskClient) -> None:
    assert api.post("/notes", json={"text": "𝒳" * 10_000}).status_code == 202


@one_database
@pytest.mark.parametrize("content_type", [
    None, "", "text/plain", "application/problem+json", "application/x-www-form-urlencoded", "multipart/form-data",
    "text/json", "application/jsonp", "application/*", "*/*", "json", "application/json, text/plain"])
def test_what_is_not_declared_as_json(api: FlaskClient, content_type: str | None) -> None:
    problem(api.post("/jobs", data=b'{"n": 5}', content_type=content_type), 415, "not-json")


@one_database
@pytest.mark.parametrize("content_type", [
    "application/json; charset=utf-8", "APPLICATION/JSON", 'application/json;charset="UTF-8"', "application/json; v=1",
    "application/json; charset=utf-16"])
def test_json_may_be_declared_in_any_spelling(api: FlaskClient, content_type: str) -> None:
    """JSON has no charset parameter: it is UTF-8 whatever one says (RFC 8259 8.1, 11)."""
    assert api.post("/jobs", data=b'{"n": 5}', content_type=content_type).status_code == 202


@one_database
def test_a_body_of_a_mebibyte_and_one_byte(api: FlaskClient, world: World) -> None:
    body = b'{"n": 5}' + b" " * (1024 * 1024 - 8)
    assert api.post("/jobs", data=body, content_type="application/json").status_code == 202
    problem(api.post("/jobs", data=body + b" ", content_type="application/json"), 413, "too-large")
    chunked = {"input_stream": io.BytesIO(body + b" "), "headers": {"Transfer-Encoding": "chunked"},
               "content_type": "application/json", "environ_overrides": {"wsgi.input_terminated": True}}
    problem(api.post("/jobs", **chunked), 413, "too-large")
    assert world.count("jobs") == 1


@one_database
def test_a_body_that_ends_early_or_is_compressed(api: FlaskClient, world: World) -> None:
    told = {"wsgi.input_terminated": True, "CONTENT_LENGTH": "100"}
    answer = api.post("/jobs", input_stream=io.BytesIO(b'{"n": 5}'), content_type="application/json",
                      environ_overrides=told)
    problem(answer, 400, "malformed-json")
    for coding in ("gzip", "br", "identity, gzip", "nope"):
        told = {"Content-Encoding": coding}
        answer = api.post("/jobs", data=b'{"n": 5}', headers=told, content_type="application/json")
        problem(answer, 415, "not-json")
    assert world.count("jobs") == 0


def test_what_the_database_tells_stays_out_of_logs_and_answers(api: FlaskClient, world: World, caplog: Any) -> None:
    """PostgreSQL repeats the whole row in its error's detail."""
    if world.dialect == "sqlite":
        return
    world.sql("ALTER TABLE jobs ADD CONSTRAINT odd CHECK (input NOT LIKE '%123457%')")
    problem(api.post("/jobs", json={"n": 123457}), 500, "internal")
    assert "CheckViolation" in caplog.text + str([record.__dict__ for record in caplog.records])
    assert "123457" not in str([record.__dict__ for record in caplog.records])


def test_a_database_that_cannot_be_written_now_is_unavailable(api: FlaskClient, world: World) -> None:
    from app import db

    if world.dialect == "sqlite":
        return
    database = world.sql("SELECT current_database()")[0][0]
    world.sql(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    db.dispose()
    problem(api.post("/jobs", json={"n": 5}), 503, "unavailable")


@one_database
def test_a_wrong_method_is_told_which_ones_there_are(api: FlaskClient) -> None:
    answer = api.delete("/jobs")
    problem(answer, 405, "method-not-allowed")
    assert "POST" in answer.headers["Allow"]
    assert api.put("/notes/1").headers["Allow"]


@one_database
@pytest.mark.parametrize("path", [
    "/", "//jobs", "/jobs//x", "/nowhere", "/jobs/x/y/z", "/%00", "/problems/nope", "/é", "/%ff"])
def test_an_unknown_address(api: FlaskClient, path: str) -> None:
    problem(api.get(path), 404, "not-found")


@one_database
def test_an_address_with_a_slash_more_is_the_same(api: FlaskClient) -> None:
    assert api.post("/jobs/", json={"n": 5}).status_code == 202


@one_database
def test_a_database_that_is_away(api: FlaskClient, world: World) -> None:
    from app import db

    db.dispose()
    world.set(DATABASE_URL="postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    for answer in (api.post("/jobs", json={"n": 5}), api.get("/jobs/01a2291c-4328-73fb-86ef-c5a9895026da")):
        found = problem(answer, 503, "unavailable")
        assert answer.headers["Retry-After"].isdigit()
        assert "127.0.0.1" not in str(found)
    assert api.get("/health/ready").status_code == 503
    assert api.get("/health").status_code == 200


@one_database
@pytest.mark.parametrize("name", problems.TABLE)
def test_each_problem_has_a_page(api: FlaskClient, name: str) -> None:
    page = api.get(f"/problems/{name}")
    assert page.status_code == 200 and page.content_type.startswith("text/html")
    assert problems.TABLE[name].title in page.text


# --- the door's edges, exactly ---


def nested(depth: int, opening: str, closing: str) -> str:
    """JSON that is so many levels deep, of these brackets in turn; a colon in an opening asks for nothing more."""
    levels = [(opening.split()[at % len(opening.split())], closing.split()[at % len(closing.split())])
              for at in range(depth)]
    return "".join(opened for opened, _ in levels) + "1" + "".join(closed for _, closed in reversed(levels))


def send(api: FlaskClient, body: str | bytes, path: str = "/jobs", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return api.post(path, data=body, headers={"Content-Type": "application/json", **named})


@one_database
@pytest.mark.parametrize("opening,closing", [("[", "]"), ('{"a":', "}"), ('{"a": [', "} ]"), ('[ {"a":', "] }")])
def test_thirty_two_levels_are_read_and_thirty_three_are_not(api: FlaskClient, opening: str, closing: str) -> None:
    assert problem(send(api, nested(32, opening, closing)), 422, "invalid-input")
    assert "32 levels" in problem(send(api, nested(33, opening, closing)), 400, "malformed-json")["detail"]
    assert "32 levels" in problem(send(api, nested(DEEP, opening, closing)), 400, "malformed-json")["detail"]
    whole = '{"n": 5, "m": ' + nested(31, opening, closing) + "}"
    assert problem(send(api, whole), 422, "invalid-input")["errors"][0]["pointer"] == "#/m"
    problem(send(api, whole.replace("1", "[1]", 1)), 400, "malformed-json")


@one_database
def test_brackets_in_a_text_and_side_by_side_are_not_depth(api: FlaskClient) -> None:
    assert send(api, '{"text": "' + "[{" * 4000 + '"}', "/notes").status_code == 202
    assert send(api, '{"text": "\\"[\\\\"}', "/notes").status_code == 202
    problem(send(api, '{"n": 5, "m": [' + ", ".join(["[[]]"] * 1000) + "]}"), 422, "invalid-input")


PLACES = ('{"n": %s}', '{"n": 5, "m": %s}', '{"n": 5, "m": [%s]}', '{"n": 5, "m": {"a": %s}}', '{"n": 5, "kind": %s}',
          '{"n": 5, "callback_url": %s}', "[%s]", "%s")


@pytest.mark.parametrize("number,status", [
    ("9" * 20, 422), ("-" + "9" * 20, 422), ("9" * 1000, 422), ("9" * 1001, 400), ("9" * 5000, 400),
    ("-" + "9" * 5000, 400),
    ("1e5000", 400), ("1e" + "9" * 5000, 400),
    ("9" * 5000 + ".0", 400), ("1.7976931348623157e308", 422), ("1.8e308", 400), ("-1.8e308", 400), ("5e-1", 422),
    ("-0", None)], ids=lambda value: str(value)[:12])
def test_a_number_of_any_length_in_every_place(
    api: FlaskClient, world: World, number: str, status: int | None,
) -> None:
    name = {400: "malformed-json", 422: "invalid-input"}
    for place in PLACES[status is None:]:
        problem(send(api, place % number), status or 422, name[status or 422])
    assert world.count("jobs") == 0
    if status is None:
        assert send(api, PLACES[0] % number).status_code == 202


@one_database
@pytest.mark.parametrize("text", ["\\ud800", "\\udfff", "\\udc00\\ud800", "a\\ud83dz", "\\u0000", "a\\u0000b"])
def test_half_a_surrogate_pair_or_a_nul_in_every_place(api: FlaskClient, world: World, text: str) -> None:
    for body in ('{"n": 5, "kind": "%s"}', '{"n": 5, "%s": 1}', '{"n": 5, "m": {"%s": 1}}', '{"n": 5, "m": ["%s"]}',
                 '{"n": 5, "callback_url": "http://h/%s"}', '["%s"]', '"%s"'):
        problem(send(api, body % text), 400, "malformed-json")
    problem(send(api, '{"text": "%s"}' % text, "/notes"), 400, "malformed-json")
    assert world.count("jobs") == 0 and world.count("notes") == 0


def test_every_other_character_is_kept_as_it_came(api: FlaskClient, world: World) -> None:
    text = "\\u0001\\u001f\\u007f\\u2028\\ufeff\\uffff\\ud83d\\ude00\\\"\\\\é\u0301"
    answer = send(api, '{"text": "%s"}' % text, "/notes")
    assert answer.status_code == 202, answer.text
    kept = "\x01\x1f\x7f\u2028\ufeff\uffff😀\"\\é\u0301"
    assert answer.json["text"] == kept and api.get("/notes/1").json["text"] == kept


@pytest.mark.parametrize("path,pointer", [
    ("/jobs?kind=%00", "#/kind"), ("/jobs?cursor=%00", "#/cursor"), ("/jobs?status=queued%00", "#/status"),
    ("/jobs?limit=1%00", "#/limit"), ("/notes?cursor=1%00", "#/cursor"), ("/notes?%00=1", "#/%00"),
    ("/jobs?kind=primes%0A", "#/kind"), ("/jobs?kind=%FF", "#/kind"), ("/jobs?kind=%ED%A0%80", "#/kind"),
    ("/notes?limit=" + "9" * 5000, "#/limit"), ("/notes?cursor=" + "9" * 20, "#/cursor"),
    ("/jobs?limit=true", "#/limit"),
    ("/jobs?limit=NaN", "#/limit"), ("/jobs?a/b~c=1&a/b~c=2", "#/a~1b~0c"), ("/notes?é=1&é=2", "#/%C3%A9")])
def test_a_query_that_cannot_be_one(api: FlaskClient, path: str, pointer: str) -> None:
    found = problem(api.get(path), 422, "invalid-input")
    assert [flaw["pointer"] for flaw in found["errors"]] == [pointer]


@one_database
def test_which_content_types_are_json(api: FlaskClient, world: World) -> None:
    """RFC 8259 knows no charset: whatever is declared, the body is read as UTF-8."""
    good = ("application/json", "Application/JSON", "application/json;charset=utf-8", " application/json ",
            'application/json; charset="utf-8"; a=b', "application/json;", "application/json; charset=utf-16")
    for value in good:
        assert send(api, '{"n": 5}', Content_Type=value).status_code == 202, value
    accepted = world.count("jobs")
    for value in ("application/problem+json", "application/jsonp", "application/json-seq", "application/*", "*/*",
                  "json",
                  "text/json", "application/json, application/json", "application/json text/html", ";application/json",
                  "application / json", "application/vnd.api+json", "application/json\xa0"):
        problem(send(api, '{"n": 5}', Content_Type=value), 415, "not-json")
    problem(send(api, '{"n": 5}'.encode("utf-16"), Content_Type="application/json; charset=utf-16"), 400,
            "malformed-json")
    assert world.count("jobs") == accepted == len(good)


@one_database
def test_a_refused_body_says_where_it_stops_being_json(api: FlaskClient) -> None:
    for body, words in ((b"", "line 1, column 1"), (b'{"n": 5,\n}', "line"), (b'{"n": "\xff"}', "byte 7"),
                        (b'\xef\xbb\xbf{"n": 5}', "line 1, column 1"), (b'{"n": NaN}', "NaN")):
        assert words in problem(send(api, body), 400, "malformed-json")["detail"]


@pytest.mark.parametrize("keys", [
    ("k k", '"k k"'), (" k", "k\t"), ("'", '"\'"'), ("\\", '"\\\\"'), ('a"b', '"a\\"b"'),
    ("x" * 255, '"' + "x" * 255 + '"'),
    ("\\" * 255, '"' + "\\\\" * 255 + '"'), ("k,l", '"k,l"'), ("%00", '"%00"'), ("?1", '"?1"')])
def test_an_odd_key_bare_or_quoted_is_one_key(api: FlaskClient, world: World, keys: tuple[str, str]) -> None:
    first, again = (send(api, '{"n": 5}', Idempotency_Key=key) for key in keys)
    assert first.status_code == again.status_code == 202 and first.data == again.data
    assert again.headers["Idempotent-Replayed"] == "true" and world.count("jobs") == 1


@one_database
def test_a_key_that_is_no_key_leaves_nothing(api: FlaskClient, world: World) -> None:
    for key in ("", " ", "\t", '""', '"', '"k', '"k"x', '"k";a=1', '"\\x"', '"\\"', "\x7f", "k\x01", "\xe9", '"\xe9"',
                "x" * 256, '"' + "\\\\" * 256 + '"'):
        for path in ("/jobs", "/notes"):
            problem(send(api, '{"n": 5, "text": "a"}', path, Idempotency_Key=key), 400, "bad-idempotency-key")
    assert world.count("jobs") == 0 and world.count("idempotency_keys") == 0
