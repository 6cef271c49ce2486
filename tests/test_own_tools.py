"""Tools of your own: files in ~/.rungs/tools that say @tool. The broken ones are named, and all else stays as it was."""
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import tools
from conftest import call, posix_only, refused, results, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

IMPORT = "from tools import tool\n"
MARK = "import pathlib; open(pathlib.Path.home() / 'ran.txt', 'a').write('x')\n"     # shows that a file was run


def put(home, name, code):
    path = home / ".rungs" / "tools" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(code if isinstance(code, bytes) else code.encode())
    return path


def simple(name, body="return 'ok'", mark="@tool"):
    return f'{IMPORT}{mark}\ndef {name}():\n    "It is {name}."\n    {body}\n'


def offered(request):
    return [tool["function"]["name"] for tool in request.body["tools"]]


def broken(run):
    """What was named at the start: file name -> reason."""
    return dict(re.findall(r"^Not a tool: .*[/\\](.+?\.py): (.*)$", run.err, re.M))


# What a file brings

WORDS = '''"""Words."""
from typing import Literal
from tools import Text, inside, load, tool


@tool(writes=False)
def count_words(path: Text, of: Literal["words", "lines"] = "words", more: list[int] = []) -> int:
    """Count the words
    of a file.

    This is for people.
    """
    text = load(inside(path))[1]
    return len(text.split() if of == "words" else text.splitlines()) + sum(more)
'''


def test_a_function_in_a_file_is_a_tool(agent):
    """The requests up to it are everyone's, and so is what is cached of them."""
    without = agent.task(["ok"]).requests[0].body["tools"]
    put(agent.home, "words.py", WORDS)
    (agent.folder / "a.txt").write_text("a b\nc\n", encoding="utf-8")
    run = agent.task([step(call("count_words", path="a.txt"), call("count_words", path="a.txt", of="lines", more=[1]),
                           call("count_words", path="../x"), call("count_words", path="", of="all")), "done"])
    *others, added = run.requests[0].body["tools"]
    assert others == without and added["function"] == {
        "name": "count_words", "description": "Count the words of a file.", "parameters": {
            "type": "object", "required": ["path"], "properties": {
                "path": {"type": "string"}, "of": {"type": "string", "enum": ["words", "lines"]},
                "more": {"type": "array", "items": {"type": "integer"}}}}}
    assert run.results[:2] == ["3", "3"] and "outside" in run.results[2]
    assert "Nothing was done. count_words(path, of, more): Count the words of a file." in run.results[3]
    assert run.requests[1].body["messages"][-4]["content"] == "[r1] count_words a.txt → 3"
    assert "● count_words a.txt → 3, " in run.err and run.out == "done\n"


GOOD = {    # each brings a tool of this name that answers ok
    "bom": b"\xef\xbb\xbf" + simple("bom").encode(),
    "crlf": simple("crlf").replace("\n", "\r\n"),
    "cookie": ("# coding: gbk\n" + simple("cookie", "return 'ok' if '价格' == '\\u4ef7\\u683c' else 'no'")).encode("gbk"),
    "loud": "print('at import')\n" + simple("loud", "print('in the call'); return 'ok'"),
    "dotted": "import tools\n" + simple("dotted", mark="@tools.tool(writes=False)").removeprefix(IMPORT),
    "helped": "import some_helper\n" + simple("helped", "return some_helper.OK"),
    "late": simple("late", "import some_helper; return some_helper.OK"),
    "json": "import json\n" + simple("from_json", "return json.loads('\"ok\"')"),  # called like a module that it needs
    "two words": simple("two_words"),
    "beside": simple("beside", "return 'ok' if open(__file__, encoding='utf-8').read() else 'no'"),
    "future": "from __future__ import annotations\nfrom typing import Literal\nfrom dataclasses import dataclass\n"
              "@dataclass\nclass A:\n    a: Literal['ok']\n" + IMPORT
              + "@tool\ndef future(a: Literal['ok'] = 'ok') -> A:\n    'It is.'\n    return A(a).a\n",
}


