"""search_files: a regular expression over the tree, without what .gitignore names, and without an end it cannot reach."""
import itertools
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import tools
from conftest import posix_only

SLOW = "a" * 60 + "!\n"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def put(path, content="needle\n"):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def search(pattern, **arguments):
    return tools.run("search_files", json.dumps({"pattern": pattern} | arguments))


def found(pattern="needle", **arguments):
    """The files with a hit."""
    lines = search(pattern, **arguments).splitlines()
    return [line.split(":")[0] for line in lines if line != "[no match]"]


def test_a_hit_is_path_line_and_text():
    put("b/c.py", "import re\n\n  def needle(x):  \n")
    put("a.txt", "Needle\nneedle 2\nneedle 3\n")
    assert search("needle") == "a.txt:2: needle 2\na.txt:3: needle 3\nb/c.py:3: def needle(x):"
    assert search(r"(?i)^needle\b(?! 3)") == "a.txt:1: Needle\na.txt:2: needle 2"
    assert search("no such thing") == "[no match]"


def test_the_path_is_a_folder_or_a_file():
    for path in ("a.txt", "a/a.txt", "a/b/a.txt", "ab/a.txt"):
        put(path)
    assert found(path="a") == ["a/a.txt", "a/b/a.txt"] and found(path="a/b/a.txt") == ["a/b/a.txt"]
    assert found() == found(path=os.getcwd()) and len(found()) == 4
    for path in ("nowhere", "..", "/", "~", ""):
        assert search("needle", path=path).startswith("Error: ")
    assert search("").startswith("Error: ")


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "(?P<n>", "a{2,1}"])
def test_an_invalid_expression_is_an_answer(pattern):
    put("a.txt")
    assert search(pattern).startswith("Error: ") and "position" in search(pattern)


IGNORED = {     # .gitignore files, files: each must be treated as git itself treats it
    "names": ({".gitignore": "*.log\n# needle\n\n/top.txt\n"}, "a.log b/a.log top.txt b/top.txt a.txt"),
    "folders": ({".gitignore": "build/\nnode_modules\ndoc/*.txt\n**/cache/**\n"},
                "build/a c/build/a node_modules/a/b doc/a.txt doc/b/a.txt x/cache/a build.txt"),
    "negated": ({".gitignore": "*.log\n!keep.log\nout/*\n!out/a\n"}, "a.log keep.log b/keep.log out/a out/b"),
    "nested": ({"b/.gitignore": "*.txt\n/c/\n"}, "a.txt b/a.txt b/d/a.txt b/c/a b/d/c/a c/a"),
    "nested negated": ({".gitignore": "*.log\n", "b/.gitignore": "!keep.log\n"}, "keep.log b/keep.log b/a.log b/c/keep.log"),
    "nested, folder gone": ({".gitignore": "b/\n", "b/.gitignore": "!a\n"}, "b/a a"),
    "odd lines": ({".gitignore": "!\n/\n*.log\n"}, "a.log a.txt"),
    "no text": ({".gitignore": b"\xff\xfe\n*.log\r\n"}, "a.log a.txt"),
    "a BOM": ({".gitignore": b"\xef\xbb\xbf*.log\n"}, "a.log a.txt")}


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("files", IGNORED.values(), ids=IGNORED.keys())
def test_gitignore_means_what_git_says(files):
    ignoring, names = files
    for name, text in ignoring.items():
        put(name, text)
    for name in names.split():
        put(name)
    subprocess.run(["git", "init", "-q"], check=True)
    git = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], encoding="utf-8", stdout=subprocess.PIPE)
    wanted = sorted(name for name in git.stdout.splitlines() if ".gitignore" not in name)
    assert sorted(name for name in found() if ".gitignore" not in name) == wanted != sorted(names.split())


def test_git_itself_is_not_searched():
    put(".git/config")
    put("sub/.git", "needle: elsewhere\n")
    put(".github/a.yml")
    assert found() == [".github/a.yml"]


def test_files_of_all_kinds():
    """GBK and UTF-16 are text; what is binary is passed over, and nothing keeps the others from being found."""
    put("binary", b"needle\0\xff")
    put("gbk.txt", "价格 needle\n".encode("gbk"))
    put("utf16.txt", "价格 needle\n".encode("utf-16"))
    put("odd.txt", b"needle \xff\xff\xfe\n")
    put("empty.txt", "")
    put("z.txt", "\ufeff价格 needle\r\n")
    assert found() == ["gbk.txt", "odd.txt", "utf16.txt", "z.txt"] and found("价格 needle$") == [
        "gbk.txt", "utf16.txt", "z.txt"]


@posix_only
def test_links_are_not_followed_and_pipes_not_waited_for(project):
    put(project.parent / "outside" / "a.txt")
    put("a/b.txt")
    Path("out").symlink_to("../outside")
    Path("to_key").symlink_to("../outside/a.txt")
    Path("a/loop").symlink_to(".")
    os.mkfifo("pipe")
    os.mkfifo("a/.gitignore")
    assert found() == ["a/b.txt"] and search("needle", path="out").startswith("Error: ")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user who may not read everything")
def test_a_folder_that_cannot_be_read_is_passed_over():
    put("a/b.txt")
    put("z.txt")
    os.chmod("a", 0)
    try:
        assert found() == ["z.txt"]
    finally:
        os.chmod("a", 0o700)


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"^(a|a)*$", r"(a|aa)+$", r"^(\w+\s?)*$"])
def test_a_catastrophic_expression_ends(monkeypatch, pattern):
    """The clock runs fast here: 20 s are over in no time. What was found until then is not lost."""
    put("a.txt", "a\n")
    put("b.txt", SLOW * 3)
    monkeypatch.setattr(tools, "time", SimpleNamespace(monotonic=itertools.count(0, 19.7 / 2).__next__))
    answer = []
    thread = threading.Thread(target=lambda: answer.append(search(pattern)), daemon=True)
    thread.start()
    thread.join(60)
    assert answer and answer[0].startswith("a.txt:1: a")
    assert answer[0] == "a.txt:1: a" or answer[0].splitlines()[-1].startswith("[stopped")


def test_many_hits_are_cut_and_it_is_said():
    put("a.txt", "needle\n" * 150)
    put("b.txt", "needle\n" * 5000)
    put("c.txt", "needle " * 100_000)
    *hits, last = search("needle").splitlines()
    assert len(hits) == 200 and "more" in last and last.startswith("[") and len(search("needle", path="c.txt")) < 1000
    assert search("needle", path="a.txt").count("\n") == 149


def test_its_line_numbers_are_those_of_read_file():
    """A form feed or Unicode's own line separator begins no line there."""
    put("a.txt", "one\x0c\ntwo\u2028 \x85 \x1c\nneedle\n")
    number = int(search("needle").split(":")[1])
    assert tools.run("read_file", json.dumps({"path": "a.txt", "offset": number})) == "needle"
