"""Any provider: which one is asked, by which settings, what a session costs, and that no key is left behind."""
import json
import re
import signal
import threading

import agent as program
import models
import offline
import pytest
from conftest import PROMPT, ROOT, as_returned, call, posix_only, refused, step, wait_until
from test_stream import finish

both = pytest.mark.parametrize("format", [
    pytest.param("openai", marks=pytest.mark.guard("v0.9 speaks this format")), "anthropic"])
COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/messages"
KEYS = {one.name: one.key for one in getattr(models, "PROVIDERS", []) if one.key}
SECRET, ALIEN = "sk-secret-0123456789abcdef", "ghp_0123456789abcdefABCDEF"      # our key, and what only looks like one
LONG = call("read_file", path="long.txt")


def put_files(agent):
    (agent.folder / "a.txt").write_text("alpha\n", encoding="utf-8")
    (agent.folder / "long.txt").write_text("a line of text\n" * 160, encoding="utf-8")


def blocks(request, kind):
    """The blocks of a kind in a request in Anthropic's format, in order."""
    return [block for message in request.body["messages"] for block in message["content"] if block["type"] == kind]


def returned(request):
    """What the tools returned, in either format."""
    found = ([block["content"] for block in blocks(request, "tool_result")] if request.path == MESSAGES else
             [message["content"] for message in request.body["messages"] if message["role"] == "tool"])
    return [as_returned(text.removeprefix("[archived] ")) for text in found]


# Who is asked

CHOICES = [     # the keys and the base URLs that are set, arguments and MODEL -> provider and, unless the usual, model
    ("", "openai", "", "", "openai"), ("", "anthropic", "", "", "anthropic"),
    ("", "openai anthropic", "", "", "openai"),
    ("zhipu", "anthropic", "", "", "zhipu"), ("zhipu", "openai", "", "", "openai"),
    ("openrouter anthropic", "openai anthropic", "", "", "anthropic"), ("openrouter", "openai", "", "", "openrouter"),
    ("anthropic openai zhipu", "openai anthropic", "", "", "zhipu"), ("openrouter", "anthropic", "", "", "anthropic"),
    ("zhipu openai", "openai anthropic", "--provider openai", "", "openai"),
    ("zhipu openai", "openai anthropic", "--provider openai", "ours", "openai"),        # it is a model of zhipu's
    ("zhipu openai", "openai anthropic", "", "ours", "zhipu ours"),
    ("zhipu openai", "openai anthropic", "--provider zhipu", "ours", "zhipu ours"),
    ("anthropic", "anthropic", "--model other", "ours", "anthropic other"),
    ("openai", "openai anthropic", "--provider anthropic --model other", "ours", "anthropic other")]


def test_the_provider_that_the_settings_choose(agent, model):
    usual, own, children = {one.name: one.model for one in models.PROVIDERS}, dict(agent.env), []
    for keys, urls, arguments, name, _ in CHOICES:
        server = model(["ok"])
        agent.env = own | {"OPENAI_BASE_URL": "", "MODEL": name, "ANTHROPIC_AUTH_TOKEN": "another"}
        agent.env |= {KEYS[key]: f"key-of-{key}" for key in keys.split()}
        agent.env |= {f"{url.upper()}_BASE_URL": server.root + "/v1" for url in urls.split()}
        children.append((agent.start([], "-p", "go", *arguments.split())[0], server))
    for (keys, *case, chosen), run in zip(CHOICES, finish(children), strict=True):
        assert (run.code, run.out, refused(run.requests)) == (0, "ok\n", []), (keys, case, run.err)
        [request], [provider, *name] = run.requests, chosen.split()
        key = f"key-of-{provider}" if provider in keys.split() else "none"
        assert request.path == (MESSAGES if provider in ("zhipu", "anthropic") else COMPLETIONS), (keys, case)
        assert [request.body["model"]] == (name or [usual[provider]]), (keys, case)
        assert ("thinking" in request.body) == (provider == "anthropic"), (keys, case)
        assert (request.headers["authorization"], request.headers.get("x-api-key", key)) == (f"Bearer {key}", key)


