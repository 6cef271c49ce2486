"""bench.py: what each version costs, and where the newest one spends its time.

    python bench.py                 versions, then overhead
    python bench.py versions        three scripted jobs, played on every version through its command line
    python bench.py overhead        the loop without model and tools, the facts, a save of memory, the start
    python bench.py traces DIR      recorded sessions, replayed through the rent rule and others
    python bench.py picture FILE    the rent over a recorded session, as rent.svg shows it

--quick: less of each, in a minute. --json FILE: write the result there. --store (versions): write docs/bench.json and
docs/bench.svg. --line TIP (versions): the line that ends there, instead of the one that main publishes.

The model is scripted: each version is told to make the same calls in the same project, this course at v0.5. What
differs is what it sends. Requests and tokens are the same on every machine; times and memory are not.
"""
import argparse
import compileall
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cached_property
from itertools import accumulate, pairwise
from operator import truediv
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import agent
import course
import memory
import models
import offline
import tools

ROOT = Path(__file__).resolve().parent
WINDOW = 200_000
PROVIDERS = {"Anthropic": ("https://api.anthropic.com", ""), "OpenAI": ("https://api.openai.com", "gpt-5.4"),
             "Zhipu": ("https://open.bigmodel.cn", "glm-5.1")}  # whose prices count: address and model, see prices.json
CODE = "*.py tests/*.py"


# ---- the jobs ----


class Again(NamedTuple):
    """The model needs a line that it read long ago. If the request still shows it, nothing happens; if not, the model
    recalls it, or, where there is no recall, reads that part of the file again."""
    line: str
    path: str
    offset: int
    limit: int


def call(name, **arguments):
    return {"name": name, "arguments": {key: value for key, value in arguments.items() if value is not None}}


def read(path, offset=None, limit=None):
    return call("read_file", path=path, offset=offset, limit=limit)


def ls(path="."):
    return call("list_dir", path=path)


def write(path, *lines):
    return call("write_file", path=path, content="\n".join(lines) + "\n")


def edit(path, old, *new):
    return call("edit_file", path=path, old_text=old, new_text="\n".join(new))


def before(path, line, *new):
    return edit(path, line, *new, line)


def after(path, line, *new):
    return edit(path, line, line, *new)


def sh(command):
    return call("terminal", command=command)


def grep(pattern, files=CODE):
    return sh(f"grep -nE '{pattern}' {files}")


def rename(path, old):
    return edit(path, old, old.replace("search_files", "find_text"))


def python(*lines):
    return sh("\n".join(["python - <<'END'", *lines, "END"]))


def rename_all(path):
    return python(f"path = '{path}'",
                  "text = open(path, encoding='utf-8').read().replace('search_files', 'find_text')",
                  "open(path, 'w', encoding='utf-8', newline='\\n').write(text)")


def passing(path):
    """Run a test file whose tests need no fixture; pytest would print times."""
    return python("import runpy", f"for name, test in runpy.run_path('{path}').items():",
                  "    if name.startswith('test_'):", "        test()", "        print(name, 'passed')")


def read_folder():
    """What the tool of the project itself says to a folder, without the machine's path."""
    return python("import tools", """print(tools.run('read_file', '{"path": "tests"}').rpartition('/')[2])""")


