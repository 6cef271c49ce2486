"""Facts: each tool call becomes one line, by rules. It stands before the result in the request and on the screen."""
import json
import re

import memory
import pytest
import tools
from conftest import PROMPT, call, posix_only, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def line(tool, result, **arguments):
    return memory.fact(tool, json.dumps(arguments), result).line()


@pytest.fixture
def do(tmp_path, monkeypatch):
    """do(tool, **arguments) -> the fact of a call that is really made, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools, "ask", lambda question: None)
    monkeypatch.setattr(tools, "sources", set())
    return lambda tool, **arguments: line(tool, tools.run(tool, json.dumps(arguments)), **arguments)


# Each rule

def test_files(do):
    assert do("write_file", path="a.py", content="x = 1\n" * 12) == "write_file a.py → created (12 lines)"
    assert do("write_file", path="a.py", content="x = 1") == "write_file a.py → replaced (1 line)"
    assert do("edit_file", path="a.py", old_text="1", new_text="2") == "edit_file a.py → edited (line 1)"
    assert do("write_file", path="b (1).py", content="x\n" * 5000) == "write_file b (1).py → created (5,000 lines)"
    assert do("read_file", path="a.py") == "read_file a.py (1 line, Python)"
    assert do("read_file", path="b (1).py") == "read_file b (1).py (lines 1-2000 of 5000, Python)"
    assert do("read_file", path="b (1).py", offset=11, limit=9) == "read_file b (1).py (lines 11-19 of 5000, Python)"
    assert do("read_file", path="b (1).py", offset=4991) == "read_file b (1).py (lines 4991-5000 of 5000, Python)"
    with open("a.txt", "wb") as file:       # "[encoding: gbk]" comes before it, and is none of its lines
        file.write("你好\r\n世界\r\n".encode("gbk"))
    assert do("read_file", path="a.txt") == "read_file a.txt (2 lines)"
    do("write_file", path="b.txt", content="[encoding: as it is]\n2\n")
    assert do("read_file", path="b.txt") == "read_file b.txt (2 lines)"
    assert do("list_dir") == "list_dir → 4 lines: a.py 5"


def test_searches(do):
    do("write_file", path="src/a.py", content="\n\nauth: 1\nauth\n")
    do("write_file", path="src/b.py", content="auth(url='http://x:80: ')\n" * 300)
    found = "src/a.py:3, src/a.py:4, src/b.py:1, src/b.py:2, src/b.py:3"
    assert do("search_files", pattern="auth", path="src") == f'search_files "auth" in src → 200+ matches: {found}'
    assert do("search_files", pattern="^auth: ") == 'search_files "^auth: " in . → 1 match: src/a.py:3'
    assert do("search_files", pattern="nowhere") == 'search_files "nowhere" in . → 0 matches'


def test_the_web(do, monkeypatch):
    found = [{"title": "1. https://no/", "href": f"https://{host}/1", "body": "x"} for host in ("a.b", "c.d", "a.b")]
    for results, fact in [(found, "→ 3 results: a.b, c.d"), (found[:1], "→ 1 result: a.b"), ([], "→ 0 results")]:
        monkeypatch.setattr(tools, "within", lambda seconds, work: results)
        assert do("web_search", query="q") == f'web_search "q" {fact}'
    monkeypatch.setattr(tools, "within", lambda seconds, work: ("https://a.b/c", "text/plain", "word\n" * 5_000))
    said = do("web_read", url="https://a.b/c", page=2)
    assert re.fullmatch(r"web_read https://a.b/c → 2,00\d lines, page 2 of 3", said)


def test_questions_and_other_tools():
    assert line("clarify", "the second", question="Which?") == "clarify Which? → the second"
    assert line("lookup", "one\ntwo\nthree", key="k", more=1) == "lookup k → 3 lines: one"
    assert line("lookup", "only this", key="k") == "lookup k → only this"
    assert line("lookup", "now", path={"a": 1}) == "lookup {'a': 1} → now"
    assert line("lookup", "", key="k") == "lookup k →" and line("lookup", "now") == "lookup → now"


def test_what_failed(do):
    assert do("read_file", path="x").startswith("read_file x → FAIL: [Errno 2] No such file")
    assert "FAIL: bad arguments: offset" in do("read_file", path="x", offset=0)
    assert do("nothing", path="x").startswith("nothing x → FAIL: there is no tool 'nothing'")
    assert line("terminal", tools.Failure("Error: the user said no. "), command="rm x") == (
        "terminal rm x → FAIL: the user said no.")


@posix_only
def test_commands(do):
    assert do("terminal", command="true") == "terminal true → exit 0, 0 lines"
    assert do("terminal", command="printf 'a\\nlast line\\n\\n'") == (
        r"terminal printf 'a\nlast line\n\n' → exit 0, 2 lines: last line")
    assert do("terminal", command="echo oh no; exit 3") == "terminal echo oh no; exit 3 → FAIL exit 3, 1 line: oh no"
    assert do("terminal", command="echo so far; sleep 9", timeout=1) == (
        "terminal echo so far; sleep 9 → FAIL timed out after 1 s, 1 line: so far")


def test_a_detail_of_one_character_is_a_detail():
    """`ls | wc -l` prints one character, and many an answer is one."""
    assert line("terminal", "exit 0\n7", command="ls | wc -l") == "terminal ls | wc -l → exit 0, 1 line: 7"
    assert line("clarify", "是", question="Delete it?") == "clarify Delete it? → 是"


# Test runners, as they print when no terminal is there; lines that do not matter are left out

SHORT = "=========================== short test summary info ============================\n"
PYTEST = """F.F.xE                                                                   [100%]
""" + SHORT + """FAILED test_a.py::test_x - assert 1 == 2
FAILED test_a.py::test_p[2] - assert 2 == 1
ERROR test_a.py::test_err - ValueError: x
"""
UNITTEST = """E..sF
ERROR: test_e (t_u.A.test_e)
----------------------------------------------------------------------
ValueError: 2 failed
FAIL: test_x (t_u.A.test_x)
----------------------------------------------------------------------
Ran 5 tests in 0.001s

