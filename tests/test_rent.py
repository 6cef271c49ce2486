"""The price of forgetting: old results are archived when their rent is due, and the bill says what it came to."""
import json
import re
import shutil
import time
from urllib.parse import urlsplit

import agent as program
import memory
import models
import offline
import pytest
from conftest import ROOT, call, refused, step
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_providers import told  # noqa: F401: a fixture, the usages that the servers tell

TITLE, HUGE = "\n<ledger what was done so far", 10**8
LINES = [40, 120, 3, 80, 200, 60, 1, 150, 90, 30]
PRICES = [(read, write) for read in (0.1, 0.25, 0.5, 1) for write in (1, 1.25)]


def patience(read, write):
    return max(2, 2 * (write - read) / read)


def reading(*counts):
    """A scripted step for each count, in which so many lines are read."""
    return [step(call("read_file", path="long.txt", limit=count)) for count in counts]


def talk(agent, script, input, prices=None, window=64_000, format="openai"):
    """A session on the command line; with prices, they hold for any model."""
    (agent.folder / "long.txt").write_text("one more line ok\n" * 3_000, encoding="utf-8")
    agent.env["CONTEXT_WINDOW"], agent.format = str(window), format
    if prices:
        (agent.program / "prices.json").write_text(json.dumps({"": prices}), encoding="utf-8")
    run = agent.run(script, "--yes", input=input)
    assert refused(run.requests) == [] and run.code == 0
    return run


def sent(run):
    """The messages of each request."""
    return [request.body["messages"] for request in run.requests]


# What is due, computed from the messages that were sent