# {calls: (what the user asks, rounds)}. A round is the list of calls in one reply.
TASKS = {
    7: ("Add an option --quiet that does not show the tool calls.", [
        [ls(), grep("notice\\(", "agent.py plan.py")],
        [read("agent.py")],
        [before("agent.py", '    parser.add_argument("--version", action="version", version=VERSION)',
                '    parser.add_argument("--quiet", action="store_true", help="do not show the tool calls")'),
         before("agent.py", "secrets = set()  # API keys", "quiet = False  # --quiet: tool calls are not shown")],
        [after("agent.py", "    options = parser.parse_args()", "    global quiet", "    quiet = options.quiet")],
        [sh("python -m py_compile agent.py && grep -n quiet agent.py")],
    ]),
    25: ("read_file on a folder only says that it is no file. Let it say what to use instead, and test it.", [
        [ls(), grep("is not a file")],
        [read("tools.py")],
        [grep("[^a-z]load\\(")],
        [read("tests/test_files.py")],
        [read("tests/conftest.py")],
        [read_folder()],
        [read("agent.py", 225, 40)],
        [before("tools.py", '    demand(real.is_file() or not real.exists(), f"{real} is not a file")',
                '    demand(not real.is_dir(), f"{real} is a folder: use list_dir")')],
        [sh("python -m py_compile tools.py"), read_folder()],
        [grep("not a file|no file", "tests/*.py README.md")],
        [read("tests/test_files.py", 45, 30)],
        [write("tests/test_folder.py", '"""A folder is no file, and the model is told what to do with it."""',
               "import json", "import sys", "from pathlib import Path", "",
               "sys.path.insert(0, str(Path(__file__).resolve().parent.parent))",
               "import tools  # noqa: E402", "", "",
               "def answer(name, **arguments):", "    return tools.run(name, json.dumps(arguments))", "", "",
               "def test_reading_a_folder_names_the_tool_for_it():",
               '    assert answer("read_file", path="tests").endswith("is a folder: use list_dir")', "", "",
               "def test_writing_to_a_folder_says_so():",
               '    assert "is a folder" in answer("write_file", path="tests", content="x")')],
        [passing("tests/test_folder.py")],
        [edit("tools.py", 'f"{real} is a folder: use list_dir"', 'f"{path_of(real)} is a folder: use list_dir"')],
        [before("tools.py", "def load(real: Path)",
                "def path_of(real: Path) -> str:", '    """The path as the model writes it."""',
                "    return real.relative_to(Path.cwd().resolve()).as_posix()", "", "")],
        [sh("python -m py_compile tools.py"), passing("tests/test_folder.py")],
        [edit("tests/test_folder.py", '.endswith("is a folder: use list_dir")',
              ' == "Error: tests is a folder: use list_dir"')],
        [passing("tests/test_folder.py")],
        [read("CHANGELOG.md", 1, 25), read("tools.py", 130, 25)],
        [after("CHANGELOG.md", "# Changelog\n", "- `read_file` on a folder names `list_dir`.", "")],
        [grep("folder", "tools.py tests/test_folder.py")],
    ]),
    80: ("Rename the tool search_files to find_text everywhere; document every tool in docs/tools.md, with a test.", [
        [ls(), ls("tests"), grep("search_files", f"{CODE} *.md")],
        [sh("mkdir .before && cp *.py *.md .before"), read("tools.py")],
        [read("tests/test_search.py"), grep("files_of|lines_of", CODE)],
        [read("plan.py"), read("skills/coding/SKILL.md")],
        [read("tests/test_plan.py")],
        [grep("^def |^class |^@tool", "*.py")],
        [read("offline.py", 780, 120), sh("grep -c '' *.py tests/*.py")],
        [read("agent.py")],
        [read("memory.py"), read("models.py")],
        [read("README.md")],
        [read("CHANGELOG.md"), read("tests/test_offline_plain.py")],
        [read("tests/test_registry.py"), read("tests/conftest.py")],
        [rename("tools.py", "def search_files("), rename("offline.py", '"search_files grep*')],
        [sh("python -m py_compile tools.py offline.py"), grep("search_files")],
        [rename("tests/test_search.py", '"""search_files: '),
         rename("tests/test_search.py", 'tools.run("search_files"')],
        [rename("tests/test_plan.py", '"list_dir", "search_files"'),
         rename("tests/test_plan.py", 'call("search_files"')],
        [rename("tests/test_offline_plain.py", '[tool("search_files"'),
         rename("tests/test_offline_plain.py", """in src', [("search_files", {"pattern": "def main\"""")],
        [rename("tests/test_offline_plain.py", """('find TODO', [("search_files\""""),
         read("tests/test_offline_plain.py", 70, 40)],
        [rename_all("tests/test_offline_plain.py"), grep("search_files")],
        [python("import tools", "print(*sorted(tools.TOOLS))"), read("tests/test_files.py")],
        [write("docs/tools.md", "# The tools", "", "Each is a function with `@tool` before it.", "", "## Files", "",
               "* `read_file(path, offset, limit)`: the text of a file, from a line on. Every tenth line has its",
               "  number before it. A file of more than 50 MB is refused, a binary one is named as such.",
               "* `write_file(path, content)`: makes a file or replaces one. Encoding, newlines and mode stay; a file",
               "  that changed since it was read is not overwritten. What steers the agent asks a person first.",
               "* `edit_file(path, old_text, new_text)`: the old text must be there exactly once. Otherwise the answer",
               "  says how often it is there, and in which lines.",
               "* `list_dir(path)`: names in order, folders with a slash, files with their size; at most 500 names.")],
        [read("tests/test_terminal.py"), grep("MAX_OUTPUT|\\.gitignore", CODE)],
        [after("docs/tools.md", "at most 500 names.",
               "* `find_text(pattern, path)`: lines that fit a regular expression, as `path:line: text`. What",
               "  .gitignore names is left out. It stops at 200 places and after 20 seconds.", "", "## Commands", "",
               "* `terminal(command, timeout)`: a shell command without input. Its result begins with `exit` and the",
               "  status. At the time limit it is killed with all that it started; so it is after 20 MB of output.")],
        [read("tests/test_web.py"), grep("web_|current_time", CODE)],
        [grep("MAX_|timeout=", "tools.py"), read("tools.py", 330, 120)],
        [after("docs/tools.md", "after 20 MB of output.", "", "## The web", "",
               "* `web_search(query)`: eight results of a search, without a key.",
               "* `web_read(url, page)`: a page as text, in parts of 10,000 characters. Private addresses are refused,",
               "  on the address that is really connected to, after every redirect.",
               "* `current_time()`: date, time and zone.")],
        [read("tests/test_skills.py"), grep("^def test_", "tests/*.py")],
        [read("skills/research/SKILL.md"), read("tests/test_memory.py", 1, 160)],
        [after("docs/tools.md", "date, time and zone.", "", "## Memory and skills", "",
               "* `memory_save(note, scope)`: a short note for later sessions, about this project or about the user.",
               "  What looks like a key or a password is refused.",
               "* `activate_skill(name)`: the whole text of a skill. Its title was in the prompt from the start.")],
        Again("def finish_step(outcome", "plan.py", 60, 40),
        [after("docs/tools.md", "from the start.", "", "## Plans", "",
               "* `clarify(question, choices)`: asks the user; with nobody there, the answer is to decide.",
               "* `submit_plan(goal, steps)`: hands in a plan. A vague one comes back with the reason.",
               "* `finish_step(outcome, note)`: ends a step of the plan, done or failed.")],
        Again("| the prompt on a terminal |", "README.md", 140, 20),
        [rename("README.md", "And `search_files`, in any mode"), rename("README.md", "| `search_files`: a regular")],
        [rename("README.md", "list_dir, search_files, web_search"), rename("README.md", "- search_files fruit")],
        [rename("README.md", "also `search_files`, and"), rename("README.md", " search_files fruit \u2192")],
        [grep("search_files", "README.md README.zh-CN.md CHANGELOG.md docs/*.md"), read("README.zh-CN.md", 255, 40)],
        [rename_all("README.zh-CN.md"), rename("CHANGELOG.md", "- `search_files`: a regular")],
        [read("README.md", 30, 70), read("tests/test_cli.py")],
        [before("README.md", "## How to walk it", "What the tools do stands in [docs/tools.md](docs/tools.md).", "")],
        Again("def put(path, content", "tests/test_search.py", 18, 30),
        [write("tests/test_docs.py", '"""docs/tools.md names every tool, and no other."""', "import re", "import sys",
               "from pathlib import Path", "", "ROOT = Path(__file__).resolve().parent.parent",
               "sys.path.insert(0, str(ROOT))", "import memory, plan, tools  # noqa: E402, E401, F401", "", "",
               "def documented():", '    text = (ROOT / "docs/tools.md").read_text(encoding="utf-8")',
               '    return re.findall(r"^\\* `(\\w+)\\(", text, re.M)', "", "", "def test_every_tool_is_documented():",
               "    assert not tools.TOOLS.keys() - documented()", "", "", "def test_nothing_else_is():",
               "    assert not set(documented()) - tools.TOOLS.keys()")],
        [passing("tests/test_docs.py"), grep("find_text")],
        [read("docs/tools.md"), sh("diff .before/tools.py tools.py; diff .before/offline.py offline.py")],
        [after("CHANGELOG.md", "# Changelog\n", "- `search_files` is now `find_text`; see docs/tools.md.", ""),
         sh("diff .before/README.md README.md")],
        [sh("rm -r .before"), sh("python -m py_compile *.py tests/*.py"), ls("docs")],
        [grep("search_files", f"{CODE} *.md docs/*.md"), read("tests/test_docs.py"), passing("tests/test_docs.py")],
        [read("CHANGELOG.md", 1, 20), read("tools.py", 238, 40)],
    ]),
}


