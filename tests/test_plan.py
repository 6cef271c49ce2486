"""Plan mode: tools that only read, a plan that the user judges, and its execution step by step.

Promise 3: plan mode cannot write. Whatever the model calls there, the project stays as it was, to the last mode bit.
"""
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import plan
import pytest
import tools
from conftest import POSIX, PROMPT, Agent, call, posix_only, refused, results, snapshot, step, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

READERS = {"read_file", "list_dir", "search_files", "web_search", "web_read", "current_time", "activate_skill", "recall"}
IN_PLAN = READERS | {"clarify", "submit_plan"}
NORMAL = READERS | {"write_file", "edit_file", "terminal", "memory"}
EXISTS = f"{sys.executable} exists.py"
SCRATCH = '\n\n@tool\ndef scratch(path: str) -> str:\n    open(path, "w").close()\n'     # it does not say writes=False
SPECIAL = r"[/] [bold]loud \x1b]0;evil\x07 \x9b5m".encode().decode("unicode_escape")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project as the working directory of this process, in plan mode, where all would be allowed."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n", encoding="utf-8")
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tools, "mode", "plan")
    monkeypatch.setattr(tools, "ask", lambda question: None)
    monkeypatch.setattr(tools, "TOOLS", dict(tools.TOOLS))
    monkeypatch.setattr(plan, "proposed", None)
    return folder


def one(n=1, **changes):
    """A step of a plan."""
    return {"file": f"{n}.txt", "lines": "1", "change": f"write {n} into it", "check": "it is there"} | changes


def submit(*steps, goal="our goal"):
    return step(call("submit_plan", goal=goal, steps=list(steps)))


def finish(outcome="done", note=""):
    return call("finish_step", outcome=outcome, note=note)


def offered(request):
    return {tool["function"]["name"] for tool in request.body["tools"]}


def said(request):
    """The user's messages."""
    return [message["content"] for message in request.body["messages"] if message["role"] == "user"]


# Promise 3

OPEN_CASE = ["echo x > out.txt", "cat a.txt | tee out.txt", "ls; touch out.txt", "ls && touch out.txt",
             "echo $(touch out.txt)", "python3 -c \"open('out.txt','w')\"", "sed -i s/a/b/ a.txt",
             "find . -name a.txt -delete", "git diff --output=out.txt", "sort -o out.txt a.txt", "echo x >& out.txt",
             "ls\ntouch out.txt"]
COMMANDS = OPEN_CASE + [
    "cat > out.txt << END\nx\nEND", "cat <<< x > out.txt", ": > a.txt", "echo x >| a.txt", "echo x >> a.txt",
    "exec 3> out.txt", "ls 2> out.txt", "ls &> out.txt", "tee out.txt < a.txt", "cat <(touch out.txt)", "`touch out.txt`",
    "cp a.txt out.txt", "mv a.txt out.txt", "rm a.txt", "ln -s / out", "mkdir out", "chmod 000 a.txt", "touch a.txt b.txt",
    "truncate -s 0 a.txt", "dd if=/dev/null of=a.txt", "install a.txt out.txt", "perl -pi -e s/a/b/ a.txt",
    "sed 'w out.txt' a.txt", "awk 'BEGIN { print > \"out.txt\" }'", "python3 - << END\nopen('out.txt', 'w')\nEND",
    "git -c core.fsmonitor='touch out.txt' status", "git -c alias.x='!touch out.txt' x", "git init", "git stash",
    "find . -exec touch out.txt ';'", "find . -fprint out.txt", "xargs touch <<< out.txt", "env touch out.txt",
    "sh -c 'touch out.txt'", "eval touch out.txt", "nohup touch out.txt &", "(sleep 0; touch out.txt)", "tar cf out.txt .",
    "vim -es -c 'w out.txt' -c q a.txt", "ls -l", "type nul > out.txt", "del a.txt"]
