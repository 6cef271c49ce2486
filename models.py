"""The providers, and one stream of events from the wire formats of OpenAI and Anthropic."""
import json
import re
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class Provider(NamedTuple):
    """Who answers. `format` is the wire format, and its SDK's name; `key` the variable that holds the key; `model` is
    asked unless MODEL names another one."""
    name: str
    format: str
    key: str
    url: str
    model: str


PROVIDERS = [  # in the order in which they are taken if there is a key
    Provider("zhipu", "anthropic", "ZHIPUAI_API_KEY", "https://open.bigmodel.cn/api/anthropic", "glm-5.1"),
    Provider("openai", "openai", "OPENAI_API_KEY", "https://api.openai.com/v1", "gpt-5.4-mini"),
    Provider("anthropic", "anthropic", "ANTHROPIC_API_KEY", "https://api.anthropic.com", "claude-sonnet-5-5"),
    Provider("openrouter", "openai", "OPENROUTER_API_KEY", "https://openrouter.ai/api/v1", "openrouter/auto"),
    Provider("offline", "openai", "", "", "offline")]
NAMES = [provider.name for provider in PROVIDERS]


def base_url(provider: Provider) -> str:
    """The variable that puts another address in the place of the provider's: of a server that speaks its format."""
    return f"{provider.format.upper()}_BASE_URL"


def is_ready(settings: dict[str, str], provider: Provider) -> bool:
    own = provider.name == provider.format and base_url(provider) in settings  # a server of one's own needs no key
    return own or provider.key in settings or provider.name == "offline"


def choose(settings: dict[str, str], name: str = "") -> Provider:
    """The provider of that name, else the first one whose key is set. A base URL limits the choice to its format, and
    its server may do without a key. With nothing set, the offline model."""
    given = [one for one in PROVIDERS if one.key and base_url(one) in settings] or PROVIDERS
    ready = [one for one in given if one.key in settings] + [one for one in given if is_ready(settings, one)]
    provider = PROVIDERS[NAMES.index(name)] if name else ready[0]
    return provider._replace(url=settings.get(base_url(provider), provider.url) if provider.key else "")


def model_of(settings: dict[str, str], provider: Provider) -> str:
    """The model to ask there. MODEL is one of the provider that is taken when none is named."""
    usual = provider.name == choose(settings).name and provider.name != "offline"
    return usual and settings.get("MODEL") or provider.model


def prices(url: str, model: str) -> dict:
    """What tokens cost there, from prices.json, as memory.Rent takes it. A name in that file is the beginning of
    host/model; the longest one that fits counts, and the empty one fits all."""
    table = json.loads(Path(__file__).with_name("prices.json").read_text(encoding="utf-8"))
    place = f"{urlsplit(url).hostname}/{model}"
    return table[max((name for name in table if place.startswith(name)), key=len)]


def connect(format: str, url: str, key: str):
    """The SDK's client; it does not retry by itself. Raises what the SDK raises for a proxy or a key that cannot be."""
    here = re.match(r".*//(localhost|127\.[\d.]+|\[::1])(:|/|$)", url)  # then without a proxy
    if format == "openai":
        import openai

        return openai.OpenAI(api_key=key, base_url=url, max_retries=0,
                             http_client=openai.DefaultHttpxClient(trust_env=not here))
    import anthropic

    # The SDK sends the key as a Bearer, and its own version; servers that are compatible know these.
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return anthropic.Anthropic(api_key=key, base_url=re.sub("/(v1/?)?$", "", url), max_retries=0,
                               default_headers=headers, http_client=anthropic.DefaultHttpxClient(trust_env=not here))


class StreamEvent(NamedTuple):
    """What happened in a reply. `kind` says what `data` is:

    thinking, text   str, the next piece
    tool_call        dict {id, function: {name, arguments}}, whole; `arguments` is JSON text
    usage            dict {prompt_tokens, cached_tokens, written_tokens, completion_tokens}: of the prompt, so many were
                     read from the provider's cache, and written to it
    done             dict, the whole message: {content, tool_calls, finish_reason}; if there was thinking, also
                     reasoning_content, or in Anthropic's format all the `blocks`
    """
    kind: str
    data: str | dict


class BrokenStream(Exception):
    """The reply ended before it was complete; no SDK notices that."""


def stream(format: str, client, request: dict):
    """Ask the model, with a request in its format; yields a StreamEvent for each thing that arrives, "done" last.
    Raises BrokenStream and what the SDK lets through: its own errors, those of its transport, JSONDecodeError."""
    return anthropic_stream(client, request) if format == "anthropic" else openai_stream(client, request)


