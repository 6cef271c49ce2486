"""The agent of main as a subprocess, in a home and an environment of its own, and servers that others have written."""
import compileall
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FORMATS = ["openai", "anthropic"]

# A job in the background ignores Ctrl-C, and so would every agent it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(repr=False)
class Run:
    code: int  # exit code
    out: str  # stdout
    err: str  # stderr
    debug: list  # what --debug FILE holds: {"request", "reply", "usage"} of each reply that arrived

    def __repr__(self):  # what a failed assertion shows
        return f"exit {self.code}\n{self.out}\n{self.err}"


class Agent:
    """`python agent.py` for a server of a format. What it may write is below `place`."""

    def __init__(self, program, place, format, url, key="any-key", **settings):
        self.program, self.work, self.home = program, place / "work", place / "home"
        for folder in (self.work, self.home):
            folder.mkdir(parents=True)
        kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TEMP", "TMPDIR") if name in os.environ}
        self.env = kept | settings | {
            f"{format.upper()}_BASE_URL": url, f"{format.upper()}_API_KEY": key, "HOME": str(self.home),
            "USERPROFILE": str(self.home), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
        self.log = place / "debug.json"

    def start(self, *arguments):
        command = [sys.executable, str(self.program / "agent.py"), "--debug", str(self.log), *arguments]
        return subprocess.Popen(command, cwd=self.work, env=self.env, encoding="utf-8", stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finish(self, child, input=""):
        try:
            out, err = child.communicate(input, timeout=90)
        finally:
            child.kill()
        assert "Traceback" not in err, err
        return Run(child.returncode, out, err, whole(self.log.read_text(encoding="utf-8")))

    def run(self, *arguments, input=""):
        """One run to its end. With an input, each line of it is a turn."""
        return self.finish(self.start(*arguments), input)


def whole(text):
    """The JSON values that stand one after the other in a text."""
    values, position = [], 0
    while text[position:].strip():
        value, position = json.JSONDecoder().raw_decode(text, position)
        values.append(value)
        position += len(text[position:]) - len(text[position:].lstrip())
    return values


def side_by_side(function, cases):
    """{case: what function(case) returned or raised}. Most of the time an agent waits for something."""
    def outcome(case):
        try:
            return function(case)
        except BaseException as error:  # it belongs to one test, not to all
            return error
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(cases, pool.map(outcome, cases)))


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """A compiled copy of the program, so that your own .env plays no part."""
    copy = tmp_path_factory.mktemp("program")
    for file in [*ROOT.glob("*.py"), ROOT / "prices.json"]:
        shutil.copy(file, copy)
    shutil.copytree(ROOT / "skills", copy / "skills")
    compileall.compile_dir(copy, quiet=2)
    return copy


@pytest.fixture(scope="session")
def agent(program, tmp_path_factory):
    """A factory: agent(format, url, key=..., SETTING=...) -> Agent."""
    return lambda *given, **settings: Agent(program, tmp_path_factory.mktemp("agent"), *given, **settings)