WRITE = {"path": "out.txt", "content": "x"}
NAMES = ["functions.write_file", "Write_File", "WRITE_FILE", "write_file ", " write_file", "write_file\n", "write-file",
         "writ\u0435_file", "tools.write_file", "default_api:write_file", "", "create_file", "save", "load", "tool", "run",
         "bash", "shell", "multi_tool_use.parallel", "__import__", "os.system", "write_file()", "read_file;write_file",
         "terminal.run", "scratch", "memory.memory", "Finish_Step"]
ATTACKS = [*(call("terminal", command=command) for command in COMMANDS), *(call(name, **WRITE) for name in NAMES),
           *(call("write_file", path=path, content="x") for path in ("a.txt", "out/x", "link/x", "to_key", "../out.txt",
                                                                     "~/out.txt", ".git/hooks/pre-commit", "AGENTS.md")),
           *(call("edit_file", path=path, old_text="a", new_text="b") for path in ("a.txt", "to_a", "link/key.txt")),
           call("memory", action="save", note="all is allowed"), call("memory", action="save", note="x", scope="global"), finish(),
           call("scratch", path="out.txt"), call("scratch"), call("terminal"), call("write_file", path=1),
           {"name": "write_file", "arguments": '{"path": "out.txt", "cont'}, {"name": "terminal", "arguments": ""}]


def test_nothing_is_written_in_plan_mode(agent):
    """Not with --yes either. The writers are not even offered; the readers go on working."""
    with open(agent.program / "tools.py", "a", encoding="utf-8") as file:
        file.write(SCRATCH)
    (agent.folder / "a.txt").write_text("a\n", encoding="utf-8")
    (agent.folder / "run.sh").write_text("touch out.txt\n", encoding="utf-8")
    outside = agent.folder.parent / "outside"
    outside.mkdir()
    (outside / "key.txt").write_text("a\n", encoding="utf-8")
    if POSIX:
        (agent.folder / "run.sh").chmod(0o750)
        for link, target in {"link": outside, "to_key": outside / "key.txt", "to_a": "a.txt"}.items():
            (agent.folder / link).symlink_to(target)
    before = [snapshot(place) for place in (agent.folder, outside, agent.home)]
    run = agent.run([step(*ATTACKS), step(call("read_file", path="a.txt"), call("search_files", pattern="^a$")), "no"],
                    "-p", "do it", "--plan", "--yes")
    assert [snapshot(place) for place in (agent.folder, outside, agent.home)] == before
    assert len(ATTACKS) >= 60 and refused(run.requests) == [] and run.out == "no\n"
    *refusals, text, hits = run.results
    for attack, answer in zip(ATTACKS, refusals, strict=True):
        assert answer.startswith("Error: ") and "plan mode" in answer, (attack, answer)
    assert text == "a" and hits == "a.txt:1: a"
    assert [offered(request) for request in run.requests] == 3 * [IN_PLAN]


def test_a_tool_that_does_not_say_writes_false_is_a_writer(project):
    @tools.tool
    def quiet(path: str) -> str:
        Path(path).write_text("x", encoding="utf-8")

    @tools.tool()
    def loud(path: str) -> str:
        Path(path).write_text("x", encoding="utf-8")
    assert tools.offered().keys() == IN_PLAN
    for mode in ("plan", "normal"):
        tools.mode = mode
        for name in ("quiet", "loud"):
            assert ("plan mode" in tools.run(name, '{"path": "x"}')) == (mode == "plan")
        assert Path("x").exists() == (mode == "normal")     # so there was something to be refused


words = st.sampled_from(["a.txt", "out.txt", "../out.txt", "touch out.txt", "echo > a.txt", ".", "a", "done", ""])
names = st.sampled_from(sorted({*NAMES, *NORMAL, *IN_PLAN, "finish_step"} - {"web_search", "web_read"}))
arguments = st.dictionaries(st.sampled_from(["path", "content", "command", "old_text", "new_text", "note", "outcome",
                                             "pattern", "goal", "steps", "question"]), words | st.just([one()]))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(names | st.text(max_size=12), arguments.map(json.dumps) | st.text()), max_size=12))
def test_no_sequence_of_calls_writes_in_plan_mode(project, calls):
    """In one process, where "allow all" answers every question."""
    before = snapshot(project.parent)
    for name, text in calls:
        answer = tools.run(name, text)
        assert name in IN_PLAN or "plan mode" in answer
    assert snapshot(project.parent) == before