# ---- versions ----

# Runs a command and writes its peak memory to a file. On Linux a process inherits the peak of the one that started it:
# that must be a small one, and not this one, which holds the model.
LAUNCHER = """import os, subprocess, sys
child = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(child.pid, 0)
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write(str(usage.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status))"""
UNIT = 2**20 if sys.platform == "darwin" else 2**10  # what makes a MiB of it
FAILED = re.compile(r"Error: |\[r\d+\] .* → FAIL: ")  # a call that could not be done; a command may well exit with 1


class Recorder(offline.Server):
    """The model that plays a job. The project's path is another one on each machine: it counts as /project."""

    def __init__(self, rounds, project):
        self.rounds, self.project = list(rounds), os.fsencode(project)
        self.usages, self.arrivals = [], []
        super().__init__([], window=WINDOW)

    def answer(self, request, wire):
        self.arrivals.append(time.monotonic())
        request.raw = request.raw.replace(self.project, b"/project")
        reply, usage = super().answer(request, wire)
        self.usages.append(usage)
        return reply, usage

    def next_reply(self, body, wire):
        calls = self.rounds.pop(0) if self.rounds else []
        if isinstance(calls, Again):
            calls = again(calls, body) or self.rounds.pop(0)
        return {"tool_calls": calls} if calls else {"text": "Done, and checked."}


def again(wanted, body):
    """The call that gets a line back; None if the request still shows it."""
    asked = {one["id"]: one["function"] for message in body["messages"] for one in message.get("tool_calls") or []}
    results = [message for message in body["messages"] if message["role"] == "tool"]
    if any(wanted.line in message["content"] for message in results):
        return None
    if any(tool["function"]["name"] == "recall" for tool in body["tools"]):
        for message in results:
            function, id = asked[message["tool_call_id"]], re.search(r"\[(r\d+)\]", message["content"])
            if id and function["name"] == "read_file" and json.loads(function["arguments"])["path"] == wanted.path:
                return [call("recall", id_or_query=id[1], find=wanted.line)]
    return [read(wanted.path, wanted.offset, wanted.limit)]


def play(version, task, place, prices):
    """Let a version, unpacked in `place`/rungs, do a job on a new copy of the project -> what it took."""
    request, rounds, project = task
    with tempfile.TemporaryDirectory(dir=place) as folder:  # its name always has the same length
        work, home, peak, log = (Path(folder) / name for name in ("project", "home", "peak", "log"))
        home.mkdir()
        course.unpack(project.id, work)
        with Recorder(rounds, work) as model, open(log, "w", encoding="utf-8") as out:
            started = time.monotonic()
            code = subprocess.run([sys.executable, "-c", LAUNCHER, peak, *command(place, work, request)], cwd=work,
                                  env=environment(place, home, model), stdin=subprocess.DEVNULL, stdout=out,
                                  stderr=out, timeout=300).returncode
            seconds = time.monotonic() - started
            requests, left = model.requests, model.rounds
        results = [message["content"] for request in requests[-1:] for message in request.body["messages"]
                   if message["role"] == "tool"]
        wrong = [result for result in results if FAILED.match(result)] + [one.error for one in requests if one.error]
        if code or left or wrong:
            said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise course.Fault(f"{version.version} did not do its job: exit {code}, rounds left: {len(left)}\n"
                               + "\n".join([*wrong, said]))
        sent = sum(usage["prompt_tokens"] for usage in model.usages)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in model.usages)
        return {"requests": len(requests), "calls": len(results), "sent": sent, "cached": cached,
                "cost": {name: round(cached * price["read"] + (sent - cached) * price["write"])
                         for name, price in prices.items()},
                "peak_mib": round(int(peak.read_text(encoding="utf-8")) / UNIT), "seconds": round(seconds, 1)}


def played(version, task, place, prices):
    """What a job takes; where the version knows prices, it is played at each of them, and the first says the rest."""
    table = place / "rungs" / "prices.json"
    if not table.exists():
        return play(version, task, place, prices)
    results = []
    for name, price in prices.items():
        table.write_text(json.dumps({"": price}), encoding="utf-8")
        results.append(play(version, task, place, {name: price}))
    return results[0] | {"cost": {name: cost for one in results for name, cost in one["cost"].items()}}


