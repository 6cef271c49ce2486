"""The whole round of a course: build a line, publish it, read it, rewrite it, publish again; and what is refused."""

import os
import signal
import subprocess
import sys
import time

import pytest

import course
from conftest import NEXT, VERSIONS


def first_line_has(said, *words):
    """Errors are one line that says what to do."""
    last = said.strip().splitlines()[-1]
    assert last.startswith("course.py: ") and all(word in last for word in words), said


# publishing


def test_first_publish(published):
    main = published.git("log", "--format=%s%n%(trailers)", "-1", "main")
    assert "Edition 1: v0.0 to v0.2" in main and "Edition: 1" in main
    assert published.git("rev-parse", "main^@") == published.git("rev-parse", "line")  # one parent: the tip
    assert published.git("diff", "--name-status", "v0.2", "main").split() == ["A", "course.py", "A", "docs/note.md"]
    assert published.git("branch", "--show-current") == "main" and published.git("status", "--porcelain") == ""
    assert (published.folder / "run.log").exists() and set(published.tags()) == {"v0.0", "v0.1", "v0.2"}


def test_first_publish_from_an_unborn_main(fresh):
    fresh.git("switch", "-q", "--orphan", "main")
    fresh.git("add", "course.py")
    fresh.course("publish")
    assert fresh.git("diff", "--name-status", "v0.2", "main").split() == ["A", "course.py", "A", "docs/note.md"]
    assert fresh.git("status", "--porcelain") == "" and (fresh.folder / "agent.py").exists()


def test_first_publish_writes_over_nothing(fresh):
    fresh.write({"README.md": "changed\n"})
    first_line_has(fresh.course("publish", code=1), "commit or stash")
    fresh.git("checkout", "-q", "README.md")
    fresh.git("switch", "-q", "--orphan", "main")
    fresh.write({"agent.py": "mine\n"})
    first_line_has(fresh.course("publish", code=1), "agent.py", "move that away")
    assert (fresh.folder / "agent.py").read_text(encoding="utf-8") == "mine\n"


def test_main_goes_on_between_publishes(published):
    published.commit("notes on main", {"docs/more.md": "between publishes\n", "docs/note.md": "changed\n"})
    published.on_line("v0.3", NEXT)
    assert "edition 1: v0.0 to v0.3" in published.course("publish")  # the line only grew: the same edition
    added = published.git("diff", "--name-status", "v0.3", "main").split()
    assert added == ["A", "course.py", "A", "docs/more.md", "A", "docs/note.md"]
    assert (published.folder / "docs/note.md").read_text(encoding="utf-8") == "changed\n"
    assert "notes on main" in published.git("log", "--first-parent", "--format=%s", "main")
    assert published.course("list").splitlines()[-1].endswith("<- main")
    first_line_has(published.course("publish", code=1), "published already")


def test_a_new_edition_reaches_readers(published, rewritten):
    old, new = published.tags(), rewritten.tags()
    assert set(new) == set(old) and not set(new.values()) & set(old.values())
    former, tip = rewritten.git("rev-parse", "main^1", "main^2").split()
    assert tip == new["v0.2"] and former == published.git("rev-parse", "main")
    assert rewritten.git("diff", "--name-status", "v0.2", "main").split() == ["A", "course.py", "A", "docs/note.md"]

    reader = published.clone("reader")
    assert reader.tags() == {}
    reader.course("tags")
    assert reader.tags() == old
    reader.git("switch", "-q", "-c", "my", "v0.1")
    reader.commit("my work", {"mine.txt": "mine\n"})
    reader.git("switch", "-q", "main")

    reader.git("remote", "set-url", "origin", rewritten.folder.as_uri())
    reader.git("pull", "-q", "--ff-only", "--no-tags")
    said = reader.course("tags", "--all")
    assert "v0.1: moved to edition 2" in said
    assert reader.tags() == {**new, **{f"edition-1/{name}": commit for name, commit in old.items()}}
    assert "moved" not in reader.course("tags", "--all")

    reader.git("rebase", "-q", "--onto", "v0.1", "edition-1/v0.1", "my")  # the command that a README shows
    assert reader.git("diff", "--name-status", "v0.1", "my").split() == ["A", "mine.txt"]
    assert rewritten.clone("newcomer").course("tags", "--all").startswith("6 tags, edition 2")