def openai_stream(client, request: dict):
    message = {"content": "", "tool_calls": [], "reasoning_content": "", "finish_reason": None}
    # The SDK looks at each part of its arguments, which in a long session takes longer than all that we do. What is in
    # extra_body takes the place of arguments of that name as it is; the bytes that are sent are the same.
    for chunk in client.chat.completions.create(model=request["model"], messages=[], extra_body=request, stream=True,
                                                stream_options={"include_usage": True}):
        if chunk.usage:
            yield StreamEvent("usage", usage_of(chunk.usage.to_dict()))
        for choice in chunk.choices or []:  # the first and the last chunk may have none
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
            thinking, text = getattr(choice.delta, "reasoning_content", None), getattr(choice.delta, "content", None)
            message["reasoning_content"] += thinking or ""
            message["content"] += text or ""
            if thinking := thinking or getattr(choice.delta, "reasoning", None):  # OpenRouter's name; not sent back
                yield StreamEvent("thinking", thinking)
            if text:
                yield StreamEvent("text", text)
            for fragment in getattr(choice.delta, "tool_calls", None) or []:
                collect(message["tool_calls"], fragment)
    if message["finish_reason"] is None:
        raise BrokenStream("the reply broke off")
    yield from (StreamEvent("tool_call", call) for call in message["tool_calls"])
    yield StreamEvent("done", message)


def collect(calls: list[dict], fragment):
    """Add a fragment to the call it belongs to, or start a new one.

    Fragments of a call should have its index, and the first one id and name. Servers break each part of that: one index
    for all, or none; no ids; one id for two; id and name in every fragment. Id and name are taken once.
    """
    name, arguments = (getattr(fragment.function, part, None) or "" for part in ("name", "arguments"))
    same_index = [call for call in calls if fragment.index in (None, call["index"])]
    same_id = [call for call in calls if fragment.id and fragment.id == call["id"]]
    both = [call for call in same_index if call in same_id]
    same_id = [] if name and fragment.index is not None else same_id  # a name at an index of its own is another call
    call = (both or same_id or same_index or [None])[-1]
    if call is None or name and (fragment.id and fragment.id != call["id"] or arguments and whole(call)):
        call = {"id": fragment.id, "index": fragment.index, "function": {"name": name, "arguments": ""}}
        calls.append(call)
    call["id"], call["function"]["name"] = call["id"] or fragment.id, call["function"]["name"] or name
    call["function"]["arguments"] += arguments


def whole(call: dict) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    except ValueError:
        return False


