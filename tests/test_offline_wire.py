"""The offline model speaks both wire formats: replies, streams, faults, usage, the prompt cache, through both SDKs."""
import http.client
import json
import socket
import subprocess
import sys
import time

import anthropic
import httpx2
import offline
import openai
import pytest

HELLO = [{"role": "user", "content": "hello"}]
RICH = {"thinking": "First I look. 先看目录。", "text": "I read both.\n\n好的。", "tool_calls": [
    {"name": "read_file", "arguments": {"path": "a b.txt", "limit": 3}},
    {"name": "list_dir", "arguments": {"path": "源码"}, "id": "mine"}]}


def chunks(client, messages=HELLO, **options):
    return list(client.chat.completions.create(model="offline", messages=messages, stream=True, **options))


def ask(client, messages=HELLO, **options):
    return client.chat.completions.create(model="offline", messages=messages, **options)


def ask_anthropic(client, messages=HELLO, **options):
    return client.messages.create(model="offline", messages=messages, max_tokens=1000, **options)


def assembled(parts):
    """(thinking, text, [(id, name, arguments)], finish_reason) of a list of chunks."""
    thinking, text, calls, finish = "", "", {}, None
    for part in parts:
        for choice in part.choices:
            thinking += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                id, name, arguments = calls.get(call.index, ("", "", ""))
                calls[call.index] = (id or call.id, name or call.function.name, arguments + call.function.arguments)
    return thinking, text, list(calls.values()), finish


# Replies


def test_openai_whole_reply(model, openai_client):
    choice = ask(openai_client(model([RICH]))).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning_content, choice.message.content) == (RICH["thinking"], RICH["text"])
    first, second = choice.message.tool_calls
    assert json.loads(first.function.arguments) == {"path": "a b.txt", "limit": 3}
    assert second.id == "mine" and first.id not in ("", "mine")


