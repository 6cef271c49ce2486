"""Streaming: a reply arrives in pieces, is shown as it comes, and counts only when it is whole."""
import json
import re
import shlex
import signal
import threading
import time
from itertools import product

import pytest
from conftest import PROMPT, Run, call, posix_only, refused, step


def finish(children):
    """Let agents that run side by side come to their ends."""
    runs = []
    for child, server in children:
        out, err = child.communicate(timeout=60)
        assert "Traceback" not in err, err
        runs.append(Run(child.returncode, out, err, server.requests))
    return runs


def side_by_side(agent, scripts, *arguments):
    return finish([agent.start(script, "-p", "go", *arguments) for script in scripts])


def messages(run):
    return run.requests[-1].body["messages"]


def plain(screen):
    """What a person reads: without colours, and with the gaps closed."""
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\]8;[^\x1b]*\x1b\\", "", screen))


def test_every_request_asks_for_a_stream_with_usage(agent):
    run = agent.task([{"tool_calls": [call("list_dir")]}, "done"])
    for request in run.requests:
        assert request.body["stream"] is True and request.body["stream_options"] == {"include_usage": True}
    assert (run.out, len(run.requests)) == ("done\n", 2)
    assert not re.search("^model ", run.err, re.M)      # that is for --time


# Tool calls come in fragments. Each call here is (name, arguments), each fragment (index, id, name, arguments).

A, B, HERE = ("read_file", '{"path": "a.txt"}'), ("read_file", '{"path": "b.txt"}'), ("list_dir", "{}")
FRAGMENTS = {
    "the same index for all": ([(0, "a", *A), (0, "b", *B)], [A, B]),
    "no index": ([(None, "a", *HERE), (None, "b", "read_file", '{"path":'), (None, None, None, ' "b.txt"}')],
                 [HERE, B]),
    "interleaved": ([(0, "a", "read_file", ""), (1, "b", "read_file", ""), (0, None, None, '{"path": "a'),
                     (1, None, None, '{"path": "b'), (0, None, None, '.txt"}'), (1, None, None, '.txt"}')], [A, B]),
    "interleaved, no index but ids": ([(None, "a", "read_file", '{"path":'), (None, "b", "read_file", '{"path":'),
                                       (None, "a", None, ' "a.txt"}'), (None, "b", None, ' "b.txt"}')], [A, B]),
    "no ids": ([(0, None, *HERE), (1, None, *B)], [HERE, B]),
    "no ids and no index": ([(None, None, *HERE), (None, None, *B)], [HERE, B]),
    "empty ids and names later": ([(0, "a", "read_file", '{"path":'), (0, "", "", ' "a.txt"}'), (1, "b", *B)], [A, B]),
    "one id for two": ([(0, "a", "list_dir", ""), (0, None, None, "{}"), (1, "a", "read_file", ""),
                        (1, None, None, B[1])], [HERE, B]),
    "index gaps": ([(3, "a", *A), (7, "b", "read_file", '{"path":'), (7, None, None, ' "b.txt"}')], [A, B]),
    "arguments null": ([(0, "a", "list_dir", None), (1, "b", "read_file", None), (1, None, None, B[1])], [HERE, B]),
    "no arguments, the same index": ([(0, "a", "list_dir", ""), (0, "b", "list_dir", "")], [HERE, HERE]),
    "the same call twice": ([(0, "a", *A), (1, "b", *A)], [A, A]),
}


def fragment(index, id, name, arguments):
    """As a delta; what is None is not sent, but for the arguments."""
    given = {"index": index, "id": id, "type": id and "function"}
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{key: value for key, value in given.items() if value is not None} | {"function": function}]}


def assembled(agent, streams):
    """The model replies with these streams, one after the other. Returns for each the calls, as they went back."""
    for name in ("a.txt", "b.txt"):
        (agent.folder / name).write_text(f"this is {name}\n", encoding="utf-8")
    run = agent.task([{"deltas": [fragment(*each) for each in stream]} for stream in streams] + ["done"])
    assert (run.code, run.out) == (0, "done\n")
    replies, answers = [], iter(run.results)
    for message in messages(run)[2:]:
        if message["role"] == "assistant":
            calls = [item["function"] for item in message["tool_calls"]]
            replies.append([(function["name"], json.loads(function["arguments"])) for function in calls])
            for name, arguments in replies[-1]:     # each did run, with the result in its place
                assert next(answers) == (f"this is {arguments['path']}" if arguments else "a.txt  14\nb.txt  14")
    return replies


