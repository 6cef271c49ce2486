"""The offline model: a loopback server that speaks the wire formats of OpenAI and Anthropic.

It has no intelligence. It plays a script, or else follows plain instructions (read README.md then run "ls").
What it has of a real provider is everything around the intelligence: streams, tool calls, thinking, usage, a prompt
cache, faults, and a judge that refuses invalid histories. Clients use it through the real SDKs, over real HTTP.

    python offline.py [--port N] [--window N] [--script FILE.json]
"""
import argparse
import base64
import hashlib
import json
import os
import re
import socket
import socketserver
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

# ---------------------------------------------------------------------------------------------------------------------
# 1. The wire: one server


def start(script=None, **options):
    """Start a model in this process and return its base URL, "http://127.0.0.1:PORT/v1". It ends with the process."""
    return Server(script, **options).base_url


@dataclass
class Request:
    """One POST to a chat endpoint. `error` says why it was refused; None when it was answered."""
    path: str
    headers: dict  # names in lower case
    raw: bytes
    body: dict = field(default_factory=dict)
    error: str | None = None


class Refusal(Exception):
    """What is wrong with a request; becomes an HTTP error in the provider's shape."""

    def __init__(self, message, param=None, status=400, code=None):
        super().__init__(message)
        self.status, self.details = status, {"message": message, "param": param, "code": code}