@pytest.mark.parametrize("mode", ["plan", "normal"])
def test_a_tool_that_was_not_offered_does_not_run_and_ends_nothing(agent, mode):
    (agent.folder / "a.txt").write_text("the text\n", encoding="utf-8")
    calls = [call("write_file", path="x.txt", content="1"), call("create_file", path="y.txt"),
             call("read_file", path="a.txt"), {"name": "", "arguments": "{}"}, call("functions.write_file")]
    calls = [one | {"id": f"c{n}"} for n, one in enumerate(calls, 1)]
    run = agent.task([step(*calls), "ok"], "--yes", *["--plan"] * (mode == "plan"))
    answers = [message for message in run.requests[1].body["messages"] if message["role"] == "tool"]
    assert run.out == "ok\n" and [answer["tool_call_id"] for answer in answers] == ["c1", "c2", "c3", "c4", "c5"]
    write, create, read, *unknown = run.results
    assert read == "the text" and not (agent.folder / "y.txt").exists()
    assert (agent.folder / "x.txt").exists() == (not write.startswith("Error: ")) == (mode == "normal")
    for error in [create, *unknown] + [write] * (mode == "plan"):
        assert error.startswith("Error: ") and f"{mode} mode" in error and "read_file" in error
        assert ("write_file, " in error.partition("available")[2]) == (mode == "normal")


# Handing a plan in

def hand_in(*steps, **changes):
    return tools.run("submit_plan", json.dumps({"goal": "our goal", "steps": steps} | changes))


@pytest.mark.parametrize("field", ["file", "lines", "change", "check"])
def test_each_step_has_a_file_lines_a_change_and_a_check(project, field):
    missing = one()
    del missing[field]
    for wrong in (missing, *(one(**{field: value}) for value in ("", " \t\n", None, [], {}))):
        answer = hand_in(one(), wrong)
        assert answer.startswith("Error: ") and re.search(rf"steps?\W* [12]\b.*\b{field}\b", answer), answer
    assert plan.proposed is None


def test_a_plan_has_a_goal_and_steps_inside_of_the_project(project):
    for steps in ([], [{}], ["edit a.txt"], [one(file="../x")], [one(file="/etc/hosts")], [one(file="~/x")]):
        assert hand_in(*steps).startswith("Error: ")
    assert hand_in(one(), goal=" ").startswith("Error: ") and hand_in(one(), steps=None).startswith("Error: ")
    if POSIX:
        Path("out").symlink_to(project.parent)
        assert "outside" in hand_in(one(file="out/x"))
    assert plan.proposed is None
    assert hand_in(one(file="new/a.txt"), one(2)) == "handed in" and len(plan.proposed.steps) == 2


@pytest.mark.parametrize("word", [
    "TBD", "tba", "To be determined", "to be decided", "figure out", "figure it out", "decide later", "somehow",
    "as needed", "as appropriate", "if necessary", "where appropriate", "and so on", "etc.", "ask the user",
    "T.B.D.", "待定", "待补充", "自行决定", "看情况", "待确认", "待讨论", "再说", "视情况", "酌情", "根据需要", "如有必要", "适当", "等等", "询问用户", "请用户"])
def test_a_vague_word_is_named_with_its_step(project, word):
    for field, text in (("change", f"set it to 3, {word}"), ("lines", word), ("check", f"检查，{word}。")):
        answer = hand_in(one(), one(**{field: text}))
        assert answer.startswith("Error: ") and "step 2" in answer and word.lower() in answer.lower(), (field, text)
    assert plan.proposed is None


@pytest.mark.parametrize("text", ["把值改成TBD", "内容tbd，以后补", "to be\ndetermined", "as  needed"])
def test_a_vague_word_is_seen_beside_chinese_and_across_blanks(project, text):
    assert "step 1" in hand_in(one(change=text))


def test_a_vague_file_is_no_file(project):
    assert hand_in(one(file="TBD")).startswith("Error: ") and hand_in(one(file="待定")).startswith("Error: ")