def test_third_edition_drops_a_version(rewritten):
    rewritten.rewrite(rewritten.tags()["v0.1"], {"docs.txt": "new in v0.1\n"})
    said = rewritten.course("publish", "line~1")
    assert "edition 3: v0.0 to v0.1" in said and "v0.2: removed" in said
    rewritten.course("tags", "--all")
    tags = rewritten.tags()
    assert tags["edition-2/v0.0"] == tags["v0.0"] != tags["edition-1/v0.0"]
    assert len({tags["v0.1"], tags["edition-1/v0.1"], tags["edition-2/v0.1"]}) == 3 and "v0.2" not in tags


# what publish refuses


def test_work_tree_must_be_clean_and_on_main(published):
    published.on_line("v0.3", NEXT)
    published.write({"docs/note.md": "changed\n"})
    first_line_has(published.course("publish", code=1), "commit or stash")
    published.git("checkout", "-q", "docs/note.md")
    published.write({"untracked.txt": "\n"})
    first_line_has(published.course("publish", code=1), "commit or stash")
    (published.folder / "untracked.txt").unlink()
    published.git("switch", "-q", "-c", "other")
    first_line_has(published.course("publish", code=1), "git switch main")
    published.git("checkout", "-q", "--detach")
    first_line_has(published.course("publish", code=1), "git switch main")


def test_crooked_lines(published):
    before = published.git("rev-parse", "main")
    published.on_line("v0.3", NEXT, trailer=False)
    first_line_has(published.course("publish", code=1), "no trailer `Version: vX.Y`")
    published.on_line("v0.2", NEXT, start="v0.2")
    first_line_has(published.course("publish", code=1), "comes after v0.2")
    published.on_line("v0.03", NEXT, start="v0.2")
    first_line_has(published.course("publish", code=1), "no trailer")
    first_line_has(published.course("publish", "nowhere", code=1), "no branch or commit nowhere")
    first_line_has(published.course("publish", "v0.1", code=1), "published already")
    assert published.git("rev-parse", "main") == before


def test_merge_in_the_line(fresh):
    tree, tip = fresh.git("rev-parse", "line^{tree}", "line").split()
    merge = fresh.git("commit-tree", tree, "-p", tip, "-p", "line~1", "-m", "v0.3: a merge\n\nVersion: v0.3")
    first_line_has(fresh.course("publish", merge, code=1), "is a merge")


def test_line_must_begin_with_v00(fresh):
    root = fresh.git("commit-tree", "line^{tree}", "-m", "v0.1: late\n\nVersion: v0.1")
    first_line_has(fresh.course("publish", root, code=1), "that is v0.0")


@pytest.mark.parametrize("path", ["docs/note.md", "Docs/NOTE.md", "docs", "course.py/part.py"])
def test_collision_with_a_file_of_main(published, path):
    published.on_line("v0.3", {**NEXT, path: "the line's\n"})
    first_line_has(published.course("publish", code=1), "is main's own", "rename")


def test_main_changes_no_file_of_the_line(published):
    published.commit("edited in the wrong place", {"README.md": "# Mine\n"})
    published.on_line("v0.3", NEXT)
    first_line_has(published.course("publish", code=1), "main changes README.md")
    first_line_has(published.course("check", code=1), "main changes README.md")


def test_line_that_does_not_check(published):
    before = published.git("rev-parse", "main"), published.tags()
    published.on_line("v0.3", {**NEXT, "tests/test_size.py": "import agent\n\n\ndef test_size():\n    assert 0\n"})
    first_line_has(published.course("publish", code=1), "not published", "does not check")
    assert (published.git("rev-parse", "main"), published.tags()) == before
    assert published.git("status", "--porcelain") == ""