def size(messages):
    """Tokens as they are estimated: a character is a quarter."""
    return sum(len(json.dumps(message, ensure_ascii=False)) // 4 + 1 for message in messages)


def plain(message):
    return message | {"content": message["content"].partition(TITLE)[0]}


def has_ledger(message):
    return TITLE in message["content"]


def is_archived(message):
    return message["role"] == "tool" and message["content"].startswith("[archived] ")


def gain(message):
    fact = message["content"].partition("\n")[0]
    return size([message]) - size([message | {"content": f"[archived] {fact}"}])


def archivings(requests, patience):
    """The numbers of the requests in which results are archived. Fails unless they are those in which it is due, each
    time for all results but those of the task's first step and of the last four, and those that save too little."""
    numbers, paid = [], 0
    for n, (before, now) in enumerate(zip(requests, requests[1:]), 1):
        whole = [plain(message) for message in before + now[len(before):]]
        steps = [k for k, message in enumerate(whole) if message["role"] == "assistant"]
        task = max(k for k, message in enumerate(whole) if message["role"] == "user")
        second, recent = [*(k for k in steps if k > task), len(whole)][:2][-1], [0, *steps][-4:][0]
        old = [k for k, message in enumerate(whole) if message["role"] == "tool" and not is_archived(message)
               and gain(message) >= 60 and k < recent and not task < k < second]
        waste = sum(gain(whole[k]) for k in old) - 200 * (not any(map(has_ledger, before)))
        paid += max(0, waste)
        due = waste > 0 and paid >= patience * (size(whole[old[0]:len(before)]) - waste)
        new = [k for k, message in enumerate(now) if is_archived(message) and not is_archived(whole[k])]
        assert new == old * due, f"request {n}: {paid} paid"
        if due:
            numbers.append(n)
            paid = 0
    return numbers


def test_archived_when_the_rent_is_due_and_not_before(agent):
    """On the command line, with the prices for a model that is not known."""
    script = [*reading(*LINES * 2), "one", *reading(*LINES), "two", "three", *reading(*LINES), "four"]
    run = talk(agent, script, "1\n2\n3\n4\n")
    assert len(archivings(sent(run), 6)) == run.err.count("Archived ") >= 2


# The same without a server, for many prices: a log, and what would be sent of it

def play(actions, rent, window=HUGE):
    """What is sent in a session: after each user's message ("user", characters) and each step of the model, (tool,
    characters of its arguments, characters of each result)."""
    log, views = [{"role": "system", "content": "s"}], []
    for name, length, *results in [("user", 9), *actions]:
        if name == "user":
            log += [{"role": "assistant", "content": "ok"}] * (len(log) > 1)
            log.append({"role": "user", "content": "u" * length})
        else:
            about = {"path": "a.py", "content": "x" * length, "command": "pytest", "old_text": "a", "new_text": "b"}
            calls = [{"id": f"c{len(log)}-{n}", "type": "function", "function": call(name, **about)}
                     for n in range(len(results))]
            log.append({"role": "assistant", "content": "", "tool_calls": calls})
            for one, count in zip(calls, results):
                text = "exit 0\n" * (name == "terminal") + "y\n" * count
                text = "created a.py (1 line)" if name == "write_file" else text
                log.append(memory.result(log, one, text, window))
        if mask := memory.mask(log, window, 0, False, rent):
            log.append(mask)
            rent.paid = rent.due = 0        # as agent.py does
        views.append(memory.view(log, window))
    return views


@pytest.mark.parametrize("read, write", PRICES)
def test_when_it_is_due_depends_on_the_prices(read, write):
    actions = [("read_file", 0, 10 * count) for count in LINES * 8]
    views = play([*actions[:35], ("user", 999), *actions[35:]], memory.Rent(read, write))
    assert len(archivings(views, patience(read, write))) >= 2


def test_what_saves_less_than_60_tokens_stays(agent):
    """Each line of the file has four or five tokens."""
    run = talk(agent, [*reading(*[2, 9, 10, 11, 12, 13, 14, 30] * 5), "done"], "go\n", {"read": 1, "write": 1})
    messages = [*map(plain, sent(run)[-1])]
    whole = [message for message in messages[5:-10] if message["role"] == "tool" and not is_archived(message)]
    assert archivings(sent(run), 2) and max(map(gain, whole)) in range(50, 60)
    assert {int(re.search(r"lines 1-(\d+)", message["content"])[1]) for message in whole} == {2, 9, 10, 11}


def rents(run):
    return [int(paid.replace(",", "")) for paid in re.findall(r"rent of old results: ([\d,]+) tokens", run.err)]


def test_the_rent_starts_anew(agent):
    eight = reading(*[100] * 8)
    script = [*reading(*[100] * 10), "one", "the summary", "two", *eight, "three", *eight, "four"]
    run = talk(agent, script, "1\n/usage\n/compact\n/usage\n2\n/usage\n3\n/usage\n/new\n/usage\n4\n/usage\n")
    assert "Archived " not in run.err and "Compressed " in run.err
    first, compressed, after, again, new, last = rents(run)
    assert first > 0 < again and last > 0 and compressed == after == new == 0


def test_the_windows_limit_wins_before_the_rent_is_due(agent):
    run = talk(agent, [*reading(*[150] * 20), "done"], "go\n/usage\n", {"read": 0.001, "write": 1}, 12_000)
    [first, *_] = [n for n, messages in enumerate(sent(run)) if any(map(is_archived, messages))]
    archivings(sent(run)[:first], patience(0.001, 1))       # until then, nothing is due
    assert run.err.count("Archived ") >= 1
    before = sum(offline.tokens(text) for text, _ in offline.openai_prompt(run.requests[first - 1].body))
    assert before > 0.85 * 12_000


# A cold cache: there is nothing to lose

def test_archived_at_once_when_the_tools_have_changed(agent):
    script = [*reading(*[100] * 7), "one", "two", *reading(100), "no plan", "three"]
    run = talk(agent, script, "1\n2\n/plan\n3\n/plan\n4\n")
    counts = [sum(map(is_archived, messages)) for messages in sent(run)]
    assert counts[8] == 0 < counts[9] and run.err.count("Archived ") <= 2


def test_archived_at_once_after_a_pause(model, monkeypatch, tmp_path, capsys):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("one more line ok\n" * 3_000, encoding="utf-8")
    server = model([*reading(*[100] * 7), "one", "two", *reading(100), "three"])
    agent = program.Agent(program.Model({"OPENAI_BASE_URL": server.base_url}, False, False))
    agent.rent.lifetime, now, pause = 300, time.monotonic, 0
    monkeypatch.setattr(time, "monotonic", lambda: now() + pause)
    agent.turn("1")
    pause += 290
    agent.turn("2")
    assert not any(map(is_archived, sent(server)[-1]))
    pause += 310
    agent.turn("3")
    assert sum(map(is_archived, sent(server)[-2])) == sum(map(is_archived, sent(server)[-1])) > 0
    assert capsys.readouterr().err.count("Archived ") == 1      # the cache is warm again


# What an archiving changes

def parts(request, format):
    """What is sent, in the order of the cache."""
    if format == "anthropic":
        return [text for text, _ in offline.anthropic_prompt(request.body)]
    return [json.dumps(request.body["tools"]), *(json.dumps(message) for message in request.body["messages"])]


@pytest.mark.parametrize("format", ["openai", "anthropic"])
def test_nothing_changes_before_the_first_result_that_is_archived(agent, told, format):
    run = talk(agent, [*reading(*[60, 90, 120] * 15), "done"], "go\n", {"read": 0.5, "write": 1}, format=format)
    prompts, breaks, title = [parts(request, format) for request in run.requests], [], json.dumps(TITLE)[1:-1]
    for n, (before, now) in enumerate(zip(prompts, prompts[1:]), 1):
        new = [k for k in range(len(before)) if "[archived] [r" in now[k] and "[archived] [r" not in before[k]]
        ledgers = [k for k, text in enumerate(now) if title in text]
        assert ledgers == ([len(now) - 1] if new else [k for k, text in enumerate(before) if title in text])
        assert before[:new[0]] == now[:new[0]] if new else before == now[:len(before)]
        if new:
            breaks.append(n)
            cached = told[n].get("cache_read_input_tokens") or told[n].get("prompt_tokens_details", {})["cached_tokens"]
            assert offline.tokens(now[0]) < cached <= sum(map(offline.tokens, now[:new[0] + 1]))
    assert len(breaks) == run.err.count("Archived ") >= 3


# The bill

def flat(usage):
    """(tokens of the prompt, tokens from the cache)"""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached


def cost(usages, read, write):
    return sum(write * (count - cached) + read * cached for count, cached in map(flat, usages))


@pytest.mark.parametrize("read, write", [(0.25, 1), (0.5, 1.25), (1, 1)])
def test_the_bill(agent, told, read, write):
    recall = step(call("recall", id_or_query="r3"))
    script = [*reading(*[60, 120] * 9), recall, "one", *reading(*LINES * 2), recall, recall, *reading(*LINES), "two"]
    prices, lines = {"read": read, "write": write, "dollars": 3}, "1\n2\n/usage\n"
    run = talk(agent, script, lines, prices)
    usages = told[:]
    assert run.err.count("Archived ") >= 2
    told.clear()
    shutil.rmtree(agent.home / ".rungs")        # what it remembers would be in the prompt
    never = talk(agent, script, lines, prices={"read": 0.001, "write": 1})
    assert "Archived " not in never.err and len(told) == len(usages)
    text = re.sub(r"(?<=\d),(?=\d)", "", run.err)
    paid, dollars, *given = re.search(r"paid as for (\d+) tokens of fresh input, \$([\d.]+), at (\S+) for one from the "
                                      r"cache and (\S+) for another", text).groups()
    share, whole, part, all = map(int, re.search(r"(\d+) % of about (\d+) without forgetting, (\d+) % of the (\d+) "
                                                 r"without a cache", text).groups())
    cached, expected, recalls = map(int, re.search(r"from the cache: (\d+) as the server says, (\d+) expected; "
                                                   r"recalls: (\d+)", text).groups())
    real = cost(usages, read, write)
    assert given == [f"{read:g}", f"{write:g}"] and int(paid) == pytest.approx(real, abs=1)
    assert float(dollars) == pytest.approx(3 * real / 1e6, abs=1e-4)
    assert all == sum(count for count, _ in map(flat, usages)) and part == pytest.approx(100 * real / all, abs=1)
    assert cached == sum(one for _, one in map(flat, usages)) and recalls == 3
    assert expected == pytest.approx(cached, rel=0.02)
    assert whole == pytest.approx(cost(told, read, write), rel=0.06)
    assert share == pytest.approx(100 * real / whole, abs=1)


# Prices

TABLE = json.loads((ROOT / "prices.json").read_text(encoding="utf-8")) if (ROOT / "prices.json").exists() else {}


def test_the_file_of_prices_is_valid():
    assert TABLE[""] == {"read": 0.25, "write": 1}
    for name, row in TABLE.items():
        assert {"read", "write"} <= row.keys() <= {"read", "write", "lifetime", "dollars"}, name
        assert 0 < row["read"] <= 1 <= row["write"] <= 2 and all(value > 0 for value in row.values()), name
        assert name == "" or re.fullmatch(r"[a-z0-9.-]+/\S*", name), name


@pytest.mark.parametrize("provider", ["zhipu", "openai", "anthropic"])
def test_the_usual_models_have_prices_in_dollars(provider):
    one = models.PROVIDERS[models.NAMES.index(provider)]
    row = models.prices(one.url, one.model)
    assert row == TABLE[f"{urlsplit(one.url).hostname}/{one.model}"] and row["dollars"] > 0


@pytest.mark.parametrize("url, model, name", [
    ("http://127.0.0.1:8000/v1", "offline", ""), ("https://openrouter.ai/api/v1", "gpt-4o", ""), ("", "gpt-4o", ""),
    ("https://API.openai.com:443/v1", "gpt-4o-mini", "api.openai.com/gpt-4o"),
    ("https://api.openai.com/v1", "gpt-5.4-mini-2026-03-17", "api.openai.com/gpt-5.4-mini"),
    ("https://api.openai.com/v1", "gpt-5.4-pro", "api.openai.com/gpt-5.4"),
    ("https://api.openai.com/v1", "new", "api.openai.com/"), ("https://api.openai.com.org/v1", "gpt-4o", ""),
    ("https://api.anthropic.com", "claude-haiku-5-5-20260101", "api.anthropic.com/claude-haiku-5-5")])
def test_the_longest_name_that_fits_counts(url, model, name):
    assert models.prices(url, model) == TABLE[name]


# The promise: never more than one and a half times what it costs never to archive, wherever the session ends

def costs(views, read, write):
    """What a session has cost after each request: what a request has in common with the one before is in the cache."""
    total, last, sums = 0, "", []
    for view in views:
        text = "".join(map(json.dumps, view))
        same = offline.common_prefix(last, text)
        total, last = total + (read * same + write * (len(text) - same)) / 4, text
        sums.append(total)
    return sums


def worst(actions, read, write):
    """The largest share of the costs without archiving, at any end of the session."""
    never = costs(play(actions, memory.Rent(1e-9, 1)), read, write)
    return max(map(float.__truediv__, costs(play(actions, memory.Rent(read, write)), read, write), never))


lengths = st.sampled_from([0, 20, 100, 150, 300, 1_000, 4_000, 10_000])
steps = st.builds(lambda name, length, results: (name, length * (name == "write_file"), *results),
                  st.sampled_from(["read_file", "read_file", "terminal", "write_file"]), lengths,
                  st.lists(lengths, min_size=1, max_size=3))
ADVERSARY = [("read_file", 0, 10_000), *[("read_file", 0, 0)] * 6]       # soon archived: there is little behind it


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(steps, steps, steps, st.tuples(st.just("user"), st.sampled_from([9, 2_000, 40_000]))),
                min_size=10, max_size=60), st.sampled_from([0.05, 0.1, 0.25, 0.5, 1]), st.sampled_from([1, 1.25]))
@example(ADVERSARY * 5, 0.1, 1)
def test_never_more_than_one_and_a_half_times_the_costs_without_archiving(actions, read, write):
    assert worst(actions, read, write) <= 1.5


@pytest.mark.parametrize("read, write", PRICES)
@pytest.mark.parametrize("length", [150, 2_000])
def test_an_adversary_who_ends_the_session_right_after_an_archiving(read, write, length):
    actions = [("read_file", 0, length)] * 80
    views = play(actions, memory.Rent(read, write))
    assert sum(sum(map(is_archived, now)) > sum(map(is_archived, before)) for before, now in zip(views, views[1:])) >= 1
    assert worst(actions, read, write) <= 1.5


def test_what_stands_behind_the_ledger_is_sent_anew_too():
    """The ledger moves. A message of the user's stands behind it, and is not behind the first result to be archived."""
    early, late = [("read_file", 0, 0), ("read_file", 0, *[10_000] * 2)], [("read_file", 0, 0)] * 5
    actions = [*early, *late, ("user", 400_000), *early, *late]
    assert worst(actions, 0.05, 1.25) <= 1.5