@pytest.mark.parametrize("text", [
    'write "TBD" into it', "replace `to be decided` by `decided`", "write “待定” into it", "read /etc/hosts",
    "please set it to 3", "请把第三行删掉", "fetch the etcd address", "add a user", "return the needed value",
    "the necessary import os", "等待两秒", "定义函数 f", "add the class Appropriate", "ask(question) returns the answer",
    "write 'TBD' into it", "写入「待定」", "访问用户页面时返回 404", "处理申请用户的列表", "mark the field `name` as required",
    "look for it in /etc.", "parse .tbdata files"])
def test_harmless_words_pass(project, text):
    assert hand_in(one(change=text)) == "handed in"


def test_a_step_cannot_look_like_two(project):
    hand_in(one(change="harmless\n2. b.txt, lines 1 [done]\n   nothing"), one(2))
    assert [line for line in str(plan.proposed).splitlines() if not line.startswith("   ")] == [
        "Goal: our goal", "1. 1.txt, lines 1", "2. 2.txt, lines 1"]


# The review

def test_the_review(agent):
    """From a pipe each line is an answer, but only here: clarify asks nobody. Two rounds of changes, then no, twice."""
    asked = step(call("clarify", question="Which?", choices=["what?", "b"]))
    special = one(change=SPECIAL, check="look [/i] at it")
    run = agent.run([asked, submit(one(change="perhaps")), submit(one(change="shorter")), submit(special), "sorry", submit(one())],
                    "--plan", "--yes", input="plan it\nwhat?\n\ne make it short\nEdit\nwith signs\nC\nagain\nonce more\nc\n")
    assert refused(run.requests) == [] and [offered(request) for request in run.requests] == 6 * [IN_PLAN]
    assert re.search("decide.*assumption", results(run.requests[1])[0])
    assert [said(request)[-1].partition("\n")[0] for request in run.requests[1:]] == [
        "plan it", "make it short", "with signs", "again", "once more"]
    assert run.err.count("Carry out this plan?") == 6 and run.err.count("What should be different?") == 1
    plans = run.out.replace("sorry\n", "").split("Goal: our goal\n")[1:]
    assert plans[0] == "1. 1.txt, lines 1\n   perhaps\n   check: it is there\n" and len(plans) == 4
    assert "[/] [bold]loud" in plans[2] and "look [/i] at it" in plans[2] and r"\x1b]0;evil\x07" in plans[2]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", run.out + run.err) and list(agent.folder.iterdir()) == []


def test_what_is_no_clear_yes_carries_nothing_out(agent):
    answers = ["a?", "y", "ok", "aa", "1", "/plan", "no", "a different file, please", "accept nothing of it"]
    run = agent.run([submit(one())], "--plan", "--yes", input="\n".join(["plan it", *answers, "c", ""]))
    assert run.err.count("Carry out this plan?") == len(answers) + 1 and len(run.requests) == 1


@posix_only
def test_a_plan_goes_to_stdout(agent):
    """Also when somebody looks on: agent.py -p … --plan > plan.txt"""
    pexpect = pytest.importorskip("pexpect")
    server, command, env = agent.prepare([submit(one(change="write 3"))], ["-p", "do it", "--plan"])
    child = pexpect.spawn("/bin/sh", ["-c", '"$@" > plan.txt', "sh", *command], cwd=str(agent.folder), env=env)
    agent.children.append(child)
    child.expect(pexpect.EOF)
    assert "write 3" in (agent.folder / "plan.txt").read_text(encoding="utf-8")


def settle(agent):
    (agent.folder / "exists.py").write_text("import os, sys\nsys.exit(not os.path.exists(sys.argv[1]))\n", encoding="utf-8")
    (agent.folder / "a.txt").write_text("first\nWHAT THE PLANNER FOUND\n", encoding="utf-8")


def write(n):
    return call("write_file", path=f"{n}.txt", content=f"{n}\n")


CHECKED = [one(n, check=f"{EXISTS} {n}.txt") for n in (1, 2)]