def test_openai_streamed_reply_is_the_same_in_small_pieces(model, openai_client):
    parts = chunks(openai_client(model([RICH])))
    thinking, text, calls, finish = assembled(parts)
    assert (thinking, text, finish) == (RICH["thinking"], RICH["text"], "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        (call["name"], call["arguments"]) for call in RICH["tool_calls"]]
    assert max(len(part.choices[0].delta.content or "") for part in parts) < 16
    assert sum(bool(part.choices[0].delta.tool_calls) for part in parts) > 4  # arguments come in fragments


def test_openai_usage_chunk_comes_last_and_only_when_asked(model, openai_client):
    client = openai_client(model(["one", "two", {"text": "three", "usage": False}]))
    assert all(part.choices and part.usage is None for part in chunks(client))
    *others, last = chunks(client, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(part.usage is None for part in others)
    assert all(part.usage is None for part in chunks(client, stream_options={"include_usage": True}))


def test_anthropic_whole_and_streamed_reply(model, anthropic_client):
    client = anthropic_client(model([RICH, RICH]))
    whole = ask_anthropic(client)
    with client.messages.stream(model="offline", messages=HELLO, max_tokens=1000) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text, first, second = message.content
        assert (thinking.thinking, text.text) == (RICH["thinking"], RICH["text"]) and thinking.signature
        assert (first.name, first.input) == ("read_file", {"path": "a b.txt", "limit": 3})
        assert (second.id, second.input) == ("mine", {"path": "源码"})
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 10


def test_anthropic_arguments_come_in_fragments(model, anthropic_client):
    events = list(ask_anthropic(anthropic_client(model([RICH])), stream=True))
    assert [event.type for event in events][0] == "message_start" and events[-1].type == "message_stop"
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert sum(delta.type == "input_json_delta" for delta in deltas) > 3


def test_anthropic_beta_and_models(model, openai_client, anthropic_client):
    server = model(["ok"], models={"small", "large"})
    message = anthropic_client(server).beta.messages.create(model="small", messages=HELLO, max_tokens=9)
    assert message.content[0].text == "ok"
    assert [one.id for one in openai_client(server).models.list()] == ["large", "small"]
    assert [one.id for one in anthropic_client(server).models.list()] == ["large", "small"]


@pytest.mark.parametrize("reason, anthropics", [("length", "max_tokens"), ("stop", "end_turn"), ("odd", "odd")])
def test_stop_reasons(model, openai_client, anthropic_client, reason, anthropics):
    server = model([{"text": "cut", "finish_reason": reason}] * 2)
    assert ask(openai_client(server)).choices[0].finish_reason == reason
    assert ask_anthropic(anthropic_client(server)).stop_reason == anthropics


def test_broken_arguments_are_sent_as_scripted(model, openai_client):
    reply = {"tool_calls": [{"name": "read_file", "arguments": '{"path": "a'}]}
    client = openai_client(model([reply, reply]))
    assert ask(client).choices[0].message.tool_calls[0].function.arguments == '{"path": "a'
    assert assembled(chunks(client))[2][0][2] == '{"path": "a'


# Scripts


def test_a_script_is_played_in_order_and_then_says_so(model, openai_client):
    server = model(["one", lambda body: f"two after {body['messages'][-1]['content']}"])
    client = openai_client(server)
    assert [ask(client).choices[0].message.content for _ in "ab"] == ["one", "two after hello"]
    with pytest.raises(openai.BadRequestError, match="script is at its end"):
        ask(client)
    assert [request.error is None for request in server.requests] == [True, True, False]
    assert server.requests[0].body["messages"] == HELLO and server.requests[0].headers["authorization"] == "Bearer any"
    assert json.loads(server.requests[0].raw) == server.requests[0].body


def test_a_slip_in_a_script_is_found_at_once():
    with pytest.raises(ValueError, match="tool_call"):
        offline.Server([{"tool_call": []}])
    with pytest.raises(ValueError, match="fault"):
        offline.Server([{"text": "x", "fault": "explode"}])


def test_a_scripted_function_that_fails_is_a_500(model, openai_client):
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
        ask(openai_client(model([lambda body: 1 / 0])))


def test_raw_deltas(model, openai_client):
    """Servers differ: no index, no ids, interleaved calls. Whatever is scripted arrives as it is."""
    deltas = [{"tool_calls": [{"index": 0, "id": "a", "function": {"name": "read_file", "arguments": ""}}]},
              {"tool_calls": [{"function": {"arguments": "{}"}}]}]
    client = openai_client(model([{"deltas": deltas}, {"deltas": deltas}]))
    with pytest.raises(openai.BadRequestError, match="scripted as a stream"):
        ask(client)
    parts = chunks(client)
    assert [part.choices[0].delta.model_dump(exclude_unset=True) for part in parts] == [*deltas, {}]
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_raw_chunks(model, openai_client, anthropic_client):
    raw = [{"choices": []}, {"choices": [{"index": 0, "delta": {"content": "ok"}}]}, ": a comment",
           {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}]
    parts = chunks(openai_client(model([{"chunks": raw}])))
    assert [part.choices == [] for part in parts] == [True, False, True] and parts[-1].usage.prompt_tokens == 7
    events = [{"type": "ping"}, {"type": "message_stop"}]
    stream = ask_anthropic(anthropic_client(model([{"chunks": events}])), stream=True)
    assert [event.type for event in stream][-1] == "message_stop"


@pytest.mark.parametrize("status, openais, anthropics", [
    (429, openai.RateLimitError, anthropic.RateLimitError), (500, openai.InternalServerError, anthropic.APIStatusError),
    (529, openai.InternalServerError, anthropic.APIStatusError)])
def test_scripted_http_errors(model, openai_client, anthropic_client, status, openais, anthropics):
    server = model([{"status": status, "message": "slow down", "headers": {"Retry-After": "7"}}] * 2)
    for error, call in ((openais, lambda: ask(openai_client(server))),
                        (anthropics, lambda: ask_anthropic(anthropic_client(server), stream=True))):
        with pytest.raises(error, match="slow down") as caught:
            call()
        assert caught.value.status_code == status and caught.value.response.headers["retry-after"] == "7"
    assert [request.error for request in server.requests] == [None, None]  # no fault of the client


# Faults inside a stream. No SDK retries these, and each has its own way to tell.


@pytest.mark.parametrize("fault, openais, anthropics", [
    ("cut", openai.APIConnectionError, httpx2.RemoteProtocolError),
    ("garbage", json.JSONDecodeError, json.JSONDecodeError),
    ("error", openai.APIError, anthropic.APIStatusError)])
def test_faults_that_raise(model, openai_client, anthropic_client, fault, openais, anthropics):
    server = model([{"text": "one two three four", "fault": fault}] * 2)
    with pytest.raises(openais):
        chunks(openai_client(server))
    with pytest.raises(anthropics):
        list(ask_anthropic(anthropic_client(server), stream=True))


def test_a_stall_runs_into_the_client_s_timeout(model, openai_client, anthropic_client):
    server = model([{"text": "one two three", "fault": "stall", "at": 2}] * 2)
    with pytest.raises(openai.APITimeoutError):
        chunks(openai_client(server, timeout=0.2))
    with pytest.raises(httpx2.ReadTimeout):
        list(ask_anthropic(anthropic_client(server, timeout=0.2), stream=True))


@pytest.mark.parametrize("fault", ["end", "empty"])
def test_an_early_end_raises_nothing(model, openai_client, anthropic_client, fault):
    server = model([{"text": "one two three four", "fault": fault}] * 2)
    assert assembled(chunks(openai_client(server)))[3] is None
    events = list(ask_anthropic(anthropic_client(server), stream=True))
    assert "message_stop" not in [event.type for event in events]


@pytest.mark.parametrize("at", [0, 1, 3, 999])
def test_a_fault_strikes_where_it_is_scripted(model, openai_client, at):
    parts = chunks(openai_client(model([{"deltas": [{"content": word} for word in "abcd"], "fault": "end", "at": at}])))
    assert assembled(parts)[1:] == ("abcd"[:at], [], None)


@pytest.mark.parametrize("fault", ["cut", "end", "garbage", "stall", "error"])
def test_faults_without_streaming(model, openai_client, fault):
    server = model([{"text": "one two three four", "fault": fault, "seconds": 0.05}])
    with pytest.raises((openai.APIError, json.JSONDecodeError)):
        ask(openai_client(server))


# Usage


@pytest.mark.parametrize("text, low, high", [
    ("你好世界" * 1000, 2400, 6000), ("word " * 800, 800, 1400), ("ＡＢＣ１２３" * 100, 300, 600), ("é" * 10, 10, 10),
    ("", 0, 0), ("a", 1, 1)])
def test_tokens_know_the_script(text, low, high):
    assert low <= offline.tokens(text) <= high


def test_cached_tokens_grow_with_the_session(model, openai_client):
    client, messages, earlier = openai_client(model(["ok"] * 12)), [{"role": "system", "content": "Be brief. " * 20}], 0
    for number in range(10):
        messages.append({"role": "user", "content": f"question {number} " * 20})
        usage = ask(client, messages).usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert earlier - 1 <= cached <= earlier  # all that was sent before, to a token
        messages.append({"role": "assistant", "content": "ok"})
        earlier = usage.prompt_tokens
    messages.pop()
    assert ask(client, messages).usage.prompt_tokens_details.cached_tokens == earlier
    messages[0] = {"role": "system", "content": "? " + messages[0]["content"]}
    assert ask(client, messages).usage.prompt_tokens_details.cached_tokens == 0


def test_tools_come_first_in_the_prefix(model, openai_client):
    client = openai_client(model(["ok"] * 3))
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]
    size = ask(client, tools=tools[:1]).usage.prompt_tokens
    other = ask(client, [{"role": "user", "content": "x"}], tools=tools[:1]).usage
    assert size > other.prompt_tokens_details.cached_tokens > size // 2
    assert ask(client, tools=tools[1:]).usage.prompt_tokens_details.cached_tokens < size // 2 + 5


def test_a_refused_request_caches_nothing(model, openai_client):
    client = openai_client(model(["ok"]))
    with pytest.raises(openai.BadRequestError):
        ask(client, [*HELLO, {"role": "assistant", "content": "x"}])
    assert ask(client).usage.prompt_tokens_details.cached_tokens == 0


def marked(text):
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def test_anthropic_caches_what_breakpoints_cover(model, anthropic_client):
    client, system = anthropic_client(model(["ok"] * 9)), [marked("Be brief. " * 50)]
    messages, before = [], 0
    for number in range(4):
        question = marked(f"question {number} " * 30)
        usage = ask_anthropic(client, messages + [{"role": "user", "content": [question]}], system=system).usage
        assert usage.cache_read_input_tokens == before  # the breakpoint of the request before
        assert usage.cache_creation_input_tokens > 0 and usage.input_tokens == 0
        before = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        messages += [{"role": "user", "content": question["text"]}, {"role": "assistant", "content": "ok"}]
    usage = ask_anthropic(client, messages + HELLO, system=system).usage  # only the system prompt is marked
    assert 0 < usage.cache_read_input_tokens < before and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens > 0


def test_anthropic_caches_nothing_without_breakpoints(model, anthropic_client):
    client = anthropic_client(model(["ok"] * 2))
    first, second = (ask_anthropic(client, system="Be brief.").usage for _ in "ab")
    assert first == second and first.input_tokens > 0
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (0, 0)


def test_anthropic_looks_back_twenty_blocks(model, anthropic_client):
    client = anthropic_client(model(["ok"] * 4))

    def read(*texts):
        content = [{"type": "text", "text": text} for text in texts[:-1]] + [marked(texts[-1])]
        return ask_anthropic(client, [{"role": "user", "content": content}]).usage.cache_read_input_tokens

    assert read("first") == 0
    assert read("first", *"b" * 20) > 0
    assert read("first", *"c" * 21) == 0


# The server


def test_a_prompt_over_the_window_is_refused_in_the_provider_s_words(model, openai_client, anthropic_client):
    server = model(["ok"] * 2, window=1000)
    messages = [{"role": "user", "content": "字" * 1600}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client(server), messages)
    assert caught.value.code == "context_length_exceeded" and "maximum context length" in str(caught.value)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask_anthropic(anthropic_client(server), messages)
    assert ask(openai_client(server), [{"role": "user", "content": "字" * 1400}]).choices[0].message.content == "ok"


def test_keys_and_models_are_checked_when_given(model, openai_client, anthropic_client):
    server = model(["ok"] * 3, keys={"good"}, models={"offline"})
    for client, call, status in ((openai_client, ask, openai.AuthenticationError),
                                 (anthropic_client, ask_anthropic, anthropic.AuthenticationError)):
        with pytest.raises(status):
            call(client(server))
        call(client(server, api_key="good"))
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        openai_client(server, api_key="good").chat.completions.create(model="nosuch", messages=HELLO)
    assert raw_post(server, {"model": "offline", "messages": HELLO}, {"x-api-key": "good"})[0] == 200


def raw_post(server, body, headers=None, path="/v1/chat/completions"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
    connection.request("POST", path, body if isinstance(body, (bytes, str)) else json.dumps(body), headers or {})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"[" * 100_000, b'"text"'])