def test_calls_are_assembled_whatever_the_server_does(agent):
    """The judge sees to it that each has an id of its own and its result."""
    replies = assembled(agent, [stream for stream, _ in FRAGMENTS.values()])
    for kind, (_, calls), reply in zip(FRAGMENTS, FRAGMENTS.values(), replies, strict=True):
        assert reply == [(name, json.loads(arguments)) for name, arguments in calls], kind


def test_calls_are_assembled_in_every_dialect(agent):
    """Index right, always 0 or absent; id, then name, in the first fragment, in all, or (ids) in none."""
    dialects = [*product(["right", "zero", "none"], ["first", "all", "none"], ["first", "all"])]

    def stream(index, ids, names):
        for number, (name, arguments) in enumerate((A, B)):
            for place, piece in enumerate((arguments[:5], arguments[5:12], arguments[12:])):
                at = {"right": number, "zero": 0, "none": None}[index]
                id = "ab"[number] if ids == "all" or (ids, place) == ("first", 0) else None
                yield at, id, name if names == "all" or place == 0 else None, piece

    replies = assembled(agent, [stream(*dialect) for dialect in dialects])
    for dialect, reply in zip(dialects, replies, strict=True):
        assert reply == [("read_file", {"path": "a.txt"}), ("read_file", {"path": "b.txt"})], dialect


def test_several_fragments_in_one_chunk(agent):
    both = fragment(0, "a", *HERE)["tool_calls"] + fragment(1, "b", *HERE)["tool_calls"]
    first = {"role": "assistant", "content": None, "tool_calls": []}
    run = agent.task([{"deltas": [first, {"tool_calls": both}]}, "done"])
    assert len(run.results) == 2 and [item["id"] for item in messages(run)[2]["tool_calls"]] == ["a", "b"]
    assert messages(run)[2]["content"] == ""


# Chunks and usage

def said(delta=None, finish=None):
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}]}


USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
CHUNKS = {      # what surrounds the answer "ok", and what is known of its price
    "no choices first and last": ([{"choices": []}, said({"role": "assistant", "content": None}),
                                   said({"content": "ok"}), said({}, "stop"), {"choices": [], "usage": USAGE}], True),
    "no usage": ([{"choices": []}, said({"content": "ok"}), said({}, "stop")], False),
    "usage with the end": ([said({"content": "ok"}), said({}, "stop") | {"usage": USAGE}], True),
    "usage so far, each time": ([said({"content": "o"}) | {"usage": USAGE | {"completion_tokens": 1}},
                                 said({"content": "k"}, "stop"), {"choices": [], "usage": USAGE}], True),
    "comments and nulls": ([": keep-alive", 'data: {"choices": null}',
                            said({"content": "ok", "tool_calls": None, "reasoning_content": None}),
                            said({"content": ""}, "stop"), {"choices": [], "usage": None}], False),
    "no delta at the end": ([said({"content": "ok"}), {"choices": [{"index": 0, "finish_reason": "stop"}]},
                             {"usage": USAGE}], True),
}


def test_chunks_without_choices(agent):
    run = agent.run([{"chunks": chunks} for chunks, _ in CHUNKS.values()], "--time", input="go\n" * len(CHUNKS))
    assert run.out == "ok\n" * len(CHUNKS) and len(run.requests) == len(CHUNKS), run.err
    for kind, (_, known), line in zip(CHUNKS, CHUNKS.values(), re.findall("^model .+", run.err, re.M), strict=True):
        assert re.search("s, 7 tokens in.*, 2 out$" if known else "s, tokens unknown$", line), kind


def test_time_shows_what_each_model_call_took(agent):
    usage = {"prompt_tokens": 1234, "completion_tokens": 56, "total_tokens": 1290}
    work = said(fragment(0, "a", *HERE), "tool_calls")
    script = [{"chunks": [work, {"choices": [], "usage": usage | cached}]} for cached in
              ({"prompt_tokens_details": {"cached_tokens": 800}}, {"prompt_cache_hit_tokens": 800})]    # DeepSeek
    run = agent.task(script + ["done"], "--time")
    *scripted, last = re.findall(r"^model .+", run.err, re.M)
    assert len(scripted) == 2 and run.out == "done\n"
    for line in scripted:
        assert re.fullmatch(r"model \d+\.\d s, 1,234 tokens in \(800 cached\), 56 out", line)
    assert re.match(r"model \d+\.\d s, [\d,]+ tokens in", last)