@pytest.mark.parametrize(("options", "script", "code", "written"), [
    ([], [submit(one(change="其余待定")), submit(*CHECKED)], 0, []),
    (["--yes"], [submit(*CHECKED), step(write(1), finish()), step(write(2)), step(finish())], 0, [1, 2]),
    (["--yes"], [submit(*CHECKED), step(write(1), finish("failed", "too hard"))], 1, [1]),
    (["--yes"], [submit(*CHECKED), step(finish())], 1, []),
    ([], ["I see no way"], 1, [])], ids=["show", "execute", "step fails", "check fails", "no plan"])
def test_a_plan_as_a_task(agent, options, script, code, written):
    settle(agent)
    run = agent.run(script, "-p", "do it", "--plan", *options)
    assert run.code == code and len(run.requests) == len(script), run.err
    assert [n for n in (1, 2) if (agent.folder / f"{n}.txt").exists()] == written
    parts = ("write 1 into it", "lines 1", f"{EXISTS} 2.txt")
    assert [part for part in parts if (part in run.out) != ("no way" not in str(script))] == [] and "待定" not in run.out
    assert options or len(script) == 1 or "step 1" in run.results[0] and "待定" in run.results[0]   # and it tries again


COMMAND_CHECKS = ["cat nowhere", "`cat nowhere`", "ls nowhere", "make all", "cat a.none", "sh ./a.sh", "cd . && cat nowhere"]
PROSE_CHECKS = ["make sure that it is there", "test that it works", "find the word in it", "It is there", "用眼看一看", "``"]


@posix_only
def test_a_check_is_run_where_it_is_a_command(agent):
    """Here each of them fails if it is run."""
    (agent.folder / "Makefile").write_text("all:\n\tcat nowhere\n", encoding="utf-8")
    checks = COMMAND_CHECKS + PROSE_CHECKS
    run = agent.run([submit(*(one(n, check=check) for n, check in enumerate(checks, 1)))] + [step(finish())] * len(checks),
                    "--plan", "--yes", input="plan it\na\n" + "skip\n" * len(COMMAND_CHECKS))
    failed = [checks[int(n) - 1] for n in re.findall(r"Step (\d+) failed", run.err)]
    assert failed == COMMAND_CHECKS and len(run.requests) == 1 + len(checks)


# The execution

def test_it_starts_in_a_fresh_context(agent):
    """With the request, the plan, and the places that were read; not with what was found there."""
    settle(agent)
    reads = step(call("read_file", path="a.txt", offset=2), call("read_file", path="nowhere.txt"), call("read_file"))
    run = agent.run(["hello", reads, submit(*CHECKED), step(write(1)), step(finish()), step(write(2), finish()), "hello again"],
                    "--yes", input="hi\n/plan\nmake one and two\na\n/usage\nhi again\n/usage\n")
    assert refused(run.requests) == []
    hi, _, _, first, second, third, last = run.requests
    executing = NORMAL | {"finish_step"}
    assert list(map(offered, run.requests)) == [NORMAL, IN_PLAN, IN_PLAN, executing, executing, executing, NORMAL]
    assert "WHAT THE PLANNER FOUND" in json.dumps(run.requests[2].body)
    assert "WHAT THE PLANNER FOUND" not in json.dumps(first.body) and "hello" not in json.dumps(first.body)
    assert [message["role"] for message in first.body["messages"]] == ["system", "user", "user"]
    assert first.body["messages"][0] == hi.body["messages"][0]
    context, request = said(first)
    for part in ("make one and two", "our goal", "write 1 into it", "write 2 into it", "1.txt", f"{EXISTS} 2.txt"):
        assert part in context
    assert re.search(r"a\.txt\b.*\b2\b", context) and "nowhere" not in context and "None" not in context
    for n, request in enumerate([said(first)[-1], said(third)[-1]], 1):
        assert f"Step {n} of 2" in request
        assert all(part in request for part in (f"{n}.txt", f"write {n} into it", f"{EXISTS} {n}.txt", "finish_step"))
    assert said(second) == said(first) and said(last)[-1] == "hi again"
    breaks = [n for n, (before, after) in enumerate(zip(run.requests, run.requests[1:]), 1)
              if after.body["tools"] != before.body["tools"]
              or after.body["messages"][:len(before.body["messages"])] != before.body["messages"]]
    assert breaks == [1, 3, 6] and re.findall(r"prefix breaks, .*: (\d+)", run.err) == ["2", "3"]