def test_main_of_the_remote_is_not_begun_again(published):
    reader = published.clone("reader")
    reader.git("fetch", "-q", "origin", "line:line")
    reader.git("checkout", "-q", "--detach")
    reader.git("branch", "-q", "-D", "main")
    first_line_has(reader.course("publish", code=1), "git switch main")


# tags


def test_clones_of_every_kind(published):
    published.commit("main goes on", {"docs/more.md": "\n"})
    reader = published.clone("reader")
    reader.git("checkout", "-q", "--detach")
    reader.course("tags")
    assert reader.tags() == published.tags()
    first_line_has(published.clone("shallow", "--depth=1").course("tags", code=1), "git fetch --unshallow")


def test_tags_and_branches_of_the_reader_stay(published):
    reader = published.clone("reader")
    reader.git("tag", "v0.1", "main")
    reader.git("tag", "-a", "-m", "annotated, but right", "v0.2", published.tags()["v0.2"])
    reader.git("branch", "v0.0", "main")
    said = reader.course("tags", code=1)
    assert "v0.1: left alone" in said and "v0.0: your branch" in said and "v0.2:" not in said
    assert reader.tags()["v0.1"] == reader.git("rev-parse", "main")


def test_nothing_published(fresh):
    first_line_has(fresh.course("tags", code=1), "nothing is published")
    assert [row.split()[0] for row in fresh.course("list", "line").splitlines()] == ["v0.0", "v0.1", "v0.2"]


def test_main_begun_by_hand(fresh):
    fresh.git("switch", "-q", "-c", "main")
    fresh.git("add", ".")
    fresh.git("commit", "-q", "-m", "by hand")
    first_line_has(fresh.course("publish", code=1), "git branch -m main old")


# check


def check_of(fresh, name, files, code=1):
    fresh.version(name, files)
    return fresh.course("check", "line", "--since", name, code=code)


def test_good_line(published):
    said = published.clone("reader").course("check")
    assert "v0.0 to v0.2: all is well" in said and said.count(" ok ") == 15
    assert "1 new" in said and "+2 -0 lines" in said
    assert published.course("check").count("as before") == 9


def test_new_test_must_fail_on_the_version_before(fresh):
    easy = "import pytest\n\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_easy(n):\n    assert n\n"
    said = check_of(fresh, "v0.3", {**NEXT, "tests/test_easy.py": easy})
    assert "tests/test_easy.py::test_easy[1]: new, but passed on v0.2" in said and "test_size" not in said


def test_new_case_of_an_old_test_is_new(fresh):
    case = "import pytest\n\n\n@pytest.mark.parametrize('n', [{}])\ndef test_easy(n):\n    assert n\n"
    fresh.version("v0.3", {**NEXT, "tests/test_easy.py": case.format("1")})
    said = check_of(fresh, "v0.4", {"tests/test_easy.py": case.format("1, 2")})
    assert "test_easy[2]: new, but passed on v0.3" in said and "test_easy[1]" not in said


def test_guard_is_accepted_with_a_reason(fresh):
    guard = "@pytest.mark.guard({})\ndef test_{}():\n    assert 1\n"
    tests = "\n\n".join(["import pytest\n", guard.format("'names stay'", "good"), guard.format("' '", "bad")])
    said = check_of(fresh, "v0.3", {**NEXT, "tests/test_guard.py": tests})
    assert "test_bad: guard needs a reason" in said and "3 new" in said and "1 fault (" in said


