"""/openapi.json and /docs: what the document says is so, and all that is so is in it."""
from __future__ import annotations

import configparser
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import jsonschema_rs
import openapi_pydantic
import pytest
from flask.testing import FlaskClient
from pydantic import BaseModel, Field, PlainValidator
from typing_extensions import Annotated

from app import states
from app.api import create_app, description, models, openapi, problems
from tests import odd_inputs, promised
from tests.conftest import World, one_database
from tests.running import a_kind, submit

ROOT = Path(__file__).parent.parent


def schemas_in(value: Any) -> Any:
    """Every schema under a media type, a header or a parameter, and each component."""
    if isinstance(value, dict):
        if isinstance(value.get("schema"), dict):
            yield value["schema"]
        for member in value.values():
            yield from schemas_in(member)
    elif isinstance(value, list):
        for member in value:
            yield from schemas_in(member)


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(
        {**schema, "components": document["components"]}, validate_formats=True)


def body_of(document: dict[str, Any], path: str) -> jsonschema_rs.Draft202012Validator:
    return validator(document, document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


# --- the document ---


@one_database
def test_it_is_a_document_of_openapi_3_1(api: FlaskClient) -> None:
    document = api.get("/openapi.json").json
    assert document["openapi"].startswith("3.1.")
    openapi_pydantic.OpenAPI.model_validate(document)
    for schema in (*schemas_in(document), *document["components"]["schemas"].values()):
        jsonschema_rs.meta.validate(schema)
        validator(document, schema)  # its references lead somewhere


@one_database
def test_every_reference_and_link_leads_somewhere(api: FlaskClient) -> None:
    document = api.get("/openapi.json").json
    for reference in re.findall(r'"(#/components/[^"]+)"', api.get("/openapi.json").text):
        found: Any = document
        for step in reference[2:].split("/"):
            found = found[step]
    by_id = {operation["operationId"]: operation for _, operation in promised.operations(document)}
    assert len(by_id) == len(promised.operations(document))
    links = [link for operation in by_id.values() for answer in operation["responses"].values()
             for link in answer.get("links", {}).values()]
    assert len(links) > 5 and {link["operationId"] for link in links} <= set(by_id)


@one_database
def test_it_has_each_route_and_no_other(api: FlaskClient) -> None:
    document = api.get("/openapi.json").json
    routed = {
        f"{method.lower()} {promised.template(rule.rule)}" for rule in api.application.url_map.iter_rules()
        for method in rule.methods or () if method not in ("HEAD", "OPTIONS")}
    described = {name for name, _ in promised.operations(document)}
    assert routed == {name for name in described if not name.startswith("head ")}


@one_database
def test_each_status_is_that_of_a_problem_it_names(api: FlaskClient) -> None:
    document = api.get("/openapi.json").json
    named: set[str] = set()
    for name, operation in promised.operations(document):
        assert {"500"} <= set(operation["responses"]), name
        assert operation["summary"] and operation["tags"], name
        for status, answer in operation["responses"].items():
            content = answer.get("content", {}).get("application/problem+json", {})
            for problem in content.get("examples", {}):
                assert problems.TABLE[problem].status == int(status)
                named.add(problem)
            assert status in ("200", "202", "304") or content or answer.get("content") or name.startswith("head ")
    assert named | {"method-not-allowed", "bad-request"} == set(problems.TABLE)  # those are of no operation


def test_the_problems_that_it_speaks_of_are_in_the_table() -> None:
    source = "".join(path.read_text() for path in (ROOT / "app/api/operations").glob("*.py"))
    spoken = set(re.findall(r'"([a-z-]+)"', "".join(re.findall(
        r"(?:refusals=|_UNREADABLE = |SUBMISSION = )([\[(].*?[\])])", source, re.DOTALL))))
    assert {"expired", "key-reused"} <= spoken
    assert spoken <= set(problems.TABLE)


@one_database
def test_its_examples_are_what_their_schemas_say(api: FlaskClient) -> None:
    document, seen = api.get("/openapi.json").json, 0
    for name, operation in promised.operations(document):
        for answer in (*operation["responses"].values(), operation.get("requestBody", {})):
            for media in answer.get("content", {}).values():
                for example in media.get("examples", {}).values():
                    validator(document, media["schema"]).validate(example["value"])
                    seen += 1
        for parameter in (*operation.get("parameters", []), *document["paths"][name.split()[1]].get("parameters", [])):
            if "example" in parameter:
                validator(document, parameter["schema"]).validate(parameter["example"])
    assert seen > 50


def test_its_words_are_those_of_the_tables() -> None:
    assert get_args(models.JobError.model_fields["code"].annotation) == states.ERROR_CODES
    assert get_args(models.Callback.model_fields["status"].annotation) == states.DELIVERY_STATES
    statuses = [get_args(model.model_fields["status"].annotation)[0] for model in (
        models.QueuedJob, models.RunningJob, models.SucceededJob, models.FailedJob)]
    assert tuple(statuses) == states.JOB_STATUSES


def test_its_version_is_that_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert description.VERSION == config["metadata"]["version"]


@one_database
def test_it_is_the_same_whatever_host_is_asked_for(api: FlaskClient, world: World) -> None:
    plain = api.get("/openapi.json")
    odd = api.get("/openapi.json", headers={"Host": "evil.example", "X-Forwarded-Host": "evil2.example",
                                            "X-Forwarded-Prefix": "/evil3"})
    assert plain.data == odd.data and plain.json["servers"] == [{"url": "/"}]
    world.set(TRUSTED_PROXIES=1)
    client = create_app().test_client()
    behind = {"X-Forwarded-Prefix": "/desk"}
    assert client.get("/openapi.json", headers=behind).json["servers"] == [{"url": "/desk"}]
    assert 'href="/desk/docs/' in client.get("/docs", headers=behind).text


@one_database
def test_a_token_is_asked_for_where_one_is_needed(world: World) -> None:
    open_document = openapi.document()
    world.set(API_TOKENS="ada:secret", RATE_LIMIT="1000/minute")
    client = create_app().test_client()
    for name, operation in promised.operations(client.get("/openapi.json").json):
        open_to_all = name.split()[1].startswith(("/health", "/openapi.json", "/docs", "/problems"))
        assert operation["security"] == ([] if open_to_all else [{"bearer": []}]), name
        assert ("401" in operation["responses"]) is not open_to_all, name
    assert open_document["paths"]["/jobs"]["post"]["security"] == [{}, {"bearer": []}]
    for path in ("/openapi.json", "/docs", "/docs/start.js"):
        assert client.get(path).status_code == 200
    assert client.get("/docs/nothing").status_code == 404
    for path, status in (("/docs", 405), ("/health", 405), ("/jobs", 401), ("/jobs/x", 401), ("/nowhere", 401)):
        assert client.delete(path).status_code == status


# --- every answer of every test is held to it ---


def _tampered(**changes: Any) -> Any:
    def tamper(answer: Any) -> Any:
        answer.status_code = changes.get("status", answer.status_code)
        answer.headers.update(changes.get("headers", {}))
        for name in changes.get("without", []):
            del answer.headers[name]
        if "members" in changes:
            answer.set_data(json.dumps({**answer.json, **changes["members"]}))
        return answer

    return tamper


@one_database
@pytest.mark.parametrize("changes", [
    {"status": 201}, {"headers": {"X-More": "1"}}, {"headers": {"Content-Type": "text/plain"}},
    {"members": {"more": 1}},
    {"headers": {"Retry-After": "soon"}}, {"headers": {"Retry-After": "61"}}, {"without": ["ETag"]},
    {"members": {"status": "waiting"}}, {"members": {"status": "succeeded"}}, {"members": {"created_at": "today"}},
    {"members": {"result": 1}}, {"without": ["Cache-Control"]},
], ids=str)
def test_an_answer_that_is_not_described_fails_its_test(api: FlaskClient, changes: dict[str, Any]) -> None:
    job_id = submit(api, n=5)
    api.get(f"/jobs/{job_id}")
    process, tamper = api.application.process_response, _tampered(**changes)
    api.application.process_response = lambda response: tamper(process(response))  # type: ignore[method-assign]
    with pytest.raises((AssertionError, jsonschema_rs.ValidationError)):
        api.get(f"/jobs/{job_id}")


# --- what POST takes ---


BODIES = [
    {"n": 5}, {"n": 0}, {"n": 10**9}, {"n": 10**9 + 1}, {"n": -1}, {"n": 5.0}, {"n": 5e0}, {"n": 1.5}, {"n": True},
    {"n": "5"}, {"n": None}, {"n": 10**30}, {"n": 1e300}, {}, {"m": 1}, {"n": 5, "m": 1}, {"n": 5, "kind": "primes"},
    {"n": 5, "kind": None}, {"n": 5, "kind": "nope"}, {"kind": "history", "note_id": 1}, [], None, "x", 5,
    {"n": 5, "callback_url": None}, {"n": 5, "callback_url": 5}, {"n": 5, "callback_url": ""},
    {"n": 5, "callback_url": "http://127.0.0.1:9/a?b=c"}, {"n": 5, "callback_url": "HTTPS://127.0.0.1:9"},
    {"n": 5, "callback_url": "ftp://127.0.0.1:9/"}, {"n": 5, "callback_url": "http://u:p@127.0.0.1:9/"},
    {"n": 5, "callback_url": "http://127.0.0.1:9/#x"}, {"n": 5, "callback_url": "http://127.0.0.1:9/" + "x" * 2048},
    {"n": 5, "callback_url": "http://"}, {"n": 5, "callback_url": "http://127.0.0.1:9/a b"},
]


@one_database
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body)[:40])
def test_the_schema_takes_a_job_when_the_service_does(api: FlaskClient, world: World, body: Any) -> None:
    world.set(CALLBACK_ALLOW="127.0.0.1:9")
    taken = api.post("/jobs", json=body).status_code == 202
    assert body_of(api.get("/openapi.json").json, "/jobs").is_valid(body) is taken