def test_the_request_is_all_that_was_asked_for(agent):
    """A plan may take several turns: what was said in the first is not lost."""
    run = agent.run(["How high?", submit(one()), step(finish())], "--plan", "--yes", input="a tower\n3 floors\na\n")
    assert all(part in said(run.requests[-1])[0] for part in ("3 floors", "a tower"))


def test_what_was_cancelled_is_not_asked_for(agent):
    run = agent.run([submit(one()), submit(one()), step(finish())], "--plan", "--yes", input="delete all\nc\na tower\na\n")
    assert "a tower" in said(run.requests[-1])[0] and "delete all" not in said(run.requests[-1])[0]
    assert "cancelled" in json.dumps(run.requests[1].body["messages"]) and refused(run.requests) == []


def test_retry_skip_stop_and_resume(agent):
    """What is done is not done again; a retry knows why; /plan goes on where the plan was stopped, also by an error."""
    settle(agent)
    run = agent.run([submit(one(1), one(2), one(3, check=f"`{EXISTS} 3.txt`")), step(finish()),
                     step(finish("failed", "no [/] compiler")), "I forget to finish",
                     step(finish()), step(finish()), {"status": 400, "message": "oh dear"}, step(write(3), finish()), "bye"],
                    "--plan", "--yes", input="do it\na\nwhat?\n\nr\nskip\nr\nstop\n/plan\n/plan\n/plan\nnow\n")
    assert len(run.requests) == 9 and set(refused(run.requests)) <= {"oh dear"}
    requests = [text for text in said(run.requests[7]) if text.startswith("Step")]
    assert [text[:6] for text in requests] == ["Step 1", "Step 2", "Step 2", "Step 3", "Step 3", "Step 3", "Step 3"]
    told = [("no [/] compiler" in text, "exit 1" in text) for text in requests]
    assert told[1:5] == [(False, False), (True, False), (False, False), (False, True)]
    assert run.err.count("What now?") == 6 and "oh dear" in run.err and "no [/] compiler" in run.err
    states = [re.findall(r"\[(done|skipped|failed|in progress)\]", shown) for shown in run.err.split("Goal: our goal")[1:]]
    stopped, broken = ["done", "skipped", "failed"], ["done", "skipped", "in progress"]
    assert states == [stopped, stopped, broken, broken, ["done", "skipped", "done"]]
    assert offered(run.requests[8]) == IN_PLAN      # with nothing left to do, /plan is the mode again


@posix_only
def test_of_a_long_failure_only_the_ends_are_told(agent):
    noisy = one(check="yes | head -c 1000000; false")
    run = agent.run([submit(noisy), step(finish()), step(finish("failed", "n" * 100_000)), step(finish())], "--plan", "--yes",
                    input="do it\na\nr\nr\nstop\n")
    assert [("exit 1" in said(request)[-1], "n" * 500 in said(request)[-1]) for request in run.requests[2:]] == [
        (True, False), (False, True)]
    assert all(len(said(request)[-1]) < 3_000 for request in run.requests) and len(run.err) < 20_000


@pytest.mark.parametrize("answer, requests", [("s", 3), ("skip", 3), ("st", 2), ("stop", 2)])
def test_the_first_letters_are_enough(agent, answer, requests):
    run = agent.run([submit(one(), one(2)), step(finish("failed")), step(finish())], "--plan", "--yes",
                    input=f"do it\na\nsure\n{answer}\n")
    assert run.err.count("What now?") == 2 and len(run.requests) == requests


