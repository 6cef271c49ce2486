"""The two formats: what is made of anything that a server may answer, right or wrong, and what goes back to it."""
import json
import re
from types import SimpleNamespace

import agent as program
import models
import offline
import pytest
from anthropic.types import RawMessageStreamEvent
from conftest import call, refused, step
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from test_providers import KEYS, LONG, blocks, both, put_files, returned
from test_stream import finish


# Raw replies in Anthropic's format

def frame(*events, start=None, delta=None, stop="end_turn"):
    """The events of a reply, with the usage that its start and its end tell."""
    message = {"id": "m", "type": "message", "role": "assistant", "model": "x", "content": [], "stop_reason": None,
               "stop_sequence": None, "usage": start or {"input_tokens": 0, "output_tokens": 0}}
    end = {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": delta or {}}
    return {"chunks": [{"type": "message_start", "message": message}, *events, end, {"type": "message_stop"}]}


def begin(index, **block):
    return {"type": "content_block_start", "index": index, "content_block": block}


def piece(index, kind, text):
    part = {"input_json": "partial_json"}.get(kind, kind)
    return {"type": "content_block_delta", "index": index, "delta": {"type": f"{kind}_delta", part: text}}


def whole(index, block):
    """A block as a server streams it: empty first, then each part in two pieces."""
    parts = {name: value for name, value in block.items() if name in ("thinking", "signature", "text", "input")}
    texts = {"input_json" if name == "input" else name: json.dumps(value) if name == "input" else value
             for name, value in parts.items()}
    empty = {name: {} if name == "input" else "" for name in parts}
    deltas = [piece(index, kind, half) for kind, text in texts.items() for half in (text[:7], text[7:])]
    return [begin(index, **block | empty), *deltas, {"type": "content_block_stop", "index": index}]


def say(*content, **more):
    """A reply of these blocks; a text stands for a block of it."""
    return frame(*(event for n, part in enumerate(content) for event in whole(n, as_block(part))), **more)


def as_block(part):
    return {"type": "text", "text": part} if isinstance(part, str) else part


def thought(text):
    return {"type": "thinking", "thinking": text, "signature": offline.sign(text)}


def use(id, name, **input):
    return {"type": "tool_use", "id": id, "name": name, "input": input}


SO_FAR = {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 3}}


# What a model may say in Anthropic's format

CONTENT = [thought("先看 around\n"), "I look.", {"type": "redacted_thinking", "data": "EuYB"}, use("a", "list_dir"),
           thought(""), thought("and then"), " and read ", use("b", "read_file", path="a.txt"), "\n"]


@pytest.mark.parametrize("provider", ["anthropic", "zhipu"])
def test_thinking_goes_back_as_it_came(agent, provider):
    """Between texts and calls, with its signatures, and the part that only the provider can read."""
    put_files(agent)
    agent.format, agent.env[KEYS[provider]] = "anthropic", "key-1234"
    last = [thought("enough"), "It is alpha."]
    run = agent.run([say(*CONTENT, stop="tool_use"), say(*last), "again"], input="go\nmore\n")
    assert (run.out, refused(run.requests)) == ("It is alpha.\nagain\n", []) and "先看 around" in run.err
    _, first, results, second, _ = (message["content"] for message in run.requests[2].body["messages"])
    assert first == [as_block(part) for part in CONTENT[:-1]]       # a text of nothing but space is refused
    assert second == [as_block(part) for part in last] and len(results) == 2


UNSIGNED = [{}, {"signature": ""}, {"signature": None}]


@pytest.mark.parametrize("more", UNSIGNED, ids=["no signature", "an empty one", "null"])
def test_thinking_that_is_not_signed_is_shown_and_not_sent_back(agent, more):
    """The provider would refuse it."""
    agent.format = "anthropic"
    thinking = [begin(0, type="thinking", thinking="", **more), piece(0, "thinking", "hm, let me see")]
    run = agent.run([frame(*thinking, *whole(1, use("a", "list_dir")), stop="tool_use"),
                     frame(*thinking, *whole(1, as_block("one"))), "two"], input="go\nmore\n")
    assert (run.out, refused(run.requests)) == ("one\ntwo\n", []) and run.err.count("hm, let me see") == 2
    assert [[block["type"] for block in message["content"]] for message in run.requests[-1].body["messages"]] == [
        ["text"], ["tool_use"], ["tool_result"], ["text"], ["text"]]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