def test_a_reply_cut_by_its_length_is_kept_and_said(agent):
    half = {"name": "write_file", "arguments": '{"path": "x", "cont'}
    run = agent.run([{"text": "half an ans", "finish_reason": "length"},
                     {"tool_calls": [half], "finish_reason": "length"}, "done"], input="go\nmore\n")
    assert run.out == "half an ans\ndone\n" and refused(run.requests) == []
    assert re.search(r"\bcut\b", run.err) and "half an ans" in [message["content"] for message in messages(run)]
    assert run.results[0].startswith("Error: ") and list(agent.folder.iterdir()) == []


# Thinking

def test_thinking_is_shown_beside_the_answer_and_goes_back_where_it_was(agent):
    """DeepSeek refuses the next request without it; other servers refuse a key that they did not send."""
    agent.options = {"require_reasoning": True}
    look = [{"reasoning_content": "先看"}, {"reasoning_content": "目录\n\x1b[2J"}, fragment(0, "a", *HERE)]
    plainly = {"thinking": "simple enough", "text": "one"}
    run = agent.run([{"deltas": look}, plainly, {"tool_calls": [call("list_dir")]}, "two"], input="go\nmore\n")
    assert (run.code, run.out, refused(run.requests)) == (0, "one\ntwo\n", [])
    assert "先看目录" in run.err and "simple enough" in run.err and "\x1b" not in run.err
    thoughts = [message.get("reasoning_content") for message in messages(run)]
    assert thoughts == [None, None, "先看目录\n\x1b[2J", None, "simple enough", None, None, None]


def test_thinking_by_another_name_is_shown_and_not_sent_back(agent):
    look = [{"reasoning": "look "}, {"reasoning": "around", "content": ""}, fragment(0, "a", *HERE)]
    run = agent.task([{"deltas": look}, "done"])
    assert run.out == "done\n" and "look around" in run.err
    assert not any("reasoning" in key for message in messages(run) for key in message)


@posix_only
def test_an_interrupt_leaves_nothing_of_half_a_reply(agent):
    """It stops after a whole call and a half. The thinking is on the screen by then."""
    half = [{"reasoning_content": "let me see"}, {"content": "I begin"},
            fragment(0, "a", "write_file", '{"path": "x", "content": "1"}'), fragment(1, "b", "read_file", '{"pa')]
    child, server = agent.prompt([{"deltas": half, "fault": "stall", "at": 4}, "I am here."])
    child.sendline("go")
    child.expect("let me see")
    time.sleep(0.3)     # the rest is on its way
    child.sendintr()
    child.expect(PROMPT)
    child.sendline("continue")
    child.expect("I am here.")
    sent = server.requests[1].body["messages"]
    assert refused(server.requests) == [] and sent[-1]["content"] == "continue"
    assert all(message["role"] in ("system", "user") for message in sent) and "let me see" not in json.dumps(sent)
    assert list(agent.folder.iterdir()) == []


# On the screen

ANSWER = ["# A ti", "tle\n\nsee [", "/usr/lib/x.so] use list[str] [", "/] end [bold]loud :smile:\n\n```python\nx = [1]",
          "\n\n\ny = None\n```\n\n1. one\n\n", "2. two\n", "\nlast **wo", "rds**"]
SHOWN = ["A title", "see [/usr/lib/x.so] use list[str] [/] end [bold]loud :smile:", "x = [1] y = None", "1 one",
         "2 two", "last words"]


def at_terminal(agent, script, redirect=""):
    """A task at a terminal, but for what `redirect` sends elsewhere. Returns the child."""
    pexpect = pytest.importorskip("pexpect")
    _, command, env = agent.prepare(script, ["-p", "go"])
    child = pexpect.spawn("/bin/sh", ["-c", f"exec {shlex.join(command)} {redirect}"], cwd=str(agent.folder), env=env,
                          encoding="utf-8", timeout=20, dimensions=(24, 80))
    agent.children.append(child)
    return child


def screen(child):
    import pexpect
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0, child.before
    return child.before