def command(place, work, request):
    return [sys.executable, str(place / "rungs" / "agent.py"), "-p", request, "--yes", "--dir", str(work)]


def environment(place, home, model):
    """A user without settings, whose model is this one."""
    return course.reader(place / "rungs", sys.executable) | {
        "HOME": str(home), "USERPROFILE": str(home), "OPENAI_BASE_URL": model.base_url, "MODEL": "bench",
        "CONTEXT_WINDOW": str(WINDOW), "TERM": "dumb"}


def first_request(place, runs):
    """Median seconds from the start of the program in `place`/rungs to its first request."""
    seconds = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(dir=place) as folder, Recorder([], folder) as model:
            started = time.monotonic()
            subprocess.run(command(place, Path(folder), "hello"), env=environment(place, folder, model), timeout=60,
                           stdin=subprocess.DEVNULL, capture_output=True, check=True)
            seconds.append(model.arrivals[0] - started)
    return round(statistics.median(seconds), 2)


def versions(tip, quick):
    """{"versions": {name: {"tasks": {calls: see play}, "first_request": seconds}}, "prices", "measured"}"""
    line = course.chosen_line(tip)
    [project] = [commit for commit in line if commit.version == "v0.5"]
    prices = {name: models.prices(*place) for name, place in PROVIDERS.items()}
    found = {}
    chosen = line[-1:] if quick else line[1:]  # v0.0 is no agent
    for version in track(chosen, "versions", lambda version: version.version):
        with course.scratch() as program:
            course.unpack(version.id, program)
            compileall.compile_dir(program, quiet=2)
            place = program.parent
            found[version.version] = {
                "tasks": {str(calls): played(version, (*task, project), place, prices)
                          for calls, task in TASKS.items()},
                "first_request": first_request(place, 1 if quick else 3)}
    return {"versions": found, "prices": prices, "measured": measured()}


def rows(result):
    """-> (heads, rows of texts): tokens and costs in thousands."""
    heads, body = ["version"], []
    for calls in TASKS:
        heads += [f"{calls} calls: sent", "cost"]
    heads += [*list(result["prices"])[1:], "cached", "requests", "peak, MiB", "start, s"]  # of the last task
    for name, version in result["versions"].items():
        tasks = list(version["tasks"].values())
        row, last = [name], tasks[-1]
        for task in tasks:
            first, *others = task["cost"].values()
            row += [f"{task['sent'] / 1000:,.0f}", f"{first / 1000:,.1f}"]
        row += [*(f"{cost / 1000:,.1f}" for cost in others), f"{last['cached'] / last['sent']:.1%}",
                str(last["requests"]), str(last["peak_mib"]), f"{version['first_request']:.2f}"]
        body.append(row)
    return heads, body


def table(result):
    """The result as a Markdown table, which the READMEs carry between <!-- bench --> and <!-- /bench -->; without the
    time of the start, which is hardly the same twice."""
    heads, body = rows(result)
    lines = [line[:-1] for line in [heads, ["---", *["---:"] * (len(heads) - 1)], *body]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_versions(result):
    heads, body = rows(result)
    show("thousands of tokens; cost: at the cache prices of " + ", ".join(result["prices"]), heads, body)


def plot(result):
    """Tokens and costs of the longest job by version, as an SVG that is readable on a light and on a dark page."""
    tasks = {name: list(version["tasks"].values())[-1] for name, version in result["versions"].items()}
    calls, width = max(TASKS), 60 + 60 * len(tasks)
    costs = {name: [task["cost"][name] / 1000 for task in tasks.values()] for name in result["prices"]}
    size = f'width="{width}" height="440" viewBox="0 0 {width} 440" font-size="12"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
             "<style>text { font-family: sans-serif; fill: #555 }",
             "@media (prefers-color-scheme: dark) { text { fill: #bbb } }</style>",
             *panel(f"Tokens sent in a job of {calls} calls, thousands", list(tasks), 30,
                    {"": [task["sent"] / 1000 for task in tasks.values()]}),
             *panel("Its cost, in thousands of fresh input tokens", list(tasks), 250, costs), "</svg>"]
    return "\n".join(lines) + "\n"


def panel(title, names, top, series):
    """Bars, a group for each name, in a panel that begins at `top` and is 160 high."""
    highest, wide = max(max(values) for values in series.values()), 48 // len(series)
    yield f'<text x="20" y="{top - 8}" font-weight="bold">{title}</text>'
    for n, (name, values) in enumerate(series.items()):
        color = ("#4c8dd6", "#e0823d", "#4fa36b")[n]
        if name:
            yield f'<rect x="{20 + 110 * n}" y="{top + 2}" width="10" height="10" fill="{color}"/>'
            yield f'<text x="{34 + 110 * n}" y="{top + 12}">{name}</text>'
        for m, value in enumerate(values):
            high, x = round(120 * value / highest), 30 + 60 * m + wide * n
            yield f'<rect x="{x}" y="{top + 160 - high}" width="{wide - 1}" height="{high}" fill="{color}"/>'
            yield (f'<text x="{x + wide / 2:g}" y="{top + 156 - high}" font-size="{9 if name else 12}" '
                   f'text-anchor="middle">{value:,.0f}</text>')
    for m, name in enumerate(names):
        yield f'<text x="{54 + 60 * m}" y="{top + 176}" text-anchor="middle">{name}</text>'


# ---- overhead ----

# A value for each parameter that a rule for facts may look at, and what its tool returns: how it begins, and goes on.
ARGUMENTS = {"path": "src/module.py", "pattern": "def", "command": "python -m pytest", "query": "words",
             "url": "https://example.com/", "id_or_query": "r1", "action": "save", "note": "a note"}