"""
JEST = """FAIL ./sum.test.js
    ✓ adds (3 ms)
    ✕ breaks (3 ms)

  ● Console
  ● sum › breaks
  ● outside of a suite

Test Suites: 1 failed, 1 total
Tests:       1 failed, 1 skipped, 1 passed, 3 total
Time:        0.312 s"""
VITEST = """ ❯ v.spec.js (3 tests | 1 failed | 1 skipped) 9ms
     × breaks 5ms
⎯⎯⎯⎯⎯⎯⎯ Failed Tests 1 ⎯⎯⎯⎯⎯⎯⎯
 FAIL  v.spec.js > sum > breaks
 Test Files  1 failed (1)
      Tests  1 failed | 1 passed | 1 skipped (3)
   Start at  05:10:10"""
CARGO = """test tests::adds ... ok
test tests::breaks ... FAILED
test tests::panics - should panic ... FAILED
test src/lib.rs - add (line 5) ... FAILED
test tests::later ... ignored

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.13s

test outside ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
GO = """=== RUN   TestA
    a_test.go:5: bad
--- FAIL: TestA (0.00s)
--- PASS: TestB (0.00s)
FAIL
FAIL\texample.com/demo\t0.002s
ok  \texample.com/demo/b\t0.003s
FAIL"""
TEST_RUNS = [
    (PYTEST + "2 failed, 2 passed, 1 xfailed, 1 error in 0.75s", 1, "3 failed, 2 passed: test_a.py::test_x, "
     "test_a.py::test_p[2], test_a.py::test_err"),
    (PYTEST + f"{'=' * 15} 2 failed, 30 passed, 1 error in 65.69s (0:01:05) {'=' * 16}", 1, "3 failed, 30 passed: "
     "test_a.py::test_x, test_a.py::test_p[2], test_a.py::test_err"),
    ("..      [100%]\n2 passed, 1 warning in 0.67s", 0, "2 passed"),
    (SHORT + "ERROR test_imp.py\n!!! Interrupted: 1 error during collection !!!\n1 error in 0.90s", 2,
     "1 failed: test_imp.py"),
    (UNITTEST + "FAILED (failures=1, errors=1, skipped=1)", 1, "2 failed, 2 passed: test_e, test_x"),
    ("....\n----\nRan 4 tests in 0.000s\n\nOK", 0, "4 passed"),
    ("...\n----\nRan 4 tests in 0.000s\n\nOK (skipped=1)", 0, "3 passed"),
    (JEST, 1, "1 failed, 1 passed: sum › breaks, outside of a suite"),
    (VITEST, 1, "1 failed, 1 passed: v.spec.js > sum > breaks"),
    (CARGO, 101, "1 failed, 2 passed: tests::breaks, tests::panics, src/lib.rs - add (line 5)"),
    (GO, 1, "1 failed, 1 passed: TestA"),
    ("--- FAIL: TestA (0.00s)\n    a_test.go:5: bad\nFAIL\nFAIL\texample.com/demo\t0.002s\nFAIL", 1, "1 failed: TestA"),
]


@pytest.mark.parametrize("output, code, said", TEST_RUNS)
def test_a_test_run(output, code, said):
    fact = line("terminal", f"exit {code}\n{output}", command="t")
    assert fact == f"terminal t → {'FAIL ' * (code > 0)}exit {code}, {len(output.splitlines())} lines, {said}"
    begun = line("terminal", f"exit {code}\n" + "noise\n" * 90_000 + output, command="cd /a && t " + "x" * 500)
    assert said.partition(":")[0] in begun and begun.startswith("terminal cd /a && t") and len(begun) <= 140


@pytest.mark.parametrize("end, failed", [
    ("OK (expected failures=1)", []), ("FAILED (failures=1, expected failures=2)", ["1"])])
def test_a_failure_that_was_expected_is_none(end, failed):
    fact = line("terminal", f"exit {len(failed)}\nRan 5 tests in 0.000s\n\n{end}", command="t")
    assert re.findall(r"(\d+) failed", fact) == failed, fact


# Any call, any result