@one_database
@pytest.mark.parametrize("body", [
    {"text": "x"}, {"text": ""}, {"text": "𝒳" * 10_000}, {"text": "x" * 10_001}, {"text": "a\nb"}, {"text": "a\x00b"},
    {"text": "x\n"}, {"text": 5}, {"text": None}, {}, {"text": "x", "id": 1}, {"text": "x", "callback_url": None}],
    ids=lambda body: repr(body)[:40])
def test_the_schema_takes_a_note_when_the_service_does(api: FlaskClient, body: Any) -> None:
    taken = api.post("/notes", json=body).status_code == 202
    assert body_of(api.get("/openapi.json").json, "/notes").is_valid(body) is taken


class Bed(BaseModel):
    name: str
    beside: list["Bed"] = []


class Garden(BaseModel):
    beds: dict[str, Bed]
    shade: float = 0
    note: str | None = None


class Odd(BaseModel):
    way: Annotated[Any, PlainValidator(lambda value: value)] = Field(default=1)


GARDENS = [
    {"beds": {}}, {"beds": {"a": {"name": "x"}}}, {"beds": {"a": {"name": "x", "beside": [{"name": "y"}]}}},
    {"beds": {"a": {"name": "x", "beside": [{"name": 5}]}}}, {"beds": {"a": {"name": "x", "size": 1}}},
    {"beds": {"a": {"name": "x\x00"}}}, {"beds": {}, "shade": 1}, {"beds": {}, "shade": True},
    {"beds": {}, "note": None}, {"beds": {}, "more": 1}, {}, {"beds": []},
]


