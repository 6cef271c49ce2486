"""The loop: input -> model -> tool calls -> results back -> ... -> plain text ends the turn."""
import json
import time

import pytest
from conftest import PROMPT, call, posix_only, refused, results, step, wait_until


def last(request):
    return request.body["messages"][-1]


def calls_of(message):
    return [(item["id"], item["function"]["name"], item["function"]["arguments"]) for item in message["tool_calls"]]


def test_plain_text_ends_the_turn(agent):
    run = agent.task(["Good morning."])
    assert (run.code, run.out) == (0, "Good morning.\n")
    [request] = run.requests
    assert request.path == "/v1/chat/completions"
    assert [message["role"] for message in request.body["messages"]] == ["system", "user"]
    assert last(request)["content"] == "do it"


def test_each_call_is_answered_in_order_and_the_loop_goes_on(agent):
    (agent.folder / "a.txt").write_text("alpha\n", encoding="utf-8")
    run = agent.task([
        {"text": "I look.", "tool_calls": [call("read_file", path="a.txt"), call("list_dir")]},
        step(call("write_file", path="b.txt", content="beta\n")),
        "written"])
    assert (run.code, len(run.requests)) == (0, 3)
    assert run.out.endswith("written\n")
    assert (agent.folder / "b.txt").read_text(encoding="utf-8") == "beta\n"
    roles = [message["role"] for message in run.requests[2].body["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    _, _, first, *answers = run.requests[1].body["messages"]
    assert first["content"] == "I look."
    assert [answer["tool_call_id"] for answer in answers] == [item[0] for item in calls_of(first)]
    assert "alpha" in answers[0]["content"] and "a.txt" in answers[1]["content"]


def test_a_turn_carries_the_turns_before_it_unchanged(agent):
    run = agent.run([step(call("list_dir")), "one", "two"], input="first\nsecond\n")
    before, after = run.requests[1].body, run.requests[2].body
    assert after["messages"][:len(before["messages"])] == before["messages"]
    assert [message["content"] for message in after["messages"][-2:]] == ["one", "second"]
    assert after["tools"] == before["tools"]


FIRST = ["read_file", "write_file", "edit_file", "list_dir", "terminal"]      # there may be more behind them


def test_the_first_request_is_small(agent):
    """What is in it is paid for with every request: at most 450 tokens, which is about 2,400 characters."""
    body = agent.task(["ok"]).requests[0].body
    first = [tool for tool in body["tools"] if tool["function"]["name"] in FIRST]
    assert [tool["function"]["name"] for tool in first] == FIRST
    assert len(json.dumps([body["messages"][0], first], ensure_ascii=False)) < 2_400


def test_a_turn_ends_after_50_rounds(agent):
    run = agent.task([step(call("list_dir"))] * 60)
    assert (run.code, run.out, len(run.requests)) == (1, "", 50)
    assert "50" in run.err.splitlines()[-1]


def test_the_session_goes_on_after_50_rounds(agent):
    run = agent.run([step(call("list_dir"))] * 50 + ["here"], input="go\nstill there?\n")
    assert run.out == "here\n" and refused(run.requests) == []


# What comes back must be a valid history, whatever the model sent.

def test_calls_to_tools_that_were_not_offered(agent):
    """Models call tools from memory; the offered call beside them still runs, the others say what there is."""
    (agent.folder / "a.txt").write_text("alpha\n", encoding="utf-8")
    names = ["create_file", "", "functions.write_file", "读取 文件", "read_file" * 10, "READ_FILE "]
    run = agent.task([
        {"tool_calls": [call("write_file", path="x.txt", content="1"), call("read_file", path="a.txt")]
         + [call(name, path="y.txt", content="1") for name in names]},
        "ok"])
    assert (run.code, run.out) == (0, "ok\n")
    wrote, read, *errors = run.results
    assert wrote == "created x.txt (1 line)" and read == "alpha"
    assert len(errors) == len(names)
    for error in errors:
        assert error.startswith("Error: ")
        assert all(name in error for name in FIRST)
    assert sorted(path.name for path in agent.folder.iterdir()) == ["a.txt", "x.txt"]


BROKEN = {
    "not JSON": "path=a.txt",
    "truncated": '{"path": "a.txt", "content": "hel',
    "truncated, but closed by chance": '{"path": "a.txt"}, {"content": "',
    "nothing": "",
    "a list": '["a.txt", "hello"]',
    "null": "null",
    "JSON in a string": '"{\\"path\\": \\"a.txt\\", \\"content\\": \\"hello\\"}"',
    "not a number": '{"path": "a.txt", "content": NaN}',
}


def test_broken_arguments_are_answered_and_go_back_as_an_empty_object(agent):
    """Some servers answer 500 for ever to a history with broken arguments in it."""
    run = agent.task([{"tool_calls": [{"name": "write_file", "arguments": text} for text in BROKEN.values()]}, "ok"])
    assert (run.code, run.out) == (0, "ok\n")
    for kind, result in zip(BROKEN, run.results, strict=True):
        assert result.startswith("Error: ") and "write_file(path, content)" in result, kind
    sent = calls_of(run.requests[1].body["messages"][2])
    assert {arguments for _, _, arguments in sent} == {"{}"}
    assert list(agent.folder.iterdir()) == []


def test_missing_and_repeated_ids_are_made_up(agent):
    (agent.folder / "a.txt").write_text("alpha\n", encoding="utf-8")
    ids = [("", ""), ("same", "same"), ("", "call_1"), (None, None)]
    run = agent.task([step(call("read_file", path="a.txt") | {"id": first}, call("list_dir") | {"id": second})
                      for first, second in ids] + ["ok"])
    assert (run.code, run.out) == (0, "ok\n")
    for request in run.requests[1:]:
        message, read, listed = request.body["messages"][-3:]
        made = [item[0] for item in calls_of(message)]
        assert all(made) and len(set(made)) == 2
        assert [read["tool_call_id"], listed["tool_call_id"]] == made
        assert "alpha" in read["content"] and "a.txt" in listed["content"]


def test_an_id_of_an_earlier_reply_is_not_used_again(agent):
    """Some servers count from call_0 in every reply; Anthropic and others refuse a conversation with one id twice."""
    script = [step(call("list_dir") | {"id": "call_0"}, call("list_dir") | {"id": "call_1"})] * 2
    run = agent.run([*script, "one", *script, "two"], input="go\nmore\n")
    assert (run.code, run.out, refused(run.requests)) == (0, "one\ntwo\n", [])
    sent = run.requests[-1].body["messages"]
    made = [item[0] for message in sent if "tool_calls" in message for item in calls_of(message)]
    assert made[:2] == ["call_0", "call_1"] and len(set(made)) == len(made) == 8
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == made


def test_thinking_goes_back_unchanged(agent):
    """DeepSeek refuses the next request otherwise. It is not part of the answer."""
    agent.options = {"require_reasoning": True}
    thoughts = ["先看目录", "one\n\n  two ✅ [/b] \x1b[1m", "x" * 5_000]
    run = agent.run([step(call("list_dir")) | {"thinking": thinking} for thinking in thoughts] + ["done", "more"],
                    input="go\nagain\n")
    assert (run.code, run.out) == (0, "done\nmore\n")
    for number, request in enumerate(run.requests):
        sent = [message["reasoning_content"] for message in request.body["messages"] if "reasoning_content" in message]
        assert sent == thoughts[:number]


def test_thinking_is_not_added_where_there_was_none(agent):
    run = agent.task([step(call("list_dir")), "done"])
    assert len(run.requests) == 2
    assert "reasoning" not in json.dumps([request.body for request in run.requests])


# Ctrl-C ends the turn, never the session, and leaves a valid history behind.

INTERRUPTED = [
    pytest.param([call("terminal", command="trap '' INT TERM; echo up > up; sleep 30"),
                  call("write_file", path="late.txt", content="x")], ["--yes"], id="a command that ignores it"),
    pytest.param([call("terminal", command="sleep 30"), call("no_such_tool")], [], id="a question"),
]


@posix_only
@pytest.mark.parametrize("calls, options", INTERRUPTED)
def test_interrupt_leaves_every_call_answered(agent, calls, options):
    child, server = agent.prompt([{"tool_calls": calls}, "I am here."], *options)
    child.sendline("go")
    if options:
        wait_until((agent.folder / "up").exists)
    else:
        child.expect(r"\[y/N")
    child.sendintr()
    child.expect(PROMPT)
    child.sendline("continue")
    child.expect("I am here.")
    request = server.requests[1]
    assert request.error is None and last(request)["content"] == "continue"
    stopped, skipped = results(request)
    assert "interrupted" in stopped and "not run" in skipped
    assert not (agent.folder / "late.txt").exists()


@posix_only
def test_interrupt_while_the_model_is_thinking(agent):
    child, server = agent.prompt([lambda body: child.sendintr() or {"text": "too late", "delay": 20}, "I am here."])
    child.sendline("go")
    child.expect(PROMPT)
    child.sendline("continue")
    child.expect("I am here.")
    assert server.requests[1].error is None
    assert "too late" not in json.dumps(server.requests[1].body)


@posix_only
def test_end_of_input_at_a_question_is_a_no(agent):
    child, server = agent.prompt([step(call("terminal", command="touch ran"), call("list_dir")), "I am here."])
    child.sendline("go")
    child.expect(r"\[y/N.*\]")
    time.sleep(0.3)     # readline is not ready at once, and loses what comes before
    child.sendeof()
    while child.expect(["I am here.", PROMPT]) == 1:    # the turn may go on or be over; the session lives
        child.sendline("continue")
    assert refused(server.requests) == []
    assert len(results(server.requests[-1])) == 2 and not (agent.folder / "ran").exists()