parts = st.one_of(texts.map(thought), texts.filter(str.strip).map(as_block),
                  texts.map(lambda data: {"type": "redacted_thinking", "data": data}),
                  st.dictionaries(st.sampled_from("abc"), texts).map(lambda input: use("", "list_dir", **input)))
EVENT = TypeAdapter(RawMessageStreamEvent)


@settings(deadline=None)
@given(st.lists(parts, min_size=1, max_size=8))
def test_any_content_goes_back_as_it_came(content):
    """Without thinking, text before calls: the order says nothing then."""
    content = [block | {"id": f"toolu_{n}"} if "id" in block else block for n, block in enumerate(content)]
    events = [EVENT.validate_python(event) for event in say(*content, delta={"output_tokens": 1})["chunks"]]
    client = SimpleNamespace(messages=SimpleNamespace(create=lambda **_: events))
    *_, (_, message) = models.anthropic_stream(client, {"model": "m", "max_tokens": 1})
    sent = models.blocks_of(json.loads(json.dumps(program.valid(message, []))))
    if not any("thinking" in block["type"] for block in content):
        text = "".join(block.get("text", "") for block in content)
        content = [as_block(text)] * bool(text) + [block for block in content if block["type"] == "tool_use"]
    assert sent == content


LIST, READ, TEXT = ("list_dir", {}), ("read_file", {"path": "a.txt"}), '{"path": "a.txt"}'
A, B = use("a", "list_dir"), use("b", "read_file", path="a.txt")
ODD = {     # events -> the calls
    "the input whole at the start": ([begin(0, **B)], [READ]),
    "and an empty piece": ([begin(0, **B), piece(0, "input_json", "")], [READ]),
    "no input": ([begin(0, **A), piece(0, "input_json", "")], [LIST]),
    "text at the start": ([begin(0, type="text", text="a"), piece(0, "text", "b"), *whole(1, A)], [LIST]),
    "interleaved": ([begin(0, **A), begin(1, **use("b", "read_file")), piece(1, "input_json", TEXT[:5]),
                     piece(0, "input_json", "{}"), piece(1, "input_json", TEXT[5:])], [LIST, READ]),
    "index gaps": ([*whole(2, A), *whole(7, B)], [LIST, READ]),
    "one id for two": ([*whole(0, A), *whole(1, B | {"id": "a"})], [LIST, READ]),
    "no input and no id": ([begin(0, type="tool_use", name="list_dir")], [LIST]),
    "a text that never comes": ([begin(0, type="text"), *whole(1, A)], [LIST]),
    "comments, pings, news": ([": still here", {"type": "ping"}, *whole(0, A), {"type": "news"}], [LIST]),
}


def test_calls_are_assembled_whatever_the_server_does(agent):
    put_files(agent)
    agent.format, script = "anthropic", [frame(*events, stop="tool_use") for events, _ in ODD.values()]
    for reply in script:
        reply["chunks"][-2:] = [SO_FAR, reply["chunks"][-2], SO_FAR, reply["chunks"][-1]]
    run = agent.task([*script, "done"])     # the ids are the same in each reply, which the provider refuses
    ids = [block["id"] for block in blocks(run.requests[-1], "tool_use")]
    assert len(set(ids)) == len(ids) == sum(len(calls) for _, calls in ODD.values())
    assert ids == [block["tool_use_id"] for block in blocks(run.requests[-1], "tool_result")]
    assert run.out == "done\n" and not any(text.startswith("Error") for text in returned(run.requests[-1])), run.err
    for (kind, (_, calls)), message in zip(ODD.items(), run.requests[-1].body["messages"][1::2], strict=True):
        made = [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]
        assert made == calls, kind


