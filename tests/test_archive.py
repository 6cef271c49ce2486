"""Archiving: old results give way to their facts, seldom and all at once; the log and all else stay as they are."""
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
from conftest import call, refused, step
from hypothesis import given, settings
from hypothesis import strategies as st

WINDOW, MARK = 8_000, re.compile(r"\[archived\] \[(r\d+)\] ")
QUARTER, TENTH = "x " * 1_000 + "end", "word " * 600     # four of the first make a quarter of the window


def said(text):
    return {"role": "user", "content": text}


def add(log, *results, text="", name="noise", **arguments):
    """A step of the model: a call for each of the results; without one, an answer."""
    n = len(log)
    calls = [{"id": f"c{n}-{k}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
             for k in range(len(results))]
    log.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
    for one, result in zip(calls, results):
        log.append(memory.result(log, one, result, WINDOW))


def history(*steps):
    """A log in which, after a first short step, each step has these results."""
    log = [{"role": "system", "content": "s"}, said("the task")]
    add(log, "ok")
    for results in steps:
        add(log, *results, path="a" * 50)
    return log


def archived(messages):
    """Places of the archived results among the messages that are sent."""
    return [n for n, message in enumerate(messages) if message["role"] == "tool" and MARK.match(message["content"])]


def due():
    """What old results owe, when any amount is enough."""
    return memory.Rent(0.25, 1, paid=10**9)


def masked(log, full=False, fixed=0, rent=None):
    """The log with a mask, if it is time for one, and what is sent then."""
    mask = memory.mask(log, WINDOW, fixed, full, rent or memory.Rent(0.25, 1))
    log = [*log, mask] if mask else log
    return log, memory.view(log, WINDOW)


@pytest.fixture(autouse=True, scope="module")
def no_ledger():
    """It changes the message of the task; test_layers.py is about it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "ledger", lambda log: "")
        yield


# When, and what

def test_not_before_the_rent_is_due_and_then_all_at_once():
    """With the prices for when none are known, old results must have cost six times what follows the first of them."""
    log, places, rent, owed = history(*[[QUARTER]] * 3, ["ok"], *[["ok"]] * 4), [], memory.Rent(0.25, 1), []
    while not places:
        add(log, QUARTER)
        before, (_, sent) = memory.view(log, WINDOW), masked(log, rent=rent)
        places = archived(sent)
        *steps, last = [n for n, entry in enumerate(log) if entry["role"] == "assistant"]
        old = [n for n in range(steps[-3]) if log[n]["content"] == QUARTER]     # the last 4 steps stay
        waste = sum(log[n]["gain"] for n in old) - 200      # for the ledger
        owed.append((sum(one for one, _ in owed[-1:]) + waste, 6 * (memory.size(before[old[0]:last]) - waste)))
    assert places == old and len(owed) > 3
    assert [paid >= price for paid, price in owed] == [False] * (len(owed) - 1) + [True]
    saved = [memory.size([before[n]]) - memory.size([sent[n]]) for n in places]
    assert saved == [log[n]["gain"] for n in places]


def test_a_full_window_archives_also_less():
    log = history([QUARTER], *[["ok"]] * 4)
    assert archived(masked(log)[1]) == [] and archived(masked(log, full=True)[1]) == [5]
    assert masked(history(["ok"] * 3, *[["ok"]] * 6), full=True)[0][-1]["role"] != "mask"     # there is nothing to gain


@pytest.mark.parametrize("calls, stay", [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_the_protection_shrinks_if_the_last_steps_are_too_long(calls, stay):
    """Each result takes a tenth of the window."""
    log = history(*[[TENTH] * calls] * 8)
    _, sent = masked(log, full=True)
    assert archived(sent) == [n for n, entry in enumerate(log) if "fact" in entry][1:-calls * stay]


def test_what_else_is_in_the_window_counts():
    log = history(*[[TENTH]] * 8)
    protected = [sum("fact" in entry for entry in log) - len(archived(masked(log, full=True, fixed=fixed)[1]))
                 for fixed in (0, WINDOW // 4, WINDOW // 2)]
    assert protected == [5, 3, 2]       # with the first one, which is short


def test_user_messages_skills_and_call_arguments_are_untouched():
    skill = "<skill coding (shipped)>\n" + "look first\n" * 200 + "</skill>"
    log = history([QUARTER] * 2)
    add(log, skill, name="activate_skill")
    log.append(said("word " * 500))
    add(log, *[QUARTER] * 3, content="y" * 2_000)
    add(log, skill, "other", name="activate_skill")      # after it was forgotten: only the newest text counts
    add(log, QUARTER, text="I say so. " * 200)
    for _ in range(4):
        add(log, "ok")
    before, (_, sent) = memory.view(log, WINDOW), masked(log, full=True)
    places = archived(sent)
    [first, newest] = [n for n, entry in enumerate(log) if entry["content"] == skill]
    assert first in places and newest not in places and sent[newest]["content"].endswith(skill)
    assert [n for n, entry in enumerate(log) if entry["content"] == QUARTER] == [n for n in places if n != first]
    assert [message for n, message in enumerate(sent) if n not in places] == [
        message for n, message in enumerate(before) if n not in places]


def test_an_archived_result_is_its_number_and_its_fact():
    log, sent = masked(history(*[["first line\n" * 900]] * 9), rent=due())
    texts = [sent[n]["content"] for n in archived(sent)]
    assert texts == [f"[archived] [r{n}] noise {'a' * 50} → 900 lines: first line" for n in range(2, len(texts) + 2)]
    for n in archived(sent):
        assert sent[n].keys() == {"role", "tool_call_id", "content"} and "[archived]" not in log[n]["content"]


# Random histories

texts = st.sampled_from(["ok", "好的，" * 30, "word " * 60])
outputs = st.sampled_from(["", "ok", "Error: no", QUARTER, "数据 rows\n" * 300, "y" * 40_000, "\x1b[2J\n\n"])
results = st.lists(outputs, max_size=4)
actions = st.one_of(st.tuples(st.just("user"), texts), st.tuples(st.just("step"), results),
                    st.tuples(st.just("step"), results), st.tuples(st.just("answer"), texts),
                    st.tuples(st.just("mask"), st.booleans()), st.tuples(st.just("skill"), st.sampled_from("ab")),
                    st.tuples(st.just("compress"), st.sampled_from([0, 2_000, 10**6])))


def to_anthropic(messages):
    """The same conversation in the other wire format's blocks: roles alternate, and results are the user's."""
    system, *rest = messages
    turns = []
    for message in rest:
        blocks = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
        blocks += [{"type": "tool_use", "id": one["id"], "name": one["function"]["name"],
                    "input": json.loads(one["function"]["arguments"])} for one in message.get("tool_calls", [])]
        role = "assistant" if message["role"] == "assistant" else "user"
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"] += blocks
    return {"max_tokens": 99, "system": system["content"], "messages": turns}


def judged(messages):
    """Both judges accept what would be sent; they raise what they refuse."""
    messages = messages if messages[-1]["role"] in ("user", "tool") else [*messages, said("next")]
    offline.judge_openai({"messages": messages}, SimpleNamespace(require_reasoning=False))
    offline.judge_anthropic(to_anthropic(messages), SimpleNamespace(thoughts={}))


@settings(max_examples=150, deadline=None)
@given(st.lists(actions, max_size=40), st.sampled_from([1_000, 3_000, 8_000, 32_000]))
def test_whatever_happened_the_view_is_valid(actions, window):
    log = [{"role": "system", "content": "s"}, said("the task")]
    for kind, value in actions:
        before, frozen = memory.view(log, window), copy.deepcopy(log)
        if kind == "mask":
            mask = memory.mask(log, window, 0, value, due())
            assert log == frozen
            if mask:
                log = [*log, mask]
                sent = memory.view(log, window)
                changed = [n for n, message in enumerate(sent) if message != before[n]]
                assert len(sent) == len(before) and memory.size(sent) < memory.size(before)
                assert changed == [n for n in archived(sent) if n not in archived(before)]
                assert len(changed) == mask["new"] > 0
                assert memory.mask(log, window, 0, False, due()) is None       # one mask does it all
        elif kind == "compress":
            record = memory.compress(log, window, value, lambda request: "S")
            assert log == frozen
            log += [record] if record else []
        else:
            if kind == "user":
                log.append(said(value))
            elif kind == "skill":
                add(log, f"<skill {value} (yours)>\n{'do so ' * 20}\n</skill>", name="activate_skill")
            else:
                add(log, *(value if kind == "step" else []), text=value if kind == "answer" else "I look.")
            assert memory.view(log, window)[:len(before)] == before     # else the prefix is the same
        frozen, sent = copy.deepcopy(log), memory.view(log, window)
        assert memory.view(log, window) == sent
        assert log == frozen
        judged(sent)
        for n in archived(sent):
            assert len(sent[n]["content"]) <= 160 and "\n" not in sent[n]["content"]
        for n in (n for skill, n in memory.skill_texts(log).items() if skill in memory.active_skills(log)):
            assert any(log[n]["content"] in message["content"] for message in sent)


# Sessions

def noise(n: int, chinese: bool = False) -> str:
    """noise"""
    return (("数据库的文件 好\n" if chinese else "word /a/b.py\n") * (n // 9 + 1))[:n]


@pytest.fixture
def talk(model, monkeypatch, tmp_path):
    """talk(script, window) -> an agent in this process, with a tool `noise`, and the model's server."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "WAITS", [])
    monkeypatch.setattr(tools, "TOOLS", dict(tools.TOOLS))
    tools.tool(noise)

    def start(script, window):
        server = model(script, window=window)
        settings = {"OPENAI_BASE_URL": server.base_url, "CONTEXT_WINDOW": str(window)}
        return program.Agent(program.Model(settings, False, False)), server

    return start


def prompt_size(request):
    return sum(offline.tokens(text) for text, _ in offline.openai_prompt(request.body))


def test_300_calls_of_any_size_are_never_refused(talk, capsys):
    rnd, made = random.Random(6), []

    def reply(body):
        if "tools" not in body:
            return "## Goal\nS"
        if len(made) >= 300 or rnd.random() < 0.1:
            return rnd.choice(["done", "好的，做完了"])
        sizes = [int(10 ** rnd.uniform(1, rnd.choice([3, 4, 4, 6]))) for _ in range(rnd.choice([2, 6, 10]))]
        made.extend(sizes)
        return step(*[call("noise", n=n, chinese=rnd.random() < 0.5) for n in sizes])

    agent, server = talk([reply] * 1_000, window=32_000)
    while len(made) < 300:
        frozen = copy.deepcopy(agent.log)
        agent.turn(f"task {len(made)} 任务")
        assert agent.log[:len(frozen)] == frozen
    assert refused(server.requests) == [] and max(made) > 500_000

    breaks, told, requests = 0, capsys.readouterr().err.count("\nArchived "), server.requests
    for last, request in zip(requests, requests[1:]):
        before, after = last.body["messages"], request.body["messages"]
        if "tools" not in request.body or before == after[:len(before)]:
            continue
        breaks += 1
        assert prompt_size(request) <= 0.6 * 32_000
        if "tools" in last.body:        # no summary was made: the prefix ends at the first newly archived result
            first = next(n for n, pair in enumerate(zip(before, after)) if pair[0] != pair[1])
            assert first == min({*archived(after)} - {*archived(before)})
            assert MARK.match(after[first]["content"])[1] in before[first]["content"].split("]")[0]
    summaries = sum("tools" not in request.body for request in requests)
    assert breaks == agent.model.total["breaks"] and 5 <= told <= breaks < len(requests) / 3      # seldom
    assert summaries <= told / 3        # facts before summaries


def test_each_masking_is_said_and_counted(agent):
    """On the command line: what is said is what is sent, and between two maskings each request begins with the last."""
    agent.env["CONTEXT_WINDOW"], agent.options = "12000", {"window": 12_000}
    (agent.folder / "a.txt").write_text("the port is 8472\n" * 120, encoding="utf-8")
    run = agent.run([step(call("read_file", path="a.txt"))] * 20 + ["done"], "--yes", input="go\n/usage\n")
    assert refused(run.requests) == [] and "Compress" not in run.err
    messages = [request.body["messages"] for request in run.requests]
    breaks = [n for n in range(1, len(messages)) if messages[n][:len(messages[n - 1])] != messages[n - 1]]
    counts = [len(archived(after)) - len(archived(before)) for before, after in zip(messages, messages[1:])]
    assert breaks == [n for n, count in enumerate(counts, 1) if count] and len(breaks) >= 2
    said = re.findall(r"Archived (\d+) results: from about [\d,]+ to ([\d,]+) tokens, (\d+) % of the window\.", run.err)
    assert [int(count) for count, *_ in said] == [counts[n - 1] for n in breaks]
    for n, (_, size, share) in zip(breaks, said):
        assert int(share) == 100 * int(size.replace(",", "")) // 12_000
        assert 0 <= int(size.replace(",", "")) - prompt_size(run.requests[n]) < 800     # an estimate, rather too much
    assert re.search(rf"^prefix breaks, .*: {len(breaks)}$", run.err, re.M)
    assert messages[-1][archived(messages[-1])[0]]["content"] == "[archived] [r2] read_file a.txt (120 lines)"


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_what_is_said_of_a_masking_can_be_compared(agent, monkeypatch, share):
    """Whatever the server counts, fewer tokens than we estimate or more: "from" and "to" are of one kind."""
    count = offline.OPENAI.usage
    monkeypatch.setattr(offline.OPENAI, "usage", lambda *arguments: (usage := count(*arguments)) | {
        "prompt_tokens": int(share * usage["prompt_tokens"])})
    agent.env["CONTEXT_WINDOW"], agent.options = "12000", {"window": 12_000}
    (agent.folder / "a.txt").write_text("the port is 8472\n" * 120, encoding="utf-8")
    run = agent.run([step(call("read_file", path="a.txt"))] * 18 + ["done"], "--yes", "-p", "go")
    said = [[int(number.replace(",", "")) for number in found]
            for found in re.findall(r"Archived .* from about ([\d,]+) to ([\d,]+) tokens", run.err)]
    gains = [prompt_size(before) - prompt_size(after) for before, after in zip(run.requests, run.requests[1:])
             if len(archived(before.body["messages"])) < len(archived(after.body["messages"]))]
    assert said and len(said) == len(gains) and "Compress" not in run.err
    for (before, after), gain in zip(said, gains):
        assert 0 < before - after - gain < 1_500, (before, after, gain)     # the latest result came between the two