NASTY = ["\x1b[1mred\x1b[0m", "\x1b]0;title\x07", "\x1b[2J", "\0\x07\b", "a\rb", "\u2028x\x85y", "\u202eevil", "好" * 9,
         "العربية", "हिन्दी", "👩\u200d👩", "→ FAIL: ", "[archived] [r1] ", "exit 0\n", "Error: ", "\n[page 1 of 2",
         "\n[lines 1-2 of 3; go on with offset=3]", "1. a\nhttps://b/", "a.py:3: ", "%s{0}[/]", " " * 99, "x" * 999]
texts = st.lists(st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=())), max_size=6).map("".join)
outcomes = texts | texts.map(tools.Failure) | st.sampled_from([output for output, *_ in TEST_RUNS])
values = st.none() | st.booleans() | st.integers() | texts | st.lists(texts, max_size=2)
ARGUMENTS = "path", "pattern", "command", "query", "url", "question"
names = texts | st.sampled_from([*memory.RULES, "list_dir", "lookup"])
arguments = texts | st.fixed_dictionaries(dict.fromkeys(ARGUMENTS, texts)).map(json.dumps) | st.dictionaries(
    st.sampled_from([*ARGUMENTS, "offset"]), values).map(json.dumps)


def is_one_short_line(fact):
    shown = f"[archived] [r123] {fact.line()}"
    assert len(shown) <= 160 and len(shown.splitlines()) == 1 and tools.printable(shown) == shown, shown
    assert all(len(fact.line(room)) <= room for room in (70, 110))      # narrower screens


@settings(max_examples=300, deadline=None)
@given(names, arguments, outcomes)
def test_any_fact_is_one_short_line(name, arguments, outcome):
    is_one_short_line(memory.fact(name, arguments, outcome))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["read_file", "write_file", "edit_file", "list_dir", "search_files", "activate_skill"]) | texts,
       texts | st.dictionaries(st.sampled_from(["path", "content", "offset", "pattern", "x"]), values).map(json.dumps))
def test_whatever_the_model_calls_has_a_fact(do, name, arguments):
    fact = memory.fact(name, arguments, tools.run(name, arguments))
    is_one_short_line(fact)
    assert fact.failed == ("→ FAIL" in fact.outcome)


@pytest.mark.parametrize("tool", [*memory.RULES, "lookup"])
@pytest.mark.parametrize("part", ["a", "好", "\x1b[1m", "\0", "1", ": "])
def test_5_mb_without_a_newline(tool, part):
    arguments = dict.fromkeys(ARGUMENTS, part * 1_000)
    result = f"created {part} (1 line)" if tool in ("write_file", "edit_file") else part * (5_000_000 // len(part))
    is_one_short_line(memory.fact(tool, json.dumps(arguments), result))


# On the wire and on the screen

def test_a_fact_is_before_the_result_and_on_the_screen(agent):
    (agent.folder / "error.txt").write_text("Error: this is what the file says\n", encoding="utf-8")
    (agent.folder / "README.md").write_text("# a\nb\n", encoding="utf-8")
    reading = [call("read_file", path=path) for path in ("error.txt", "nowhere", "README.md")]
    run = agent.task([step(*reading), step(call("write_file", path="a.py", content="x\n"), call("no", path="x")),
                      "done"], "--yes")
    sent = [message["content"] for message in run.requests[-1].body["messages"] if message["role"] == "tool"]
    facts = [text.split("\n")[0] for text in sent]
    assert sent[0] == "[r1] read_file error.txt (1 line)\nError: this is what the file says"
    assert facts[1].startswith("[r2] read_file nowhere → FAIL: ") and "No such file" in sent[1]
    assert sent[2] == "[r3] read_file README.md (2 lines, Markdown)\n# a\nb"
    assert sent[3] == "[r4] write_file a.py → created (1 line)"         # that says it all
    assert len(facts[4]) < 160 and "…" in facts[4] and "\nError: there is no tool 'no' in" in sent[4]
    shown = re.findall(r"^● (.*), \d+\.\d s$", run.err, re.M)
    assert [shown[0], *shown[2:4]] == [facts[n].split("] ", 1)[1] for n in (0, 2, 3)]
    assert re.match("read_file nowhere → FAIL: .*", shown[1]) and len(shown[1]) <= 70


@posix_only
def test_the_screen_shows_one_line_and_no_control_characters(agent):
    command = "printf '\\033[2Jevil\\007\\nlast'; : " + "数据" * 90
    child, server = agent.prompt([step(call("terminal", command=command)), "done"], "--yes", columns=80)
    child.sendline("go")
    child.expect(PROMPT)
    shown = [text for text in re.split(r"[\r\n]+", tools.ESCAPES.sub("", child.before)) if text.startswith("● ")]
    assert len(shown) == 1 and shown[0].startswith("● terminal printf") and len(shown[0]) <= 80, shown
    assert "\x07" not in shown[0] and "\x1b[2J" not in child.before
    [sent] = [message["content"] for message in server.requests[-1].body["messages"] if message["role"] == "tool"]
    assert re.fullmatch(r"\[r1\] terminal printf .*…据.* → exit 0, 2 lines: last", sent.split("\n")[0])
