"""Every fault of llmock, a server that breaks its replies and then judges the client."""
import json
import os
import signal
import time
import urllib.request
from typing import NamedTuple

import pytest
from llmock.pytest_plugin import LLMock
from llmock.simulation import MockResponseSettings
from llmock.testing import LLMockServer

from real.conftest import FORMATS, side_by_side

AGAIN, MORE = "trying again in 1 s (2 of 3)", "trying again in 3 s (3 of 3)"
WRITE = {"name": "write_file", "arguments": {"path": "x.txt", "content": "all of it, and only once"}}
PERMANENT, PASSING = (400, 401, 403, 404, 422), [(408, 409), (429, 500), (502, 503), (504, 529)]


class Fault(NamedTuple):
    """What llmock is told, and what comes of it. Each reply that is not broken says "fine"."""
    script: object
    requests: int
    said: tuple = ()  # on stderr
    code: int = 0
    turns: int = 1


def statuses(llmock, codes):
    for code in codes:
        llmock.fail(code)


FAULTS = {
    "disconnect": Fault(lambda m: m.disconnect(after_chunks=3), 2, (AGAIN,)),
    "disconnect at once": Fault(lambda m: m.disconnect(after_chunks=0), 2, (AGAIN,)),
    "disconnect twice": Fault(lambda m: m.disconnect(after_chunks=3, times=2), 3, (AGAIN, MORE)),
    "disconnect always": Fault(lambda m: m.disconnect(after_chunks=3, times=None), 3, (
        AGAIN, MORE, "check {}_BASE_URL, and the network"), code=1),
    "truncate": Fault(lambda m: m.truncate(after_chunks=4), 2, (AGAIN, "broke off")),
    "truncate before the end": Fault(lambda m: m.truncate(after_chunks=2), 2, (AGAIN, "broke off")),
    "malformed": Fault(lambda m: m.corrupt(after_chunks=3).pace(100), 2, (AGAIN,)),
    "stall": Fault(lambda m: m.stall(after_chunks=2, seconds=0.3), 1),
    "slow first token": Fault(lambda m: m.slow_first_token(0.8), 1),
    "delay": Fault(lambda m: m.delay(0.8), 1),
    "a call that is cut": Fault(lambda m: m.call_tool(**WRITE, times=2).disconnect(after_chunks=4), 3, (
        AGAIN, "● write")),
    "a call that ends early": Fault(lambda m: m.call_tool(**WRITE, times=2).truncate(after_chunks=4), 3, (
        AGAIN, "● write")),
    "malformed arguments": Fault(lambda m: m.break_tool_call(), 2, ("FAIL",)),
    "unknown tool": Fault(lambda m: m.break_tool_call("unknown_tool"), 2, ("● llmock_unknown_tool", "FAIL")),
    "rate limit": Fault(lambda m: m.rate_limit(times=2, retry_after=2), 3, (
        "trying again in 2 s (2 of 3)", "trying again in 2 s (3 of 3)")),
    "outage": Fault(lambda m: m.outage(status=500), 3, (AGAIN, MORE, "check MODEL and {}_BASE_URL"), code=1),
    "context overflow": Fault(lambda m: m.context_overflow(times=None), 1, (
        "start a new conversation, or lower CONTEXT_WINDOW",), code=1),
    "a smaller window": Fault(lambda m: m.call_tool("read_file", {"path": "big.txt"}).limits(context_window=2500), 3, (
        "The model's window is smaller than 64,000 tokens",)),
    "permanent statuses": Fault(lambda m: statuses(m, PERMANENT), len(PERMANENT), (
        "check MODEL and {}_BASE_URL", "check {}_API_KEY"), turns=len(PERMANENT)),
}
for pair in PASSING:  # the third try is right
    FAULTS["{} and {}".format(*pair)] = Fault(lambda m, pair=pair: statuses(m, pair), 3, (
        "trying again in 1 s (2 of 3)", f" {pair[0]}: ", f" {pair[1]}: ", "(3 of 3)"))


def get(server, path):
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{server.url}/_llmock/{path}") as answer:
        return json.load(answer)


def serve():
    return LLMockServer(responses=MockResponseSettings(response_style="static", tool_mode="off"))


@pytest.fixture(scope="module")
def runs(agent):
    """{(format, name of the fault): (run, llmock's verdict, its requests, x.txt)}"""
    def one(case):
        format, name = case
        fault = FAULTS[name]
        with serve() as server:
            fault.script(LLMock(server))
            here = agent(format, server.base_url(format))
            (here.work / "big.txt").write_text("words and words\n" * 800)
            run = here.run("-p", "go", "--yes") if fault.turns == 1 else here.run(input="go\n" * fault.turns)
            written = [file.read_text() for file in here.work.glob("x.txt")]
            return run, get(server, "verdict"), get(server, "requests")["requests"], written
    return side_by_side(one, [(format, name) for format in FORMATS for name in FAULTS])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(runs, format, name):
    run, verdict, requests, written = runs[format, name]
    fault, turns = FAULTS[name], run.out.count("Mock response")
    assert (run.code, len(requests)) == (fault.code, fault.requests), run
    assert turns == (0 if fault.code or name == "permanent statuses" else fault.turns), run
    for words in fault.said:
        assert words.format(format.upper()) in run.err, run
    if AGAIN not in fault.said and name != "rate limit":
        assert "trying again" not in run.err, run
    assert verdict["findings"] == [] and verdict["passed"], run
    assert written == [WRITE["arguments"]["content"]] * ("● write" in fault.said)


@pytest.mark.skipif(os.name == "nt", reason="a process cannot be sent Ctrl-C alone")
@pytest.mark.parametrize("format", FORMATS)
def test_a_stall_can_be_interrupted(agent, format):
    with serve() as server:
        LLMock(server).stall(after_chunks=2, seconds=30)
        here = agent(format, server.base_url(format))
        child, begun = here.start("-p", "go"), time.monotonic()
        while get(server, "scenario")["pending"] and time.monotonic() < begun + 30:
            time.sleep(0.1)
        time.sleep(0.5)  # it is taken when the request arrives, so the stall begins in a moment
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        run = here.finish(child)
        assert (run.code, run.out) == (130, "") and "Interrupted." in run.err, run
        assert time.monotonic() < begun + 25 and get(server, "verdict")["findings"] == []