@pytest.mark.parametrize("keys, taken", [
    ("", "offline offline"), ("openrouter", "openrouter openrouter/auto"), ("zhipu openai anthropic", "zhipu glm-5.1"),
    ("anthropic openrouter", "anthropic claude-sonnet-5-5"), ("openai anthropic", "openai gpt-5.4-mini")])
def test_the_first_provider_with_a_key(agent, keys, taken):
    agent.env |= {"OPENAI_BASE_URL": ""} | {KEYS[key]: "key-1234" for key in keys.split()}
    [own] = re.findall(r"^\* (.*\S)", agent.run([], input="/model\n").err, re.M)
    assert own.split() == taken.split()


FIRST = [("zhipu", "ANTHROPIC_BASE_URL", ""), ("openai", "OPENAI_BASE_URL", "/v1"),
         *(("anthropic", "ANTHROPIC_BASE_URL", path) for path in ("/v1", "/v1/", "/"))]


def test_one_key_and_a_base_url_are_enough(agent, model):
    """However the server reads the key. With a wrong one, the variable to look at is named."""
    children, own = [], dict(agent.env)
    for provider, url, path in FIRST:
        for key in ("sk-right-1", "sk-wrong-1"):
            server = model(["hello"], keys={"sk-right-1"})
            agent.env = own | {"OPENAI_BASE_URL": "", url: server.root + path, KEYS[provider]: key}
            children.append((agent.start([], "-p", "hi")[0], server))
    runs = finish(children)
    for (provider, *_), right, wrong in zip(FIRST, runs[::2], runs[1::2], strict=True):
        assert (right.code, right.out) == (0, "hello\n"), right.err
        assert provider == "openai" or right.requests[0].headers["anthropic-version"] == "2023-06-01"
        assert wrong.code == 1 and KEYS[provider] in wrong.err and len(wrong.requests) == 1, wrong.err
        assert "sk-wrong-1" not in wrong.err


def test_only_the_sdk_in_use_is_loaded(agent):
    """The other one may be broken. Neither is needed to look around."""
    for format, other in (("openai", "anthropic"), ("anthropic", "openai")):
        folder = agent.folder.parent / f"no_{other}"
        folder.mkdir()
        (folder / f"{other}.py").write_text("raise SystemExit('it was loaded')\n", encoding="utf-8")
        agent.format, agent.env["PYTHONPATH"] = format, str(folder)
        assert agent.run(["ok"], "-p", "go").out == "ok\n"
        agent.format = other
        run = agent.run([], input="/model\n/help\n/usage\n")
        assert (run.code, run.requests) == (0, []) and "/model" in run.err
        assert agent.run([], "--help").code == agent.run([], "--version").code == 0


def test_model_chooses_for_the_next_conversation(agent, model):
    server = model(["one", "two", "three", "four"])
    agent.env |= {"OPENAI_BASE_URL": server.base_url, "ANTHROPIC_BASE_URL": server.root, "MODEL": "ours",
                  "ANTHROPIC_API_KEY": "key-a", "OPENAI_API_KEY": "key-o"}
    (agent.folder / "sub").mkdir()
    lines = ["/model", "/model anthropic", "one", "/new", "two", "/usage", "/model", "/model nobody",
             "/model anthropic small", "three", "/cd sub", "four"]
    run = agent.run([], "--time", input="\n".join(lines))
    assert (run.code, run.out, refused(server.requests)) == (0, "one\ntwo\nthree\nfour\n", []), run.err
    assert [(request.path, request.body["model"], request.headers["authorization"]) for request in server.requests] == [
        (COMPLETIONS, "ours", "Bearer key-o"), (MESSAGES, "claude-sonnet-5-5", "Bearer key-a"),
        (MESSAGES, "claude-sonnet-5-5", "Bearer key-a"), (MESSAGES, "small", "Bearer key-a")]
    listed = re.findall(r"^([* ]) (\w+) +(\S+)(?: +needs (\w+))?$", run.err, re.M)
    assert [name for own, name, *_ in listed if own == "*"] == ["openai", "anthropic"] and "no nobody" in run.err
    assert [name for _, name, *_ in listed] == 2 * [one.name for one in models.PROVIDERS]
    assert ("*", "openai", "ours", "") in listed and (" ", "zhipu", "glm-5.1", "ZHIPUAI_API_KEY") in listed
    assert re.search(r"^prefix breaks, .*: 0$", run.err, re.M)      # another model has another cache
    assert run.err.count("openai      ours") == 2       # MODEL is one of the provider that is taken when none is named
    assert re.search(r"in all \d+\.\d s for 4 requests, \d+\.\d s for tools\n\Z", run.err), run.err


