"""The offline model refuses what a strict provider refuses: an invalid history never passes unseen."""
import copy
import http.client
import json

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}


def call(id="c1", name="read_file", arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls, **more):
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


def result(id="c1", content="ok"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def use(id="c1", name="read_file", input=None):
    return {"type": "tool_use", "id": id, "name": name, "input": input or {}}


def used(id="c1", content="ok"):
    return {"type": "tool_result", "tool_use_id": id, "content": content}


@pytest.fixture
def openai_says(model, openai_client):
    """openai_says(messages, …) -> None when they are accepted, else the refusal's message."""
    client = openai_client(model())

    def says(messages, **options):
        try:
            client.chat.completions.create(model="offline", messages=messages, **options)
        except openai.BadRequestError as error:
            assert error.type == "invalid_request_error"
            return error.body["message"]

    return says


@pytest.fixture
def anthropic_says(model, anthropic_client):
    client = anthropic_client(model())

    def says(messages, **options):
        try:
            client.messages.create(**{"model": "offline", "messages": messages, "max_tokens": 100} | options)
        except anthropic.BadRequestError as error:
            assert error.body["error"]["type"] == "invalid_request_error"
            return error.body["error"]["message"]

    return says


# OpenAI, case by case


@pytest.mark.parametrize("messages", [
    [USER],
    [USER, USER],
    [{"role": "system", "content": "x"}, {"role": "developer", "content": "y"}, USER],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [USER, calling(call()) | {"content": None}, result()],
    [USER, calling(call("a"), call("b")), result("b"), result("a"), USER],
    [USER, calling(call()), result(), calling(call()), result()],
])
def test_openai_accepts(openai_says, messages):
    assert openai_says(messages) is None


@pytest.mark.parametrize("messages, index, reason", [
    ([], "messages", "non-empty"),
    ([{"role": "system", "content": "x"}], "messages[0]", "last message"),
    ([{"role": "robot", "content": "x"}], "messages[0]", "unknown role"),
    ([USER, {"role": "system", "content": "x"}, USER], "messages[1]", "only at the beginning"),
    ([{"role": "assistant", "content": "x"}, USER], "messages[0]", "must be a user's"),
    ([USER, {"role": "assistant", "content": "x"}], "messages[1]", "last message"),
    ([USER, calling(call())], "messages[1]", "no result"),
    ([USER, calling(call()), USER], "messages[1]", "no result"),
    ([USER, calling(call("a"), call("b")), result("a"), USER, result("b")], "messages[1]", "no result"),
    ([USER, result()], "messages[1]", "no unanswered call"),
    ([USER, calling(call()), result(), result()], "messages[3]", "no unanswered call"),
    ([USER, calling(call()), result("c2")], "messages[2]", "no unanswered call"),
    ([USER, calling(call(""), call("b")), result(""), result("b")], "messages[1].tool_calls[0]", "non-empty"),
    ([USER, calling(call("a"), call("a")), result("a"), result("a")], "messages[1].tool_calls[1]", "twice"),
    ([USER, calling(call(name="")), result()], "messages[1].tool_calls[0]", "name must match"),
    ([USER, calling(call(name="functions.read")), result()], "messages[1].tool_calls[0]", "name must match"),
    ([USER, calling(call(name="x" * 65)), result()], "messages[1].tool_calls[0]", "name must match"),
    ([USER, calling(call(arguments="")), result()], "messages[1].tool_calls[0]", "JSON object"),
    ([USER, calling(call(arguments='{"a": ')), result()], "messages[1].tool_calls[0]", "JSON object"),
    ([USER, calling(call(arguments="[]")), result()], "messages[1].tool_calls[0]", "JSON object"),
    ([USER, calling(call(arguments={})), result()], "messages[1].tool_calls[0]", "JSON object"),
    ([USER, calling()], "messages[1]", "non-empty list"),
    ([{"role": "user", "content": None}], "messages[0]", "null only beside tool_calls"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0]", "text parts"),
    ([{"role": "user", "content": 7}], "messages[0]", "text parts"),
    ([USER, {"role": "assistant", "content": None}, USER], "messages[1]", "null only beside tool_calls"),
    ([USER, "hello"], "messages[1]", "object"),
])
def test_openai_refuses(openai_says, messages, index, reason):
    message = openai_says(messages)
    assert message.startswith(index + ":") and reason in message


@pytest.mark.parametrize("options, reason", [
    ({"tools": []}, "non-empty"),
    ({"tools": [TOOL, TOOL]}, "two tools named 'read_file'"),
    ({"tools": [{"type": "function", "function": {"name": "a b", "parameters": SCHEMA}}]}, "name must match"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "type object"),
    ({"stream_options": {"include_usage": True}}, "only with stream"),
])
def test_openai_refuses_options(openai_says, options, reason):
    assert openai_says([USER], tools=[TOOL]) is None
    assert reason in openai_says([USER], **options)


def test_a_lone_surrogate_is_refused(model):
    body = '{"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "%s"}]}'
    connection = http.client.HTTPConnection("127.0.0.1", model(["ok"]).server_address[1])
    for text, status in ((r"\ud83d", 400), (r"\ud83d\ude00", 200)):
        connection.request("POST", "/v1/chat/completions", body % text)
        response = connection.getresponse()
        assert response.status == status
        assert status == 200 or "messages[1]" in response.read().decode()
    connection.close()


def test_a_refused_request_leaves_the_script_alone(model, openai_client):
    client = openai_client(model(["first"]))
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="offline", messages=[USER, result()])
    assert client.chat.completions.create(model="offline", messages=[USER]).choices[0].message.content == "first"


