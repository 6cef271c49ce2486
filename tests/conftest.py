"""Fixtures: a model for each test, both real SDKs to talk to it, and the agent, run the way a reader runs it.

No test uses a key or leaves this machine.
"""
import ast
import compileall
import ctypes
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import offline  # noqa: E402

import openai  # noqa: E402

PROMPT = r"(?:\n|\x1b\[\?2004h[^\r\n]*?)(?:plan|[A-Z]+) \d+% >"    # a fresh one: pastes are marked from there on
POSIX = os.name != "nt"
posix_only = pytest.mark.skipif(not POSIX, reason="needs a POSIX terminal, shell or file system")

compiled = tempfile.TemporaryDirectory()    # the program with its bytecode: compiling it for every test takes seconds
for file in [*ROOT.glob("*.py"), *ROOT.glob("prices.json")]:
    shutil.copy(file, compiled.name)
for folder in ROOT.glob("skills"):
    shutil.copytree(folder, Path(compiled.name, "skills"))
compileall.compile_dir(compiled.name, quiet=2)



def imported(file):
    """The names of the modules that a program imports, at once or later."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


# For `imitate` below: all of them, and what the SDK imports only when it is used.
for name in [name for file in ROOT.glob("*.py") for name in imported(file)]:
    importlib.import_module(name)
with offline.Server(["ok"]) as server:
    openai.OpenAI(api_key="any", base_url=server.base_url).chat.completions.create(
        model="any", messages=[{"role": "user", "content": "hi"}])

# A job in the background ignores Ctrl-C, and so would every agent it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def refused(requests):
    """What the judge found wrong with the requests: reasons."""
    return [request.error for request in requests if request.error]


def call(name, **arguments):
    """One tool call of a scripted reply."""
    return {"name": name, "arguments": json.dumps(arguments)}


def step(*calls):
    """A scripted reply that makes these calls, all at once."""
    return {"tool_calls": list(calls)}


@pytest.fixture
def model():
    """A factory: model(script=None, **options) -> offline.Server. What it made is closed at the end."""
    servers = []

    def make(script=None, **options):
        servers.append(offline.Server(script, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def openai_client():
    """openai_client(server) -> an OpenAI client that does not retry."""
    import openai
    client = openai.OpenAI(api_key="any", base_url="http://127.0.0.1", max_retries=0, timeout=10)
    return lambda server, **options: client.with_options(base_url=server.base_url, **options)


@pytest.fixture(scope="session")
def anthropic_client():
    """anthropic_client(server) -> an Anthropic client that does not retry."""
    import anthropic
    client = anthropic.Anthropic(api_key="any", base_url="http://127.0.0.1", max_retries=0, timeout=10)
    return lambda server, **options: client.with_options(base_url=server.root, **options)


@dataclass
class Run:
    code: int           # exit code
    out: str            # stdout
    err: str            # stderr
    requests: list      # what the model was sent, in order

    @property
    def results(self):
        """The tools' results, as the last request carried them to the model."""
        return results(self.requests[-1])


def results(request):
    """What the tools returned, without the fact before it; where the fact says it all, as the tool put it."""
    return [as_returned(message["content"]) for message in request.body["messages"] if message["role"] == "tool"]


def as_returned(content):
    fact, newline, text = content.partition("\n")
    said = re.fullmatch(r"(?s)\[r\d+\] \w+ (?:(.*) )?→ (FAIL: |(?:created|replaced|edited) (?=\())?(.*)", fact)
    if newline:
        return text
    return "Error: " + said[3] if said[2] == "FAIL: " else f"{said[2]}{said[1]} {said[3]}" if said[2] else said[3]


def snapshot(folder):
    """All that is below a folder: names, kinds and modes, and the bytes or where a link leads."""
    def inside(path):
        return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return {path.relative_to(folder).as_posix(): (path.lstat().st_mode, inside(path)) for path in folder.rglob("*")}


def wait_until(condition, seconds=30):
    for _ in range(20 * seconds):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never happened")


