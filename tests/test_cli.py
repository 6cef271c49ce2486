"""The command line: what goes where, what is asked of the environment, and what an error says."""
import re
import time
import signal

import pytest
from conftest import PROMPT, call, posix_only, refused, results, step

READ = step(call("read_file", path="a.txt"))


# -p, pipes and the prompt

def test_the_answer_alone_goes_to_stdout(agent):
    (agent.folder / "a.txt").write_text("alpha\n", encoding="utf-8")
    run = agent.task([READ, step(call("no_such_tool")), "It says alpha."])
    assert (run.code, run.out) == (0, "It says alpha.\n")
    good, bad = run.err.splitlines()
    assert re.match(r"● read_file a\.txt \(1 line\), ", good)
    assert re.match(r"● no_such_tool .*→ FAIL: there is no tool", bad)


def test_piped_lines_are_turns(agent):
    run = agent.run(["one", "two", "三"], input="first\r\nsecond\n第三")
    assert (run.code, run.out) == (0, "one\ntwo\n三\n")
    asked = [message["content"] for message in run.requests[2].body["messages"] if message["role"] == "user"]
    assert asked == ["first", "second", "第三"]


def test_piped_bytes_that_are_no_text(agent):
    child, server = agent.start(["one", "two"])
    child.stdin.buffer.write(b"caf\xe9 \x00 \x1b[1m\nsecond\n")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "one\ntwo\n") and "Traceback" not in err
    assert len(server.requests) == 2 and refused(server.requests) == []


def test_help_and_version_need_nothing(agent):
    agent.env |= {"OPENAI_BASE_URL": "nonsense", "ALL_PROXY": "socks://127.0.0.1:9", "SSL_CERT_FILE": "/nowhere/ca.pem"}
    usage, version = agent.run([], "--help"), agent.run([], "--version")
    assert usage.code == version.code == 0
    for option in ("-p", "--dir", "--yes", "--debug", "--version"):
        assert option in usage.out
    assert re.search(r"\d+\.\d+", version.out)


def test_commands_are_not_sent_to_the_model(agent):
    run = agent.run(["one"], input="/help\n/tools\n/nonsense\nhello\n/quit\nnever seen\n")
    assert (run.code, run.out, len(run.requests)) == (0, "one\n", 1)
    for word in ("/quit", "edit_file", "/nonsense"):
        assert word in run.err
    assert run.requests[0].body["messages"][-1]["content"] == "hello"


def test_dir_is_where_the_tools_work(agent):
    (agent.folder / "sub").mkdir()
    (agent.folder / "sub" / "a.txt").write_text("alpha\n", encoding="utf-8")
    run = agent.task([step(call("list_dir"), call("read_file", path="../a.txt")), "ok"], "--dir", "sub")
    assert "a.txt" in run.results[0] and run.results[1].startswith("Error: ")
    missing = agent.run(["ok"], "-p", "go", "--dir", "nowhere")
    assert missing.code != 0 and missing.requests == [] and "nowhere" in missing.err


@posix_only
@pytest.mark.parametrize("columns", [60, 200])
def test_a_session_at_the_prompt(agent, columns):
    (agent.folder / "a.txt").write_text("alpha\n", encoding="utf-8")
    agent.env["MODEL"] = "some-model"
    child, server = agent.prompt([READ, "It says [/alpha] 完成.", "two"], columns=columns)
    assert "some-model" in child.before and agent.folder.name in child.before
    child.sendline("go 看看")
    child.expect(r"● read_file a\.txt \(")
    child.expect_exact("It says [/alpha] 完成.")
    child.expect(PROMPT)
    child.sendline("")                  # an empty line is no turn
    child.expect(PROMPT)
    child.sendline("again")
    child.expect("two")
    child.expect(PROMPT)
    child.sendeof()
    child.expect(child_end())
    child.close()
    assert child.exitstatus == 0
    assert [request.body["messages"][-1]["content"] for request in server.requests][::2] == ["go 看看", "again"]