@posix_only
def test_at_a_terminal_the_answer_is_rendered(agent):
    """Foreign text is never taken for markup, in whatever pieces it comes."""
    del agent.env["NO_COLOR"]
    agent.env["TERM"] = "xterm-256color"
    raw = screen(at_terminal(agent, [{"deltas": [{"content": piece} for piece in ANSWER]}], "2>errors"))
    text = plain(raw)
    places = [text.find(part) for part in SHOWN]
    assert -1 not in places and places == sorted(places), text
    assert [text.count(part) for part in SHOWN] == [1] * len(SHOWN)
    assert not any(mark in text for mark in ("# A", "```", "**"))
    [code] = [line for line in raw.splitlines() if "None" in line]
    assert re.search(r"\x1b\[[\d;]*(38;[25];|3[1-7])", code)


@posix_only
def test_the_spinner_shows_a_name_as_it_is(agent):
    """MODEL and the names of tools are foreign text, too; in a tool's name "[/]" would be markup that ends nothing."""
    agent.env["MODEL"] = "[/i] a [bold]model"
    text = plain(screen(at_terminal(agent, [step(call("[/] tool [red]", path="x")), {"text": "ok", "delay": 0.5}])))
    assert "ok" in text and "[/i] a [bold]model" in text and "● [/] tool [red] x → FAIL: there" in text


@posix_only
def test_at_a_terminal_a_block_is_shown_as_soon_as_it_is_whole(agent):
    child = at_terminal(agent, [{"deltas": [{"content": piece} for piece in ANSWER], "fault": "stall", "at": 6}])
    child.expect("A title")
    child.expect(r"\[bold\]loud")
    child.expect("y = None")
    child.sendintr()


@posix_only
def test_in_a_pipe_the_answer_is_as_the_model_wrote_it(agent):
    """Also when the rest is at a terminal, and a first try broke off."""
    text = "".join(ANSWER)
    redirects = (">mixed", ">out 2>errors </dev/null")
    for child in [at_terminal(agent, [{"text": text, "fault": "cut"}, text], redirect) for redirect in redirects]:
        screen(child)
    assert [(agent.folder / name).read_text(encoding="utf-8") for name in ("mixed", "out")] == [text + "\n"] * 2
    errors = (agent.folder / "errors").read_text(encoding="utf-8")
    assert AGAIN.search(errors) and not re.search(r"[\x1b\r]|\d s\b(?! \(2 of 3\))", errors)     # no spinner


NASTY = ["\x1b[2J", "\x1b]0;owned\x07", "\x1b]52;c;aGk=\x07", "\x9b31m", "\x08", "\u202e",
         "&#27;[2J", "&#x9b;31m", "&#8238;", "&#x1b;]0;owned&#7;"]


@posix_only
def test_an_answer_has_no_escape_sequences_of_its_own(agent):
    """Markdown also knows characters by number: &#27; is Escape."""
    nasty = "".join(NASTY)
    places = [f"# head {nasty}", f"text {nasty}", f"* item {nasty}", f"```\ncode {nasty}\n```",
              f"``` {nasty}\nmore\n```", f"[link {nasty}](http://x.test/{nasty} \"{nasty}\")",
              f"![picture {nasty}](<{nasty}>)",
              f"| a {nasty} |\n|---|\n| b {nasty} |"]
    raw = screen(at_terminal(agent, ["\n\n".join(places) + "\n\nend"], "2>errors"))
    assert "end" in plain(raw).split() and "head" in raw and "# head" not in raw
    for escape in ("\x1b[2J", "\x1b]0;", "\x1b]52", "\x07", "\x9b", "\x08", "\u202e"):
        assert escape not in raw, escape


@posix_only
def test_a_spinner_counts_the_seconds_of_model_and_tools(agent):
    work = {"tool_calls": [call("terminal", command="sleep 1.4")]}
    child, _ = agent.prompt([work, {"text": "done", "delay": 1.4}], "--yes")
    child.sendline("go")
    second = r"\b1(\.\d)? ?s\b"
    assert child.expect([second, "●"]) == 0
    child.expect(r"● terminal sleep 1\.4 → exit 0, 0 lines, [\d.]+ s")
    assert child.expect([second, "done"]) == 0
    child.expect("done")


# Another try