def imitate(arguments, env):
    """Do in a fork of this process what `python agent.py` would do, without importing the packages anew: of the hundreds
    of agents that the tests start, each would need half a second for it. PYTHONPATH names modules to be used instead."""
    os.closerange(3, 1000)      # one of them tells Popen that the child lives
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    encoding = env["PYTHONIOENCODING"]
    sys.stdin = open(0, encoding=encoding)
    sys.stdout = open(1, "w", encoding=encoding)
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest has loaded readline, in whose start a Ctrl-C gets lost; the program does without it.
    ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyOS_ReadlineFunctionPointer").value = None
    instead = [Path(name) for name in env.get("PYTHONPATH", "").split(os.pathsep) if name]
    sys.argv, sys.path = arguments, [os.path.dirname(arguments[0]), *map(str, instead), *sys.path]
    replaced = {file.stem for file in [*ROOT.glob("*.py"), *(file for folder in instead for file in folder.iterdir())]}
    for name in [name for name in sys.modules if name.partition(".")[0] in replaced]:
        del sys.modules[name]
    if "SSL_CERT_FILE" not in env:      # reading all certificates takes long, and nothing here needs one
        ssl.SSLContext.load_verify_locations = lambda *_, **__: None
    code = 1
    try:
        if "sitecustomize" in replaced:
            importlib.import_module("sitecustomize")
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:    # a second signal may strike at any moment: never back into pytest, whose files would be deleted
            os._exit(code)


class Agent:
    """`python agent.py` in a folder, a home and an environment of its own."""

    def __init__(self, place, model):
        self.model = model
        self.program, self.folder, self.home = place / "program", place / "work", place / "home"
        self.folder.mkdir()
        self.home.mkdir()
        shutil.copytree(compiled.name, self.program)    # a copy, so that your own .env plays no part
        ours = re.compile(r".*API_KEY.*|OPENAI_.*|ANTHROPIC_.*|MODEL|CONTEXT_WINDOW|.*_PROXY|SSL_CERT_.*|PYTHON.*|WEB_.*|TZ",
                          re.IGNORECASE)
        self.env = {name: value for name, value in os.environ.items() if not ours.match(name)}
        self.env |= {"HOME": str(self.home), "USERPROFILE": str(self.home), "NO_COLOR": "1", "TERM": "xterm",
                     "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.encoding = "utf-8"             # of the console
        self.format = "openai"              # of the server: whose base URL is set
        self.options = {}                   # of the server
        self.children = []

    def prepare(self, script, arguments):
        """Start the model; returns (server, command line, environment)."""
        server = self.model(script, **self.options)
        url = {"openai": server.base_url, "anthropic": server.root}[self.format]
        env = {f"{self.format.upper()}_BASE_URL": url, "PYTHONIOENCODING": self.encoding} | self.env
        return server, [sys.executable, str(self.program / "agent.py"), *arguments], env

    def instead(self, command, env):
        """What a new process does instead of starting the program anew, where a fork is safe."""
        return (lambda: imitate(command[1:], env)) if sys.platform == "linux" else None

    def start(self, script, *arguments):
        """The agent as a Popen with pipes, and its server."""
        server, command, env = self.prepare(script, arguments)
        child = subprocess.Popen(command, cwd=self.folder, env=env, encoding=self.encoding, stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=self.instead(command, env))
        self.children.append(child)
        return child, server

    def run(self, script, *arguments, input=""):
        """One run to its end, `input` piped in."""
        child, server = self.start(script, *arguments)
        out, err = child.communicate(input, timeout=60)
        assert "Traceback" not in err, err
        return Run(child.returncode, out, err, server.requests)

    def task(self, script, *arguments):
        """One run of `-p`; every request must be a valid one."""
        run = self.run(script, "-p", "do it", *arguments)
        assert refused(run.requests) == []
        return run

    def call(self, *calls):
        """Let the model make these calls in one reply; returns their results."""
        run = self.task([step(*calls), "done"], "--yes")
        assert (run.code, run.out) == (0, "done\n"), run.err
        return run.results

    def prompt(self, script, *arguments, columns=80):
        """The agent at a terminal, waiting at its prompt: a pexpect child to type into, and its server."""
        pexpect = pytest.importorskip("pexpect")
        server, command, env = self.prepare(script, arguments)
        child = pexpect.spawn(command[0], command[1:], cwd=str(self.folder), env=env, encoding="utf-8", timeout=20,
                              dimensions=(24, columns), preexec_fn=self.instead(command, env))
        self.children.append(child)
        child.expect(PROMPT)
        return child, server

    def close(self):
        for child in self.children:
            if isinstance(child, subprocess.Popen):
                child.kill()
                child.communicate()
            else:
                child.close(force=True)


@pytest.fixture
def agent(tmp_path, model):
    agent = Agent(tmp_path, model)
    yield agent
    agent.close()
