"""Phases: what a task is at, by its tool calls, and what archiving leaves alone meanwhile."""
import copy
import json
import re
from collections import Counter
from types import SimpleNamespace

import agent as program
import memory
import offline
import pytest
import tools
from conftest import PROMPT, call, posix_only, refused, step
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = posix_only
PLANNING, EXECUTING, VERIFYING = "PLANNING", "EXECUTING", "VERIFYING"
WRITE, READ = call("write_file", path="a.py", content="1\n"), call("read_file", path="a.py")
OUTSIDE = call("write_file", path="../b.py", content="1\n")
NOT_THERE = call("edit_file", path="a.py", old_text="nowhere", new_text="2")
NO_CONTENT = call("write_file", path="c.py")


def run(command):
    return call("terminal", command=command)


PASSES, FAILS = run("sh -c 'exit 0'"), run("bash -c 'exit 1'")


# Which calls lead where

STORY = [([[PASSES], [READ]], PLANNING),                    # before a write, a test says nothing
         ([[OUTSIDE], [NOT_THERE], [NO_CONTENT], [PASSES]], PLANNING),      # nothing was written
         ([[WRITE]], EXECUTING),
         ([], PLANNING),                                    # a new message
         ([[WRITE], [READ], [run("ls")]], EXECUTING),
         ([[WRITE], [FAILS]], VERIFYING),
         ([[PASSES]], PLANNING),                            # what was written for another task does not count
         ([[WRITE, PASSES], [READ], [run("ls")]], VERIFYING),
         ([[WRITE], [FAILS], [call("edit_file", path="a.py", old_text="1", new_text="2")]], EXECUTING),
         ([[WRITE], [FAILS], [WRITE], [PASSES]], VERIFYING),
         ([[WRITE], [PASSES], [NOT_THERE], [OUTSIDE]], VERIFYING)]


def test_the_prompt_and_usage_tell_the_phase(agent):
    script = [reply for calls, _ in STORY for reply in [*(step(*one) for one in calls), "ok"]]
    child, server = agent.prompt(script, "--yes")
    told = [re.search("[A-Z]{5,}", child.after[-20:])[0]]
    for _ in STORY:
        for line, pattern in [("go on", r"(?:plan|[A-Z]+)(?= \d+% >)"), ("/usage", r"(?<=phase of the task: )\w+")]:
            child.send(line + "\r")
            child.expect(PROMPT)
            told.append(re.search(pattern, child.after if line == "go on" else child.before)[0])
    assert told == [PLANNING, *(phase for _, phase in STORY for _ in range(2))]
    assert refused(server.requests) == []


CHECKS = ["pytest", "pytest -q tests/test_a.py", "py.test", "python -m pytest", "python3 app.py", "python3.11 -m unittest",
          "cd app && pytest -x 2>&1 | tail -5", "cd app; npm test", "ls\nmake check", "CI=1 DEBUG=0 npm run test:unit",
          "npm t", "yarn lint", "npx jest", "uv run pytest", "poetry run mypy src", "sudo make", "time ./run.sh --fast",
          "../bin/tool", "go test ./...", "go vet ./...", "cargo clippy", "cargo build --release", "node app.js", "tsc",
          "bash check.sh", "ruff check .", "ls || ctest", "dotnet test", "(pytest -q)"]
OTHERS = ["ls", "cat test.py", "grep -rn pytest .", "git diff", "git commit -m 'make it work'", "pip install pytest",
          "echo python", "mkdir tests", "npm install jest", "cargo add serde", "go mod tidy", "which node",
          "rm -rf ./build", "cp ./a ./b", "sed -i s/test/run/ a.py", "export CI=1", "touch pytest.ini", "pytester",
          "python-config --libs", "makeinfo a.texi", "npm testify"]
CHECKS_TOO = ["pytest; echo $?", "(cd app && pytest)", ".venv/bin/pytest -q", "timeout 60 pytest", "if pytest; then ls; fi",
              "pnpm exec vitest", "bundle exec rspec", "coverage run -m pytest", "npm --prefix web test", "pytest>out",
              "A='x y' pytest", "cargo +nightly test", "python - <<'END'\nprint(1)\nEND", "python -c 'import a'",
              "cat <<< a; make", "echo $((1<<2)); make"]
OTHERS_TOO = ["python -m pip install a", "python3 --version", "node --version; make --help", "cat <<< a", "cat > a <<EOF\nmake\nEOF",
              "echo ';sh'", 'git commit -m "a\nmake it (pytest)"', "cat <<'A' > b\npytest\n", "npm install --save test"]