OVERLOAD = {"status": 529, "message": "Overloaded"}
AGAIN = re.compile(r"; trying again in (\d+) s \((\d) of 3\)")
PASSING = {str(status): {"status": status, "message": "not now"} for status in (408, 409, 429, 500, 529)}
BROKEN = {"thinking": "hm-1", "text": "I write-1", "tool_calls": [call("write_file", path="x", content="1")], "at": 99}
PASSING |= {fault: BROKEN | {"fault": fault} for fault in ("cut", "end", "garbage", "error", "empty")}
PASSING["stall"] = BROKEN | {"fault": "stall", "seconds": 0.5}


def test_what_may_pass_is_tried_again(agent):
    """At 99 the whole reply has come, and only its end is missing. Still nothing of it is acted on."""
    runs = side_by_side(agent, [[reply, {"tool_calls": [call("list_dir")]}, "fine"] for reply in PASSING.values()])
    for kind, run in zip(PASSING, runs, strict=True):
        assert (run.code, run.out, len(run.requests)) == (0, "fine\n", 3), (kind, run.err)
        assert AGAIN.findall(run.err) == [("1", "2")] and refused(run.requests) == [], (kind, run.err)
        assert run.requests[0].raw == run.requests[1].raw and "-1" not in json.dumps(messages(run)[1:]), kind
    assert list(agent.folder.iterdir()) == []


def test_three_tries_are_all(agent):
    """Each with a longer wait; then the next turn starts anew."""
    run = agent.run([OVERLOAD, {"text": "ha", "fault": "end"}, OVERLOAD, "here"], input="go\nstill there?\n")
    assert (run.out, len(run.requests)) == ("here\n", 4)
    assert AGAIN.findall(run.err) == [("1", "2"), ("3", "3")] and "Overloaded" in run.err.split("3 of 3")[1]


def test_what_will_not_pass_is_not_tried_again(agent):
    quota = {"status": 429, "message": "You exceeded your quota", "code": "insufficient_quota"}
    final = [{"status": status, "message": "never"} for status in (400, 401, 403, 404)] + [quota]
    for reply, run in zip(final, side_by_side(agent, [[OVERLOAD, reply, "late"] for reply in final]), strict=True):
        assert (run.code, run.out, len(run.requests)) == (1, "", 2), reply
        assert len(AGAIN.findall(run.err)) == 1 and reply["message"] in run.err


@pytest.mark.guard("v0.1 tries once, whatever happens")
def test_a_server_that_is_not_there_is_not_tried_again(agent):
    agent.env["OPENAI_BASE_URL"] = "http://127.0.0.1:9/v1"
    run = agent.run([], "-p", "go")
    assert run.code == 1 and "OPENAI_BASE_URL" in run.err and not AGAIN.search(run.err)


def test_the_server_may_name_the_wait(agent):
    waits = {"2": "2", "soon": "1", "Wed, 21 Oct 2015 07:28:00 GMT": None, "nan": None}
    runs = side_by_side(agent, [[OVERLOAD | {"headers": {"Retry-After": value}}, "fine"] for value in waits])
    for (value, wait), run in zip(waits.items(), runs, strict=True):
        assert (run.code, run.out, len(run.requests)) == (0, "fine\n", 2), (value, run.err)
        [(announced, _)] = AGAIN.findall(run.err)
        assert announced == wait or wait is None and int(announced) <= 1, value


def test_a_long_wait_is_the_users_business(agent):
    """Trying again earlier than the server allows is in vain, and some servers count it against you."""
    full = {"status": 429, "message": "the hour is used up", "headers": {"Retry-After": "3600"}}
    for script in ([full, "late"], [OVERLOAD, full, "late"]):
        run = agent.run(script, "-p", "go")
        assert (run.code, run.out, len(run.requests)) == (1, "", len(script) - 1)
        assert "the hour is used up" in run.err and "the server asks to wait 3,600 s" in " ".join(run.err.split())
        assert len(AGAIN.findall(run.err)) == len(script) - 2


@posix_only
def test_an_interrupt_ends_the_wait(agent):
    child, server = agent.start([OVERLOAD | {"headers": {"Retry-After": "50"}}, "late"], "-p", "go")
    watchdog = threading.Timer(30, child.kill)
    watchdog.start()
    while not AGAIN.search(line := child.stderr.readline()):
        assert line, "it ended without a word of another try"
    watchdog.cancel()
    assert AGAIN.search(line)[1] == "50"
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=10)
    assert (child.returncode, out, len(server.requests)) == (130, "", 1)