@posix_only
def test_ctrl_c_at_the_prompt_clears_the_line_and_the_second_leaves(agent):
    child, server = agent.prompt(["here"])
    child.send("half a tho")
    interrupt(child)
    child.expect(PROMPT)
    child.sendline("hello")
    child.expect("here")
    child.expect(PROMPT)
    interrupt(child)
    child.expect(PROMPT)
    interrupt(child)
    child.expect(child_end())
    child.close()
    assert child.exitstatus in (0, 130)
    assert server.requests[0].body["messages"][-1]["content"] == "hello"


def interrupt(child):
    time.sleep(0.3)     # a signal between readline's prompt and its first look at the keyboard waits for the next key
    child.sendintr()


def child_end():
    import pexpect
    return pexpect.EOF


@posix_only
@pytest.mark.parametrize("reply", [{"text": "late", "delay": 20}, step(call("terminal", command="sleep 20"))],
                         ids=["the model", "a command"])
def test_ctrl_c_ends_a_task_with_130(agent, reply):
    def interrupt(body):
        import threading
        threading.Timer(0.5, child.send_signal, [signal.SIGINT]).start()
        return reply

    child, server = agent.start([interrupt, "never"], "-p", "go", "--yes")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, len(server.requests)) == (130, "", 1)
    assert "Traceback" not in err


# The environment

def test_the_env_file_beside_the_program(agent):
    """Notepad writes a BOM and CRLF. The shell wins; an empty value is none; the project's own .env is not ours."""
    lines = ["\ufeffOPENAI_API_KEY=from-file", "MODEL=file-model", "CONTEXT_WINDOW=", ""]
    (agent.program / ".env").write_bytes("\r\n".join(lines).encode())
    (agent.folder / ".env").write_text("OPENAI_API_KEY=from-project\nMODEL=project-model\n", encoding="utf-8")
    agent.env |= {"MODEL": "shell-model", "OPENAI_API_KEY": ""}
    [request] = agent.task(["ok"]).requests
    assert request.body["model"] == "shell-model"
    headers = {name.lower(): value for name, value in dict(request.headers).items()}
    assert headers["authorization"] == "Bearer from-file"


