"""terminal: asks first, takes no input, ends with its time limit, and takes everything it started with it."""
import json
import sys
import time

import pytest
from conftest import POSIX, PROMPT, call, posix_only, results, step, wait_until

PYTHON = f'"{sys.executable}"'


def write(agent, name, code):
    (agent.folder / name).write_text(code, encoding="utf-8")


def lines(result):
    return result.rstrip("\n").split("\n")


# The result

def test_the_exit_code_comes_first_then_the_output(agent):
    write(agent, "both.py", "import sys\nprint('to stdout', flush=True)\nsys.exit('to stderr')\n")
    both, quiet, missing = agent.call(call("terminal", command=f"{PYTHON} both.py"),
                                      call("terminal", command="exit 3"),
                                      call("terminal", command="no-such-program-here"))
    assert lines(both) == ["exit 1", "to stdout", "to stderr"]
    assert lines(quiet) == ["exit 3"]
    assert not missing.startswith("exit 0") and "no-such-program-here" in missing


@posix_only
def test_it_is_a_shell_in_the_working_directory(agent):
    where, pipe, killed = agent.call(call("terminal", command="pwd && cd /"),
                                     call("terminal", command="pwd | grep -c work; [[ a == a ]] && echo 'bash'"),
                                     call("terminal", command="kill -9 $$"))
    assert lines(where) == ["exit 0", str(agent.folder.resolve())]
    assert lines(pipe) == ["exit 0", "1", "bash"]      # and the cd of the call before is forgotten
    assert not killed.startswith("exit 0")


def test_output_is_text_without_escape_sequences(agent):
    write(agent, "loud.py", r"""
import sys
sys.stdout.buffer.write(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07plain \x1b]8;;http://x.y\x1b\\link\x1b]8;;\x1b\\")
sys.stdout.buffer.write(b" [bold]loud[/i]\n")
sys.stdout.buffer.write("完成 ✅\r\n".encode() + b"bad \xff byte\n")
""")
    [result] = agent.call(call("terminal", command=f"{PYTHON} loud.py"))
    assert lines(result)[:2] == ["exit 0", "red plain link [bold]loud[/i]"]
    assert lines(result)[2].rstrip("\r") == "完成 ✅"
    assert "\x1b" not in result and "title" not in result
    assert lines(result)[3].startswith("bad ") and "�" not in result


def test_long_output_keeps_both_ends(agent):
    write(agent, "long.py", "print('first')\nfor n in range(200_000):\n    print('line', n)\nprint('last')\n")
    [result] = agent.call(call("terminal", command=f"{PYTHON} long.py"))
    assert len(result) <= 30_300 and result.startswith("exit 0\nfirst\n") and result.rstrip().endswith("last")
    assert "characters" in result


@posix_only
def test_endless_output_does_not_fill_the_machine(agent):
    [result] = agent.call(call("terminal", command="yes 'on and on'", timeout=3))
    assert not result.startswith("exit 0") and "on and on" in result and len(result) <= 30_300


def test_the_limit_is_between_1_and_600_seconds(agent):
    for error in agent.call(*(call("terminal", command="echo > ran", timeout=limit) for limit in (0, -1, 601))):
        assert error.startswith("Error: ") and "600" in error
    assert list(agent.folder.iterdir()) == []


# Asking

@posix_only
def test_it_asks_before_it_runs(agent):
    """Anything but yes is a refusal, and what the person says instead goes to the model."""
    yes, no = ["y", "yes", "YES"], ["n", "", "yes but use ls instead"]
    child, server = agent.prompt([step(call("terminal", command=f"echo > '{answer}!'")) if asked else "I see."
                                  for answer in yes + no for asked in (True, False)])
    for answer in yes + no:
        child.sendline("go")
        child.expect_exact(f"echo > '{answer}!'")
        child.expect(r"\[y/N")
        child.sendline(answer)
        child.expect("I see.")
    assert sorted(path.name for path in agent.folder.iterdir()) == ["YES!", "y!", "yes!"]
    for answer, result in zip(yes + no, results(server.requests[-1]), strict=True):
        assert result.startswith("exit 0") if answer in yes else answer in result


def test_with_nobody_to_ask_it_is_refused(agent):
    """A line of piped input is the next task, never the answer to a question."""
    run = agent.run([step(call("terminal", command="echo 1 > ran")), "one", "two"], input="go\ny\n")
    assert run.out == "one\ntwo\n"
    assert run.results[0].startswith("Error: ") and "--yes" in run.results[0]
    assert run.requests[2].body["messages"][-1]["content"] == "y"
    assert not (agent.folder / "ran").exists()


TRICKS = ["\x1b[2K\x1b[8m", "\x9b8m", "\u202e", "\r ls", "\x08" * 20, "\n" * 3, "x" * 300, " " * 300]