SAMPLES = {"terminal": ("exit 0\n", "tests/test_module.py::test_function PASSED\n"),
           "search_files": ("", "src/module.py:12: def function(argument):\n"),
           "web_search": ("<web>\n", "1. A title\nhttps://example.com/page\nWhat it says.\n"),
           "web_read": ("<web>\n", "A paragraph of a page, with a few words in it.\n\n"),
           "write_file": ("created src/module.py (", "3 lines) "), "edit_file": ("edited src/module.py (", "line 3) ")}
CODE_LINE = "def function(argument):  # a line of code\n"
PARTS = "result", "fact", "mask", "view", "size"  # functions of memory.py; one may call another, and contain its time


def overhead(quick):
    """{"rounds": {messages: see loop_rounds}, "facts": {tool: {"ms", "exponent"}}, "save_ms", "start": {what: seconds},
    "measured"}. Rounds and facts are processor time, so that other work on the machine counts less; the rest is not."""
    result, here = {"measured": measured()}, os.getcwd()
    with course.scratch() as folder, patch.dict(os.environ, HOME=str(folder.parent)):
        (folder / "work").mkdir()
        os.chdir(folder / "work")
        try:
            parts = {"rounds": lambda: loop_rounds([10, 100, 1000] + [10_000] * (not quick)), "facts": fact_times,
                     "save_ms": save_time, "start": lambda: start_times(folder, 1 if quick else 3)}
            for name in track(list(parts), "overhead"):
                result[name] = parts[name]()
        finally:
            os.chdir(here)
    return result


def exponent(times):
    """{size: time} -> the slope of log time over log size, by least squares: 1 is linear, 2 quadratic."""
    sizes = [math.log(int(size)) for size in times]
    return round(statistics.linear_regression(sizes, [*map(math.log, times.values())]).slope, 2)


def loop_rounds(sizes):
    """A session with a model and tools that answer at once. A round is what lies between two replies: the results go
    into the log, room is made, the request is built and becomes JSON. From 1,000 messages on, only each 50th reply and
    the last ones are asked for: all would take minutes, and there is no sum of them then."""
    model = agent.Model({"OPENAI_BASE_URL": "http://localhost", "CONTEXT_WINDOW": str(WINDOW)}, None, False)
    spent, found, history = dict.fromkeys(PARTS, 0.0), {}, []

    def complete(messages, offered, stable=0):
        request = json.dumps({"messages": messages, "tools": offered}, ensure_ascii=False)
        model.usage = dict.fromkeys(["cached_tokens", "written_tokens", "completion_tokens"], 0)
        model.usage["prompt_tokens"] = len(request) // 4
        return reply(len(session.log)) if offered else {"content": "## Goal\n- what the user asked", "tool_calls": []}

    def timed(name, function):
        def measuring(*args, **options):
            started = time.process_time()
            try:
                return function(*args, **options)
            finally:
                spent[name] += time.process_time() - started
        return measuring

    with ExitStack() as stack:
        model.complete = complete
        stack.enter_context(patch.object(agent, "run", lambda call: call["id"] + "\n" + 40 * CODE_LINE))
        for module in (agent, memory):
            stack.enter_context(patch.object(module, "notice", lambda *_, **__: None))
        for name in PARTS:
            stack.enter_context(patch.object(memory, name, timed(name, getattr(memory, name))))
        session = agent.Agent(model)
        session.log.append({"role": "user", "content": "Read it all."})
        memory.fact("read_file", json.dumps(ARGUMENTS), "")  # what it imports at the first call counts for nothing
        message = session.ask()
        for size in sizes:
            while len(session.log) < size:
                earlier, started = dict(spent), time.process_time()
                session.step(message)
                message = reply(len(session.log))
                if size <= 1000 or len(session.log) % 100 == 0 or size - len(session.log) < 20:
                    message = session.ask()
                    seconds = time.process_time() - started
                    history.append((seconds, {name: spent[name] - earlier[name] for name in PARTS}))
            found[str(size)] = {
                "round_ms": milliseconds(seconds for seconds, _ in history[-9:]),
                "parts_ms": {name: milliseconds(parts[name] for _, parts in history[-9:]) for name in PARTS},
                "session_s": round(sum(seconds for seconds, _ in history), 4) if size <= 1000 else None,
                "sent": len(session.sent)}
    return found


def reply(n):
    """A model's message that reads another file with each n."""
    arguments = json.dumps({"path": f"src/module_{n % 97}.py", "offset": n + 1})
    function = {"name": "read_file", "arguments": arguments}
    return {"content": "", "tool_calls": [{"id": f"call_{n}", "function": function}], "finish_reason": "tool_calls"}


def milliseconds(seconds):
    return round(1000 * statistics.median(seconds), 3)


