"""Two promises, tried on random sessions and random files (Hypothesis).

1. Valid requests: whatever happened, the provider accepts what is sent next. The offline model is the judge.
2. No surprises on the reader's machine: file tools change the bytes they were asked to change, and nothing else.
"""
import json
import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import tools
from conftest import POSIX, Agent, call, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

text = st.text(max_size=12)                                                 # control characters too
anything = st.text(st.characters(exclude_categories=()), max_size=12)       # lone halves of surrogate pairs too
json_values = st.none() | st.booleans() | st.integers() | anything | st.lists(anything, max_size=2)
names = st.sampled_from(["read_file", "write_file", "edit_file", "list_dir", "terminal"])


# Promise 1

COMMANDS = ["echo hi", "exit 3"] + POSIX * ["kill -INT $PPID; sleep 20"]       # the last one is Ctrl-C while it runs
valid_calls = st.one_of(
    st.builds(call, st.just("terminal"), command=st.sampled_from(COMMANDS)),
    st.builds(call, st.just("write_file"), path=st.sampled_from(["a.txt", "b/c.txt", "../d.txt"]), content=anything),
    st.builds(call, st.just("read_file"), path=st.sampled_from(["a.txt", "b", "nowhere"])),
    st.just(call("list_dir")))
broken_calls = st.fixed_dictionaries(
    {"name": names | text,
     "arguments": text | st.dictionaries(st.sampled_from(["path", "command", "x"]), json_values).map(json.dumps)},
    optional={"id": st.sampled_from(["", "same", "call 1", "é"])}
).filter(lambda one: one["name"] != "terminal")
rounds = st.fixed_dictionaries({"tool_calls": st.lists(valid_calls | broken_calls, min_size=1, max_size=3)},
                               optional={"text": text, "thinking": text})
endings = st.sampled_from(["done", "[/b] \x1b[2J", {"status": 400, "message": "oh dear"},
                           {"status": 403, "message": "not you"}, {"text": "", "finish_reason": "length"},
                           {"text": "x", "fault": "cut"}] + POSIX * ["Ctrl-C"])
turns = st.lists(st.tuples(st.lists(rounds, max_size=3), endings), min_size=1, max_size=5)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns)
def test_every_request_is_valid_whatever_happened(model, turns):
    with tempfile.TemporaryDirectory() as place:
        agent = Agent(Path(place), model)
        session(agent, turns)
        agent.close()


def session(agent, turns):
    """Play the turns. The script is used up turn by turn: what an interrupted turn leaves of it is dropped."""
    script, said = [], []

    def next_reply(body):
        reply = planned(body)
        if reply == "Ctrl-C":
            agent.children[-1].send_signal(signal.SIGINT)
            reply = {"text": "too late", "delay": 1}
        return reply

    def planned(body):
        if body["messages"][-1]["content"] not in said and body["messages"][-1]["role"] == "user":      # a new turn
            said.append(body["messages"][-1]["content"])
            rounds, ending = turns[len(said) - 1] if len(said) <= len(turns) else ([], "bye")
            script[:] = [*rounds, ending]
        return script.pop(0) if script else "said again"       # a reply that breaks may be asked for once more

    lines = [f"turn {n}\n" for n in range(len(turns) + 1)]
    run = agent.run([next_reply] * 100, "--yes", input="".join(lines))
    assert refused(run.requests) == []
    assert run.out.endswith("bye\n") and len(said) == len(lines)


# Promise 5

@contextmanager
def working_directory():
    """An empty one, beside a folder that is none of our business; `tools` works in it."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as place:
        work, secret = Path(place, "work"), Path(place, "secret")
        work.mkdir()
        secret.mkdir()
        (secret / "key.txt").write_bytes(b"hunter2\n")
        os.chdir(work)
        try:
            yield work, secret
        finally:
            os.chdir(before)


def tool(name, **arguments):
    return tools.run(name, json.dumps(arguments))


def files_below(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


scripts = st.text(st.sampled_from("ab 1\t\n\r完成价格éß✅🐍ñ日本\u2028\x85\x0b"), max_size=30)
encodings = st.sampled_from(["utf-8", "utf-8-sig", "gbk", "gb18030", "big5", "shift_jis", "latin-1", "utf-16"])


@st.composite
def marked_files(draw):
    """(bytes with MARK in them once, a function that gives the bytes with another text in MARK's place)"""
    if draw(st.booleans()):
        before, after = draw(st.binary(max_size=20)), draw(st.binary(max_size=20))
        return before + b"MARK" + after, lambda new: before + new.encode() + after
    before, after, encoding = draw(scripts), draw(scripts), draw(encodings)
    before, after = (text.encode(encoding, "ignore").decode(encoding) for text in (before, after))
    return (before + "MARK" + after).encode(encoding), lambda new: (before + new + after).encode(encoding)


@settings(max_examples=200, deadline=None)
@given(marked_files(), st.sampled_from(["", "x", "MARK", "<b>\\1</b>"]), st.booleans())
def test_an_edit_changes_nothing_else(file, new, read_first):
    data, edited = file
    with working_directory() as (work, _):
        (work / "file").write_bytes(data)
        if read_first:
            shown = tool("read_file", path="file")
            shown.encode()      # a result is text that can be sent
        answer = tool("edit_file", path="file", old_text="MARK", new_text=new)
        assert answer.startswith(("edited file (line ", "Error: "))
        assert files_below(work) == {"file": data if answer.startswith("Error: ") else edited(new)}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text("abc价", min_size=1, max_size=3), min_size=3, max_size=8, unique=True), st.data(),
       st.sampled_from(["\n", "\r\n"]), st.sampled_from(["utf-8", "utf-8-sig", "gbk"]), st.booleans())
