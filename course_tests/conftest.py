"""A toy course of three versions, made by git alone, and what a maintainer and a reader do with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COURSE = Path(__file__).resolve().parent.parent / "course.py"

AGENT = '''"""A toy."""

import os
import sys


def names():
    return sorted(name for name in os.listdir() if name.endswith(".md"))


if __name__ == "__main__":
    print("files:", *names())
    print("done in 0.1 s")
'''

README = """# Toy {version}

```console
$ python agent.py
files: README.md README.zh-CN.md
done in 7 ms
$ python -c "for i in range(9): print(i)"
0
…
8
```
"""

TEST_V00 = "def test_readme():\n    assert open('README.md', encoding='utf-8').read()\n"
TEST_V01 = "import agent\n\n\ndef test_names():\n    assert 'README.md' in agent.names()\n"
TEST_V02 = "import agent\n\n\ndef test_count():\n    assert agent.count() == 2\n"
COUNT = "\n\ndef count():\n    return len(names())\n"


def with_code(agent, code):
    return agent.replace("\n\nif __name__", code + "\n\nif __name__")


VERSIONS = {
    "v0.0": {"README.md": "# Toy v0.0\n", "tests/test_readme.py": TEST_V00,
             "requirements.in": "pytest\n", "requirements.txt": "pytest==9.2.0\n", ".gitignore": "*.log\n",
             # plugins that the toy does not need cost more time than its tests
             "pytest.ini": "[pytest]\naddopts = -p no:hypothesispytest -p no:anyio\n"},
    "v0.1": {"README.md": README.format(version="v0.1"), "agent.py": AGENT, "tests/test_agent.py": TEST_V01},
    "v0.2": {"README.md": README.format(version="v0.2"), "agent.py": with_code(AGENT, COUNT),
             "tests/test_count.py": TEST_V02},
}
NEXT = {"agent.py": with_code(VERSIONS["v0.2"]["agent.py"], COUNT.replace("count", "size")),  # a v0.3 that is right
        "tests/test_size.py": TEST_V02.replace("count", "size")}
FIX = {"tests/test_readme.py": TEST_V00 + "\n\n# a fix in the first version\n"}


class Repo:
    """A git work tree. All that its methods return is text; git's own failures are test failures."""

    def __init__(self, folder, env):
        self.folder, self.env = Path(folder), env

    def git(self, *args):
        done = subprocess.run(["git", *args], cwd=self.folder, env=self.env, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, f"git {args}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def course(self, *args, code=0):
        """Run course.py here; `code` is the exit code it must have."""
        done = subprocess.run([sys.executable, "course.py", *args], cwd=self.folder, env=self.env,
                              capture_output=True, encoding="utf-8")
        said = done.stdout + done.stderr
        assert done.returncode == code and "Traceback" not in said, f"course.py {args}: exit {done.returncode}\n{said}"
        return said

    def write(self, files):
        for path, text in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text, encoding="utf-8", newline="\n")

    def commit(self, message, files):
        self.write(files)
        self.git("add", "--", *files)
        self.git("commit", "-q", "-m", message)

    def version(self, name, files, trailer=True):
        """Commit a version. The Chinese README of the toy is the English one."""
        if "README.md" in files:
            files = {**files, "README.zh-CN.md": files["README.md"]}
        self.commit(f"{name}: idea of {name}" + f"\n\nVersion: {name}" * trailer, files)

    def clone(self, name, *options):
        copy = self.folder.parent / name
        self.git("clone", "-q", "-b", "main", "--single-branch", "--no-tags", *options, self.folder.as_uri(), str(copy))
        return Repo(copy, self.env)

    def on_line(self, name, files, trailer=True, start="line"):
        """Add a version to the line, from a work tree of its own, as main is checked out here."""
        with_line = Repo(self.folder.parent / "on-line", self.env)
        self.git("worktree", "add", "-q", "--detach", str(with_line.folder), start)
        with_line.version(name, files, trailer)
        self.git("branch", "-f", "line", with_line.git("rev-parse", "HEAD"))
        self.git("worktree", "remove", "--force", str(with_line.folder))

    def rewrite(self, old, files):
        """Put a change into the version at commit `old` and replay the later ones on it."""
        work = Repo(self.folder.parent / "rewriting", self.env)
        self.git("worktree", "add", "-q", "--detach", str(work.folder), old)
        work.write(files)
        work.git("add", "--", *files)
        work.git("commit", "-q", "--amend", "--no-edit")
        new, tip = work.git("rev-parse", "HEAD"), self.git("rev-parse", "line")
        work.git("rebase", "-q", "--onto", new, old, tip)
        self.git("branch", "-f", "line", work.git("rev-parse", "HEAD"))
        self.git("worktree", "remove", "--force", str(work.folder))

    def tags(self):
        """{tag: its commit}"""
        lines = self.git("for-each-ref", "refs/tags", "--format=%(refname:strip=2) %(objectname)").splitlines()
        return dict(line.split() for line in lines)


def toy(folder, env):
    """An unpublished line of v0.0 to v0.2, with the branch `line` checked out and main's own files lying about."""
    folder.mkdir(parents=True)
    repo = Repo(folder, env)
    repo.git("init", "-q", "-b", "line")
    for name, files in VERSIONS.items():
        repo.version(name, files)
    shutil.copy(COURSE, folder)
    repo.write({"docs/note.md": "main's own\n", "run.log": "ignored\n"})
    return repo


@pytest.fixture(scope="session")
def env(tmp_path_factory):
    """The same git for everybody, whatever the machine's configuration says."""
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER")
           for what, value in (("NAME", "Toy"), ("EMAIL", "toy@example.org"), ("DATE", "2024-01-01T00:00:00Z"))}
    home = str(tmp_path_factory.mktemp("home"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_"))}
    return {**clean, **who, "HOME": home, "USERPROFILE": home, "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull, "PYTHONUTF8": "1"}


@pytest.fixture(scope="session")
def templates(tmp_path_factory, env):
    """The toy before and after each publish, made once: tests get copies (with the results of check in .git)."""
    folder = tmp_path_factory.mktemp("templates")
    fresh = toy(folder / "fresh", env)
    fresh.course("check", "line")
    shutil.copytree(fresh.folder, folder / "published", symlinks=True)
    published = Repo(folder / "published", env)
    published.course("publish")
    shutil.copytree(published.folder, folder / "rewritten", symlinks=True)
    rewritten = Repo(folder / "rewritten", env)
    rewritten.rewrite(published.tags()["v0.0"], FIX)
    assert "edition 2: v0.0 to v0.2" in rewritten.course("publish")
    return folder


@pytest.fixture
def fresh(templates, tmp_path, env):
    """A line that was checked and not yet published."""
    return Repo(shutil.copytree(templates / "fresh", tmp_path / "course"), env)


@pytest.fixture
def published(templates, tmp_path, env):
    """A course whose main has published edition 1, v0.0 to v0.2."""
    return Repo(shutil.copytree(templates / "published", tmp_path / "course"), env)


@pytest.fixture
def rewritten(templates, tmp_path, env):
    """The same after a fix in v0.0: main has published edition 2 as well."""
    return Repo(shutil.copytree(templates / "rewritten", tmp_path / "again"), env)