def test_without_a_key_it_is_the_offline_model(agent):
    agent.env |= {"OPENAI_BASE_URL": "", "DEEPSEEK_API_KEY": "sk-secret-1"}
    (agent.folder / "README.md").write_text("A fine project.\n", encoding="utf-8")
    run = agent.run([], "-p", "list . then read README.md", "--yes")
    assert run.code == 0 and run.out.strip()
    assert "offline" in run.err and "● list_dir" in run.err and "● read_file README.md" in run.err
    for name in ("DEEPSEEK_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):      # how to use the key that is there
        assert name in run.err
    assert "sk-secret" not in run.out + run.err


def test_debug_shows_the_traffic_and_no_key(agent):
    agent.env |= {"OPENAI_API_KEY": "sk-secret-1", "OTHER_API_KEY": "sk-secret-2"}
    (agent.folder / "a.txt").write_text("OPENAI_API_KEY=sk-secret-1\nOTHER_API_KEY=sk-secret-2\n", encoding="utf-8")
    run = agent.task([READ, "It is a key file."], "--debug")
    assert run.out == "It is a key file.\n"
    assert '"messages"' in run.err and "tool_call" in run.err
    assert "sk-secret" not in run.err


def test_a_key_in_a_tool_call_is_not_shown(agent):
    agent.env["OPENAI_API_KEY"] = "sk-secret-1"
    run = agent.task([step(call("read_file", path="sk-secret-1"), call("terminal", command="echo sk-secret-1")), "ok"], "--yes")
    assert "sk-secret" not in run.err and run.err.count("***") >= 2


def test_a_placeholder_for_a_key_is_no_secret(agent):
    """Servers of one's own are often given a key such as "x"; hiding it would make holes in every word."""
    agent.env["OPENAI_API_KEY"] = "x"
    assert "next.txt" in agent.task([step(call("read_file", path="next.txt")), "ok"]).err


def test_a_proxy_is_not_asked_for_this_machine(agent):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        agent.env[name] = "http://127.0.0.1:9"
    assert agent.task(["ok"]).out == "ok\n"


@pytest.mark.parametrize("host, here", [("[::1]", True), ("localhost", True), ("localhost.invalid", False)])
def test_this_machine_has_several_names(agent, host, here):
    agent.env |= {"OPENAI_BASE_URL": f"http://{host}:9/v1", "ALL_PROXY": "nonsense://127.0.0.1:9"}
    assert ("scheme" in agent.run([], "-p", "go").err) != here


# Errors name the setting to change

def says(run, *words):
    """The run failed in a line or two (of 80 columns, so they may be wrapped), which hold one of these words."""
    assert (run.code, run.out) == (1, ""), run.err
    assert len(run.err.splitlines()) <= 4 and any(word in run.err for word in words), run.err


def go(agent, script=("ok",), **options):
    agent.options = options
    return agent.run(list(script), "-p", "go")


def test_nothing_listens_there(agent):
    """It is the address, not the proxy, which is not asked for this machine."""
    agent.env |= {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "all_proxy": "socks5://127.0.0.1:9",
                  "NO_PROXY": "127.0.0.1,localhost"}
    says(go(agent), "OPENAI_BASE_URL")


@pytest.mark.parametrize("url", ["127.0.0.1:9/v1", "http://127.0.0.1:port/v1"])
def test_a_base_url_that_is_none(agent, url):
    agent.env["OPENAI_BASE_URL"] = url
    says(go(agent), "OPENAI_BASE_URL")


def test_a_wrong_key(agent):
    agent.env["OPENAI_API_KEY"] = "sk-wrong"
    run = go(agent, keys={"sk-right"})
    says(run, "OPENAI_API_KEY")
    assert "sk-wrong" not in run.err


def test_a_key_with_a_character_that_no_header_holds(agent):
    agent.env["OPENAI_API_KEY"] = "sk-“quoted”"
    says(go(agent), "OPENAI_API_KEY")


def test_an_unknown_model(agent):
    agent.env["MODEL"] = "gpt-forgotten"
    says(go(agent, models={"gpt-known"}), "MODEL")


def test_a_request_over_the_window(agent):
    says(go(agent, window=50), "CONTEXT_WINDOW")


@pytest.mark.parametrize("value", ["64k", "0"])
def test_a_window_that_is_none(agent, value):
    agent.env["CONTEXT_WINDOW"] = value
    run = go(agent)
    assert run.code != 0 and run.requests == [] and "CONTEXT_WINDOW" in run.err


def test_an_empty_answer_is_a_failure(agent):
    says(go(agent, [""]), "empty", "no answer")


def test_a_package_that_is_missing(agent):
    stub = agent.home / "stubs" / "openai.py"
    stub.parent.mkdir()
    stub.write_text("raise ModuleNotFoundError(\"No module named 'openai'\")\n", encoding="utf-8")
    agent.env["PYTHONPATH"] = str(stub.parent)
    run = go(agent)
    says(run, "pip install -r requirements.txt")
    assert "'openai'" in run.err and run.requests == []


TROUBLES = [    # reply, what the person must see of it
    ({"status": 400, "message": "oh [/dear] \x1b[2J"}, "oh [/dear]"),
    ({"status": 403, "message": "not you"}, "OPENAI_API_KEY"),
    ({"status": 404, "message": "no such page"}, "OPENAI_BASE_URL"),
]


def test_after_any_trouble_the_next_turn_works(agent):
    child, server = agent.start([reply for trouble, _ in TROUBLES for reply in (READ, trouble, "fine")])
    out, err = child.communicate("go\nstill there?\n" * len(TROUBLES), timeout=60)
    assert out == "fine\n" * len(TROUBLES)
    errors = re.split(r"● read_file.*\n", err)[1:]
    for (reply, word), error in zip(TROUBLES, errors, strict=True):
        assert word in error and len(error.splitlines()) <= 3, reply
    assert "\x1b" not in err and "Traceback" not in err
    assert refused(server.requests) == []


PROXIES = {     # what shells in China often export; the model is elsewhere
    "a SOCKS proxy that is off": {"all_proxy": "socks5://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    "a scheme nobody knows": {"ALL_PROXY": "socks://127.0.0.1:9"},
    "no scheme": {"https_proxy": "127.0.0.1:9"},
    "no port": {"http_proxy": "http://127.0.0.1:port"},
    "a missing certificate file": {"SSL_CERT_FILE": "/nowhere/ca.pem"},
}


@pytest.mark.parametrize("settings", PROXIES.values(), ids=PROXIES.keys())
def test_a_proxy_that_cannot_work_is_named(agent, settings):
    agent.env |= settings | {"OPENAI_BASE_URL": "https://model.invalid/v1", "OPENAI_API_KEY": "sk-1"}
    if "http_proxy" in settings:
        agent.env["OPENAI_BASE_URL"] = "http://model.invalid/v1"
    run = go(agent)
    says(run, *settings)


def test_a_proxy_that_cannot_work_leaves_the_prompt_alive(agent):
    agent.env |= {"ALL_PROXY": "socks://127.0.0.1:9", "OPENAI_BASE_URL": "http://model.invalid/v1"}
    run = agent.run([], input="hello\nhello\n/quit\n")
    assert run.code == 0 and run.out == "" and run.err.count("ALL_PROXY") >= 2


# Foreign text is shown as it is

MARKUP = "see [/usr/lib/x.so] use list[str] [/] end [bold]loud[/i] :smile: **star** [link=http://x]"


def test_square_brackets_are_text(agent):
    (agent.folder / "[red]a.txt").write_text("[/i] done [bold]loud", encoding="utf-8")
    run = agent.run([step(call("list_dir"), call("read_file", path="[red]a.txt"), call("[/]", **{"[/x]": "[/y]"}),
                                     call("read_file", path="[/z]")), MARKUP, "ok"], input="[/] hello\nmore\n")
    assert (run.code, run.out) == (0, MARKUP + "\nok\n")
    assert "● read_file [red]a.txt (1 line)" in run.err and "[/z]" in run.err
    sent = [message["content"] for message in run.requests[-1].body["messages"]]
    assert MARKUP in sent and "[/] hello" in sent and "[/i] done [bold]loud" in run.results


ESCAPES = ["\x1b[2J", "\x1b]0;owned\x07", "\x1b]52;c;aGk=\x07", "\x9b31m", "\r", "\x08", "\u202e"]


@posix_only
def test_escape_sequences_are_made_visible(agent):
    """In tool lines, outcomes, errors and answers alike: a file name must not write to the clipboard."""
    nasty = "a" + "".join(ESCAPES) + "b"
    (agent.folder / nasty).write_text(nasty, encoding="utf-8")
    run = agent.task([step(call("read_file", path=nasty), call("list_dir"), call("terminal", command=f"echo '{nasty}'"),
                                      call(nasty), call("read_file", path="x", **{nasty: nasty})),
                      f"The answer is {nasty}."], "--yes")
    assert run.code == 0 and "The answer is a" in run.out
    for escape in ESCAPES:
        assert escape not in run.err.replace("\r\n", "\n") and escape not in run.out.replace("\r\n", "\n")
    assert len(run.err.splitlines()) <= 8       # one line a call, whatever is in it


# Consoles that are not UTF-8

@pytest.mark.parametrize("encoding", ["gbk", "cp1252"])
def test_a_console_that_cannot_show_everything(agent, encoding):
    """What is missing in the code page is replaced on the screen, and whole in the history."""
    text = "完成 ✅ 🐍 ĳ — end"
    agent.encoding = encoding
    agent.env["PYTHONUTF8"] = "0"
    (agent.folder / "a.txt").write_text(text[:10], encoding="utf-8")
    run = agent.run([READ, text, "ok"], input="go\nmore\n")
    assert run.code == 0 and run.out.endswith("end\nok\n") and len(run.out.splitlines()) == 2
    assert ("完成" in run.out) == (encoding == "gbk")
    sent = run.requests[-1].body["messages"]
    assert sent[-2]["content"] == text and results(run.requests[-1]) == [text[:10]]
    assert refused(run.requests) == []


def test_every_exit_works_on_a_gbk_console(agent):
    agent.encoding = "gbk"
    agent.env["PYTHONUTF8"] = "0"
    assert agent.run([], "--help").code == agent.run([], "--version").code == 0
    assert agent.run([{"status": 400, "message": "🐍 ✅"}], "-p", "go").code == 1
