"""What becomes of the errors of the official SDKs. The offline model plays them, in both formats."""
from typing import NamedTuple

import anthropic
import httpx2
import openai
import pytest

import models
import offline
from real.conftest import FORMATS, side_by_side

SDKS = {"openai": openai, "anthropic": anthropic}


class Case(NamedTuple):
    """An HTTP error, the SDKs' classes for it, and what the agent does: so many `requests`, `said` on stderr. With more
    than one request there is an answer in the end."""
    reply: dict
    classes: tuple  # of openai, of anthropic
    requests: int
    said: tuple
    wait: float = 0  # that a Retry-After asks for


def refusal(status, message, said, *classes, **more):
    return Case({"status": status, "message": message} | more, classes, 1, (message, said))


def passing(status, classes, wait=0, **headers):
    said = f" {status}: ", f"trying again in {wait or 1:g} s (2 of 3)"
    headers = {name.replace("_", "-"): text for name, text in headers.items()}
    return Case({"status": status, "message": "The server is busy.", "headers": headers}, classes, 2, said, wait)


RATE, INTERNAL = ("RateLimitError",) * 2, ("InternalServerError",) * 2
CASES = {
    "400": refusal(400, "messages.1: no such role", "check MODEL and {}_BASE_URL", *["BadRequestError"] * 2),
    "401": refusal(401, "Incorrect API key provided.", "check {}_API_KEY", *["AuthenticationError"] * 2),
    "403": refusal(403, "Your country is not supported.", "check {}_API_KEY", *["PermissionDeniedError"] * 2),
    "404": refusal(404, "The model does not exist.", "check MODEL and {}_BASE_URL", *["NotFoundError"] * 2),
    "413": refusal(413, "Request exceeds the maximum size", "start a new conversation",
                   "APIStatusError", "ContentTooLargeError"),
    # OpenAI's alone: the status of a request that came too early, but it will not do to wait
    "quota": refusal(429, "You exceeded your current quota.", "check your plan", *RATE, code="insufficient_quota"),
    "429": passing(429, RATE),
    "429, Retry-After: 2": passing(429, RATE, 2, Retry_After="2"),
    "429, Retry-After: 0.5": passing(429, RATE, 0.5, Retry_After="0.5"),
    "429, Retry-After is a date": passing(429, RATE, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
    "500": passing(500, INTERNAL),
    "529": passing(529, ("InternalServerError", "OverloadedError")),
}
ALL = [(format, name) for format in FORMATS for name in CASES if (format, name) != ("anthropic", "quota")]
every_case = pytest.mark.parametrize("format, name", ALL)


def address(format, server):
    return server.base_url if format == "openai" else server.root


@every_case
def test_the_error_of_the_sdk(format, name):
    case = CASES[name]
    provider = models.choose({}, format)
    with offline.Server([case.reply]) as server:
        client = models.connect(format, address(format, server), "any-key")
        messages = [{"role": "user", "content": "hi"}]
        ask = {"model": "any", "messages": messages} | ({"max_tokens": 9} if format == "anthropic" else {})
        with pytest.raises(SDKS[format].APIStatusError) as caught:
            [*models.stream(format, client, ask)]
        assert type(caught.value).__name__ == case.classes[FORMATS.index(format)]
        assert caught.value.status_code == case.reply["status"]
        assert len(server.requests) == 1  # the SDK does not try again by itself
        assert models.is_passing(provider, caught.value) == (case.requests > 1)
        assert models.asked_wait(caught.value) == case.wait


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fault, error", [
    ("cut", httpx2.RemoteProtocolError), ("garbage", ValueError), ("end", models.BrokenStream), ("error", None)])
def test_the_error_inside_of_a_stream(format, fault, error):
    """All of them are passing. An error event is an APIError, a dropped connection may be raw or in one."""
    with offline.Server([{"text": "one two three", "fault": fault, "at": 2}]) as server:
        client = models.connect(format, address(format, server), "any-key")
        ask = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        with pytest.raises((error or SDKS[format].APIError, SDKS[format].APIError)) as caught:
            [*models.stream(format, client, ask | ({"max_tokens": 9} if format == "anthropic" else {}))]
        assert models.is_passing(models.choose({}, format), caught.value), repr(caught.value)
        assert models.asked_wait(caught.value) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_nobody_there(format):
    """That is a setting to mend, and nothing to wait for."""
    with offline.Server([]) as server:
        url = address(format, server)
    client = models.connect(format, url, "any-key")
    ask = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(SDKS[format].APIConnectionError) as caught:
        [*models.stream(format, client, ask | ({"max_tokens": 9} if format == "anthropic" else {}))]
    assert not models.is_passing(models.choose({}, format), caught.value)


@pytest.fixture(scope="module")
def runs(agent):
    def one(case):
        format, name = case
        with offline.Server([CASES[name].reply, "fine"]) as server:
            return agent(format, address(format, server)).run("-p", "go"), len(server.requests)
    return side_by_side(one, ALL)


@every_case
def test_what_the_user_sees(runs, format, name):
    case, (run, requests) = CASES[name], runs[format, name]
    assert requests == case.requests, run
    assert (run.code, run.out) == ((0, "fine\n") if case.requests > 1 else (1, "")), run
    for words in case.said:
        assert words.format(format.upper()) in run.err, run
    assert len(run.err.splitlines()) == 1 and "any-key" not in run.err, run
