"""Context: the log of a conversation, the view of it that is sent, and what makes room when the window is full."""
import copy
import json
import random
import re
from types import SimpleNamespace

import agent as program
import memory
import offline
import pytest
import tools
from conftest import PROMPT, call, posix_only, refused, results, step
from hypothesis import given, settings
from hypothesis import strategies as st

HEADINGS = ["Goal", "Done", "Current state", "Decisions", "Exact values", "Preferences"]


def noise(n: int) -> str:
    """noise"""
    return ("好 word /a/b.py\n" * (n // 15 + 1))[:n]


@pytest.fixture
def talk(model, monkeypatch, tmp_path):
    """talk(script, window) -> an agent in this process, with a tool `noise`, and the model's server."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(program, "WAITS", [])
    monkeypatch.setattr(memory, "mask", lambda *_: None)        # this file is about what comes after it
    monkeypatch.setattr(tools, "TOOLS", dict(tools.TOOLS))
    tools.tool(noise)

    def start(script, window=8_000, **options):
        server = model(script, window=window, **options)
        settings = {"OPENAI_BASE_URL": server.base_url, "CONTEXT_WINDOW": str(window)}
        return program.Agent(program.Model(settings, False, False)), server

    return start


def judged(messages):
    """The judge's verdict on what would be sent; raises what it refuses."""
    offline.judge_openai({"messages": messages}, SimpleNamespace(require_reasoning=False))
    roles = [message["role"] for message in messages]
    assert roles[0] == "system" and roles[1:2] in ([], ["user"])


def is_summary(request):
    return "tools" not in request.body


def records(messages):
    """Places of the records among the messages."""
    return [n for n, message in enumerate(messages) if message["role"] == "user" and "<record " in message["content"]]


def prompt_size(request):
    return sum(offline.tokens(text) for text, _ in offline.openai_prompt(request.body))


def number(text):
    return int(text.replace(",", ""))


# The estimate (C2)

ZH, EN = "你好世界" * 1000, "word " * 800
ESTIMATES = [(ZH, 2400, 6000), (EN, 800, 1400), ("ＡＢＣ１２３" * 100, 300, 900), (ZH[:2000] + EN[:2000], 1600, 3700),
             ("こんにちは" * 200, 500, 1500), ("안녕하세요" * 200, 500, 1500), ("𠀀" * 100, 60, 200), ("✅" * 100, 60, 300),
             ("Здравствуй" * 100, 250, 1500), ("{'a': 1}\n" * 100, 200, 450), ("", 0, 2)]


@pytest.mark.parametrize("text, least, most", ESTIMATES)
def test_estimate(text, least, most):
    assert least <= memory.estimate(text) <= most
    assert memory.estimate(text) >= offline.tokens(text)


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("text, compressed", [("你好世界" * 100, True), ("word " * 80, False), ("ＡＢＣ１２３好" * 57, True)])
def test_compression_starts_in_time_and_not_too_early(talk, text, compressed, usage):
    agent, server = talk([lambda body: {"text": "好" if "tools" in body else "S", "usage": usage}] * 50, window=6_000)
    for n in range(20):
        assert agent.turn(f"{n} {text}") == "好"
    assert refused(server.requests) == []
    assert any(map(is_summary, server.requests)) == compressed
    if compressed:      # the tokens before the first compression, from which the last message is still missing
        first = list(map(is_summary, server.requests)).index(True)
        assert prompt_size(server.requests[first - 1]) > 0.75 * 6_000


def test_the_providers_count_is_the_base_of_the_meter(agent):
    """Tabs are estimated at twice their tokens. Where the provider counted, only what is newer is estimated."""
    agent.env["CONTEXT_WINDOW"] = "8000"
    run = agent.run([{"text": "one", "usage": False}, "two"], input="a" + "\t" * 4_000 + "b\n/usage\nmore\n/usage\n")
    guess, counted = (number(used) for used in re.findall(r"([\d,]+) of 8,000 tokens in the window", run.err))
    assert guess > prompt_size(run.requests[0]) + 500
    assert 0 <= counted - prompt_size(run.requests[1]) < 40


# The log and its view (C1)

def said(text):
    return {"role": "user", "content": text}


def did(name, *calls, **more):
    function = {"name": "noise", "arguments": "{}"}
    made = [{"id": f"{name}-{n}", "type": "function", "function": function} for n in range(len(calls))]
    return [{"role": "assistant", "content": name} | ({"tool_calls": made} if made else {}) | more,
            *(memory.result([], one, noise(size), 8_000) for one, size in zip(made, calls))]


C1 = [{"role": "system", "content": "s"}, said("u1"), *did("a1", 900, 900), *did("a2"), said("u2"), *did("a3", 900),
      *did("a4", 900, 900), said("u3")]


def test_every_cut_is_a_valid_one(monkeypatch):
    for first in range(4):
        for last in range(len(C1)):
            monkeypatch.setattr(memory, "KEEP", [(first + 1, last)])
            if record := memory.compress(C1, 8_000, 0, lambda request: "S"):
                sent = memory.view([*C1, record], 8_000)
                judged(sent)
                [place] = records(sent)
                assert "\nS\n" in sent[place]["content"] and said("u3") in sent[place + 1:]
                assert sent[:first + 1] == memory.view(C1, 8_000)[:first + 1]
            assert record or last > 4       # one that helps is made


texts = st.sampled_from(["ok", "好的，" * 30, "word " * 60, "</record> <record x> 你好\n\n[/]"])
steps = st.lists(st.sampled_from([0, 40, 900, 40_000]), max_size=5)
actions = st.one_of(st.tuples(st.just("user"), texts), st.tuples(st.just("step"), steps),
                    st.tuples(st.just("answer"), texts),
                    st.tuples(st.just("compress"), st.sampled_from([0, 300, 2_000, 10**6])))


@settings(max_examples=150, deadline=None)
@given(st.lists(actions, max_size=40), st.sampled_from([1_000, 3_000, 8_000, 64_000]))
def test_whatever_happened_the_view_is_valid(actions, window):
    log, facts, before = [{"role": "system", "content": "s"}, said("the task")], [], []
    for n, (kind, value) in enumerate(actions):
        if kind == "compress":
            frozen, asked = copy.deepcopy(log), []
            record = memory.compress(log, window, value, lambda request: asked.append(request) or f"fact{n}.")
            assert log == frozen and len(asked) <= 1
            assert all(memory.estimate(request) < window for request in asked)
            if record:
                old = memory.view(log, window)
                log, facts, before = [*log, record], [*facts, f"fact{n}."], []
                assert memory.size(memory.view(log, window)) < memory.size(old)
        else:
            happened = {"user": lambda: [said(f"{n} {value}")], "step": lambda: did(f"a{n}", *value),
                        "answer": lambda: did(value)}
            log = log + happened[kind]()
        frozen, sent = copy.deepcopy(log), memory.view(log, window)
        assert memory.view(log, window) == sent and log == frozen         # it is pure
        judged(sent if sent[-1]["role"] in ("user", "tool") else [*sent, said("next")])
        assert sent[:len(before)] == before                             # between compressions it only grows
        before = sent
        assert all(memory.estimate(message["content"]) <= window // 2 for message in sent if message["role"] == "tool")
        latest, places = [entry for entry in log if entry["role"] == "user"][-1], records(sent)
        if facts:
            [place] = [place for place in places if sent[place]["content"].startswith("<record ")]
            assert latest in sent[place + 1:]
            assert "history, not a request" in sent[place]["content"].split("\n")[0]
            assert len(re.findall(r"</?record\b", sent[place]["content"])) == 2     # the fence, and no other
            assert [fact for fact in facts if f"{fact}\n" in sent[place]["content"]] == facts


def test_a_cut_result_keeps_to_its_limit_whatever_it_is_made_of():
    """At both ends Chinese, in between English: the ends have more tokens than their length says."""
    result = "好" * 8_000 + "word " * 40_000 + "好" * 8_000
    log = [{"role": "system", "content": "s"}, said("u"), *did("a", 1)]
    log[-1]["content"] = result
    assert memory.estimate(memory.view(log, 8_000)[-1]["content"]) <= 8_000 // 8 + 50


def test_a_long_earlier_summary_is_summarised_again_as_a_whole():
    log, asked = [{"role": "system", "content": "s"}, said("task"), *did("a")], []

    def summarise(request):
        asked.append(request)
        return " ".join(f"value{len(asked)}.{n}." for n in range(250))
    for _ in range(3):      # the second is added to the first; together they are too long, and are told anew
        log += [entry for n in range(30) for entry in (said(f"q{n} " + "w " * 100), *did("b " * 100))]
        log.append(memory.compress(log, 8_000, 3_000, summarise))
    missing = [value for value in (f"value{k}.{n}." for k in (1, 2) for n in range(250)) if value not in asked[2]]
    assert len(missing) < 50, f"{len(missing)} of 500 values were not shown to the model, and are lost"


# A window that fills up

def test_the_first_3_and_the_last_20_messages_stay(talk):
    agent, server = talk([step(call("noise", n=4_500)) if n < 48 else "done" for n in range(48)]
                         + [lambda body: "S" if "tools" not in body else step(call("noise", n=10))] * 5, window=64_000)
    server.script.insert(20, offline.checked("done"))
    agent.turn("task one")
    with pytest.raises(program.ModelError):
        agent.turn("task two")      # 50 rounds
    asked = list(map(is_summary, server.requests))
    at = asked.index(True)
    before, summary, after = (request.body["messages"] for request in server.requests[at - 1:at + 2])
    assert 0.9 * 64_000 < prompt_size(server.requests[at - 1]) and prompt_size(server.requests[at + 1]) < 0.5 * 64_000
    assert [message["role"] for message in after[:6]] == ["system", "user", "assistant", "tool", "user", "user"]
    assert after[:4] == before[:4] and records(after) == [4] and after[5] == said("task two")
    assert after[6]["role"] == "assistant" and 20 <= len(after[6:]) <= 22 and after[6:-2] == before[-len(after[6:-2]):]
    positions = [summary[0]["content"].index(f"## {heading}") for heading in HEADINGS]
    assert positions == sorted(positions) and [message["role"] for message in summary] == ["user"]


FAULTY = {"refused": {"status": 400, "message": "no"}, "empty": "", "far too long": "很长 word " * 600,
          "cut off": {"text": "x", "fault": "cut"},
          "only calls": step(call("noise", n=5)), "good": "S"}


@pytest.mark.parametrize("kind", FAULTY)
def test_a_faulty_summary_neither_ends_nor_repeats(talk, capsys, kind):
    def reply(body):
        return FAULTY[kind] if "tools" not in body else step(*[call("noise", n=9_000)] * 2) if turns.pop() else "go on"

    turns = [n % 4 > 0 for n in range(200)]
    agent, server = talk([reply] * 200)
    for n in range(10):
        assert agent.turn(f"turn {n}") == "go on"
    asked = "".join("S" if is_summary(request) else "." for request in server.requests)
    assert refused(server.requests) == []
    assert 1 <= asked.count("S") <= asked.count(".") / 3 and "SS" not in asked, asked
    assert ("gave no summary" in capsys.readouterr().err) == (kind in ("refused", "empty", "cut off"))
    last = json.dumps(server.requests[-1].body, ensure_ascii=False)
    assert all(f"turn {n}" in last for n in range(10))      # what the user said stays


def test_a_session_of_300_messages_is_never_refused(talk):
    """Chinese and English, long and short results, up to twelve calls at once, summaries good and bad."""
    choose = random.Random(1).choice

    def text(tokens):
        return f"{choose(range(10**6))} " + ("数据 rows " * tokens)[:tokens * 2]

    def reply(body):
        if "tools" not in body:
            return choose([{"status": 400, "message": "no"}, "", text(900), "## Goal\n" + text(100), text(2_000)])
        if choose([1, 1, 0]):
            return step(*[call("noise", n=choose([10, 300, 3_000, 30_000])) for _ in range(choose([1, 2, 6, 12]))])
        return text(choose([5, 60]))

    agent, server = talk([reply] * 2_000)
    latest = []
    while len(agent.log) < 300:
        latest.append(text(choose([3, 30, 300, 2_500])))
        frozen, sent = copy.deepcopy(agent.log), len(server.requests)
        agent.turn(latest[-1])
        assert agent.log[:len(frozen)] == frozen                  # nothing rewrites a message
        for request in server.requests[sent:]:
            assert is_summary(request) or said(latest[-1]) in request.body["messages"][-40:]
    assert refused(server.requests) == []
    assert sum(map(is_summary, server.requests)) < len(server.requests) / 2


def test_long_messages_and_long_summaries_still_fit(talk):
    """The most that stays at the same time: a long first task, two long summaries, long messages and the latest."""
    agent, server = talk([lambda body: "好的 ok" if "tools" in body else "总结" * 640] * 200)
    for n in range(25):
        agent.turn(f"{n} " + "数据" * (700 if n < 20 else 1_700))
    assert refused(server.requests) == []


def test_thinking_stays_with_its_message_and_out_of_the_summary(talk):
    """W3: DeepSeek refuses a message with calls that lost its reasoning_content."""
    def reply(body):
        thinking = f"先看{len(server.requests)}目录"
        return "S" if "tools" not in body else step(*[call("noise", n=3_000)] * 2) | {"thinking": thinking}

    agent, server = talk([reply] * 47 + ["done"] * 2, require_reasoning=True)
    agent.turn("go")
    assert refused(server.requests) == []
    for request in server.requests:
        thoughts = [message.get("reasoning_content") for message in request.body["messages"] if "tool_calls" in message]
        assert all(re.fullmatch("先看[0-9]+目录", thought) for thought in thoughts)
        assert not is_summary(request) or "先看" not in json.dumps(request.body, ensure_ascii=False)
    assert any(map(is_summary, server.requests)) and thoughts


def test_without_thinking_there_is_none_after_a_compression_either(talk):
    agent, server = talk([lambda body: step(call("noise", n=9_000)) if "tools" in body else "S"] * 29 + ["done"])
    agent.turn("go")
    assert any(map(is_summary, server.requests))
    assert not any(b"reasoning" in request.raw for request in server.requests)


def test_a_result_of_2_mb_is_whole_in_the_log_and_cut_when_sent(talk):
    agent, server = talk([step(call("noise", n=2_000_000)), "ok"], window=64_000)
    agent.turn("go")
    assert agent.log[-2]["content"] == noise(2_000_000)
    [sent] = results(server.requests[1])
    assert 10_000 < len(sent) < 30_200 and "2,000,000 characters" in sent
    assert sent[:5_000] == noise(5_000) and noise(2_000_000).endswith(sent[-5_000:])


TOO_LONG = [    # how servers put it: OpenAI and DeepSeek, OpenRouter, Anthropic, Zhipu, Moonshot, Qwen, llama.cpp, vLLM
    "This model's maximum context length is 9 tokens", "Your input exceeds the context window of this model",
    "prompt is too long: 9 tokens > 8 maximum", "input length and `max_tokens` exceed context limit: 9 + 9 > 9",
    "Prompt exceeds max length", "Your request exceeded model token limit: 9 (requested: 10)",
    "Range of input length should be [1, 9]", "the request exceeds the available context size",
    "The input (9 tokens) is longer than the model's context length (8 tokens)"]


def test_a_request_that_is_too_long_in_any_words(agent):
    """A server that took too long means something else, and may be asked again."""
    slow = {"status": 504, "message": "upstream took too long to answer"}
    run = agent.run([*({"status": 400, "message": message} for message in TOO_LONG), slow, "fine"],
                    input="go\n/new\n" * (len(TOO_LONG) + 1))
    advice = re.findall("Error: .*; (.+)", run.err)
    assert advice == ["start a new conversation, or lower CONTEXT_WINDOW"] * len(TOO_LONG) and run.out == "fine\n"


# The command line

def test_compact_new_and_usage(agent):
    agent.env["CONTEXT_WINDOW"] = "8000"
    long = "x " * 6_000     # more than a third of the window
    run = agent.run(["word " * 700, "word " * 700, "S", "three", "four"],
                    input=f"one\ntwo\n/usage\n/compact\n/usage\nthree\n{long}\n/new\nfour\n/usage\n")
    assert (run.code, refused(run.requests)) == (0, [])
    assert list(map(is_summary, run.requests)) == [False, False, True, False, False]

    before, after = map(number, re.search(r"Compressed from \D*([\d,]+) to ([\d,]+) tokens", run.err).groups())
    used = [number(count) for count in re.findall(r"([\d,]+) of 8,000 tokens in the window", run.err)]
    assert abs(used[0] - before) < 200 and used[1] == after < before - 500 and used[2] < after
    bars = re.findall(r"\[(#*)(·*)\]", run.err)
    assert [len(full) for full, _ in bars] == [20 * count // 8_000 for count in used]
    assert {len(full + empty) for full, empty in bars} == {20}
    total, share, received = re.findall(r"5 requests: ([\d,]+) tokens sent, (\d+) % .*; ([\d,]+) received", run.err)[0]
    assert number(total) == sum(map(prompt_size, run.requests)) and 0 < int(share) < 100
    assert number(received) == sum(map(offline.tokens, ["word " * 700] * 2 + ["S", "three", "four"]))

    _, *sent = run.requests[3].body["messages"]
    [place] = records(sent)
    assert "\nS\n" in sent[place]["content"] and "two" in json.dumps(sent[place + 1:]) and sent[-1] == said("three")
    errors = [line for line in run.err.splitlines() if line.startswith("Error")]
    assert len(errors) == 1 and "third of the window" in errors[0]
    system, four = run.requests[4].body["messages"]
    assert four == said("four") and system == run.requests[0].body["messages"][0]


def test_the_offline_model_summarises(agent):
    (agent.folder / "notes.txt").write_text("the port is 8472\n" * 400, encoding="utf-8")
    run = agent.run(None, "--yes", input="read notes.txt\nread notes.txt\n/compact\nlist .\n/compact\nread notes.txt\n")
    assert run.code == 0 and refused(run.requests) == []
    sent = run.requests[-1].body["messages"]
    record = sent[records(sent)[0]]["content"]
    assert all(f"\n## {heading}\n" in record for heading in HEADINGS)
    assert "notes.txt" in record and "400" in record


@posix_only
def test_interrupting_a_summary_leaves_all_as_it_was(agent):
    """Once at /compact, once when the window is full; the meter stands before each prompt."""
    agent.env["CONTEXT_WINDOW"] = "4000"

    def slow(body):
        assert "tools" not in body
        child.sendintr()
        return {"text": "S", "delay": 5}

    def meter():
        return int(re.search(r"(\d+)% >", child.after)[1])

    child, server = agent.prompt(["word " * 900, slow, "here", "word\n" * 2_000, slow, "S", "still here"])
    meters = [meter()]
    for line, answer in [("one", "word"), ("/compact", ""), ("two", "here"), ("three", "word"), ("four", ""),
                         ("five", "still here")]:
        child.sendline(line)
        child.expect(answer)
        child.expect(PROMPT)
        meters.append(meter())
    assert refused(server.requests) == []
    assert list(map(is_summary, server.requests)) == [False, True, False, False, True, True, False]
    one, _, two, *_, five = (request.body["messages"] for request in server.requests)
    assert two[:2] == one and [message["content"] for message in two[3:]] == ["two"]
    assert said("four") in five or "four" in json.dumps(five) and five[-1] == said("five")
    assert meters[0] < meters[1] < 60 < 95 < meters[4] and meters[-1] < 60
    assert abs(meters[1] - meters[2]) <= 2


def test_an_answer_is_not_taken_for_a_request_after_compact(talk):
    agent, server = talk(["word " * 900, "I deleted it.", "S", "ok"])
    agent.turn("one")
    agent.turn("delete a.txt")
    agent.compress()
    agent.turn("thanks")
    assert [message["content"] for message in server.requests[-1].body["messages"][-3:]] == [
        "delete a.txt", "I deleted it.", "thanks"]


@pytest.mark.parametrize("window", [2500, 3500])
def test_a_task_goes_on_after_a_compression_and_is_not_begun_again(agent, window):
    """The offline model counts the calls that it sees, and those that the record says are done."""
    agent.env["CONTEXT_WINDOW"], agent.options = str(window), {"window": window}
    (agent.folder / "a.txt").write_text("the port is 8472\n" * 60, encoding="utf-8")
    run = agent.run(None, "-p", " then ".join(["read a.txt"] * 20 + ["write b.txt 'done'"]), "--yes")
    assert run.code == 0 and refused(run.requests) == []
    assert run.err.count("● read_file") == 20 and run.err.count("● write_file") == 1 and "Compressed" in run.err