@one_database
def test_a_kind_of_ones_own_is_a_variant_with_its_own_schema(world: World) -> None:
    with a_kind(print, input=Garden) as garden, a_kind(print, input=Bed) as bed, a_kind(print, input=Odd) as odd:
        api = create_app().test_client()
        takes = body_of(api.get("/openapi.json").json, "/jobs")
        for body in ({"kind": garden, **one} for one in GARDENS):
            taken = api.post("/jobs", json=body).status_code == 202
            assert takes.is_valid(body) is taken, body
        for body in ({"kind": bed, "name": "x"}, {"kind": odd}, {"kind": odd, "way": [1]}, {"n": 5}):
            assert api.post("/jobs", json=body).status_code == 202 and takes.is_valid(body), body
        for body in ({"name": "x"}, {"kind": bed, "n": 5}, {"beds": {}}):
            assert api.post("/jobs", json=body).status_code == 422 and not takes.is_valid(body), body


@one_database
def test_the_schema_of_an_odd_kind_takes_what_its_validator_takes(world: World) -> None:
    wrong = []
    with contextlib.ExitStack() as stack:
        tried = [(stack.enter_context(a_kind(print, input=model)), model, bodies) for model, bodies in odd_inputs.TRIED]
        api = create_app().test_client()
        document = api.get("/openapi.json").json
        takes = body_of(document, "/jobs")
        for schema in document["components"]["schemas"].values():
            jsonschema_rs.meta.validate(schema)
        for kind, model, bodies in tried:
            for body in ({"kind": kind, **one} for one in bodies):
                status = api.post("/jobs", json=body).status_code
                taken = (takes.is_valid(body), takes.is_valid({**body, "callback_url": None}))
                if status not in (202, 422) or taken[0] is not (status == 202) or taken[1] < taken[0]:
                    wrong.append((model.__name__, body, status, taken))
    assert not wrong, wrong
    assert "(?i)" not in json.dumps(document)  # which ECMA-262 does not have