class Server(ThreadingHTTPServer):
    """The model. It listens from its construction to close(), and is a context manager.

    script: a list of replies (section 4), or None to follow plain instructions
    window: tokens; a larger prompt is refused        keys, models: sets of what is accepted; None accepts anything
    require_reasoning: like DeepSeek, refuse an own message with tool calls that lost its `reasoning_content`
    """
    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = os.name != "nt"  # on Windows it would let two servers share one port
    allow_reuse_port = False

    def __init__(self, script=None, *, window=64_000, require_reasoning=False, keys=None, models=None, port=0):
        self.script = None if script is None else [checked(reply) for reply in script]
        self.window, self.require_reasoning, self.keys, self.models = window, require_reasoning, keys, models
        self.requests, self.connections = [], set()
        self.prompts, self.prefixes = [], set()  # the prompt caches: OpenAI's, Anthropic's
        self.thoughts = {}  # call id -> the thinking texts that were sent with it
        self.lock, self.closing = threading.Lock(), threading.Event()
        super().__init__(("127.0.0.1", port), Handler)
        self.root = f"http://127.0.0.1:{self.server_address[1]}"
        self.base_url = self.root + "/v1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own looks the host name up, which can take seconds

    def process_request(self, connection, address):
        self.connections.add(connection)
        super().process_request(connection, address)

    def shutdown_request(self, connection):
        self.connections.discard(connection)
        super().shutdown_request(connection)

    def handle_error(self, connection, address):
        if not isinstance(sys.exc_info()[1], OSError):  # a client that goes away is no error
            super().handle_error(connection, address)

    def close(self):
        self.closing.set()
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            hang_up(connection)

    def __exit__(self, *_):
        self.close()

    def answer(self, request, wire):
        """Judge a request and choose its reply. Returns (reply, usage); raises Refusal."""
        self.check_key(request.headers)
        body = request.body = parse(request.raw)
        demand(isinstance(body.get("model"), str) and body["model"], "model", "a model name is required")
        if self.models is not None and body["model"] not in self.models:
            raise Refusal(f"The model `{body['model']}` does not exist.", "model", 404, "model_not_found")
        wire.judge(body, self)
        prompt = wire.prompt(body)
        size = sum(tokens(text) for text, _ in prompt)
        if size > self.window:
            raise Refusal(wire.too_long.format(size, self.window), "messages", code="context_length_exceeded")
        reply = complete(self.next_reply(body, wire), wire.call_id)
        if "status" in reply:
            return reply, None
        with self.lock:
            for call in reply["tool_calls"]:
                self.thoughts.setdefault(call["id"], set()).add(reply["thinking"])
            return reply, wire.usage(self, prompt, size, completion_tokens(reply))

    def check_key(self, headers):
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self.keys is not None and given not in self.keys:
            raise Refusal("Incorrect API key provided.", status=401, code="invalid_api_key")

    def next_reply(self, body, wire):
        if self.script is None:
            return follow(*wire.conversation(body))
        with self.lock:
            if not self.script:
                raise Refusal("The script is at its end: it has no reply to this request.")
            reply = self.script[0]
            if not callable(reply) and not body.get("stream") and ("deltas" in reply or "chunks" in reply):
                raise Refusal("This reply is scripted as a stream: ask for it with stream=true.", "stream")
            if not callable(reply) and "deltas" in reply and wire is ANTHROPIC:
                raise Refusal("This reply is scripted as deltas, which only the OpenAI format has.")
            self.script.pop(0)
        return checked(reply(body)) if callable(reply) else reply


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # each event leaves at once

    def log_message(self, *_):
        pass

    def do_GET(self):
        if urlsplit(self.path).path != "/v1/models":
            return self.send_json(404, OPENAI.error(404, f"There is no GET {self.path} here."))
        try:
            self.server.check_key(lower(self.headers))
        except Refusal as refusal:
            return self.send_json(refusal.status, OPENAI.error(refusal.status, **refusal.details))
        names = sorted(self.server.models or ["offline"])
        both = {"object": "model", "created": 0, "owned_by": "offline",  # what each of the two SDKs looks for
                "type": "model", "created_at": "2026-01-01T00:00:00Z"}
        self.send_json(200, {"object": "list", "data": [{"id": name, "display_name": name} | both for name in names],
                             "has_more": False, "first_id": names[0], "last_id": names[-1]})

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        raw = self.rfile.read(int(length)) if length.isdecimal() else b""
        self.close_connection |= not length.isdecimal()  # what follows is an unread body
        path = urlsplit(self.path).path
        wire = {"/v1/chat/completions": OPENAI, "/v1/messages": ANTHROPIC}.get(path)
        if wire is None:
            wire = ANTHROPIC if path.startswith("/v1/messages") else OPENAI
            return self.send_json(404, wire.error(404, f"There is no POST {path} here; the offline model answers POST "
                                                       "/v1/chat/completions and POST /v1/messages."))
        request = Request(path, lower(self.headers), raw)
        self.server.requests.append(request)
        try:
            reply, usage = self.server.answer(request, wire)
        except Refusal as refusal:
            request.error = refusal.details["message"]
            return self.send_json(refusal.status, wire.error(refusal.status, **refusal.details))
        except Exception as error:  # a scripted function that fails, say: do not leave the client waiting
            request.error = f"The offline model failed: {error!r}"
            return self.send_json(500, wire.error(500, request.error))
        self.wait(reply.get("delay", 0))
        self.send_reply(wire, request.body, reply, usage)

    def send_reply(self, wire, body, reply, usage):
        fault = reply.get("fault")
        status = reply.get("status", 529)
        error = wire.error(status, reply.get("message", "The server is overloaded."), code=reply.get("code"),
                           type=reply.get("type"))
        if "status" in reply:
            self.send_json(status, error, reply.get("headers", {}))
        elif fault == "empty":
            self.send(200, "application/json", b"")
        elif body.get("stream"):
            self.send_stream(reply, *wire.events(body, reply, usage), wire.event(error))
        elif fault == "error":
            self.send_json(status, error)
        else:
            self.send_whole(reply, dumps(wire.whole(body, reply, usage)).encode())

    def send_whole(self, reply, data):
        fault, half = reply.get("fault"), data[:len(data) // 2]
        if fault in ("cut", "stall"):
            self.send(200, "application/json", half, promised=len(data))
            self.wait(reply.get("seconds", 3600) if fault == "stall" else 0)
            hang_up(self.connection)
        else:
            self.send(200, "application/json", half if fault else data)

    def send_stream(self, reply, events, closing, error):
        """Send the events, then the closing ones; the scripted fault, if any, strikes before event number `at`."""
        self.send(200, "text/event-stream", chunked=True)
        fault = reply.get("fault")
        at = min(reply.get("at", len(events) // 2), len(events))
        for number, event in enumerate(events + closing):
            self.wait(reply.get("pace", 0) if number else 0)
            if fault and number == at:
                if fault in ("cut", "stall"):
                    self.wait(reply.get("seconds", 3600) if fault == "stall" else 0)
                    return hang_up(self.connection)
                if fault != "end":
                    self.send_chunk(error if fault == "error" else 'event: message_delta\ndata: {"broken": \n\n')
                if fault != "garbage":
                    break
            self.send_chunk(event)
        self.send_chunk("")  # HTTP's mark of the end

    def send_chunk(self, text):
        data = text.encode()
        self.wfile.write(b"%X\r\n%s\r\n" % (len(data), data))

    def send_json(self, status, value, headers=()):
        self.send(status, "application/json", dumps(value).encode(), headers=headers)

    def send(self, status, kind, data=b"", *, chunked=False, promised=None, headers=()):
        length = ("Content-Length", len(data) if promised is None else promised)
        size = ("Transfer-Encoding", "chunked") if chunked else length
        self.send_response(status)
        for name, value in [("Content-Type", kind), size, *dict(headers).items()]:
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def wait(self, seconds):
        if seconds:
            self.server.closing.wait(seconds)  # so that closing is quick


def hang_up(connection):
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client was quicker


def lower(headers):
    return {name.lower(): value for name, value in headers.items()}


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The wire: two formats. A reply is {"thinking": str, "text": str, "tool_calls": [{"id", "name", "arguments": str}]}


def pieces(text):
    """Cut a text into a word or a few characters each, losing nothing, so that streaming is visible."""
    return re.findall(r"\s*(?:[!-~]{1,12}|[^\s!-~]{1,3})|\s+", text)


def finish_reason(reply):
    return reply.get("finish_reason", "tool_calls" if reply["tool_calls"] else "stop")


def openai_error(status, message, param=None, code=None, type=None):
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": type or kind, "param": param, "code": code}}


def openai_event(value):
    return f"data: {dumps(value)}\n\n"


def openai_frame(body, object):
    return {"id": "chatcmpl-" + uuid.uuid4().hex, "object": object, "created": int(time.time()), "model": body["model"]}


def openai_whole(body, reply, usage):
    message = {"role": "assistant", "content": reply["text"]}
    if reply["thinking"]:
        message["reasoning_content"] = reply["thinking"]
    if reply["tool_calls"]:
        message["content"] = reply["text"] or None
        message["tool_calls"] = [{"id": call["id"], "type": "function",
                                  "function": {"name": call["name"], "arguments": call["arguments"]}}
                                 for call in reply["tool_calls"]]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(reply)}
    whole = openai_frame(body, "chat.completion") | {"choices": [choice]}
    return whole | ({"usage": usage} if reply.get("usage", True) else {})


def openai_deltas(reply):
    yield {"role": "assistant", "content": ""}
    yield from ({"reasoning_content": piece} for piece in pieces(reply["thinking"]))
    yield from ({"content": piece} for piece in pieces(reply["text"]))
    for index, call in enumerate(reply["tool_calls"]):
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function",
                               "function": {"name": call["name"], "arguments": ""}}]}
        for piece in pieces(call["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def openai_events(body, reply, usage):
    """Returns (events, closing events), each a text for the wire."""
    done = ["data: [DONE]\n\n"]
    if "chunks" in reply:
        return raw_events(reply, openai_event), done
    frame = openai_frame(body, "chat.completion.chunk")

    def chunk(delta, finish=None):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return openai_event(frame | {"choices": [choice]})

    closing = [chunk({}, finish_reason(reply))]
    if (body.get("stream_options") or {}).get("include_usage") and reply.get("usage", True):
        closing.append(openai_event(frame | {"choices": [], "usage": usage}))
    return [chunk(delta) for delta in reply.get("deltas") or openai_deltas(reply)], closing + done


def raw_events(reply, event):
    return [chunk + "\n\n" if isinstance(chunk, str) else event(chunk) for chunk in reply["chunks"]]


def anthropic_error(status, message, param=None, code=None, type=None):
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
             429: "rate_limit_error", 529: "overloaded_error"}
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": type or kind, "message": message}}


def anthropic_event(value):
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n"


def sign(thinking):
    return base64.b64encode(hashlib.sha256(("offline " + thinking).encode()).digest()).decode()


def anthropic_whole(body, reply, usage):
    finish = finish_reason(reply)
    content = [{"type": "thinking", "thinking": reply["thinking"], "signature": sign(reply["thinking"])}]
    content = content * bool(reply["thinking"]) + [{"type": "text", "text": reply["text"]}] * bool(reply["text"])
    content += [{"type": "tool_use", "id": call["id"], "name": call["name"],
                 "input": json_object(call["arguments"]) or {}} for call in reply["tool_calls"]]
    return {"id": "msg_" + uuid.uuid4().hex[:24], "type": "message", "role": "assistant", "model": body["model"],
            "content": content, "stop_sequence": None,
            "stop_reason": {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}.get(finish, finish),
            "usage": usage if reply.get("usage", True) else {"input_tokens": 0, "output_tokens": 0}}


def anthropic_events(body, reply, usage):
    """Returns (events, closing events), each a text for the wire."""
    if "chunks" in reply:
        return raw_events(reply, anthropic_event), []
    whole, arguments = anthropic_whole(body, reply, usage), [call["arguments"] for call in reply["tool_calls"]]
    output = whole["usage"]["output_tokens"]
    events = [{"type": "message_start", "message": whole | {
        "content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": min(1, output)}}}]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "thinking":
            empty = {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
            deltas += [{"type": "signature_delta", "signature": block["signature"]}]
        elif block["type"] == "text":
            empty = {"text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            empty = {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(arguments.pop(0))]
        events += [{"type": "content_block_start", "index": index, "content_block": block | empty},
                   *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
                   {"type": "content_block_stop", "index": index}]
    closing = [{"type": "message_delta", "usage": {"output_tokens": output},
                "delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None}}, {"type": "message_stop"}]
    return [anthropic_event(event) for event in events], [anthropic_event(event) for event in closing]


# ---------------------------------------------------------------------------------------------------------------------
# 3. The judge: what a strict provider refuses


def demand(condition, where, why):
    if not condition:
        raise Refusal(f"{where}: {why}", where)


def parse(raw):
    try:
        text = raw.decode("utf-8")
        body = json.loads(text, parse_constant=lambda name: json.loads("NaN is no JSON"))
    except (ValueError, RecursionError):
        raise Refusal("We could not parse the JSON body of your request.") from None
    demand(isinstance(body, dict), "body", "a JSON object is required")
    if re.search(r"\\u[dD][89a-fA-F]", text):  # only an escape can bring a lone surrogate in
        messages = body.get("messages")
        for index, message in enumerate(messages if isinstance(messages, list) else []):
            demand(is_unicode(message), f"messages[{index}]", "a lone surrogate is not valid Unicode")
        demand(is_unicode(body), "body", "a lone surrogate is not valid Unicode")
    return body


def is_unicode(value):
    try:
        return bool(dumps(value).encode("utf-8"))
    except UnicodeEncodeError:
        return False


def is_name(value):
    return isinstance(value, str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", value) is not None


def json_object(text):
    """The dictionary that a JSON text holds, or None."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def blocks(content):
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def texts(content):
    """The texts of a string or a list of text blocks; None for anything else."""
    parts = blocks(content)
    if isinstance(parts, list) and parts and all(isinstance(part, dict) and part.get("type") == "text"
                                                 and isinstance(part.get("text"), str) for part in parts):
        return [part["text"] for part in parts]


def judge_tool(tool, schema, names, where):
    demand(is_name(tool.get("name")), where, "the tool's name must match ^[a-zA-Z0-9_-]{1,64}$")
    demand(tool["name"] not in names, where, f"there are two tools named {tool['name']!r}")
    names.add(tool["name"])
    demand(isinstance(schema, dict) and schema.get("type") == "object" and isinstance(schema.get("required", []), list)
           and isinstance(schema.get("properties", {}), dict)
           and all(name in schema.get("properties", {}) for name in map(str, schema.get("required", [])))
           and all(isinstance(property, dict) for property in schema.get("properties", {}).values()),
           where, "the parameters must be a JSON schema of type object")


def judge_openai(body, server):
    messages = body.get("messages")
    demand(isinstance(messages, list) and messages, "messages", "a non-empty list is required")
    begun, caller, pending = False, None, []  # pending: ids of the caller's tool calls that still lack a result
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        demand(isinstance(message, dict), at, "an object is required")
        role, calls = message.get("role"), message.get("tool_calls")
        demand(role in ("system", "developer", "user", "assistant", "tool"), at, f"unknown role {role!r}")
        if role == "tool":
            id = message.get("tool_call_id")
            demand(id in pending, at, f"a result for {id!r}, which is no unanswered call of the message before")
            pending.remove(id)
        else:
            demand(not pending, caller, f"no result for tool_call_ids {pending} directly after this message")
        if role in ("system", "developer"):
            demand(not begun, at, "a system message is allowed only at the beginning")
        else:
            demand(begun or role == "user", at, "the first message after the system's must be a user's")
            begun = True
        content = message.get("content")
        demand(texts(content) is not None or content is None and role == "assistant" and calls, at,
               "content must be a string or a list of text parts (null only beside tool_calls)")
        if role == "assistant" and calls is not None:
            caller, pending = at, judge_openai_calls(calls, at)
    demand(not pending, caller, f"no result for tool_call_ids {pending} directly after this message")
    demand(messages[-1]["role"] in ("user", "tool"), at, "the last message must be a user's or a tool's")
    judge_openai_options(body)
    for message in messages if server.require_reasoning else []:
        for call in message.get("tool_calls") or []:
            if (message.get("reasoning_content") or "") not in server.thoughts.get(call["id"], {
                    message.get("reasoning_content") or ""}):
                raise Refusal("The `reasoning_content` in the thinking mode must be passed back to the API.")


def judge_openai_calls(calls, at):
    """Returns the calls' ids."""
    demand(isinstance(calls, list) and calls, at, "tool_calls must be a non-empty list, or absent")
    ids = []
    for index, call in enumerate(calls):
        where = f"{at}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) and call.get("type") == "function" else None
        demand(isinstance(function, dict), where, "a function call is required")
        id = call.get("id")
        demand(isinstance(id, str) and id, where, "the id must be a non-empty string")
        demand(id not in ids, where, f"the id {id!r} is used twice")
        demand(is_name(function.get("name")), where, "the function's name must match ^[a-zA-Z0-9_-]{1,64}$")
        demand(isinstance(function.get("arguments"), str) and json_object(function["arguments"]) is not None, where,
               "arguments must be a string that holds a JSON object")
        ids.append(id)
    return ids


def judge_openai_options(body):
    tools, options, names = body.get("tools"), body.get("stream_options"), set()
    demand(tools is None or isinstance(tools, list) and tools, "tools", "must be a non-empty list, or absent")
    for index, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        demand(isinstance(function, dict), f"tools[{index}]", "a function is required")
        judge_tool(function, function.get("parameters", {"type": "object"}), names, f"tools[{index}]")
    demand(options is None or body.get("stream") and isinstance(options, dict), "stream_options",
           "allowed only with stream")


def full(content):
    return all(text.strip() for text in texts(content) or [""])


BLOCKS = {  # type of a block -> (who may send it, what it must have, in words)
    "text": ("user assistant", full, "text blocks must not be empty"),
    "tool_result": ("user", lambda block: block.get("content") in (None, "", []) or full(block["content"]),
                    "content must be a string or a list of text blocks, none empty"),
    "tool_use": ("assistant", lambda block: is_name(block.get("id")) and is_name(block.get("name"))
                 and isinstance(block.get("input"), dict),
                 "an id and a name that match ^[a-zA-Z0-9_-]{1,64}$ and an input object are required"),
    "thinking": ("assistant", lambda block: isinstance(block.get("thinking"), str) and block.get("signature"),
                 "a thinking block needs its signature"),
    "redacted_thinking": ("assistant", lambda block: True, ""),
}


def judge_anthropic(body, server):
    limit, messages, thinking = body.get("max_tokens"), body.get("messages"), body.get("thinking", {})
    demand(isinstance(limit, int) and limit > 0, "max_tokens", "a positive number is required")
    demand(full(body.get("system", "-")), "system", "must be a string or a list of text blocks, none empty")
    demand(isinstance(messages, list) and messages, "messages", "a non-empty list is required")
    used, pending = set(), []
    for index, message in enumerate(messages):
        at = f"messages.{index}"
        demand(isinstance(message, dict), at, "an object is required")
        role, content = message.get("role"), blocks(message.get("content"))
        demand(role != "system", at, "system is no role here: use the top-level `system` parameter")
        demand(role in ("user", "assistant"), at, f"unknown role {role!r}")
        demand(index or role == "user", at, "the first message must be a user's")
        demand(role == ("user", "assistant")[index % 2], at, "roles must alternate between user and assistant")
        demand(isinstance(content, list) and content, at, "content must be a string or a list of blocks, and not empty")
        for number, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            roles, is_good, why = BLOCKS.get(kind if isinstance(kind, str) else None, ("", None, ""))
            where = f"{at}.content.{number}"
            demand(role in roles.split(), where, f"a block of type {kind!r} is not possible in this role")
            demand(is_good([block] if kind == "text" else block), where, why)
        pending = judge_anthropic_calls(content, used, pending, at)
    demand(messages[-1]["role"] == "user", at, "the last message must be a user's")
    demand(isinstance(body.get("tools", []), list), "tools", "a list is required")
    names = set()
    for index, tool in enumerate(body.get("tools", [])):
        demand(isinstance(tool, dict), f"tools.{index}", "an object is required")
        judge_tool(tool, tool.get("input_schema"), names, f"tools.{index}")
    marks = sum(marked for _, marked in anthropic_prompt(body))
    demand(marks <= 4, "cache_control", f"at most 4 blocks may have it, and {marks} do")
    demand(isinstance(thinking, dict), "thinking", "must be an object, or absent")
    if thinking.get("type") in ("enabled", "adaptive"):
        judge_anthropic_thinking(messages, server.thoughts)


def judge_anthropic_calls(content, used, pending, at):
    """Each call of the message before has its result here, before anything else. Returns the new calls' ids."""
    calls, begun = [], False
    for number, block in enumerate(content):
        where = f"{at}.content.{number}"
        if block["type"] == "tool_result":
            id = block.get("tool_use_id")
            demand(id in pending, where, f"a tool_result for {id!r}, which is no unanswered call of the message before")
            demand(not begun, where, "tool_result blocks must come before all others")
            pending.remove(id)
        else:
            begun = True
        if block["type"] == "tool_use":
            demand(block["id"] not in used, where, f"tool_use ids must be unique, and {block['id']!r} is used twice")
            used.add(block["id"])
            calls.append(block["id"])
    demand(not pending, at, f"no tool_result for the tool_use ids {pending} of the message before")
    return calls


def judge_anthropic_thinking(messages, thoughts):
    for index, message in enumerate(messages):
        content = blocks(message["content"])
        thinking = [block for block in content if block["type"] == "thinking"]
        for block in thinking:
            demand(block["signature"] == sign(block["thinking"]), f"messages.{index}",
                   "invalid `signature` in `thinking` block")
        text = "".join(block["thinking"] for block in thinking)
        for block in content:
            demand(block["type"] != "tool_use" or text in thoughts.get(block["id"], {text}), f"messages.{index}",
                   "`thinking` blocks of a message with tool calls must come back as they were sent")


# ---------------------------------------------------------------------------------------------------------------------
# 4. Usage (tokens and the prompt cache) and the script

CJK = r"\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"


def tokens(text):
    """Tokens of a text: a quarter for an ASCII character, 0.7 for a CJK one, 1 for any other; rounded up."""
    if text.isascii():
        return (len(text) + 3) // 4
    ascii = len(text.encode("ascii", "ignore"))
    cjk = sum(map(len, re.findall(f"[{CJK}]+", text)))
    return (5 * ascii + 14 * cjk + 20 * (len(text) - ascii - cjk) + 19) // 20


def completion_tokens(reply):
    return tokens(reply["thinking"] + reply["text"] + "".join(c["name"] + c["arguments"] for c in reply["tool_calls"]))


def openai_prompt(body):
    """The prompt as one text, in the order of the cache: [(text, False)]. A message's role stands behind it, so that
    two prompts which begin differently have nothing in common."""
    parts = [dumps(body["tools"])] if body.get("tools") else []
    for message in body["messages"]:
        parts += [message.get("reasoning_content") or "", *(texts(message.get("content")) or [])]
        parts += ["\0" + dumps(call) for call in message.get("tool_calls") or []]
        parts += ["\0", message["role"][0], message.get("tool_call_id") or ""]
    return [("".join(parts), False)]


def openai_usage(server, prompt, size, completion):
    """All that an earlier prompt began with in the same way is read from the cache."""
    [(text, _)] = prompt
    shared = max((common_prefix(text, earlier) for earlier in server.prompts), default=0)
    server.prompts = [earlier for earlier in server.prompts if not text.startswith(earlier)][-31:] + [text]
    return {"prompt_tokens": size, "completion_tokens": completion, "total_tokens": size + completion,
            "prompt_tokens_details": {"cached_tokens": size - tokens(text[shared:])}}


def common_prefix(a, b):
    """Length of the common prefix, by bisection: linear, at the speed of comparing memory."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def anthropic_prompt(body):
    """The prompt as blocks in the order of the cache: [(text, has a cache breakpoint)]."""
    prompt = [("t", tool) for tool in body.get("tools", [])]
    prompt += [("s", block) for block in blocks(body.get("system", []))]
    prompt += [(message["role"][0], block) for message in body["messages"] for block in blocks(message["content"])]
    return [(role + dumps({key: value for key, value in block.items() if key != "cache_control"}),
             block.get("cache_control") is not None) for role, block in prompt]


def anthropic_usage(server, prompt, size, completion):
    """Reads end where an earlier request had a breakpoint, at most 20 blocks before one of this request."""
    digests, sizes = [b""], [0]  # of everything up to each block's end
    for text, _ in prompt:
        digests.append(hashlib.sha256(digests[-1] + text.encode()).digest())
        sizes.append(sizes[-1] + tokens(text))
    marks = [number for number, (_, marked) in enumerate(prompt, 1) if marked]
    hits = [end for mark in marks for end in range(max(1, mark - 20), mark + 1) if digests[end] in server.prefixes]
    server.prefixes.update(digests[mark] for mark in marks)
    read, written = sizes[max(hits, default=0)], sizes[max(marks, default=0)]
    return {"input_tokens": size - written, "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written - read, "output_tokens": completion}


# A reply of a script is a text, a function of the request's body that returns a reply, or a dictionary of these keys:

REPLY = {"text", "thinking", "tool_calls", "finish_reason", "usage",  # what is said; usage: False leaves it out
         "deltas", "chunks",  # or the raw stream: OpenAI's deltas, or whole chunks
         "status", "message", "type", "code", "headers",  # or an HTTP error
         "fault", "at", "seconds", "delay", "pace"}  # what goes wrong, before which event; how long things take
FAULTS = {"cut",  # the connection is dropped
          "end",  # the stream ends early and cleanly
          "garbage", "error",  # a broken event, an error event
          "stall",  # silence, then cut
          "empty"}  # a reply without a body


def checked(reply):
    """A slip in a script is found when the script is given, not when it is played."""
    reply = {"text": reply} if isinstance(reply, str) else reply
    if not callable(reply) and (unknown := (set(reply) - REPLY) | ({reply.get("fault") or "cut"} - FAULTS)):
        raise ValueError(f"script: unknown {', '.join(map(str, unknown))} in {reply}")
    return reply


def complete(reply, call_id):
    """The reply with all of thinking, text, tool_calls; those of a raw stream are read from it."""
    deltas = reply.get("deltas") or [choice.get("delta") or {} for chunk in reply.get("chunks", [])
                                     if isinstance(chunk, dict) for choice in chunk.get("choices", [])[:1]]
    functions = [call | (call.get("function") or {}) for delta in deltas for call in delta.get("tool_calls") or []]
    said = {"thinking": "".join(delta.get("reasoning_content") or "" for delta in deltas),
            "text": "".join(delta.get("content") or "" for delta in deltas), "tool_calls": functions} | reply
    calls = [{"id": call.get("id", call_id + uuid.uuid4().hex[:16]), "name": call.get("name") or "",
              "arguments": call.get("arguments", {})} for call in said["tool_calls"]]
    for call in calls:
        call["arguments"] = call["arguments"] if isinstance(call["arguments"], str) else dumps(call["arguments"])
    return said | {"tool_calls": calls}


# ---------------------------------------------------------------------------------------------------------------------
# 5. Plain instructions. There is no state: the reply derives from the request alone


@dataclass
class Call:
    id: str
    name: str
    arguments: dict
    result: str = ""
    failed: bool = False


@dataclass
class Turn:
    role: str
    text: str
    calls: list = field(default_factory=list)  # with their results, so that no turn is a tool's


def openai_conversation(body):
    """Returns (tools {name: schema of the parameters}, turns)."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in body.get("tools") or []}
    return {} if body.get("tool_choice") == "none" else tools, turns_of(body["messages"])


def anthropic_conversation(body):
    tools, messages = {tool["name"]: tool["input_schema"] for tool in body.get("tools", [])}, []
    for message in body["messages"]:
        content = blocks(message["content"])
        messages += [{"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content"),
                      "is_error": block.get("is_error")} for block in content if block["type"] == "tool_result"]
        said = [block for block in content if block["type"] == "text"]
        calls = [{"id": block["id"], "function": {"name": block["name"], "arguments": dumps(block["input"])}}
                 for block in content if block["type"] == "tool_use"]
        messages += [{"role": message["role"], "content": said, "tool_calls": calls}] if said or calls else []
    return {} if body.get("tool_choice") == {"type": "none"} else tools, turns_of(messages)


def turns_of(messages):
    """A result is an error when its first line says so: "Error …", "exit 1 …", "[r7] terminal make → FAIL …"."""
    turns = []
    for message in messages:
        text = "\n".join(texts(message.get("content")) or [])
        if message["role"] == "tool":
            [call] = [call for call in turns[-1].calls if call.id == message["tool_call_id"]]
            call.result = text
            failure = re.match(r"(?:\[.*→ )?(?:Error|FAIL\b|exit (?!0\b)-?\d)", text)
            call.failed = bool(message.get("is_error") or failure)
        else:
            turns.append(Turn(message["role"], text, [
                Call(call["id"], call["function"]["name"], json_object(call["function"]["arguments"]))
                for call in message.get("tool_calls") or []]))
    return turns


def follow(tools, turns):
    """The reply: the tool calls of the first clause that is not done yet; an account when all are."""
    text, done, hidden = last_request(turns)
    if SUMMARISE.search(Text(text).hidden) and (not tools or len(headings(text)) >= 2):
        return {"text": summary(text, turns)}
    groups, lost = understand(text, tools)
    ahead = len(done) + hidden
    for group in groups:
        if ahead <= 0:
            return {"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in group]}
        ahead -= len(group)
    called = {call.name for call in done}
    steps = plan_steps(lost, tools["submit_plan"]) if "submit_plan" in tools else []
    if steps and "submit_plan" not in called:
        plan = {"goal": " ".join(text.split())[:200], "steps": steps}
        return {"tool_calls": [{"name": "submit_plan", "arguments": plan}]}
    if "finish_step" in tools and "finish_step" not in called:
        return {"tool_calls": [{"name": "finish_step", "arguments": finish_step(done, tools["finish_step"])}]}
    if not done and not hidden:
        return {"text": introduction(lost, tools)}
    lost = [] if called & OWN_TOOLS else [f"I could not follow: {clause}" for clause in lost]
    earlier = [f"- {hidden} calls that the record counts"] * bool(hidden)
    return {"text": "\n".join(["Done:", *earlier, *(f"- {line_of(call)}" for call in done), *lost])}


def last_request(turns):
    """Returns (the last thing the user said, the tool calls since then, how many more there were by the record before
    it: "<record …: 12>"). Fenced data is not said."""
    done = []
    for number, turn in reversed([*enumerate(turns)]):
        if turn.role == "user" and (text := without_data(turn.text)):
            counted = re.match(r"<record [^>]*: (\d+)>", turns[number - 1].text)
            return text, done, int(counted[1]) if counted else 0
        done = turn.calls + done
    return "", done, 0


def without_data(text):
    """The text without <name>…</name> or [name]…[/name] blocks around it; nothing if it is a record with headings."""
    block = r"[<\[]([A-Za-z][\w-]*)[^>\]\n]*[>\]].*?[<\[]/\1[>\]]"
    text = re.sub(rf"(?s)\A(?:\s*{block})+", "", text)
    while (shorter := re.sub(rf"(?s)(?:\A|\n)\s*{block}\s*\Z", "", text)) != text:
        text = shorter
    text = text.strip()
    return "" if len(re.findall(r"(?m)^#+ ", text)) >= 2 and not SUMMARISE.search(text) else text


# What can be said -> the tools that do it, best first: an exact name, or with * a word of the name. A tool's own name,
# or all the words of it, can be said as well. `free`: all that follows is one text. `hint`: the enum value meant.

def verb(phrase, pattern, tools, free=False, hint=""):
    return SimpleNamespace(phrase=phrase, pattern=re.compile(pattern, re.I), tools=tools.split(), free=free,
                           hint=hint.split())


READ = verb("read", r"\b(?:read|show|open|cat|view)\b|读取|阅读|读|查看|打开|看", "read_file read* view* open* cat*")
FETCH = verb("fetch", r"\b(?:fetch|browse|visit)\b|打开网页|访问|浏览", "web_read fetch* browse*")
VERBS = [
    READ, FETCH,
    verb("search the web for", r"\b(?:search (?:the )?web(?: for)?|look up)\b|(?:上网|联网|网上)(?:搜索|查找|搜|查)",
         "web_search"),
    verb("write", r"\b(?:write|create)\b|写入|写|创建|新建", "write_file write* create*"),
    verb("edit", r"\b(?:edit|replace|change|modify)\b|修改|替换|编辑", "edit_file edit* replace*"),
    verb("list", r"\b(?:list|ls)\b|列出", "list_dir list* ls*"),
    verb("run", r"\b(?:run|execute)\b|运行|执行", "terminal run* execute* shell* bash* command*"),
    verb("search", r"\b(?:search|find|grep)(?: for)?\b|搜索|查找", "search_files grep* find* web_search search*"),
    verb("remember", r"\bremember(?: that)?\b|记住", "memory_save remember* memory", True, "save add"),
    verb("forget", r"\bforget\b|忘记", "forget* memory", True, "delete remove forget"),
    verb("recall", r"\brecall\b|回忆|想起", "recall", True),
    verb("ask", r"\bask(?: me| the user)?\b|询问(?:用户)?", "clarify ask*", True),
    verb("use the skill", r"\buse\b(?=.*\bskill\b)|\bactivate\b|(?:使用|启用|用)(?=.*技能)|激活", "activate_skill skill*"),
    verb("what time is it?", r"\b(?:what|current|the) time\b|几点|时间", "current_time time*"),
    verb("", r"\b(?:add|delete|remove|rename|move|fix|refactor|implement|update)\b|增加|添加|删除|修复|重构|更新", ""),
]
OWN_TOOLS = {"submit_plan", "finish_step"}  # called when the clauses are done, never by a clause

QUOTED = re.compile(r'```\w*\n(.*?)```|"((?:\\.|[^"\\])*)"|“([^”]*)”|‘([^’]*)’|「([^」]*)」|『([^』]*)』|`([^`\n]+)`'
                    r"|(?<![A-Za-z0-9])'([^'\n]*)'(?![A-Za-z0-9])", re.S)
CUT = re.compile(r"\n|[;；。]|\b(?:and )?then\b|然后|接着|最后|再(?!见)|(?<=[\w\0])[.!?](?=\s|$)", re.I)
AND = re.compile(r"\s*(?:[,，、]|\band\b|并且|并|和|以及)\s*(?:also |please |请)?", re.I)
LABEL = re.compile(r"\s*(?:[-*•]|\d+[.)、])?\s*(?:(?:step|change|check|步骤)[^:：\0]{0,12}[:：]\s*)?", re.I)
IGNORED = re.compile(r"\s*(?:goal|file|path|lines?)\s*[:：]", re.I)  # what a plan's step says beside its change
WORD = re.compile(rf"\0\d+\0|[{CJK}]+(?:[./\\][^\s\0,，]*)?|[^\s\0{CJK},]+(?:(?<=[/\\])[^\s\0]*)?")
FILLER = re.compile(r"(?:the|an?|all|and|files?|folder|directory|contents?|please|me|my|it|its|this|that|of|to|in|into|"
                    r"at|from|with|for|on|by|here|now|first|just|also|can|could|would|you|is|are|skill|named|called|-|"
                    r"[请先把将在到从里中的成为用上文件目录内容一下个这和与给帮我并技能名叫，：、]+)[.:!?]*", re.I)
PLACED = re.compile(r"(?:\b(?:to|into|in|at|from|of|under)\s+(?:the\s+)?|[在到从]\s*)\Z")


class Text:
    """A text whose quoted strings are hidden, so that no rule looks inside them."""

    def __init__(self, text):
        self.quotes, self.originals = [], []
        self.hidden = QUOTED.sub(self.hide, text.replace("\0", ""))

    def hide(self, match):
        inner = next(group for group in match.groups() if group is not None)
        self.quotes.append(re.sub(r'\\([n"])', lambda escape: escape[1].replace("n", "\n"), inner))
        self.originals.append(match[0])
        return f"\0{len(self.quotes) - 1}\0"

    def show(self, hidden):
        return re.sub(r"\0(\d+)\0", lambda match: self.originals[int(match[1])], hidden)

    def value(self, word):
        """What a word means: a quoted string without its quotes."""
        quoted = re.fullmatch(r"\0(\d+)\0", word)
        return self.quotes[int(quoted[1])] if quoted else self.show(word.rstrip(".,:!?") or word)


def understand(said, tools):
    """Returns (groups of calls [(tool, arguments)], one group for each clause; the clauses it cannot follow)."""
    text, groups, lost = Text(said), [], []
    for clause in CUT.split(text.hidden)[:200]:
        clause = LABEL.sub("", clause, count=1).strip(" \t\r,，")
        if IGNORED.match(clause) or not re.search(r"[^\W\d_]|\0", clause):
            continue
        calls = [calls_of(part, text, tools) for part in parts(clause, tools)] if len(clause) < 2000 else [[]]
        if all(calls):
            groups.append(sum(calls, []))
        else:
            lost.append(text.show(clause))
    return groups, lost


def parts(clause, tools):
    """Cut "read a and list b" before each further verb."""
    first = find_verb(clause, tools)
    if first and first.free:
        return [clause]
    cuts = [match.span() for match in AND.finditer(clause)
            if (further := find_verb(clause[match.end():], tools)) and further.spans[0][0] == 0]
    return [clause[start:end] for start, end in zip([0] + [b for _, b in cuts], [a for a, _ in cuts] + [len(clause)])]


def find_verb(clause, tools):
    """The first verb of a clause, the longest if two begin there: (tool, spans of its words, free, hint), or None."""
    found = []
    for one in VERBS:
        if match := one.pattern.search(clause):
            one = FETCH if one is READ and "://" in clause else one
            found.append(SimpleNamespace(tool=offered(one, tools), spans=[match.span()], free=one.free, hint=one.hint))
    words = {match[0].lower().rstrip("s"): match.span() for match in reversed([*re.finditer("[A-Za-z]+", clause)])}
    for name in sorted(tools.keys() - OWN_TOOLS):
        exact = re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-]|\.\w)", clause)
        spans = [exact.span()] if exact else sorted(words[word] for word in own_words(name) if word in words)
        if exact or len(spans) == len(own_words(name)):
            found.append(SimpleNamespace(tool=name, spans=spans, free=False, hint=[]))
    return min(found, default=None, key=lambda one: (
        one.spans[0][0], -sum(end - start for start, end in one.spans), one.tool is None))


def own_words(name):
    """What is to be said of a tool's name: "copy a b" is enough for copy_file."""
    words = [word.rstrip("s") for word in re.split(r"[_-]+", name.lower())]
    return [word for word in words if word not in ("file", "dir")] or words


def offered(verb, tools):
    for wanted in verb.tools:
        for name in tools:
            if name == wanted or wanted[-1] == "*" and wanted[:-1] in name.split("_") and "web" not in name:
                return name


def calls_of(part, text, tools):
    """The calls that a part of a clause asks for; [] if that is not clear."""
    verb = find_verb(part, tools)
    if not verb or not verb.tool:
        return []
    for start, end in verb.spans:
        part = part[:start] + " " * (end - start) + part[end:]
    return [(verb.tool, arguments) for arguments in Form(tools[verb.tool], part, text, verb).fill()]


def kind_of(name, schema):
    """How a parameter is filled: by its JSON type, or for a string by what its name means."""
    if "enum" in schema:
        return "enum"
    type = schema.get("type") or next((one.get("type") for one in schema.get("anyOf", [])), "string")
    if type != "string":
        return type
    senses = {"url": "url|link", "path": "path|file|dir|folder|source|destination|src|dst|target",
              "command": "command|cmd|script", "word": r"\A(?:name|id|skill|key)\Z"}
    return next((sense for sense, pattern in senses.items() if re.search(pattern, name, re.I)), "text")


def path_like(value):
    return re.search(r"[./\\]", value) is not None and not re.search(r"\s|://|\A\d[\d.]*\Z", value)


def convert(value, kind, schema):
    """A word's value in the type of a parameter, or None."""
    if kind == "integer":
        return int(value) if re.fullmatch(r"-?\d+", value) else None
    if kind == "number":
        return float(value) if re.fullmatch(r"-?\d+(?:\.\d+)?", value) else None
    if kind == "boolean":
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(value.lower())
    return value if kind != "enum" or value in schema["enum"] else None


class Form:
    """A tool's parameters, filled from the words beside its verb: each rule takes its words away from the rest."""

    def __init__(self, schema, rest, text, verb):
        self.properties, self.required = schema.get("properties", {}), schema.get("required", [])
        self.kinds = {name: kind_of(name, self.properties[name]) for name in self.properties}
        self.rest, self.text, self.verb, self.arguments = rest, text, verb, {}

    def fill(self):
        """Returns the arguments of each call; [] when a required parameter stays empty: nothing is guessed."""
        self.fill_named()
        self.fill_exact()
        if several := self.several_places():
            return [self.arguments | one for one in several]
        for name in [*self.required, *self.kinds]:
            if self.open(name, "path", "url", "word"):
                self.fill_place(name)
        self.fill_texts()
        self.fill_optional()
        lost = not self.required and not self.arguments and "path" in self.kinds.values() and self.words()
        return [] if lost or set(self.required) - set(self.arguments) else [self.arguments]

    def open(self, name, *kinds):
        return name not in self.arguments and self.kinds.get(name) in kinds

    def wanted(self):
        return [name for name in self.required if self.open(name, "text", "command")]

    def words(self):
        """[(start, end, word)] of what is left."""
        return [(*match.span(), match[0]) for match in WORD.finditer(self.rest) if not FILLER.fullmatch(match[0])]

    def quotes(self):
        return [word for word in self.words() if word[2].startswith("\0")]

    def put(self, name, value, start=0, end=0):
        self.arguments[name] = value
        self.rest = self.rest[:start] + " " * (end - start) + self.rest[end:]

    def fill_named(self):
        """"timeout 5", "path=src", "content "x""."""
        for name, kind in self.kinds.items():
            sign = "(?:[=:：]|is)?" if kind in ("integer", "number", "boolean") else r"(?:[=:：]|(?=\s*\0))"
            pattern = rf"(?<!\w){re.escape(name).replace('_', '[_ ]')}\s*{sign}\s*(\0\d+\0|[^\s,，]+)"
            said = re.search(pattern, self.rest, re.I) if kind not in ("array", "object") else None
            value = convert(self.text.value(said[1]), kind, self.properties[name]) if said else None
            if value is not None:
                self.put(name, value, *said.span())

    def fill_exact(self):
        """Required enums and numbers: only an exact word fits."""
        for name in self.required:
            if not self.open(name, "enum", "integer", "number"):
                continue
            kind, schema = self.kinds[name], self.properties[name]
            fits = [(hint, 0, 0) for hint in self.verb.hint if hint in schema.get("enum", [])]
            fits += [(value, start, end) for start, end, word in self.words()
                     if (value := convert(self.text.value(word), kind, schema)) is not None]
            if fits:
                self.put(name, *fits[0])

    def several_places(self):
        """"a.txt and b.txt" for a tool that needs one path: one call each."""
        missing = [name for name in self.required if name not in self.arguments]
        [name] = missing if len(missing) == 1 else [*self.kinds][:1] if not missing and self.kinds else [None]
        values = [self.text.value(word) for _, _, word in self.words()]
        listed = len(values) > 1 and len(AND.split(self.rest.strip())) == len(values)
        sure = not missing or all(re.search(r"[./\\]", value) for value in values)
        if self.open(name, "path", "url") and listed and sure:
            return [{name: value} for value in values]

    def fill_place(self, name):
        """A path, URL or name: what looks like one, or stands after "in", or is the only word left."""
        kind, required, words, texts = self.kinds[name], name in self.required, self.words(), len(self.wanted())
        bare, spare = len(words) - len(self.quotes()), len(self.quotes()) > texts  # quotes that no text needs
        only_place = sum(self.open(other, "path", "url") for other in self.required) < 2
        best, rank = None, 0
        for start, end, word in words if required or len(words) > texts else []:
            value, quoted = self.text.value(word), word.startswith("\0")
            before = PLACED.search(self.rest[:start])
            fits = kind != "word" and (path_like(value) or kind == "url" and "://" in value)
            if quoted and not spare or kind == "path" and "://" in value:
                continue
            score = 10 * bool(before and only_place) + (7 - quoted if fits else 0)
            score += 2 if not quoted and bare == 1 and (required or not texts) else 1 if quoted and required else 0
            if score > rank:
                best, rank = (value, before.start() if before else start, end), score
        if best:
            self.put(name, *best)

    def fill_texts(self):
        wanted, words, quotes = self.wanted(), self.words(), self.quotes()
        command = len(wanted) == 1 and self.kinds[wanted[0]] == "command"
        if command and words and not words[0][2].startswith("\0"):  # git commit -m "x": the quotes belong to it
            if not re.match(r"\s*(?:the|an?|all|my|this|that|it|every)\b", self.rest, re.I):
                self.put(wanted[0], self.text.show(self.rest.strip()), 0, len(self.rest))
        elif len(quotes) < len(wanted) == 1:
            self.fill_free(wanted[0])
        elif len(quotes) >= len(wanted) or len(words) == len(wanted):
            for name, (start, end, word) in zip(wanted, quotes if len(quotes) >= len(wanted) else words):
                self.put(name, self.text.value(word), start, end)

    def fill_free(self, name):
        phrase = re.sub(r"^(?:\s+|(?:that|for|about)\b|[-:：，,把将里中的])+", "", self.text.show(self.rest))
        if phrase := re.sub(r"\s{2,}", " ", phrase).strip(" ,，"):
            self.put(name, phrase, 0, len(self.rest))

    def fill_optional(self):
        """What is still quoted goes into a list; what is still said, into the text of a free verb."""
        for name in self.kinds:
            items = self.quotes() or (self.words() if name in self.required else [])
            if self.open(name, "array") and items:
                self.put(name, [self.text.value(word) for _, _, word in items], 0, len(self.rest))
            elif self.open(name, "text") and self.verb.free and "text" not in map(self.kinds.get, self.arguments):
                self.fill_free(name)


def short(value, limit=60):
    text = " ".join((value if isinstance(value, str) else dumps(value)).split())
    return text if len(text) <= limit else text[:limit - 1] + "…"


def line_of(call):
    """A call and its outcome in one line: "read_file a.txt: 12 lines". A result that begins with such a line of its own,
    "[r7] read_file a.txt (12 lines)", is told by that."""
    lines = call.result.strip().splitlines() or ["no output"]
    if own := re.match(rf"(?:\[archived\] )?\[r\d+\] ({re.escape(call.name)}\b.*)", lines[0]):
        return own[1]
    outcome = lines[0] if len(lines) == 1 and len(lines[0]) <= 100 else f"{len(lines)} lines"
    outcome = "failed: " + short(lines[0], 100) if call.failed else outcome
    argument = "" if call.name in OWN_TOOLS else short(next(iter(call.arguments.values()), ""))
    return f"{call.name} {argument}".strip() + f": {outcome}"


def introduction(lost, tools):
    """What it is, and what can be said to it with the tools offered now."""
    phrases = []
    for name in [name for name in tools if name not in OWN_TOOLS]:
        said = next((verb.phrase for verb in VERBS if offered(verb, tools) == name), name)
        phrases.append(" ".join([said] + [f"<{parameter}>" for parameter in tools[name].get("required", [])]))
    lines = [f"I could not follow: {short(clause, 200)}" for clause in lost[:5]]
    lines += ["I am the offline model: I have no intelligence, I follow plain instructions."]
    if not phrases:
        return "\n".join(lines + ["No tools are offered now, so there is nothing that I can do but summarise."])
    samples = {"path": "README.md", "command": '"ls"', "url": "https://example.com"}
    easy = sorted(phrases, key=lambda phrase: phrase.count("<") > 1)[:2]
    example = re.sub(r"<(\w+)>", lambda match: samples.get(kind_of(match[1], {}), '"hello"'), " then ".join(easy))
    return "\n".join([*lines, "With the tools offered now I can follow:", *(f"- {phrase}" for phrase in phrases),
                      f'Join them with "then", ";" or new lines. For example: {example}'])


# Summaries: extraction, never invention

SUMMARISE = re.compile(r"summari[sz]e|summary|总结|概括", re.I)
SAID_BY = re.compile(r"^\W*(user|assistant|tool|system|用户|助手)\b[^:：\]\n]{0,40}[\]:：]+\s*(.*)", re.I)
ITEM = re.compile(r"(?:[-*] *)?\**[^\W\d_][\w /-]{0,30}?\** *[:：]")
FENCED = re.compile(r"^<([A-Za-z][\w-]*)[^>\n]*>$(.*?)^</\1>", re.S | re.M)  # only tags alone on their lines: fast
VALUE = re.compile(r'"[^"\n]{1,60}"|`[^`\n]{1,60}`|“[^”\n]{1,60}”|[\w.-]*[/\\][\w./\\-]+|\b[\w-]+\.[A-Za-z]\w{0,5}\b'
                   r"|\b\d[\d.,:]*\d\b|\b\d\b|\b[A-Za-z]\w*_\w+\b|\b[a-z]+[A-Z]\w+\b")
DECISION = r"\b(?:decide[ds]?|chose|chosen|choose|use|using)\b|决定|选择|用"
PREFERENCE = r"\b(?:prefers?|likes?|always|never)\b|喜欢|总是|从不|偏好"


def headings(text):
    """The headings that a request to summarise names, as they stand there: "## Goal", or "- goal:"."""
    lines = [line.strip() for line in FENCED.sub("", text).splitlines() if not SAID_BY.match(line)]
    marked = [line for line in lines if re.match(r"#+ *\S", line)]
    items = [match[0] for line in lines if (match := ITEM.match(line)) and not SUMMARISE.search(match[0])]
    return list(dict.fromkeys(marked if len(marked) >= 2 else items))


def summary(text, turns):
    """The headings asked for, filled from the conversation and an earlier summary in it; about 1,200 tokens at most."""
    names = headings(text) or ["## Goal", "## Done", "## State", "## Decisions", "## Exact values", "## Preferences"]
    turns = [turn for turn in turns[:-1] + transcript(turns[-1].text) if turn.role not in ("system", "developer")]
    earlier = [record(turn.text, names) for turn in turns]
    turns = [turn for turn, kept in zip(turns, earlier) if not kept]
    lines = []
    for name in names:
        items = [item for kept in earlier for item in kept.get(name, [])] + extract(name, turns)
        items = within(items, 1100 // len(names)) or ["(nothing)"]
        one_line = [f"{name} {'; '.join(items)}"]
        lines += [name, *(f"- {item}" for item in items), ""] if name.startswith("#") else one_line
    return "\n".join(lines).strip()


def transcript(text):
    """The turns that a message quotes: <fenced data>, and lines such as "user: …" or "[assistant] …"."""
    turns, fenced = [], [match[2] for match in FENCED.finditer(text)]
    for part in fenced or [text]:
        turns.append(Turn("data", ""))
        for line in part.splitlines():
            if match := SAID_BY.match(line):
                turns.append(Turn({"用户": "user", "助手": "assistant"}.get(match[1], match[1].lower()), match[2]))
            elif fenced or turns[-1].role != "data":
                turns[-1].text += "\n" + line
    return turns


def record(text, names):
    """{heading: items} of an earlier summary; {} for any other text."""
    found, current = {}, None
    for line in map(str.strip, text.splitlines()):
        named = next((name for name in names if line == name or line.startswith(name + " ")), None)
        if named:
            current = found.setdefault(named, [])
            current += line[len(named):].strip().split("; ")
        elif re.match(r"#|</?[a-z]", line):
            current = None
        elif current is not None:
            current.append(line.removeprefix("- "))
    return found if len(found) >= 2 else {}


def extract(heading, turns):
    spoken = [turn.text for turn in turns if turn.role in ("user", "assistant")]
    calls = [call for turn in turns for call in turn.calls]

    def about(pattern):
        return re.search(pattern, heading, re.I)

    def sentences(pattern):
        return [one.strip(" -*") for text in spoken for one in re.split(r"(?<=[.!?])\s+|(?<=[。！？])|\n|;", text)
                if re.search(pattern, one, re.I)]

    if about("goal|task|request|目标|任务"):
        return [without_data(turn.text) for turn in turns if turn.role == "user"]
    if about("done|progress|action|complete|完成|进展"):
        return [line_of(call) for call in calls] + [
            line.strip(" -*") for turn in turns for line in turn.text.splitlines()
            if re.match(r"\W*(?:[a-z]+_[a-z_]+|terminal|recall)\b\s*[({\[: ]\s*\S|\[r\d+\]", line)]
    if about("decision|决定|决策"):
        return sentences(DECISION)
    if about("prefer|like|偏好|喜好"):
        return sentences(PREFERENCE)
    if about("value|exact|identifier|fact|file|path|数值|精确|文件"):
        given = [str(value) for call in calls for value in call.arguments.values()]
        return [match[0].rstrip(".") for text in spoken + given + [call.result[:2000] for call in calls]
                for match in VALUE.finditer(text)]
    last_lines = [line for text in spoken[-2:] for line in text.strip().splitlines()[-3:]]
    return [line_of(call) for call in calls[-3:]] + last_lines


def within(items, budget):
    """The items without repetition; those over the budget of tokens are left out from the middle."""
    items = list(dict.fromkeys(short(item, 200) for item in items if item.strip() not in ("", "(nothing)")))
    items = items[:100] + items[100:][-100:]
    while len(items) > 1 and sum(tokens(item) + 1 for item in items) > budget:
        del items[len(items) // 2]
    return items


# Plans


def plan_steps(lost, schema):
    """A step for each clause that no offered tool can do; [] when there is nothing in them to plan."""
    if not any(find_verb(Text(clause).hidden, {}) or VALUE.search(clause) for clause in lost):
        return []
    item = schema.get("properties", {}).get("steps", {}).get("items", {})
    return [plan_step(clause, item) for clause in lost]


def plan_step(clause, schema):
    if schema.get("type", "string") == "string":
        return clause
    text = Text(clause)
    path = next((value for word in WORD.findall(text.hidden) if path_like(value := text.value(word))), ".")
    lines = re.search(r"\blines?\s+(\d+(?:\s*[-–]\s*\d+)?)", text.hidden)
    check = re.search(r"(?:\b(?:check|verify)\b(?: with| by| that|:)?|检查|验证)\s*(.+)", text.hidden)
    known = {"file": path, "path": path, "lines": lines[1] if lines else "1", "change": clause,
             "check": text.value(check[1].strip()) if check else f"read {path}"}
    others = {name: stand_in(schema["properties"].get(name, {}), clause) for name in schema.get("required", [])}
    return others | {name: known[name] for name in schema.get("properties", {}) if name in known}


def finish_step(done, schema):
    failed = next((call for call in done if call.failed), None)
    outcome = "failed" if failed or not done else "done"
    note = line_of(failed) if failed else f"{len(done)} calls, none failed" if done else "I could not follow this step."
    return {name: outcome if outcome in property.get("enum", []) else stand_in(property, note)
            for name, property in schema.get("properties", {}).items()
            if "enum" in property or name in schema.get("required", []) or name in ("note", "summary", "reason")}


def stand_in(schema, text):
    """A value for a field that must not stay empty."""
    values = {"integer": 1, "number": 1, "boolean": True, "array": [text], "object": {}}
    return schema["enum"][0] if "enum" in schema else values.get(schema.get("type"), text)


# ---------------------------------------------------------------------------------------------------------------------

OPENAI = SimpleNamespace(
    judge=judge_openai, prompt=openai_prompt, usage=openai_usage, whole=openai_whole, events=openai_events,
    event=openai_event, error=openai_error, conversation=openai_conversation, call_id="call_",
    too_long="Your messages resulted in {} tokens, but this model's maximum context length is {} tokens.")
ANTHROPIC = SimpleNamespace(
    judge=judge_anthropic, prompt=anthropic_prompt, usage=anthropic_usage, whole=anthropic_whole,
    events=anthropic_events, event=anthropic_event, error=anthropic_error, conversation=anthropic_conversation,
    call_id="toolu_", too_long="prompt is too long: {} tokens > {} maximum")


def main():
    parser = argparse.ArgumentParser(description="The offline model: a server for any OpenAI or Anthropic client.")
    parser.add_argument("--port", type=int, default=8000, help="8000; 0 takes a free one")
    parser.add_argument("--window", type=int, default=64_000, help="context window in tokens")
    parser.add_argument("--script", type=Path, help="a JSON file with a list of replies, instead of plain instructions")
    options = parser.parse_args()
    try:
        script = json.loads(options.script.read_text(encoding="utf-8")) if options.script else None
        server = Server(script, window=options.window, port=options.port)
    except (OSError, ValueError, OverflowError) as error:
        sys.exit(f"offline.py: cannot serve on port {options.port}: {error}")
    print("The offline model, with no intelligence and no network. Point a client at it, with any key and model name:\n"
          f"  OpenAI     OPENAI_BASE_URL={server.base_url}\n"
          f"  Anthropic  ANTHROPIC_BASE_URL={server.root}\nCtrl-C ends it.", flush=True)
    try:
        while True:
            time.sleep(1)  # and not one long wait, which Ctrl-C does not end on Windows
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