def usage_of(usage: dict) -> dict:
    """Tokens in one shape; DeepSeek has a name of its own for those that came from its cache."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or usage.get("prompt_cache_hit_tokens")
    return {"prompt_tokens": usage.get("prompt_tokens") or 0, "cached_tokens": cached or 0, "written_tokens": 0,
            "completion_tokens": usage.get("completion_tokens") or 0}


# ---- Anthropic's format ----

PIECES = {"thinking", "text", "signature", "partial_json"}  # what of a block comes in pieces


def anthropic_request(request: dict, stable: int, room: int) -> dict:
    """What {model, messages, tools} is in Anthropic's form: the system prompt apart, and messages of blocks by the user
    and the assistant in turn, with the results of tool calls among the user's. `room` is the most tokens of the answer.

    Four blocks are cache breakpoints: up to each of them the provider may read the prompt from its cache, or write it
    there. They are the last tool, the system prompt, the last message, and the last of the first `stable` messages,
    which were an earlier request: after an archiving, too, what they hold is in the cache.
    https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching"""
    parts, messages, breakpoint = request["messages"], [], {"cache_control": {"type": "ephemeral"}}
    asked = [n for n, message in enumerate(parts) if message["role"] in ("user", "tool")]
    marks = asked[-1:] + [n for n in asked if n < stable][-1:]
    for n, message in enumerate(parts):
        content = [] if message["role"] == "system" else blocks_of(message)
        if n in marks:
            content[-1] |= breakpoint
        role = "assistant" if message["role"] == "assistant" else "user"
        if content and messages and messages[-1]["role"] == role:
            messages[-1]["content"] += content
        elif content:
            messages.append({"role": role, "content": content})
    system = [{"type": "text", "text": one["content"]} | breakpoint for one in parts if one["role"] == "system"]
    functions = [tool["function"] for tool in request.get("tools", [])]
    tools = [{"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
             | (breakpoint if one is functions[-1] else {}) for one in functions]
    built = {"model": request["model"], "max_tokens": room, "system": system, "tools": tools, "messages": messages}
    return {key: value for key, value in built.items() if value}


def blocks_of(message: dict) -> list[dict]:
    """The content blocks of a message. Those that came with thinking go back as they came, in the same order."""
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
    calls = [{"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
              "input": json.loads(call["function"]["arguments"])} for call in message.get("tool_calls", [])]
    if "blocks" in message:
        return [calls.pop(0) if block["type"] == "tool_use" else dict(block) for block in message["blocks"]]
    return [{"type": "text", "text": message["content"]}] * bool(message["content"].strip()) + calls


def anthropic_stream(client, request: dict):
    parts, blocks, usage, finish = [], {}, {}, None  # blocks: those of parts by their index, the latest of each
    for event in client.messages.create(model=request["model"], max_tokens=request["max_tokens"], messages=[],
                                        extra_body=request, stream=True):  # as in OpenAI's format
        said = {}
        if event.type in ("message_start", "message_delta"):  # servers tell different parts of the usage in each
            told = event.message.usage if event.type == "message_start" else event.usage
            usage |= {name: count for name, count in (told.to_dict() if told else {}).items() if count is not None}
            finish = event.type == "message_delta" and event.delta.stop_reason or finish
        elif event.type == "content_block_start":
            said = event.content_block.to_dict(exclude_none=True)
            blocks[event.index] = said | dict.fromkeys(PIECES & said.keys(), "")
            parts.append(blocks[event.index])
        elif event.type == "content_block_delta":
            said = event.delta.to_dict(exclude_none=True)
            if event.index not in blocks:
                raise BrokenStream("a piece came without its block")
        for part in PIECES & said.keys():
            blocks[event.index][part] = blocks[event.index].get(part, "") + said[part]
            if part in ("thinking", "text") and said[part]:
                yield StreamEvent(part, said[part])
    if finish is None:
        raise BrokenStream("the reply broke off")
    if usage:
        cached, written = usage.get("cache_read_input_tokens", 0), usage.get("cache_creation_input_tokens", 0)
        yield StreamEvent("usage", {"prompt_tokens": usage.get("input_tokens", 0) + cached + written,
                                    "cached_tokens": cached, "written_tokens": written,
                                    "completion_tokens": usage.get("output_tokens", 0)})
    needed = {"thinking": "signature", "text": "text"}  # blocks without these are refused when they go back
    parts = [block for block in parts if block["type"] not in needed or block.get(needed[block["type"]], "").strip()]
    calls = [{"id": block.get("id"), "index": n, "function": {
        "name": block.get("name"), "arguments": block.get("partial_json") or json.dumps(block.get("input") or {})}}
        for n, block in enumerate(parts) if block["type"] == "tool_use"]
    message = {"content": "".join(block["text"] for block in parts if block["type"] == "text"), "tool_calls": calls,
               "finish_reason": "length" if finish == "max_tokens" else finish}
    yield from (StreamEvent("tool_call", call) for call in calls)
    thought = any("thinking" in block["type"] for block in parts)  # also redacted_thinking
    yield StreamEvent("done", message | ({"blocks": parts} if thought else {}))


def is_passing(provider: Provider, error: Exception) -> bool:
    """Whether the same request may succeed in a moment: the server is overloaded, or the connection broke."""
    if isinstance(error, ImportError) or asked_wait(error) > 60:
        return False
    import httpx2

    if status := getattr(error, "status_code", None):  # 200 is that of an error event inside of a stream
        passing = status in (200, 408, 409, 429) or status >= 500
        return passing and getattr(error, "code", None) != "insufficient_quota"
    raw = isinstance(error, httpx2.TransportError)  # as Anthropic's SDK lets it through
    cause = error if raw else error.__cause__ or error  # OpenAI's APIError with no cause is such an event, too
    broken = BrokenStream, json.JSONDecodeError, httpx2.TransportError, import_module(provider.format).APIError
    setup = httpx2.ConnectError, httpx2.ProxyError, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError
    return isinstance(cause, broken) and not isinstance(cause, setup)


def reason(error: Exception) -> str:
    """What is wrong, in the server's words if it said something."""
    body = getattr(error, "body", None)
    said = body.get("error", body) if isinstance(body, dict) else None
    said = said.get("message") if isinstance(said, dict) else said
    return f"{getattr(error, 'status_code', 'error')}: {said}" if said else str(error.__cause__ or error)


def asked_wait(error: Exception) -> float:
    """The seconds that a Retry-After header asks for, 0 if there is none (RFC 9110, section 10.2.3)."""
    asked = error.response.headers.get("retry-after", "") if hasattr(error, "response") else ""
    return float(asked) if asked.replace(".", "", 1).isdecimal() else 0