def fact_times():
    """How long the rules take for a result of 1 MiB, and how that grows."""
    found, arguments = {}, json.dumps(ARGUMENTS)
    for tool in [*memory.RULES, "any_tool"]:
        begin, line = SAMPLES.get(tool, ("", CODE_LINE))
        times = {}
        for size in (2**18, 2**20, 2**22):
            text = begin + line * (size // len(line))
            times[size] = min(duration(lambda: memory.fact(tool, arguments, text), time.process_time) for _ in range(7))
        found[tool] = {"ms": round(1000 * times[2**20], 3), "exponent": exponent(times)}
    return found


def duration(work, clock=time.perf_counter):
    started = clock()
    work()
    return clock() - started


def save_time():
    """Milliseconds to add a note to a file of 200."""
    note = {"note": "a" * 100, "when": "2026-01-01 00:00", "directory": "/project"}
    memory.change("project", lambda content: content["notes"].extend([note] * 200))
    return milliseconds(duration(lambda: memory.change("project", lambda content: content["notes"].append(note)))
                        for _ in range(9))


def start_times(folder, runs):
    """Median seconds until --help is printed, the prompt stands on a terminal, and -p sends its first request."""
    import pexpect

    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.json"), *ROOT.glob("skills/*/*")]:
        (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (folder / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    compileall.compile_dir(folder, quiet=2)
    program, place = [sys.executable, str(folder / "agent.py")], folder.parent

    def prompt():
        child = pexpect.spawn(program[0], program[1:], env=terminal, timeout=30)
        child.expect(r"\d% >")
        return child
    with Recorder([], folder) as model:
        env, seconds, children = environment(place, place, model), [], []
        terminal = env | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        for _ in range(runs):
            seconds.append(duration(lambda: children.append(prompt())))
            children[-1].close(force=True)
        helping = [duration(lambda: subprocess.run([*program, "--help"], env=env, capture_output=True, check=True))
                   for _ in range(runs)]
    return {"--help": round(statistics.median(helping), 2), "prompt": round(statistics.median(seconds), 2),
            "first request": first_request(place, runs)}


def show_overhead(result):
    body, smaller = [], None
    for size, row in result["rounds"].items():
        def growth(what):
            pair = smaller and {n: result["rounds"][n][what] for n in (smaller, size)}
            return f"{exponent(pair):.2f}" if pair and all(pair.values()) else "-"
        body.append([f"{int(size):,}", f"{row['sent']:,}", f"{row['round_ms']:.2f}", growth("round_ms"),
                     *(f"{row['parts_ms'][name]:.2f}" for name in PARTS),
                     f"{1000 * row['parts_ms']['view'] / row['sent']:.1f}",
                     f"{row['session_s']:.2f}" if row["session_s"] else "-", growth("session_s")])
        smaller = size
    show("a loop round, without model and tools: median milliseconds, and of these in functions of memory.py\n"
         "x: from the row above on, it grows as messages ** x",
         ["messages", "sent", "round", "x", *PARTS, "view, µs a message", "session, s", "x"], body)
    show("facts of a result of 1 MiB", ["tool", "ms", "grows as size ** x"],
         [[tool, f"{row['ms']:.3f}", str(row["exponent"])] for tool, row in result["facts"].items()])
    show("memory and start", ["what", "took"],
         [["memory.change", f"{result['save_ms']:.1f} ms"],
          *([what, f"{seconds:.2f} s"] for what, seconds in result["start"].items())])


# ---- real sessions ----

ALIASES = {"bash": "terminal", "execute_bash": "terminal", "run_commands": "terminal", "read": "read_file",
           "read_files": "read_file", "open": "read_file", "edit": "edit_file", "editor": "edit_file",
           "str_replace_editor": "edit_file", "write": "write_file", "create": "write_file"}  # by other agents
PRICES = [(read, write) for write in (1, 1.25) for read in (0.1, 0.25, 0.5, 1)]
USUAL = 64_000  # tokens, the window unless it is set; here it counts as never full
WORD = re.compile(r"[\w./:-]{12,}")  # long enough to have been read somewhere


def session_of(file):
    """A recorded session as the log that the agent would have of it."""
    log, calls = [], {}
    for line in file.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        if said["role"] == "tool":
            id = said["tool_call_id"]
            call = calls.get(id) or call_of({"id": id, "name": "unknown", "args": {}})
            text = "exit 0\n" * (call["function"]["name"] == "terminal") + (said["text"] or "")
            log.append(memory.result(log, call, text, USUAL))
        else:
            log.append({"role": said["role"], "content": said["text"] or ""})
            if said["tool_calls"]:
                log[-1]["tool_calls"] = [call_of(call) for call in said["tool_calls"]]
                calls |= {call["id"]: call for call in log[-1]["tool_calls"]}
    return log if log[0]["role"] == "system" else [{"role": "system", "content": agent.SYSTEM}, *log]


def call_of(call):
    name = ALIASES.get(call["name"], call["name"])
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": json.dumps(call["args"])}}


class Threshold:
    """What the versions from v0.6 to v1.0 do: archive when old results take a quarter of the window."""

    def is_due(self, waste, resend):
        return waste > USUAL / 4


class Always:
    def is_due(self, waste, resend):
        return True


class Session:
    """A recorded session and what each policy makes of it. `size`: tokens of each entry as it was, by its place;
    `requests`: the places of the model's messages; a request is all that stands before one."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        self.size = [memory.size([memory.shown(entry, USUAL)]) for entry in self.log]
        self.before = [0, *accumulate(self.size)]  # tokens before each place
        self.gain = [entry.get("gain", 0) for entry in self.log]
        self.requests = [n for n, entry in enumerate(self.log) if entry["role"] == "assistant"]

    def masks(self, rent):
        """What the program archives at each request: its own function is asked."""
        masks, mask = [], None
        for n in self.requests:
            log = self.log[:n] + [mask] * bool(mask)  # at the end, so that no place changes
            new = memory.mask(log, USUAL, 0, False, rent)
            if new and hasattr(rent, "paid"):
                rent.paid = 0
            mask = new or mask
            masks.append(new)
        return masks

    @cached_property
    def last_ten(self):
        """Another usual policy: all but the ten latest results are archived, with each request."""
        results = [n for n, gain in enumerate(self.gain) if gain > 0]
        sets = [frozenset([n for n in results if n < place][:-10]) for place in self.requests]
        return [{"archived": now, "ledger": ""} if now != before else None for before, now in pairwise([set(), *sets])]

    def costs(self, masks, read, write, in_task=False, charge=False):
        """Of each request, in tokens of fresh input. `in_task`: the ledger stands behind the user's message, instead of
        where it was written. `charge`: for each result that is needed again, a request with a recall of 15 lines."""
        archived, ledger, place, sent, recalled, costs = frozenset(), 0, None, 0, {}, []
        for n, mask in zip(self.requests, masks):
            same = sent
            if mask:
                first = min([*mask["archived"] - archived, n])
                first = min(first, place) if place and not in_task else first
                if mask["ledger"] and in_task:
                    first = min(first, max(m for m in range(n) if self.log[m]["role"] == "user"))
                same = self.before[first] - sum(self.gain[m] for m in archived if m < first)
                archived, recalled = mask["archived"], {}
                ledger, place = (memory.estimate(mask["ledger"]), n) if mask["ledger"] else (0, None)
            sent = self.before[n] - sum(self.gain[m] for m in archived) + ledger + sum(recalled.values())
            costs.append(read * min(same, sent) + write * (sent - min(same, sent)))
            for m, word in self.needed(n, archived).items() if charge else ():
                if m in recalled:
                    continue
                recalled[m] = self.slice_of(m, word)
                costs[-1] += read * sent + write * recalled[m]
                sent += recalled[m]
        return costs

    @cached_property
    def sources(self):
        """For each of the model's messages the words that it repeats, each with the places where it stood before."""
        places, sources = {}, {}
        for n, entry in enumerate(self.log):
            words = {*WORD.findall(f"{entry['content']} {entry.get('tool_calls', '')}")}
            if entry["role"] == "assistant":
                sources[n] = {word: places[word].copy() for word in words if word in places}
            for word in words:
                places.setdefault(word, []).append(n)
        return sources

    def needed(self, n, archived):
        """The archived results with a word in them that the model says next and could see nowhere else."""
        return {places[-1]: word for word, places in self.sources[n].items()
                if archived.issuperset(places) and word not in memory.told(self.log[places[-1]])}

    def slice_of(self, place, word):
        """Tokens of a recall of a result: the call and the 15 lines around a word."""
        lines = self.log[place]["content"].split("\n")
        hit = next((n for n, line in enumerate(lines) if word in line), 0)
        return 40 + memory.estimate("\n".join(line[:1000] for line in lines[max(0, hit - 7):hit + 8]))

    @cached_property
    def archivable(self):
        """All that is old at each request."""
        return [frozenset(mask["archived"]) if mask else frozenset() for n in self.requests
                for mask in [memory.mask(self.log[:n], USUAL, 0, False, Always())]]

    def optimum(self, read, write):
        """The least cost, for one who knows the whole session: dynamic programming over the requests at which all
        that is old then is archived."""
        known, sets = frozenset(), []
        for old in self.archivable:
            known |= old
            sets.append(known)
        saved = [sum(self.gain[m] for m in one) for one in sets] + [0]  # the last, as -1, for nothing archived yet
        best = {-1: write * self.before[self.requests[0]]}  # by the request at which was archived last
        for t, (before, n) in enumerate(pairwise(self.requests), 1):
            further = {}
            for s, cost in best.items():
                same, now = self.before[before] - saved[s], self.before[n] - saved[s]
                further[s] = min(further.get(s, math.inf), cost + read * same + write * (now - same))
                if new := sets[t] - (sets[s] if s >= 0 else frozenset()):
                    first = min(new)
                    kept = self.before[first] - sum(self.gain[m] for m in (sets[s] if s >= 0 else ()) if m < first)
                    now = self.before[n] - saved[t]
                    further[t] = min(further.get(t, math.inf), cost + read * kept + write * (now - kept))
            best = further
        return min(best.values())


def traces(folder, quick):
    """Play recorded sessions through the policies: {"sessions", "requests", "calls", "rows": one for each price,
    "adversary"}."""
    files = sorted(folder.glob("*.jsonl"))[::6 if quick else 1]
    if not files:
        raise course.Fault(f"there is no *.jsonl in {folder}")
    sessions = [Session(file.stem, session_of(file)) for file in track(files, "sessions", lambda file: file.stem)]
    rows = [row_of(sessions, *price) for price in track(PRICES[::3] if quick else PRICES, "prices")]
    return {"sessions": len(sessions), "requests": sum(len(one.requests) for one in sessions),
            "calls": sum("fact" in entry for one in sessions for entry in one.log), "rows": rows,
            "adversary": adversary(100 if quick else 2000), "measured": measured()}


def row_of(sessions, read, write):
    """What each policy costs at a price, as shares."""
    costs = {}
    for one in sessions:
        rent = one.masks(memory.Rent(read, write))
        policies = {"never": [None] * len(rent), "last ten": one.last_ten, "threshold": one.masks(Threshold()),
                    "rent": rent}
        found = {name: sum(one.costs(masks, read, write)) for name, masks in policies.items()}
        found |= {"rent, ledger in the task": sum(one.costs(rent, read, write, in_task=True)),
                  "rent, recalls charged": sum(one.costs(rent, read, write, charge=True)),
                  "optimum": one.optimum(read, write)}
        for name, cost in found.items():
            costs.setdefault(name, []).append(cost)
    never, best = costs["never"], costs["optimum"]
    return {"read": read, "write": write, "policies": {name: {
        "whole": sum(all) / sum(never), "worst": max(map(truediv, all, never)),
        "median to optimum": statistics.median(map(truediv, all, best)),
        "worst to optimum": max(map(truediv, all, best)),
        "worst session": sessions[max(range(len(all)), key=lambda n: all[n] / best[n])].name}
        for name, all in costs.items()}}


def rent_picture(session, read, write):
    """An SVG of the rent and of the price over a session: they meet, and all that is old is archived."""
    rent, mask, rents, prices = memory.Rent(read, write), None, [], []
    for n in session.requests:
        new = memory.mask(session.log[:n] + ([mask] if mask else []), USUAL, 0, False, rent)
        rents.append(rent.paid)
        prices.append(rent.due)
        rent.paid, rent.due, mask = (0, 0, new) if new else (rent.paid, rent.due, mask)
    most, last = max(rents + prices), len(rents)

    def line(values, color):
        points = [f"{40 + 640 * n / last:.0f},{280 - 220 * value / most:.0f}" for n, value in enumerate(values, 1)]
        return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>'

    words = [(60, 20, "#d9820f", f"due: {rent.patience:g} times what would be sent anew"),
             (60, 40, "#3b82f6", "rent: what could be archived, added up from request to request"),
             (520, 300, "#808080", f"{last} requests →"), (4, 65, "#808080", f"{most / 1000:.0f}k"),
             (12, 284, "#808080", "0")]
    return "\n".join(['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 310" font-family="sans-serif"',
                      ' font-size="13"><path d="M40 60V280H680" fill="none" stroke="#808080"/>',
                      line(prices, "#d9820f"), line(rents, "#3b82f6"),
                      *(f'<text x="{x}" y="{y}" fill="{color}">{text}</text>' for x, y, color, text in words),
                      "</svg>", ""])


def adversary(count):
    """Sessions that try to make the rule pay, by chance and by design, each ended after any of its requests. Returns
    the most that it ever paid, as a multiple of never archiving: {"sessions", "worst"}."""
    chance, worst = random.Random(1), 0
    for n in track(range(count), "adversary", lambda n: str(n) if n % 100 == 0 else "…"):
        read, write = chance.choice(PRICES)
        small, large = sorted(chance.choices([50, 300, 1_000, 5_000, 30_000], k=2))
        log = [{"role": "system", "content": "s" * 400}, {"role": "user", "content": "the task"}]
        for step in range(chance.randrange(8, 40)):
            # One long result and then short ones is the worst that can be planned: much to resend, little to gain.
            by_chance = chance.choices([small, large], k=chance.choice([1, 4]))
            sizes = [large if step == n % 7 else small] if n % 2 else by_chance
            calls = [call_of({"id": f"c{step}-{k}", "name": chance.choice(["read_file", "terminal", "write_file"]),
                              "args": {"path": "a.py", "command": "pytest"}}) for k in range(len(sizes))]
            log.append({"role": "assistant", "content": "w" * chance.choice([0, small]), "tool_calls": calls})
            log += [memory.result(log, call, "x" * size, USUAL) for call, size in zip(calls, sizes)]
            if chance.random() < 0.05:
                log.append({"role": "user", "content": "go on"})
        session = Session("adversary", log)
        paid = accumulate(session.costs(session.masks(memory.Rent(read, write)), read, write))
        never = accumulate(session.costs([None] * len(session.requests), read, write))
        worst = max(worst, *map(truediv, paid, never))
    return {"sessions": count, "worst": worst}


def show_traces(result):
    for row in result["rows"]:
        show(f"a token from the cache {row['read']:g}, another one {row['write']:g}",
             ["policy", "all sessions, to never", "worst", "median, to the optimum", "worst", "in"],
             [[name, f"{one['whole']:.3f}", f"{one['worst']:.3f}", f"{one['median to optimum']:.3f}",
               f"{one['worst to optimum']:.3f}", one["worst session"]] for name, one in row["policies"].items()])
    print("{sessions} sessions, {requests:,} requests, {calls:,} calls".format_map(result))
    print("an adversary, in {sessions:,} sessions, made the rule pay at most {worst:.2f} times what never to archive "
          "costs".format_map(result["adversary"]))


# ---- the command line ----


def measured():
    """How it was measured: what times and memory depend on."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "system": sys.platform,
            "date": time.strftime("%Y-%m-%d"), "window": WINDOW}


def track(items, what, name=str):
    """Yield the items; meanwhile a bar on stderr, or a line for each where no terminal is."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=len(items))
        for item in items:
            progress.update(task, description=f"{what}: {name(item)}")
            if not console.is_terminal:
                print(f"{what}: {name(item)}", file=sys.stderr, flush=True)
            yield item
            progress.advance(task)


def show(title, heads, body):
    grid = Table(*heads, title=title, title_justify="left")
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in body:
        grid.add_row(*row)
    console = Console()
    console = console if console.is_terminal else Console(width=200)  # into a file: nothing is cut
    console.print(grid)


def main(argv):
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1].strip(), description=__doc__.split("\n\n")[2])
    parser.add_argument("command", nargs="?", choices=["versions", "overhead", "traces", "picture"])
    parser.add_argument("path", nargs="?", type=Path, help="traces: the folder that has them; picture: one of them")
    parser.add_argument("--quick", action="store_true", help="less of each; versions: only the newest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--store", action="store_true", help="versions: write docs/bench.json and docs/bench.svg")
    parser.add_argument("--line", metavar="TIP", help="versions: of this line, not of the one that main publishes")
    args = parser.parse_args(argv)
    if (args.command in ("traces", "picture")) != bool(args.path):
        parser.error("traces and picture, and nothing else, need a path")
    if args.store and (args.quick or args.command not in (None, "versions")):
        parser.error("--store is for all versions, and not for --quick")

    result = {}
    if args.command in (None, "versions"):
        result["versions"] = versions(args.line, args.quick)
        show_versions(result["versions"])
    if args.command in (None, "overhead"):
        result["overhead"] = overhead(args.quick)
        show_overhead(result["overhead"])
    if args.command == "traces":
        result["traces"] = traces(args.path, args.quick)
        show_traces(result["traces"])
    if args.command == "picture":
        unknown = models.prices("", "")
        print(rent_picture(Session(args.path.stem, session_of(args.path)), unknown["read"], unknown["write"]), end="")
    if args.store:
        (ROOT / "docs").mkdir(exist_ok=True)
        save(ROOT / "docs/bench.json", dumps(result["versions"]))
        save(ROOT / "docs/bench.svg", plot(result["versions"]))
    if args.json:
        save(args.json, dumps(result))


def dumps(result):
    return json.dumps(result, ensure_ascii=False, indent=1) + "\n"


def save(path, text):
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (course.Fault, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"bench.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