@pytest.mark.parametrize("reply", [
    {"thinking": "先看目录", "tool_calls": [{"id": "c1", "name": "list_dir"}]},
    {"deltas": [{"reasoning_content": "先看"}, {"reasoning_content": "目录"},
                {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "list_dir", "arguments": "{}"}}]}]}])
def test_reasoning_must_come_back_where_it_was(model, openai_client, reply):
    client = openai_client(model([reply, "done", "done"], require_reasoning=True))

    def ask(messages):
        return list(client.chat.completions.create(model="offline", messages=messages, stream=True))

    ask([USER])
    for lost in ({}, {"reasoning_content": "先看"}):
        with pytest.raises(openai.BadRequestError, match="reasoning_content` in the thinking mode must be passed back"):
            ask([USER, calling(call(), **lost), result()])
    ask([USER, calling(call(), reasoning_content="先看目录"), result()])
    ask([USER, calling(call("foreign")), result("foreign")])  # not the server's own: nothing is known about it


# Anthropic, case by case


@pytest.mark.parametrize("messages, options", [
    ([USER], {}),
    ([USER], {"system": [{"type": "text", "text": "x"}]}),
    ([USER, {"role": "assistant", "content": [use("a"), use("b")]},
      {"role": "user", "content": [used("b"), used("a", ""), {"type": "text", "text": "go on"}]}], {}),
])
def test_anthropic_accepts(anthropic_says, messages, options):
    assert anthropic_says(messages, **options) is None


@pytest.mark.parametrize("messages, index, reason", [
    ([], "messages", "non-empty"),
    ([{"role": "system", "content": "x"}, USER], "messages.0", "top-level"),
    ([{"role": "assistant", "content": "x"}, USER], "messages.0", "must be a user's"),
    ([USER, USER], "messages.1", "alternate"),
    ([USER, {"role": "assistant", "content": "x"}], "messages.1", "last message"),
    ([{"role": "user", "content": ""}], "messages.0.content.0", "empty"),
    ([{"role": "user", "content": [{"type": "text", "text": " \n"}]}], "messages.0.content.0", "empty"),
    ([{"role": "user", "content": []}], "messages.0", "empty"),
    ([USER, {"role": "assistant", "content": [use()]}, USER], "messages.2", "no tool_result"),
    ([USER, {"role": "assistant", "content": [use("a"), use("b")]}, {"role": "user", "content": [used("a")]}],
     "messages.2", "no tool_result"),
    ([USER, {"role": "assistant", "content": [use()]}, {"role": "user", "content": [used(), used()]}],
     "messages.2.content.1", "no unanswered call"),
    ([USER, {"role": "assistant", "content": [use()]},
      {"role": "user", "content": [{"type": "text", "text": "x"}, used()]}], "messages.2.content.1", "before all"),
    ([{"role": "user", "content": [used()]}], "messages.0.content.0", "no unanswered call"),
    ([USER, {"role": "assistant", "content": [use("a"), use("a")]}, {"role": "user", "content": [used("a")]}],
     "messages.1.content.1", "unique"),
    ([USER, {"role": "assistant", "content": [use()]}, {"role": "user", "content": [used()]},
      {"role": "assistant", "content": [use()]}, {"role": "user", "content": [used()]}],
     "messages.3.content.0", "unique"),
    ([USER, {"role": "assistant", "content": [use("")]}, {"role": "user", "content": [used("")]}],
     "messages.1.content.0", "id and a name"),
    ([USER, {"role": "assistant", "content": [use(name="a.b")]}, {"role": "user", "content": [used()]}],
     "messages.1.content.0", "id and a name"),
    ([USER, {"role": "assistant", "content": [use() | {"input": "{}"}]}, {"role": "user", "content": [used()]}],
     "messages.1.content.0", "object"),
    ([{"role": "user", "content": [use()]}], "messages.0.content.0", "not possible"),
])
def test_anthropic_refuses(anthropic_says, messages, index, reason):
    message = anthropic_says(messages)
    assert message.startswith(index + ":") and reason in message


