"""The input line at a terminal: modes, history, pastes, Chinese, completion. From a pipe: plain lines."""
import re

import pytest
from conftest import PROMPT, posix_only, wait_until

pytestmark = posix_only
SHIFT_TAB, UP, LEFT = "\x1b[Z", "\x1b[A", "\x1b[D"


def said(request):
    return request.body["messages"][-1]["content"]


def offered(request):
    return {tool["function"]["name"] for tool in request.body["tools"]}


def at_editor(agent, script):
    """The agent at its prompt. That the terminal is told to mark pastes shows at once that a line editor is there."""
    child, server = agent.prompt(script)
    assert "\x1b[?2004h" in child.before + child.after
    return child, server


def press(child, keys, line):
    """Type, and wait after a Tab until the line is complete: for its end, because it may be drawn in pieces."""
    start, tab, end = keys.partition("\t")
    child.send(start + tab)
    if tab:
        child.expect_exact(line[-2:])
    child.send(end)


def test_shift_tab_and_plan_switch_the_mode(agent):
    """What was typed stays; the prompt says which mode it is, and the model is told."""
    def mode():
        return re.search(r"(plan|[A-Z]+) \d+% >", child.after)[1]

    child, server = at_editor(agent, ["1", "2", "3", "4"])
    child.send("half of")
    child.send(SHIFT_TAB)
    child.expect_exact("Plan mode.")
    child.expect(r"plan \d+% >[^\r\n]*half of")
    child.send(" it\r")
    child.expect(PROMPT)
    wait_until(lambda: len(server.requests) == 1)
    child.send(SHIFT_TAB)
    child.expect_exact("Normal mode.")
    child.expect(PROMPT)
    modes = [mode()]
    for line in ("normal", "/plan", "planning", "/plan", "normal again"):
        child.send(line + "\r")
        child.expect(PROMPT)
        modes.append(mode())
    assert modes == ["PLANNING", "PLANNING", "plan", "plan", "PLANNING", "PLANNING"]
    first, second, third, fourth = server.requests
    assert said(first).startswith("half of it\n") and "plan:" in said(first)
    assert said(third).startswith("planning\n") and "plan:" in said(third)
    assert (said(second), said(fourth)) == ("normal", "normal again")
    assert ["submit_plan" in offered(request) for request in server.requests] == [True, False, True, False]
    assert ["write_file" in offered(request) for request in server.requests] == [False, True, False, True]


def test_history_is_that_of_the_project(agent):
    """Up brings back the lines of earlier sessions in this folder, none of another; they lie in ~/.rungs."""
    child, server = at_editor(agent, ["1"])
    child.send("remember 这个\r")
    child.expect(PROMPT)
    child.sendeof()
    child.expect(r"\S*$")
    child.close()
    [file] = [path for path in agent.home.rglob("*") if path.is_file() and "remember 这个" in path.read_text("utf-8")]
    assert file.is_relative_to(agent.home / ".rungs") and list(agent.folder.iterdir()) == []

    child, server = at_editor(agent, ["2"])
    child.send(UP + "!\r")
    child.expect(PROMPT)
    assert said(server.requests[0]) == "remember 这个!"

    agent.folder = agent.folder.parent / "elsewhere"
    agent.folder.mkdir()
    child, server = at_editor(agent, ["3"])
    child.send(UP + "new\r")
    child.expect(PROMPT)
    assert said(server.requests[0]) == "new"


def test_typing(agent):
    """Pastes, Chinese and completion, and how to leave."""
    (agent.folder / "src").mkdir()
    for name in ("文件.txt", "src/main_program.py"):
        (agent.folder / name).write_text("x", encoding="utf-8")
    typed = {"\x1b[200~a\n\n  b\r\nc\x1b[201~\r": "a\n\n  b\nc",         # a paste is one request
             "完成了\x7f\x7f作\r": "完作",                                # backspace takes a whole character
             "完成" + LEFT + "不\x7f没\r": "完没成",
             "read src/ma\t\r": "read src/main_program.py",
             "看 文\t\r": "看 文件.txt"}
    child, server = at_editor(agent, ["ok"] * len(typed))
    for keys, line in typed.items():
        press(child, keys, line)
        child.expect(PROMPT)
    assert [said(request) for request in server.requests] == list(typed.values())
    child.send("thrown away\x03")
    child.expect("Ctrl-C again")
    child.expect(PROMPT)
    child.send("goes on\x03")
    child.expect("Ctrl-C again")
    child.expect(r"\S*$")
    wait_until(lambda: not child.isalive())
    assert child.exitstatus == 0 and len(server.requests) == len(typed)


@pytest.mark.parametrize("start", ["/usa", "/us"])
def test_tab_completes_a_command(agent, start):
    """Also where a folder begins like it: /usr."""
    child, _ = at_editor(agent, [])
    press(child, start + "\t\r", "usage")
    child.expect(r"\d+ requests: |There is no")
    assert "requests" in child.match[0]


def test_a_home_that_cannot_be_written_to_costs_the_history_only(agent):
    agent.env["HOME"] = "/dev/null"
    child, server = at_editor(agent, ["fine"])
    child.send("hello\r")
    child.expect("fine")
    child.expect(PROMPT)


@pytest.mark.guard("v0.4 read plain lines, too")
def test_piped_input_is_plain_lines(agent):
    run = agent.run(["1", "2", "3"], input="one\n完成\n\x1b[200~three\x1b[201~\n")
    assert run.out == "1\n2\n3\n" and not re.search("\x1b|\\d% >", run.out + run.err)
    assert [said(request) for request in run.requests][:2] == ["one", "完成"]
    assert not list(agent.home.rglob("history"))