@pytest.mark.parametrize("commands, phase", [(CHECKS, VERIFYING), (OTHERS, EXECUTING), (CHECKS_TOO, VERIFYING),
                                             (OTHERS_TOO, EXECUTING)])
def test_which_commands_are_checks(agent, commands, phase):
    """None of them is there to be run: that a check fails does not count."""
    agent.env["PATH"] = str(agent.home)
    script = [reply for command in commands for reply in (step(WRITE, run(command)), "ok")]
    done = agent.run(script, "--yes", input="go on\n/usage\n" * len(commands))
    told = re.findall(r"phase of the task: (\w+)", done.err)
    assert dict(zip(commands, told, strict=True)) == dict.fromkeys(commands, phase)


def test_a_check_that_was_not_allowed_is_none(agent):
    done = agent.run([step(WRITE), step(PASSES), "ok"], input="go on\n/usage\n")
    assert re.findall(r"phase of the task: (\w+)", done.err) == [EXECUTING]


# What stays whole. A result has about a 23rd of the window. Where nothing is cheaper from the cache, old results are
# archived soon; where that costs next to nothing, only when the window is full.

WINDOW = 16_000


def archived(request):
    """The numbers of the results that are archived, and of those that are whole."""
    sent = [message["content"] for message in request.body["messages"] if message["role"] == "tool"]
    found = [re.match(r"(\[archived\] )?\[r(\d+)\] ", text) for text in sent]
    return [int(one[2]) for one in found if one[1]], [int(one[2]) for one in found if not one[1]]


def first_masking(agent, script, lines=160, read=1):
    """Carry out the task; returns the first request in which something is archived, and all requests. `read`: the price
    of a token from the cache."""
    (agent.program / "prices.json").write_text(json.dumps({"": {"read": read, "write": 1}}), encoding="utf-8")
    agent.env["CONTEXT_WINDOW"], agent.options = str(WINDOW), {"window": WINDOW}
    (agent.folder / "long.txt").write_text("one more line ok\n" * lines, encoding="utf-8")
    requests = agent.task([*map(step, script), "done"], "--yes").requests
    return next((request for request in requests if archived(request)[0]), None), requests


LONG, SAME = call("read_file", path="long.txt"), run("cat long.txt")
CHECK = run("bash -c 'cat long.txt'")
LONG_REASON = call("edit_file", path="x/" * 60 + "a.py", old_text="nowhere", new_text="2")


@pytest.mark.parametrize("script, read, whole", [
    ([LONG] * 11, 1, [1, 6, 7, 8, 9]),
    ([SAME] * 11, 1, [1, 6, 7, 8, 9]),                                  # commands are protected in VERIFYING only
    ([LONG, LONG, WRITE] + [LONG] * 12, 1, [1, 2, 3, 9, 10, 11, 12, 13, 14]),
    ([LONG, LONG, WRITE] + [SAME] * 12, 1, [1, 2, 3, 9, 10, 11, 12, 13, 14]),
    ([LONG, LONG, WRITE, CHECK] + [LONG] * 9, 1, [1, 3, 7, 8, 9, 10]),        # and only while the window is full
    ([LONG, LONG, WRITE, CHECK] + [LONG] * 20, 0.001, [1, 3, 4, 17, 18, 19, 20]),
    ([LONG, WRITE, CHECK] + [SAME] * 2 + [LONG] * 2 + [LONG_REASON] + [LONG] * 20, 0.001,
     [1, 2, 4, 5, 8, 18, 19, 20, 21])])
def test_what_is_archived_depends_on_the_phase(agent, script, read, whole):
    request, _ = first_masking(agent, script, read=read)
    assert archived(request)[1] == whole


def test_the_first_steps_are_those_of_the_latest_task(agent):
    (agent.folder / "long.txt").write_text("one more line ok\n" * 160, encoding="utf-8")
    (agent.program / "prices.json").write_text('{"": {"read": 1, "write": 1}}', encoding="utf-8")
    agent.env["CONTEXT_WINDOW"] = str(WINDOW)
    script = [*[step(LONG)] * 3, "done", *[step(LONG)] * 9, "done"]
    requests = agent.run(script, "--yes", input="one\ntwo\n").requests
    assert archived(requests[-1]) == ([1, 2, 3, 5, 6, 7, 8], [4, 9, 10, 11, 12])