def test_a_provider_without_a_key_says_what_it_needs(agent):
    run = agent.run(["still here"], input="/model zhipu\n/new\ngo\n")
    assert (run.code, run.out) == (0, "still here\n") and "zhipu needs ZHIPUAI_API_KEY" in run.err
    agent.env["OPENAI_BASE_URL"] = ""
    for name, word in (("openrouter", "OPENROUTER_API_KEY"), ("nobody", "zhipu")):
        run = agent.run([], "-p", "go", "--provider", name)
        assert run.code == 2 and word in run.err


# Settings

def test_env_files_and_their_order(agent):
    """The home's, then the one beside the program, then the shell; an empty value is none; BOM and CRLF are fine."""
    (agent.home / ".rungs").mkdir()
    (agent.home / ".rungs/.env").write_bytes("\ufeffANTHROPIC_API_KEY=from-home\r\nMODEL=home\r\n".encode())
    (agent.folder / ".env").write_text("ANTHROPIC_API_KEY=project\nMODEL=project\n", encoding="utf-8")
    agent.format, seen = "anthropic", []
    for text, shell in [("", {}), ("\ufeffMODEL=beside\r\nANTHROPIC_API_KEY=\r\n", {}),
                        ("MODEL=beside\n", {"MODEL": "shell", "ANTHROPIC_API_KEY": " "})]:
        (agent.program / ".env").write_bytes(text.encode())
        agent.env |= shell
        [request] = agent.task(["ok"]).requests
        seen.append((request.headers["x-api-key"], request.body["model"]))
    assert seen == [("from-home", name) for name in ("home", "beside", "shell")]


def test_the_example_names_exactly_the_variables_that_are_read():
    code = "".join(file.read_text(encoding="utf-8") for file in ROOT.glob("*.py"))
    read = set(re.findall(r'settings(?:\.get\(|\[)"([A-Z_]+)"', code)) | {*KEYS.values()}
    read |= {models.base_url(one) for one in models.PROVIDERS}
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    assert set(re.findall(r"^#? ?([A-Z_]+)=", example, re.M)) == read


# The whole of a session, in both formats

@posix_only
@both
def test_every_request_of_a_session_is_accepted(agent, format):
    """It visits all features. The judge also sees that thinking comes back as it was, and each call has its result."""
    def interrupted(reply, when=lambda: True):
        def wait():
            wait_until(when)
            child.send_signal(signal.SIGINT)
        return lambda body: threading.Thread(target=wait).start() or reply

    put_files(agent)
    agent.format, agent.options, agent.env["CONTEXT_WINDOW"] = format, {"require_reasoning": True}, "8000"
    plan = {"goal": "b", "steps": [{"file": "b.txt", "lines": "1", "change": "write b", "check": "it is there"}]}
    work = step(call("terminal", command="echo > up; sleep 30"), call("list_dir"))      # Ctrl-C between two calls
    script = [step(call("list_dir"), call("read_file", path="a.txt"), call("read_file", path="nowhere"),
                   {"name": "read_file", "arguments": '{"path": "a.t'}, call("no such tool"),
                   {"name": "activate_skill", "arguments": '{"name": "coding"}'}) | {"thinking": "先看 around"},
              step(call("memory", action="save", note="a is alpha")) | {"text": "I note it."},
              {"thinking": "so", "text": "one"},
              *[step(LONG) | {"thinking": f"again {n}"} for n in range(12)],
              step(call("recall", id_or_query="r9")), "two",
              "## Goal\nS", interrupted(work, (agent.folder / "up").exists), "three",
              step(call("submit_plan", **plan)) | {"thinking": "a plan"},
              step(call("write_file", path="b.txt", content="b\n"), call("finish_step", outcome="done")),
              interrupted({"text": "late", "delay": 20}), "four", "five"]
    lines = ["one", "two", "/compact", "run it", "go on", "/plan", "plan it", "accept", "wait", "go on", "/new", "hi"]
    child, server = agent.start(script, "--yes")
    out, err = child.communicate("\n".join(lines), timeout=60)
    assert refused(server.requests) == [] and server.script == [] and "Traceback" not in err, err
    assert out.startswith("one\ntwo\nthree\nGoal: b\n") and out.endswith("\nfour\nfive\n") and "late" not in out
    for word in ("Archived ", "Compressed ", "→ FAIL", "● recall r9", "Step 1 of 1", "Interrupted.", "A new c"):
        assert word in err, (word, err)
    assert {request.path for request in server.requests} == {MESSAGES if format == "anthropic" else COMPLETIONS}
    _, read, *errors, skill = returned(server.requests[1])
    assert read == "alpha" and all(text.startswith("Error: ") for text in errors) and skill.startswith("<skill coding")
    stopped, skipped = returned(server.requests[19])[-2:]
    assert "interrupted" in stopped and "not run" in skipped and (agent.folder / "b.txt").exists()


