"""One stream of events from a provider's wire format (OpenAI's chat completions)."""
import json
from typing import NamedTuple


class StreamEvent(NamedTuple):
    """What happened in a reply. `kind` says what `data` is:

    thinking, text   str, the next piece
    tool_call        dict {id, function: {name, arguments}}, whole; `arguments` is JSON text
    usage            dict {prompt_tokens, cached_tokens, completion_tokens}
    done             dict, the whole message: {content, tool_calls, reasoning_content, finish_reason}
    """
    kind: str
    data: str | dict


class BrokenStream(Exception):
    """The reply ended before it was complete; no SDK notices that."""


def stream(client, request: dict):
    """Ask the model; yields a StreamEvent for each thing that arrives, "done" last. Raises BrokenStream and what the
    SDK lets through: its own errors, those of its transport, JSONDecodeError."""
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
    return {"prompt_tokens": usage.get("prompt_tokens") or 0, "cached_tokens": cached or 0,
            "completion_tokens": usage.get("completion_tokens") or 0}


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed in a moment: the server is overloaded, or the connection broke."""
    if isinstance(error, ImportError) or asked_wait(error) > 60:
        return False
    import httpx2
    import openai

    if status := getattr(error, "status_code", None):
        return (status in (408, 409, 429) or status >= 500) and error.code != "insufficient_quota"
    cause = error.__cause__ or error  # an APIError with neither is an error event inside of a stream
    broken = BrokenStream, json.JSONDecodeError, httpx2.TransportError, openai.APIError
    setup = httpx2.ConnectError, httpx2.ProxyError, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError
    return isinstance(cause, broken) and not isinstance(cause, setup)


def asked_wait(error: Exception) -> float:
    """The seconds that a Retry-After header asks for, 0 if there is none (RFC 9110, section 10.2.3)."""
    asked = error.response.headers.get("retry-after", "") if hasattr(error, "response") else ""
    return float(asked) if asked.replace(".", "", 1).isdecimal() else 0