def test_newlines_and_encoding_stay(lines, data, newline, encoding, last_newline):
    """The model always writes \\n; the file keeps what it has, in an edit and when it is replaced."""
    start = data.draw(st.integers(0, len(lines) - 2))
    end = data.draw(st.integers(start + 2, len(lines)))
    lines = [f"{n} {line}" for n, line in enumerate(lines)]

    def on_disk(lines):     # the first line makes sure that GBK is not just ASCII
        return (newline.join(["价格", *lines]) + newline * last_newline).encode(encoding)

    with working_directory() as (work, _):
        (work / "file").write_bytes(on_disk(lines))
        answer = tool("edit_file", path="file", old_text="\n".join(lines[start:end]), new_text="新\nnew")
        assert answer == f"edited file (line {start + 2})"
        assert (work / "file").read_bytes() == on_disk(lines[:start] + ["新", "new"] + lines[end:])
        tool("write_file", path="file", content="\n".join(["价格", *lines[::-1]]) + "\n" * last_newline)
        assert (work / "file").read_bytes() == on_disk(lines[::-1])


ways_out = st.sampled_from(["..", "../secret", "dir/../../secret", "{secret}", "{work}/../secret", "to_secret",
                            "dir/to_secret", "~", "..\\secret", ".git", "{work}/.GIT", "to_git", "", "dir", "{work}"])
detours = st.sampled_from([".", "dir/..", "../secret", "", "..", "x" * 300, "完成"])
targets = st.sampled_from(["key.txt", "new.txt", "config", "AGENTS.md", "agents.MD", "to_key", "to_new", "a", ""])
paths = st.builds(lambda *parts: "/".join(parts), ways_out, detours, targets) | targets | anything
file_calls = st.one_of(
    st.builds(call, st.just("read_file"), path=paths, offset=st.integers(-1, 3), limit=st.integers(-1, 3)),
    st.builds(call, st.just("write_file"), path=paths, content=anything),
    st.builds(call, st.just("edit_file"), path=paths, new_text=anything,
              old_text=st.sampled_from(["hunter2", "core", "text"])),
    st.builds(call, st.just("list_dir"), path=paths))


@settings(max_examples=150, deadline=None)
@given(st.lists(file_calls, max_size=8))
def test_nothing_outside_is_read_or_touched(calls):
    """Nor is .git or AGENTS.md, because there is nobody here to ask."""
    with working_directory() as (work, secret):
        (work / "dir").mkdir()
        (work / "a").write_text("text\n", encoding="utf-8")
        (work / ".git").mkdir()
        (work / ".git" / "config").write_text("core\n", encoding="utf-8")
        if POSIX:
            for link, target in {"to_secret": "../secret", "dir/to_secret": secret, "to_key": secret / "key.txt",
                                 "to_new": "../secret/new.txt", "to_git": ".git"}.items():
                (work / link).symlink_to(target)
        above = sorted(os.listdir(work.parent))
        for one in calls:
            arguments = json.loads(one["arguments"])
            arguments["path"] = arguments["path"].replace("{work}", str(work)).replace("{secret}", str(secret))
            answer = tool(one["name"], **arguments)
            answer.encode()
            assert "hunter2" not in answer
        assert files_below(secret) == {"key.txt": b"hunter2\n"} and sorted(os.listdir(work.parent)) == above
        assert files_below(work / ".git") == {"config": b"core\n"}
        assert "agents.md" not in (path.name.lower() for path in work.rglob("*"))