@pytest.fixture
def told(monkeypatch):
    """The usages that the servers tell, in order."""
    numbers = []
    for wire in (offline.OPENAI, offline.ANTHROPIC):
        def usage(*arguments, count=wire.usage):
            numbers.append(count(*arguments))
            return numbers[-1]
        monkeypatch.setattr(wire, "usage", usage)
    return numbers


def test_all_that_was_sent_before_comes_from_the_cache(agent, told):
    """An earlier request that is the beginning of this one is read from the cache as a whole: the one before, also
    after 12 calls at once (the provider looks back over 20 blocks only); after an archiving, the last unchanged one."""
    put_files(agent)
    agent.format, agent.env["CONTEXT_WINDOW"] = "anthropic", "16000"
    short = call("memory", action="list")       # its fact says it all, so that it is never archived
    script = [*[step(short)] * 4, step(*[short] * 12), step(short), step(*[short] * 12), "one",
              *[step(LONG)] * 9, step(*[short] * 12), *[step(LONG)] * 14, "two"]
    run = agent.run(script, "--yes", input="one\ntwo\n")
    assert run.out == "one\ntwo\n" and refused(run.requests) == [] and run.err.count("Archived ") >= 2, run.err
    prompts, shared = [[text for text, _ in offline.anthropic_prompt(request.body)] for request in run.requests], [0]
    for n, prompt in list(enumerate(prompts))[1:]:
        shared.append(max(len(one) for one in [[], *prompts[:n]] if prompt[:len(one)] == one))
        assert told[n]["cache_read_input_tokens"] >= sum(map(offline.tokens, prompt[:shared[n]])), n
    breaks = [n for n in range(1, len(prompts)) if shared[n] < len(prompts[n - 1])]
    assert len(breaks) == run.err.count("Archived ") and shared[breaks[0]] > 60     # all of the first turn


def test_where_the_breakpoints_are(agent):
    agent.format = "anthropic"
    run = agent.task([step(*[call("list_dir")] * 3), step(call("list_dir")), "done"])
    assert run.out == "done\n" and len(run.requests) == 3
    for request in run.requests:
        tools, system, messages = (request.body[part] for part in ("tools", "system", "messages"))
        assert [n for n, tool in enumerate(tools) if "cache_control" in tool] == [len(tools) - 1]
        assert ["cache_control" in block for block in system] == [True]
        marked = [(n, k) for n, message in enumerate(messages) for k, block in enumerate(message["content"])
                  if "cache_control" in block]
        ends = [(n, len(message["content"]) - 1) for n, message in enumerate(messages) if message["role"] == "user"]
        assert marked == ends[-2:]      # the ends of this request and of the one before