def test_skipped_test_proves_nothing(fresh):
    skip = "import agent, pytest\n\n\n@pytest.mark.skipif({}, reason='')\ndef test_it():\n    assert agent\n"
    never = {"tests/test_never.py": skip.format("True")}
    only_now = {"tests/test_now.py": skip.format("not hasattr(agent, 'size')")}
    said = check_of(fresh, "v0.3", {**NEXT, **never, **only_now})
    assert "test_never.py::test_it is new, but skipped here" in said
    assert "test_now.py::test_it: new, but skipped on v0.2" in said and "1 fault" in said


FORKS = """
import os
import tempfile

import pytest

kept = tempfile.TemporaryDirectory()


@pytest.mark.guard("of the course")
@pytest.mark.parametrize("leave", [KeyboardInterrupt, SystemExit, ValueError])
def test_fork(leave):
    child = os.fork()
    if not child:
        raise leave
    os.waitpid(child, 0)
    assert os.path.exists(kept.name)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_that_comes_back_to_pytest_goes_no_further(fresh):
    """It would run the tests that are left a second time, and then delete what the first process still needs."""
    said = check_of(fresh, "v0.3", {**NEXT, "tests/test_fork.py": FORKS}, code=0)
    assert "7 passed, 0 skipped; 4 new" in said


def test_failing_test_and_broken_agent(fresh):
    wrong = NEXT["tests/test_size.py"].replace("2", "3")
    said = check_of(fresh, "v0.3", {"agent.py": NEXT["agent.py"] + "    sys.exit(3)\n", "tests/test_size.py": wrong})
    assert "pytest: exit 1" in said and "--yes: exit 3" in said and "2 faults" in said


def test_transcripts(fresh):
    readme = VERSIONS["v0.2"]["README.md"].replace("files: README.md", "files: all")
    said = check_of(fresh, "v0.3", {**NEXT, "README.md": readme})
    assert "-files: all" in said and "+files: README.md README.zh-CN.md" in said and "1 fault" in said
    assert "something else: 1" in fresh.course("transcripts", code=1)


def test_transcripts_are_renewed(fresh):
    itself = "```console\n$ wc -l < README.md\n$ pwd\n$ printf '$ no\\n'\n```\n"  # renewing it makes it longer
    readme = VERSIONS["v0.2"]["README.md"].replace("files: README.md", "files: all") + "\n" + itself
    fresh.version("v0.3", {**NEXT, "README.md": readme})
    fresh.write({"README.zh-CN.md": readme.replace("# Toy", "# 玩具")})
    assert "something else: 0" in fresh.course("transcripts", "--write")
    text = (fresh.folder / "README.zh-CN.md").read_text(encoding="utf-8")
    assert "# 玩具" in text and "files: README.md README.zh-CN.md\ndone in" in text and "0\n…\n8\n" in text
    assert f"README.md\n{len(text.splitlines())}\n$ pwd\n~/rungs\n$ printf '$ no\\n'\n…\n```\n" in text
    fresh.git("commit", "-q", "-a", "--amend", "--no-edit")
    assert "all is well" in fresh.course("check", "line", "--since", "v0.3")


def test_chinese_readme_shows_the_same_code(fresh):
    fresh.commit("v0.3: x\n\nVersion: v0.3", {**NEXT, "README.zh-CN.md": "```console\n$ true\n```\n"})
    said = fresh.course("check", "line", "--since", "v0.3", code=1)
    assert "README.zh-CN.md differs from README.md in code block 1" in said


def test_budget(fresh):
    many = "".join(f"x{n} = {n}\n" for n in range(261))
    assert "adds 261 code lines, at most 260" in check_of(fresh, "v0.3", {"data.py": many})
    said = check_of(fresh, "v0.4", {"data.py": many.replace("x1 = 1\n", "x1 = 2\n")})
    assert "removes 1 code lines" in said


@pytest.mark.parametrize("lines, faults", [(150, "all is well"), (151, "1 fault")])
def test_median(fresh, lines, faults):
    """It counts from six versions on; v0.1 is not one of them."""
    for number in range(3, 8):
        files = {**NEXT, "data.py": "".join(f"x{n} = {n}\n" for n in range(lines * (number - 2)))}
        fresh.commit(f"v0.{number}: x\n\nVersion: v0.{number}", files)
    said = fresh.course("check", "line", "--since", "v0.7", code=lines > 150)
    assert f"median {lines} code lines" in said and faults in said


def test_pins(fresh):
    said = check_of(fresh, "v0.3", {**NEXT, "requirements.in": "pytest\nRich[extra]>=1  # why\n",
                                    "requirements.txt": "pytest==8.0 \\\n    --hash=sha256:0\nattrs>=1\n"})
    assert "attrs>=1 is not pinned" in said and "names rich, which has no pin" in said
    assert "pytest==9.2.0, but v0.3 has 8.0" in fresh.course("check", "line", "--since", "v0.1", code=1)


def test_versions_see_no_keys_no_home_and_no_main(fresh):
    spy = """import os