@posix_only
def test_the_question_shows_the_whole_command(agent):
    """What could hide a part of it is made visible, and none of it is cut off."""
    agent.env["TERM"] = "dumb"      # so that the only escape sequences are the command's
    child, _ = agent.prompt([step(call("terminal", command=f"touch a; #{trick}; touch z")) if asked else "I see."
                             for trick in TRICKS for asked in (True, False)])
    for trick in TRICKS:
        child.sendline("go")
        child.expect(r"\[y/N")
        assert "touch a" in child.before and "touch z" in child.before, trick
        assert not any(sign in child.before.replace("\r\n", "\n") for sign in "\x1b\x9b\u202e\r\x08"), trick
        child.sendline("n")
        child.expect("I see.")


# No input

READERS = ["cat", "read -p 'go? ' x; echo \"[$x]\"", "head -c 1", "cat /dev/tty", "read x < /dev/tty"]


@posix_only
@pytest.mark.parametrize("start", ["pty", "pipe"])
def test_a_command_that_reads_neither_waits_nor_eats_the_next_line(agent, start):
    """NEXT PROMPT is already typed when the commands run."""
    write(agent, "ask.py", "print(input('name? '))\n")
    calls = [call("terminal", command=command, timeout=10) for command in [f"{PYTHON} ask.py", *READERS]]

    def reply(body):
        (child.sendline if start == "pty" else type_line)("NEXT PROMPT")
        return {"tool_calls": calls}

    def type_line(line):
        child.stdin.write(line + "\n")
        child.stdin.flush()

    script = [reply, "one", "two"]
    child, server = agent.prompt(script, "--yes") if start == "pty" else agent.start(script, "--yes")
    (child.sendline if start == "pty" else type_line)("go")
    wait_until(lambda: len(server.requests) == 3)
    python, cat, read, *rest = results(server.requests[1])
    assert python.startswith("exit 1\n") and "EOFError" in python
    assert lines(cat) == ["exit 0"] and lines(read)[-1].endswith("[]")
    assert not any(result.startswith("timed out") for result in rest)
    assert server.requests[2].body["messages"][-1]["content"] == "NEXT PROMPT"


# The end of a command is the end of all that it started

HEART = """
import sys, time
while True:
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write("x")
    time.sleep(0.02)
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "heart.py", "grandchild"])
"""
SETSID = PARENT.replace("grandchild", "own_session").replace("])", "], start_new_session=True)")
FAMILY = {"grandchild": f"{PYTHON} parent.py"}
if POSIX:
    FAMILY = {
        "background": f"{PYTHON} heart.py background &",
        "orphan": f"({PYTHON} heart.py orphan > /dev/null 2>&1 &)",
        "own_session": f"{PYTHON} setsid.py &",
        "deaf": f"(trap '' TERM INT HUP; {PYTHON} heart.py deaf) &",
        **FAMILY}
HOUSE = "\n".join(["echo begin", *FAMILY.values(), "echo late > late"])


def settle(agent):
    for name, code in {"heart.py": HEART, "parent.py": PARENT, "setsid.py": SETSID}.items():
        write(agent, name, code)


def beats(agent):
    """How often each heart has beaten."""
    files = {name: agent.folder / name for name in FAMILY}
    return {name: file.stat().st_size if file.exists() else 0 for name, file in files.items()}


def alive(agent):
    before = beats(agent)
    assert all(before.values()), f"not all of the family was there: {before}"
    time.sleep(0.3)
    return [name for name, count in beats(agent).items() if count > before[name]]


def test_the_time_limit_ends_the_children_too(agent):
    settle(agent)
    command = HOUSE if POSIX else f"echo begin&{FAMILY['grandchild']}&echo late> late"
    [result] = agent.call(call("terminal", command=command, timeout=2))
    assert result.startswith("timed out after 2 s") and "begin" in lines(result)
    assert alive(agent) == [] and not (agent.folder / "late").exists()


@posix_only
def test_ctrl_c_ends_the_children_too(agent):
    settle(agent)
    child, _ = agent.prompt([step(call("terminal", command=HOUSE))], "--yes")
    child.sendline("go")
    wait_until(lambda: all(beats(agent).values()))
    child.sendintr()
    child.expect(PROMPT)
    assert alive(agent) == [] and not (agent.folder / "late").exists()


@posix_only
def test_a_background_child_does_not_hold_the_call(agent):
    quiet, loud = agent.call(call("terminal", command="sleep 9 & echo started", timeout=5),
                             call("terminal", command="(sleep 9; echo late) & echo started", timeout=5))
    assert lines(quiet) == lines(loud) == ["exit 0", "started"]


# What a command may know

def test_api_keys_are_not_in_its_environment(agent):
    agent.env |= {"OPENAI_API_KEY": "sk-secret-1", "my_api_key_2": "sk-secret-2", "HARMLESS": "yes"}
    write(agent, "show.py", "import json, os\nprint(json.dumps(dict(os.environ)))\n")
    [result] = agent.call(call("terminal", command=f"{PYTHON} show.py"))
    known = json.loads(lines(result)[1])
    assert known["HARMLESS"] == "yes" and not any("API_KEY" in name.upper() for name in known)
    assert "sk-secret" not in result