@both
def test_usage_adds_up_what_the_server_told(agent, told, format):
    agent.format = format
    run = agent.run([*[step(call("list_dir"))] * 3, "one", step(call("list_dir")), "two"], input="one\ntwo\n/usage\n")

    def bill(usages):
        flat = [usage | usage.get("prompt_tokens_details", {}) for usage in usages]
        cached, written, sent, out = (sum(usage.get(name, 0) for usage in flat for name in names.split()) for names in (
            "cached_tokens cache_read_input_tokens", "cache_creation_input_tokens",
            "prompt_tokens input_tokens cache_read_input_tokens cache_creation_input_tokens",
            "completion_tokens output_tokens"))
        return len(usages), sent, 100 * cached // sent, out, sent - cached - written, cached, written

    numbers = (r"([\d,]+) requests: ([\d,]+) tokens sent, (\d+) % .*; ([\d,]+) received\n +"
               r"([\d,]+) fresh, ([\d,]+) from the cache, ([\d,]+) written")
    shown = [tuple(int(count.replace(",", "")) for count in line) for line in re.findall(numbers, run.err)]
    assert shown == [bill(told), bill(told[-2:])] and len(told) == 6 and run.out == "one\ntwo\n"
    assert re.search(r"^prefix breaks, .*: 0$", run.err, re.M)


# Keys

@posix_only
def test_no_key_is_left_behind(agent):
    """Not ours, and nothing that looks like one: in no file of memory, not in the history, not in that of --debug."""
    agent.env["OPENAI_API_KEY"], debug = SECRET, agent.folder.parent / "debug.txt"
    (agent.folder / "a.txt").write_text(f"one {SECRET}\ntwo {ALIEN}\n", encoding="utf-8")
    debug.write_text("before\n", encoding="utf-8")
    show = step(call("read_file", path="a.txt"), *(call("terminal", command=f"echo {key}") for key in (SECRET, ALIEN)),
                *(call("memory", action="save", note=f"the key is {key}") for key in (SECRET, ALIEN)))
    child, server = agent.prompt([show, f"{SECRET} and {ALIEN}"] + ["ok"] * 3, "--yes", "--debug", str(debug))
    for line in ("look", f"I always use {ALIEN}", f"my key is {SECRET}", "a plain line"):
        child.sendline(line)
        child.expect("and ghp_|ok  ")
        child.expect(PROMPT)
        assert '"messages"' not in child.before
    child.sendeof()
    child.expect(pytest.importorskip("pexpect").EOF)
    child.wait()
    files = [debug, *(file for file in agent.home.rglob("*") if file.is_file())]
    kept = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert len(server.requests) == 5 and refused(server.requests) == []
    assert "look" in kept["history"] and "a plain line" in kept["history"] and "my key" not in kept["history"]
    text = kept["debug.txt"]
    assert text.startswith("before\n") and text.count('"messages"') == text.count('"reply"') == 5 and "***" in text
    assert [name for name, text in kept.items() if SECRET in text or ALIEN in text] == []


@both
def test_debug_shows_the_request_as_it_is_sent(agent, format):
    agent.format = format
    run = agent.task([step(call("list_dir")), "done"], "--debug", "log.txt")
    logged, text = [], (agent.folder / "log.txt").read_text(encoding="utf-8")
    while text.strip():
        value, end = json.JSONDecoder().raw_decode(text)
        logged, text = [*logged, value], text[end:].lstrip()
    assert "messages" not in run.err and run.out == "done\n" and len(logged) == 2
    for value, request in zip(logged, run.requests, strict=True):
        assert value["request"].items() <= request.body.items() and {"messages", "tools"} <= {*value["request"]}
    assert logged[1]["reply"]["content"] == "done" and logged[1]["usage"]["prompt_tokens"] > 500


# The table of commands and options

@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_each_command_and_option_names_a_test_that_is_there(agent, readme):
    rows = re.findall(r"^\| (`[/-].*?) \|.*\| `(tests/\w+\.py)::(\w+)` \|$", (ROOT / readme).read_text(encoding="utf-8"), re.M)
    named = {name for cells, *_ in rows for name in re.findall(r"`(/\w+|--?[a-z]+)", cells)}
    options = {name for name in re.findall(r"(?<![\w-])--?[a-z]+", agent.run([], "--help").out) if name != "-h"}
    assert named == {*program.COMMANDS, *options}
    for _, file, test in rows:
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)