def test_what_may_be_in_a_file(agent):
    for name, code in GOOD.items():
        put(agent.home, f"{name}.py", code)
    put(agent.home, "some_helper.py", "OK = 'ok'\n")
    names = [name.replace(" ", "_").replace("json", "from_json") for name in sorted(GOOD)]
    run = agent.task([step(*map(call, names)), "done"])
    assert broken(run) == {} and offered(run.requests[0])[-len(GOOD):] == names      # in the order of the files
    assert dict(zip(names, run.results)) == dict.fromkeys(names, "ok")
    assert run.out == "done\n" and "at import" in run.err and "in the call" in run.err


RESULTS = {"None": "None", "[1, '价']": "[1, '价']", "b'x'": "b'x'", "1 / 2": "0.5", "'caf\\udce9'": "caf\\xe9"}


def test_what_is_no_text_is_made_text(agent):
    for n, value in enumerate(RESULTS):
        put(agent.home, f"{n}.py", simple(f"give_{n}", f"return {value}"))
    assert agent.call(*(call(f"give_{n}") for n in range(len(RESULTS)))) == list(RESULTS.values())


# What is wrong with a file

BROKEN = {      # the file, a word of the reason
    "syntax": (IMPORT + "@tool\ndef syntax(:\n", "SyntaxError"),
    "gbk": (simple("gbk", "return '价格'").encode("gbk"), "SyntaxError"),
    "nul": (simple("nul") + "\0", "binary"),
    "deep": ("(" * 10_000, "Error"),
    "missing": ("import no_such_module\n" + simple("missing"), "no_such_module"),
    "exits": (simple("exits") + "import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "raises": (simple("raises") + "raise ValueError('a\\nb \\udce9')\n", "ValueError: a b \\udce9"),
    "no docstring": (IMPORT + "@tool\ndef f(a: str):\n    pass\n", "f has no docstring"),
    "no annotation": (IMPORT + "@tool\ndef f(a: str, b=1):\n    'x'\n", "b=1"),
    "many": (IMPORT + "@tool\ndef f(*a: str):\n    'x'\n", "*a"),
    "any": (IMPORT + "@tool\ndef f(**a: str):\n    'x'\n", "**a"),
    "unknown type": (IMPORT + "@tool\ndef f(a: 'Nothing'):\n    'x'\n", "Nothing"),
    "no type for JSON": (IMPORT + "@tool\ndef f(a: type(open)):\n    'x'\n", "Pydantic"),
    "async": (IMPORT + "@tool\nasync def f(a: str):\n    'x'\n", "async"),
    "chinese name": (simple("数"), "ASCII"),
    "long name": (simple("f" * 65), "ASCII"),
    "another": ("def tool(f):\n    return f\n@tool\ndef f():\n    'x'\n", "from tools import tool"),
    "built-in": (simple("read_file"), "another tool read_file"),
    "built-in memory": (simple("recall"), "another tool recall"),
    "built-in plan": (simple("submit_plan"), "another tool submit_plan"),
    "half": (simple("half") + simple("edit_file"), "another tool edit_file"),
    "twice": (simple("twice") + simple("twice"), "another tool twice"),
    "z first": (simple("fine"), "another tool fine"),
}


def test_a_broken_file_is_named_and_the_others_stay(agent):
    """In one line each. A file brings all of its tools or none, and nothing takes the place of another tool."""
    without = agent.task(["ok"]).requests[0].body["tools"]
    put(agent.home, "a.py", simple("fine"))
    for name, (code, _) in BROKEN.items():
        put(agent.home, f"{name}.py", code)
    put(agent.home, "zz.py", simple("last"))
    (agent.folder / "a.txt").write_text("alpha\n", encoding="utf-8")
    run = agent.task([step(call("fine"), call("last"), call("half"), call("read_file", path="a.txt")), "done"])
    assert run.out == "done\n" and run.requests[0].body["tools"][:-2] == without
    assert offered(run.requests[0])[-2:] == ["fine", "last"]
    fine, last, half, read = run.results
    assert (fine, last, read) == ("ok", "ok", "alpha") and "no tool 'half'" in half
    told = broken(run)
    assert list(told) == sorted(f"{name}.py" for name in BROKEN)
    for name, (_, why) in BROKEN.items():
        assert why in told[f"{name}.py"] and len(told[f"{name}.py"]) < 250, name


@posix_only
def test_what_is_no_file(agent):
    put(agent.home, "a.py", simple("fine"))
    folder = agent.home / ".rungs" / "tools"
    (folder / "folder.py").mkdir()
    (folder / "dangling.py").symlink_to("nowhere")
    (folder / ".#a.py").symlink_to("me@here:1")      # what an editor leaves there
    (folder / "link.py").symlink_to(put(agent.home, "../../elsewhere.py", simple("linked")))
    os.mkfifo(folder / "fifo.py")
    put(agent.home, "unreadable.py", simple("hidden")).chmod(0)
    expected = {"dangling.py", "fifo.py", "folder.py", *["unreadable.py"] * bool(os.getuid())}     # root reads all
    run = agent.task([step(call("fine"), call("linked")), "done"])
    assert set(broken(run)) == expected and run.results == ["ok", "ok"]


def test_what_is_not_run(agent):
    """Not a helper, not a tool of another library, not a project's file; and nothing for --help and --version."""
    put(agent.home, "helper.py", MARK)
    put(agent.home, "server.py", MARK + "@mcp.tool()\ndef f():\n    'x'\n")
    put(agent.home, "text.py", MARK + "code = '''\n@tool\ndef f(): 'x'\n'''\n")
    put(agent.home, ".hidden.py", MARK + simple("hidden"))
    put(agent.folder, "project.py", MARK + simple("project"))
    agent_file = put(agent.home, "mine.py", simple("mine"))
    run = agent.task([step(call("mine"), call("project")), "done"])
    assert run.results[0] == "ok" and "no tool 'project'" in run.results[1] and broken(run) == {}
    assert not (agent.home / "ran.txt").exists()
    agent_file.write_text(MARK + simple("mine"), encoding="utf-8")
    for option in ("--help", "--version"):
        assert agent.run([], option).code == 0 and not (agent.home / "ran.txt").exists()


def test_they_are_loaded_once(agent):
    """What changes there meanwhile counts from the next start on: all requests begin with the same tools."""
    file = put(agent.home, "mine.py", MARK + simple("mine"))
    change = call("terminal", command=f'{sys.executable} -c "import os; os.remove({str(file)!r})"'.replace("\\", "/"))
    run = agent.run([step(change, call("mine")), "one", "two", "three"], "--yes", input="a\n/plan\nb\n/plan\n/new\nc\n")
    assert refused(run.requests) == [] and not file.exists() and results(run.requests[1])[-1] == "ok"
    normal = [run.requests[n] for n in (0, 1, 3)]
    assert all(offered(request)[-1] == "mine" for request in normal) and "mine" not in offered(run.requests[2])
    assert normal[0].body["tools"] == normal[1].body["tools"] == normal[2].body["tools"]
    assert (agent.home / "ran.txt").read_text(encoding="utf-8") == "x"


# What a tool does

RAISES = {"raise ValueError('bad [/]')": "Error: ValueError: bad [/]", "import sys; sys.exit(5)": "Error: SystemExit: 5",
          "raise tools.ToolError('try again')": "Error: try again", "{}['key']": "Error: KeyError: 'key'",
          "raise OSError('no disk')": "Error: no disk", "assert False": "Error: AssertionError: ",
          "import pydantic; pydantic.TypeAdapter(int).validate_python('x')": "Error: ValidationError: 1 validation",
          "raise ValueError('x' * 5000 + '\\udce9 end')": "Error: ValueError: xxx", "fail()": "Error: RecursionError"}


def test_whatever_it_raises_is_an_answer(agent):
    for n, body in enumerate(RAISES):
        put(agent.home, f"{n}.py", "import tools\ndef fail():\n    fail()\n" + simple(f"fail_{n}", body))
    errors = agent.call(*(call(f"fail_{n}") for n in range(len(RAISES))))
    for error, expected in zip(errors, RAISES.values(), strict=True):
        assert error.startswith(expected) and "Nothing was done" not in error


SEND = "import os, signal, time; os.kill(os.getpid(), signal.{}); time.sleep(20)"


@posix_only
def test_ctrl_c_in_it_stops_the_turn_and_sigterm_the_program(agent):
    put(agent.home, "mine.py", simple("interrupted", SEND.format("SIGINT")) + simple("ended", SEND.format("SIGTERM")))
    run = agent.run([step(call("interrupted"), call("current_time")), "two", step(call("ended"))], input="a\nb\nc\nd\n")
    assert refused(run.requests) == [] and run.out == "two\n" and run.code == 143
    assert "Interrupted." in run.err and len(run.requests) == 3
    assert results(run.requests[1]) == ["Error: interrupted by the user", "Error: not run, the user interrupted"]
    assert agent.run([step(call("interrupted"))], "-p", "do it").code == 130


def test_plan_mode_withholds_what_may_write(agent):
    """What says nothing is a writer, and what pretends to be a reader was declared so by the user."""
    put(agent.home, "mine.py", simple("undeclared", MARK) + simple("writer", MARK, "@tool(writes=True)")
        + simple("reader", mark="@tool(writes=False)") + simple("planner", mark="@tool(writes=False, only='plan')"))
    calls = step(*map(call, ["undeclared", "writer", "reader", "planner"]))
    run = agent.run([calls, "no plan", calls, "done"], "--yes", "--plan", input="a\n/plan\nb\n")
    assert refused(run.requests) == [] and offered(run.requests[0])[-4:] == ["clarify", "submit_plan", "reader", "planner"]
    undeclared, writer, *read = results(run.requests[1])
    assert "no tool 'undeclared' in plan mode" in undeclared and "no tool 'writer'" in writer and read == ["ok", "ok"]
    assert offered(run.requests[2])[-3:] == ["undeclared", "writer", "reader"]
    assert (agent.home / "ran.txt").read_text(encoding="utf-8") == "xx"


def test_tools_shows_whose_they_are_and_what_is_broken(agent):
    put(agent.home, "mine.py", simple("mine", mark="@tool(writes=False)"))
    put(agent.home, "bad.py", simple("read_file"))
    put(agent.home, "exit.py", simple("never") + "exit()\n")      # Python's own would close stdin, and end our input
    run = agent.run([], input="/tools\n/plan\n/tools\n")
    normal, plan = run.err.split("Plan mode.")
    for listed in (normal, plan):
        assert re.search(r"^mine +\(yours, mine\.py\) It is mine\.$", listed, re.M)
        assert re.search(r"^read_file +Read a text file", listed, re.M)
    assert len(re.findall(r"^Not a tool: .*bad\.py: there is another tool read_file, which stays$", normal, re.M)) == 2


def test_the_offline_model_calls_it_by_its_name(agent):
    put(agent.home, "words.py", WORDS)
    (agent.folder / "a.txt").write_text("a b\nc\n", encoding="utf-8")
    run = agent.run(None, "-p", "count words a.txt")
    assert run.code == 0 and run.out == "Done:\n- count_words a.txt → 3\n"


# No file breaks the start

pieces = st.sampled_from([IMPORT, "import tools\n", "@tool\n", "@tools.tool(writes=False)\n", "@tool(only=1)\n", "def a(",
                          "def b(x: str", "async def c(", "class D(", "x, *, y: int = 1", "*z: str", "):\n", "):\n    'x'\n",
                          "    return 1\n", "raise SystemExit\n", "1 / 0\n", "\n", "@", "'", "价", "\ufeff", "\0", "\t"])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(pieces, max_size=8).map("".join) | st.binary(max_size=9))
def test_no_file_breaks_the_start(tmp_path, monkeypatch, code):
    with monkeypatch.context() as patch:
        for name in ("HOME", "USERPROFILE"):
            patch.setenv(name, str(tmp_path))
        before = dict(tools.TOOLS)
        for name, value in {"TOOLS": dict(before), "own": {}, "not_tools": []}.items():
            patch.setattr(tools, name, value)
        patch.setattr(sys, "path", list(sys.path))
        put(tmp_path, "any.py", code)
        put(tmp_path, "last.py", simple("last"))
        tools.load_own()
        assert list(tools.TOOLS)[:len(before)] == list(before) and tools.run("last", "{}") == "ok"
        assert all(tools.TOOLS[name] is function for name, function in before.items())
        assert set(tools.TOOLS) == set(before) | set(tools.own) and len(tools.not_tools) <= 1
        assert json.dumps([*map(tools.definition, tools.offered().values())])