@one_database
def test_a_kind_that_cannot_be_described_is_open_and_spoils_no_other(world: World, caplog: Any) -> None:
    plain = openapi.document()
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(a_kind(print, input=model)) for model in odd_inputs.UNDESCRIBED]
        document = create_app().test_client().get("/openapi.json").json
    schemas = document["components"]["schemas"]
    for name in names:
        schema = schemas.pop(f"NewJob.{name}")
        assert "cannot be said" in schema["description"] and schema["required"] == ["kind"]
        assert validator(document, schema).is_valid({"kind": name, "a": 5, "more": [1]})
        assert not validator(document, schema).is_valid({"kind": "primes", "a": 5})
    assert schemas == plain["components"]["schemas"]
    said = [record for record in caplog.records if record.msg == "an input cannot be described"]
    assert {record.schema for record in said} == {f"NewJob.{name}" for name in names}
    assert "secret" not in "".join(str(record.__dict__) for record in said)


@one_database
def test_metrics_are_neither_limited_nor_away(api: FlaskClient) -> None:
    assert set(api.get("/openapi.json").json["paths"]["/metrics"]["get"]["responses"]) == {"200", "400", "401", "500"}


@one_database
def test_kinds_of_job_modules_appear(world: World, monkeypatch: Any) -> None:
    from app import kinds

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    world.set(JOB_MODULES="greenhouse.watering")
    try:
        schema = create_app().test_client().get("/openapi.json").json["components"]["schemas"]["NewJob.watering"]
        assert schema["properties"]["kind"]["const"] == "watering" and "kind" in schema["required"]
        assert {"beds", "crop", "callback_url"} <= set(schema["properties"])
        assert schema["additionalProperties"] is False
    finally:
        kinds._registered.pop("watering", None)
        sys.modules.pop("greenhouse.watering", None)


# --- the page ---


@one_database
def test_the_page_loads_from_nowhere_else(api: FlaskClient) -> None:
    page = api.get("/docs")
    assert page.headers["Cache-Control"] == "no-store"
    addresses = re.findall(r'(?:src|href|data-document)="([^"]*)"', page.text)
    assert len(addresses) == 5 and "<script>" not in page.text and "style=" not in page.text
    for address in addresses:
        parts = urlsplit(address)
        assert (parts.scheme, parts.netloc) == ("", "") and parts.path.startswith("/")
        assert api.get(address).status_code == 200
    policy = dict(part.split(" ", 1) for part in page.headers["Content-Security-Policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert {source for sources in policy.values() for source in sources.split()} == {
        "'self'", "'none'", "'unsafe-inline'", "data:"}
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert "validatorUrl: null" in api.get("/docs/start.js").text
    style = api.get("/docs/swagger-ui.css").text
    assert "url(http" not in style and "url(//" not in style and "@import" not in style


@one_database
@pytest.mark.parametrize("path", ["/docs/nothing.js", "/docs/LICENSE", "/docs/..%2f__init__.py", "/docs/a/b"])
def test_an_unknown_part_of_the_page(api: FlaskClient, path: str) -> None:
    answer = api.get(path)
    assert answer.status_code == 404 and answer.content_type == "application/problem+json"