FULL = {"input_tokens": 100, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 20, "output_tokens": 5}
USAGES = [({}, {}, "0 tokens in (0 cached), 0 out"), (FULL, {}, "150 tokens in (30 cached), 5 out"),
          ({}, FULL, "150 tokens in (30 cached), 5 out"),
          (FULL, {"output_tokens": 9}, "150 tokens in (30 cached), 9 out"),
          (FULL, dict.fromkeys(FULL), "150 tokens in (30 cached), 5 out"), (None, None, "tokens unknown"),
          ({"input_tokens": 100, "output_tokens": 1}, {"output_tokens": 5}, "100 tokens in (0 cached), 5 out"),
          ({}, FULL | {"cache_creation_input_tokens": 0}, "130 tokens in (30 cached), 5 out")]


def test_usage_wherever_it_is_told(agent):
    agent.format, script = "anthropic", [say("ok", start=start, delta=delta) for start, delta, _ in USAGES]
    for reply, (start, *_) in zip(script, USAGES):
        if start is None:
            del reply["chunks"][0]["message"]["usage"], reply["chunks"][-2]["usage"]
    run = agent.run(script, "--time", input="go\n" * len(USAGES))
    assert run.out == "ok\n" * len(USAGES), run.err
    assert re.findall(r"^model [\d.]+ s, (.+)$", run.err, re.M) == [line for *_, line in USAGES]


def test_thinking_is_asked_for_until_it_is_refused(agent):
    agent.format, no = "anthropic", {"status": 400, "message": "adaptive thinking is not supported on this model"}
    run = agent.run([step(call("list_dir")) | {"thinking": "hm"}, no, step(call("list_dir")), "one", "two", "three"],
                    input="one\ntwo\n/new\nthree\n")
    assert run.out == "one\ntwo\nthree\n" and refused(run.requests) == [], run.err
    assert [request.body.get("thinking") for request in run.requests] == [{"type": "adaptive"}] * 2 + [None] * 4
    assert {request.body["max_tokens"] for request in run.requests} == {16_000}


# What goes wrong

HALF = {"thinking": "hm-1", "text": "I write-1", "tool_calls": [call("write_file", path="x", content="1")]}
PASSING = [HALF | {"fault": fault, "at": at} for fault, at in [
    ("cut", 0), ("cut", 4), ("cut", 99), ("end", 4), ("end", 99), ("garbage", 4), ("error", 99), ("empty", 0)]]
PASSING += [{"status": 529, "message": "Overloaded"}, {"status": 504, "message": "upstream took too long to answer"},
            {"status": 429, "message": "slowly", "headers": {"Retry-After": "0.5"}}]


@both
def test_what_may_pass_is_tried_again(agent, format):
    """Nothing of a reply that broke off is acted on, or goes back."""
    agent.format, failed = format, []
    runs = finish([agent.start([reply, step(call("list_dir")), "fine"], "-p", "go") for reply in PASSING])
    for reply, run in zip(PASSING, runs, strict=True):
        waits, wait = re.findall(r"; trying again in (\S+) s \(2 of 3\)", run.err), "0.5" if "headers" in reply else "1"
        if (run.code, run.out, len(run.requests), waits) != (0, "fine\n", 3, [wait]):
            failed.append((reply, run.err))
            continue
        assert run.requests[0].raw == run.requests[1].raw and b"-1" not in run.requests[2].raw.split(b'"messages"')[1]
    assert failed == [] and list(agent.folder.iterdir()) == []


@both
def test_what_will_not_pass_is_told_at_once(agent, format):
    agent.format, name = format, format.upper()
    words = {400: "MODEL", 401: f"{name}_API_KEY", 403: f"{name}_API_KEY", 404: f"{name}_BASE_URL", 413: "new conv",
             429: "the server asks to wait 3,600 s"}
    more = {429: {"headers": {"Retry-After": "3600"}}}
    runs = finish([agent.start([{"status": status, "message": "never"} | more.get(status, {}), "late"], "-p", "go")
                   for status in words])
    for word, run in zip(words.values(), runs, strict=True):
        assert (run.code, run.out, len(run.requests), len(run.err.splitlines())) == (1, "", 1, 1), run.err
        assert "never" in run.err and word in run.err, run.err