def test_size():
    import agent
    agent.size()
    assert not [name for name in os.environ if "KEY" in name] and not os.path.exists(".git")
    assert os.listdir(os.path.expanduser("~")) == ["rungs"]
    import pytest
    with pytest.raises(ImportError):
        import course
"""
    fresh.env = {**fresh.env, "OPENAI_API_KEY": "secret", "PYTEST_ADDOPTS": "--nonsense"}
    assert "all is well" in check_of(fresh, "v0.3", {**NEXT, "tests/test_size.py": spy}, code=0)
    first_line_has(fresh.course("check", "line", "--since", "v0.9", code=1), "there is no v0.9")


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interrupted_check_leaves_nothing(fresh, tmp_path):
    slow = "import time\n\n\ndef test_slow():\n    open('began', 'w')\n    time.sleep(60)\n"
    fresh.version("v0.3", {"tests/test_slow.py": slow})
    temp = tmp_path / "temp"
    temp.mkdir()
    process = subprocess.Popen([sys.executable, "course.py", "check", "line", "--since", "v0.3"], cwd=fresh.folder,
                               env={**fresh.env, "TMPDIR": str(temp)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # else deaf in some shells
    deadline = time.monotonic() + 30
    while not (began := list(temp.glob("*/home/rungs/began"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert b"Traceback" not in process.communicate(timeout=10)[0] and process.returncode == 130
    assert began and list(temp.glob("course-*")) == []


# the small rules


@pytest.mark.skipif(os.name == "nt", reason="bash")
def test_run_out_of_time_takes_its_children_along(tmp_path):
    code, output = course.run(["bash", "-c", "(sleep 2; touch late) & echo began; wait"], tmp_path, dict(os.environ), 0.5)
    assert code is None and output == "began\n"
    time.sleep(2)
    assert not (tmp_path / "late").exists()


def test_code_lines():
    source = ('"""Doc."""\n\n# why\nx = 1  # a note\n\n\ndef f():\n    """Two\n    lines."""\n'
              '    return """a\n\n# b"""\n\n\ndef g(): "doc"\n')
    assert course.code_lines(source) == ["x = 1", "def f():", '    return """a', '# b"""', 'def g(): "doc"']


def test_masks_and_any_lines():
    agrees = course.agrees
    assert agrees(["a", "took 0.3 s"], ["a", "took   12.5 s"]) and agrees(["12 ms"], ["1 min 3 s"])
    assert agrees(["a", "…", "z"], ["a", "b", "c", "z"]) and agrees(["a", "…"], ["a"]) and agrees(["…"], [""])
    assert not agrees(["a", "…", "z"], ["a", "b"])
    assert not agrees(["3 files"], ["4 files"]) and not agrees(["a.c"], ["abc"])


def test_fences():
    text = "1. x\n   ```console\n   $ a\n     b\n   ```\n~~~~ py\n```\n~~~\n~~~~\n``` not `a` fence\n"
    assert [(f.info, f.body) for f in course.fences(text)] == [("console", ["$ a", "  b"]), ("py", ["```", "~~~"])]