@pytest.mark.parametrize("options, reason", [
    ({"system": ""}, "empty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"name": "a"}]}, "type object"),
    ({"tools": [{"name": "a", "input_schema": SCHEMA}] * 2}, "two tools"),
    ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5}, "at most 4"),
])
def test_anthropic_refuses_options(anthropic_says, options, reason):
    assert anthropic_says([USER], tools=[{"name": "a", "input_schema": SCHEMA}]) is None
    assert reason in anthropic_says([USER], **options)


def test_thinking_blocks_must_come_back_unchanged(model, anthropic_client):
    reply = {"thinking": "hm", "text": "I look.", "tool_calls": [{"name": "ls"}]}
    client = anthropic_client(model([reply] + ["ok"] * 9))
    options = {"model": "offline", "max_tokens": 5000, "thinking": {"type": "adaptive"}}
    content = client.messages.create(messages=[USER], **options).model_dump(exclude_none=True)["content"]
    thinking, text, tool = content

    def answer(*blocks, **more):
        messages = [USER, {"role": "assistant", "content": list(blocks)},
                    {"role": "user", "content": [used(tool["id"])]}]
        return client.messages.create(messages=messages, **options | more).content[0].text

    assert answer(*content) == "ok"
    for changed, reason in ([text, tool], "must come back"), ([thinking | {"thinking": "ha"}, text, tool], "signature"):
        with pytest.raises(anthropic.BadRequestError, match=reason):
            answer(*changed)
    assert answer(text, tool, thinking={"type": "disabled"}) == "ok"


# Both: any valid history is accepted, and any single slip in it is refused

text = st.text(st.characters(codec="utf-8"), max_size=8).map(lambda text: "x" + text)
arguments = st.dictionaries(text, text | st.integers() | st.none(), max_size=2)
step = st.tuples(text, st.lists(arguments, max_size=3))
turn = st.tuples(text, st.lists(step, max_size=3))
calling_turn = st.tuples(text, st.just([("I call.", [{}, {"a": 1}])]))
histories = st.builds(lambda before, turn, after: [*before, turn, *((said, []) for said in after)],
                      st.lists(turn, max_size=3), calling_turn, st.lists(text, max_size=1))
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def openai_history(history):
    """history: [(what the user says, [(what the model says, [arguments of a call, …]), …]), …]"""
    messages, count = [{"role": "system", "content": "Be brief."}], 0
    for said, steps in history:
        messages.append({"role": "user", "content": said})
        for answer, calls in steps:
            ids = [f"c{count + number}" for number in range(len(calls))]
            count += len(calls)
            message = {"role": "assistant", "content": answer}
            if ids:
                message["tool_calls"] = [call(id, "read_file", json.dumps(one)) for id, one in zip(ids, calls)]
            messages += [message, *map(result, ids)]
    return messages


def anthropic_history(history):
    messages = []
    for message in openai_history(history)[1:]:
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = [used(message["tool_call_id"])] if message["role"] == "tool" else [
            {"type": "text", "text": message["content"]}]
        blocks += [use(one["id"], "read_file", json.loads(one["function"]["arguments"]))
                   for one in message.get("tool_calls", [])]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    return messages


@quick
@given(histories)
def test_valid_histories_are_accepted(openai_says, anthropic_says, history):
    assert openai_says(openai_history(history), tools=[TOOL]) is None
    assert anthropic_says(anthropic_history(history), tools=[{"name": "read_file", "input_schema": SCHEMA}]) is None


def pick(data, messages, wanted):
    return data.draw(st.sampled_from([index for index, message in enumerate(messages) if wanted(message)]))


def is_result(message):
    return message["role"] == "tool"


def is_call(message):
    return bool(message.get("tool_calls"))


def drop_result(messages, data):
    del messages[pick(data, messages, is_result)]