@both
def test_a_window_that_is_smaller_than_it_is_said_to_be(agent, format):
    put_files(agent)
    agent.format, agent.options, agent.env["CONTEXT_WINDOW"] = format, {"window": 6000}, "32000"
    run = agent.run([lambda body: step(LONG) if "tools" in body else "S"] * 14 + [lambda body: "done"] * 9, "-p", "go")
    assert (run.code, run.out) == (0, "done\n") and "model's window is smaller than 32,000 tokens" in run.err, run.err
    errors = refused(run.requests)
    assert 1 <= len(errors) <= 3 and all("6000" in error for error in errors) and run.err.count("● read_file") >= 10


TOO_LONG = [    # how servers put it: OpenAI and DeepSeek, OpenRouter, Anthropic, Zhipu, Moonshot, Qwen, llama.cpp, vLLM
    "This model's maximum context length is 9 tokens", "Your input exceeds the context window of this model",
    "prompt is too long: 9 tokens > 8 maximum", "input length and `max_tokens` exceed context limit: 9 + 9 > 9",
    "Prompt exceeds max length", "Your request exceeded model token limit: 9 (requested: 10)",
    "Range of input length should be [1, 9]", "the request exceeds the available context size",
    "The input (9 tokens) is longer than the model's context length (8 tokens)"]


@pytest.mark.parametrize("message", TOO_LONG)
def test_a_request_that_is_too_long_in_any_words(agent, message):
    put_files(agent)
    agent.format = "anthropic"
    run = agent.run([*[step(LONG)] * 4, {"status": 400, "message": message}, *[lambda body: "fine"] * 2], "-p", "go")
    assert (run.code, run.out) == (0, "fine\n") and "model's window is smaller" in run.err, run.err


@both
def test_a_window_in_which_nothing_can_be_gained(agent, format):
    agent.format, agent.options = format, {"window": 50}
    run = agent.run(["never"], input="go\nagain\n/usage\n")
    assert (run.code, run.out) == (0, "") and len(run.requests) <= 4 and run.err.count("CONTEXT_WINDOW") == 2, run.err
    assert "is smaller than" not in run.err and "of 64,000 tokens in the window" in run.err


PROXIES = {"all_proxy": "socks5://127.0.0.1:9", "ALL_PROXY": "socks://127.0.0.1:9", "https_proxy": "127.0.0.1:9"}
MARKUP = "see [/usr/lib/x.so] use list[str] [/] end [bold]loud[/i] :smile: 完成 ✅"


def test_proxies_markup_and_a_gbk_console_in_anthropics_format(agent):
    agent.format, agent.encoding, shown = "anthropic", "gbk", MARKUP.replace("✅", "?")
    agent.env |= PROXIES | {"PYTHONUTF8": "0"}
    run = agent.run([step(call("[/]", **{"[/x]": MARKUP})) | {"thinking": MARKUP, "text": MARKUP}, MARKUP, "ok"],
                    input="[/] go\nmore\n")
    assert (run.code, run.out) == (0, f"{shown}\nok\n") and run.err.count(shown) >= 2 and refused(run.requests) == []
    assert [block["text"] for block in blocks(run.requests[2], "text")].count(MARKUP) == 2
    agent.env["ANTHROPIC_BASE_URL"] = "http://model.invalid"
    run = agent.run([], "-p", "go")
    assert run.code == 1 and all(word in run.err for word in ("ANTHROPIC_BASE_URL", "all_proxy", "ALL_PROXY")), run.err


def test_a_package_that_is_missing_is_named(agent):
    (agent.home / "anthropic.py").write_text("raise ImportError('No module named anthropic')\n", encoding="utf-8")
    agent.env["PYTHONPATH"], agent.format = str(agent.home), "anthropic"
    run = agent.run([], "-p", "go")
    assert run.code == 1 and "No module named anthropic; pip install -r requirements.txt" in run.err