def test_a_body_that_is_no_json_object(model, body):
    status, answer = raw_post(model(["ok"]), body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_unknown_paths(model):
    status, answer = raw_post(model(), {}, path="/v1/responses")
    assert status == 404 and "/v1/responses" in answer["error"]["message"]
    assert raw_post(model(), {}, path="/v1/messages/count_tokens")[1]["type"] == "error"


def test_a_client_that_goes_away_is_no_error(model, openai_client, capfd):
    server = model([{"text": "word " * 2000, "pace": 0.001}, "still here"])
    stream = openai_client(server).chat.completions.create(model="offline", messages=HELLO, stream=True)
    next(iter(stream))
    stream.close()
    assert ask(openai_client(server)).choices[0].message.content == "still here"
    time.sleep(0.05)
    server.close()
    assert capfd.readouterr().err == ""


def test_many_clients_at_once_get_one_reply_each(model):
    from concurrent.futures import ThreadPoolExecutor
    server = model([str(number) for number in range(40)])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: raw_post(server, {"model": "m", "messages": HELLO})[1], range(40)))
    assert sorted(int(answer["choices"][0]["message"]["content"]) for answer in answers) == list(range(40))


def test_close_ends_a_stalled_stream(model, openai_client):
    server = model([{"text": "one two", "fault": "stall", "at": 1}])
    stream = openai_client(server).chat.completions.create(model="offline", messages=HELLO, stream=True)
    next(iter(stream))
    server.close()
    with pytest.raises(openai.APIConnectionError):
        list(stream)


def test_command_line(tmp_path):
    script = tmp_path / "script.json"
    script.write_text('["from a file"]', encoding="utf-8")
    program = subprocess.Popen([sys.executable, offline.__file__, "--port", "0", "--script", str(script)],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    try:
        text = program.stdout.readline()
        while "/v1" not in text:
            text += program.stdout.readline()
        port = int(text.split("127.0.0.1:")[1].split("/")[0].split()[0])
        taken = subprocess.run([sys.executable, offline.__file__, "--port", str(port)], capture_output=True,
                               encoding="utf-8")
        assert taken.returncode == 1 and taken.stderr.count("\n") == 1 and str(port) in taken.stderr
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": HELLO}))
        assert "from a file" in connection.getresponse().read().decode()
    finally:
        program.terminate()
        program.communicate()


def test_it_listens_on_this_machine_only(model):
    assert model().socket.getsockname()[0] == "127.0.0.1"
    assert model().socket.family == socket.AF_INET