def double_result(messages, data):
    index = pick(data, messages, is_result)
    messages.insert(index, messages[index])


def orphan_result(messages, data):
    messages.insert(data.draw(st.integers(1, len(messages))), result("nobody"))


def result_before_call(messages, data):
    index = pick(data, messages, is_call)
    messages[index], messages[index + 1] = messages[index + 1], messages[index]


def drop_call(messages, data):
    del messages[pick(data, messages, is_call)]


def user_between(messages, data):
    messages.insert(pick(data, messages, is_result), USER)


def system_in_the_middle(messages, data):
    messages.insert(data.draw(st.integers(2, len(messages))), {"role": "system", "content": "x"})


def assistant_first(messages, data):
    messages.insert(1, {"role": "assistant", "content": "x"})


def assistant_last(messages, data):
    messages.append({"role": "assistant", "content": "x"})


def changed_call(**changes):
    def change(messages, data):
        one = messages[pick(data, messages, is_call)]["tool_calls"][0]
        for key, value in changes.items():
            (one if key == "id" else one["function"])[key] = value
    change.__name__ = f"call with {changes}"
    return change


def no_content(messages, data):
    messages[pick(data, messages, lambda message: not is_call(message))]["content"] = None


SLIPS = [drop_result, double_result, orphan_result, result_before_call, drop_call, user_between, system_in_the_middle,
         assistant_first, assistant_last, no_content, changed_call(id=""), changed_call(id="other"),
         changed_call(name="no.name"), changed_call(arguments='{"cut": '), changed_call(arguments="null")]


@quick
@given(histories, st.sampled_from(SLIPS), st.data())
def test_any_slip_is_refused_by_openai(openai_says, history, slip, data):
    messages = copy.deepcopy(openai_history(history))
    slip(messages, data)
    assert openai_says(messages) is not None


def of_type(kind):
    return lambda message: any(block["type"] == kind for block in message["content"])


def drop_tool_result(messages, data):
    content = messages[pick(data, messages, of_type("tool_result"))]["content"]
    content[0] = {"type": "text", "text": "x"}


def double_tool_result(messages, data):
    content = messages[pick(data, messages, of_type("tool_result"))]["content"]
    content.insert(0, content[0])


def text_before_results(messages, data):
    messages[pick(data, messages, of_type("tool_result"))]["content"].insert(0, {"type": "text", "text": "x"})


def drop_tool_use(messages, data):
    content = messages[pick(data, messages, of_type("tool_use"))]["content"]
    content.remove(next(block for block in content if block["type"] == "tool_use"))


def double_tool_use(messages, data):
    content = messages[pick(data, messages, of_type("tool_use"))]["content"]
    content.append(content[-1])


def same_role_neighbours(messages, data):
    index = data.draw(st.integers(0, len(messages) - 1))
    messages.insert(index, {"role": messages[index]["role"], "content": "x"})


def empty_text(messages, data):
    messages[pick(data, messages, of_type("text"))]["content"].append({"type": "text", "text": ""})


def drop_message(messages, data):
    del messages[data.draw(st.integers(0, len(messages) - 1))]


ANTHROPIC_SLIPS = [drop_tool_result, double_tool_result, text_before_results, drop_tool_use, double_tool_use,
                   same_role_neighbours, empty_text, drop_message, assistant_last]


@quick
@given(histories, st.sampled_from(ANTHROPIC_SLIPS), st.data())
def test_any_slip_is_refused_by_anthropic(anthropic_says, history, slip, data):
    messages = copy.deepcopy(anthropic_history(history))
    slip(messages, data)
    assert anthropic_says(messages) is not None


junk = st.recursive(st.none() | st.integers() | text, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from("role content type text id name function tool_calls properties required".split()),
    inner, max_size=4), max_leaves=12)


@quick
@given(junk, st.sampled_from(["messages", "tools", "system", "thinking", "stream_options", "tool_calls", "content"]))
def test_nonsense_is_refused_and_never_a_crash(model, junk, place):
    connection = http.client.HTTPConnection("127.0.0.1", model().server_address[1], timeout=5)
    body = {"model": "offline", "messages": [USER], "max_tokens": 9, place: junk}
    if place in ("tool_calls", "content"):
        body["messages"] = [USER, {"role": "assistant", "content": "x", place: junk}, USER]
    for path in ("/v1/chat/completions", "/v1/messages"):
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        assert response.status in (200, 400), response.read()
        response.read()
    connection.close()