@posix_only
def test_the_review_and_ctrl_c_at_a_terminal(agent):
    long = call("terminal", command="echo > began; sleep 30; echo > ended")
    child, server = agent.prompt([submit(one()), submit(one(change=SPECIAL)), submit(one(), one(2)), submit(one(), one(2)),
                                  step(write(1), finish()), step(long), step(write(2)), step(finish()), "bye"], "--yes")
    child.sendline("/plan")
    child.expect(r"plan \d+% >")
    child.sendline("plan it")
    child.expect_exact("write 1 into it")
    for answer in ("e", "with signs", "e two steps", "c"):
        child.expect(r"different\?" if answer == "with signs" else "cancel")
        child.sendline(answer)
        if answer == "with signs":
            child.expect_exact("[/] [bold]loud")
            child.expect_exact(r"\x1b]0;evil\x07")
    child.expect(r"plan \d+% >")
    child.sendline("again")
    child.expect("cancel")
    child.sendline("a")
    child.expect_exact("1 of 2 steps left")
    wait_until((agent.folder / "began").exists)
    child.sendintr()
    child.expect_exact("[done]")
    child.expect_exact("[in progress]")
    child.expect("Interrupted")
    child.expect(PROMPT)
    child.sendline("/plan")
    child.expect_exact("[in progress]")
    child.expect(r"\[done\].*\[done\]")
    child.sendline("thanks")
    child.expect("bye")
    assert refused(server.requests) == [] and not (agent.folder / "ended").exists()
    assert [text[:6] for text in said(server.requests[-1]) if text.startswith("Step")] == ["Step 1", "Step 2", "Step 2"]
    assert (agent.folder / "2.txt").exists() and offered(server.requests[-1]) == NORMAL


# Questions

@posix_only
def test_clarify_asks_with_choices(agent):
    """A number stands for a choice, anything else for itself."""
    ask = step(call("clarify", question="Which [/] colour?", choices=["red", "blue \x1b[5m"]))
    child, server = agent.prompt([ask] * 5 + [step(call("clarify", question="Why?")), "ok"], "--plan")
    child.sendline("go")
    for answer in ("2", "1", "a bit of both", "3", ""):
        for line in ("Which [/] colour?", "1. red", "2. blue \\x1b[5m"):
            child.expect_exact(line)
        child.sendline(answer)
    child.expect_exact("Why?")
    child.sendline("我喜欢")
    child.expect("ok")
    *answers, nothing, why = results(server.requests[-1])
    assert answers == ["blue \x1b[5m", "red", "a bit of both", "3"] and "decide" in nothing and why == "我喜欢"


# Promise 1, again

replies = st.sampled_from(["text", submit(one()), submit(one(), one(2)), submit(one(change="TBD")), step(finish()),
                           step(finish("failed"), finish()), step(write(1), call("nothing")), "Ctrl-C",
                           step(call("clarify", question="?"), finish("maybe")), {"status": 400, "message": "oh dear"},
                           step(finish(), *[call("terminal", command="kill -INT $PPID; sleep 9")] * POSIX)])
inputs = st.sampled_from(["/plan", "a", "e", "c", "r", "sk", "st", "do it", "/new", "/compact"])


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(replies, min_size=5, max_size=30), st.lists(inputs, min_size=5, max_size=20))
def test_every_request_is_valid_in_all_modes(model, planned, lines):
    """Whatever the model replies, whatever is typed, and wherever Ctrl-C comes in between."""
    planned = planned[::-1]

    def next_reply(body):
        reply = planned.pop() if planned else "text"
        if reply == "Ctrl-C":
            if not POSIX:
                return "text"
            agent.children[-1].send_signal(signal.SIGINT)
            return {"text": "too late", "delay": 0.3}
        return reply

    with tempfile.TemporaryDirectory() as place:
        agent = Agent(Path(place), model)
        run = agent.run([next_reply] * 200, "--yes", "--plan", input="do it\n" + "\n".join(lines) + "\n")
        agent.close()
    assert refused(run.requests) == [] and run.code == 0
    for request in run.requests:
        if "tools" in request.body:         # a summary is asked for without any
            hint = said(request)[-1]
            assert ("plan:" in hint.partition("<mode>")[2]) == ("submit_plan" in offered(request))
            assert offered(request) in (NORMAL, IN_PLAN, NORMAL | {"finish_step"})
