"""read_file, write_file, edit_file and list_dir: exact to the byte, and never outside the working directory."""
import os
import re
import sys

import pytest
from conftest import POSIX, call, posix_only, results, step

REPLACED = "�".encode()     # what a lenient decoder leaves behind in place of bytes it cannot read


def write(agent, **files):
    """write(agent, a_txt=b"...") makes a.txt."""
    for name, data in files.items():
        (agent.folder / name.replace("_", ".")).write_bytes(data)


def read(agent, name):
    return (agent.folder / name).read_bytes()


def names(agent):
    return sorted(path.relative_to(agent.folder).as_posix() for path in agent.folder.rglob("*"))


# Reading

def test_read_shows_lines_as_they_are_and_numbers_every_tenth(agent):
    write(agent, a_txt="".join(f"line {n}\n" for n in range(1, 13)).encode(), b_txt=b"\tone\r\n  two  ", c_txt=b"",
          d_txt="\ufeff开头\n".encode())
    twelve, crlf, empty, bom = agent.call(*(call("read_file", path=f"{name}.txt") for name in "abcd"))
    assert twelve.splitlines() == [f"line {n}" for n in range(1, 10)] + ["10|line 10", "line 11", "line 12"]
    assert crlf.splitlines() == ["\tone", "  two  "]
    assert empty == "[empty file]"
    assert bom.rstrip("\n") == "开头"


def test_a_long_file_is_read_in_parts(agent):
    write(agent, a_txt=b"".join(b"%d\n" % n for n in range(1, 100_001)))
    start, middle, end, beyond, nowhere = agent.call(
        call("read_file", path="a.txt"), call("read_file", path="a.txt", offset=2001, limit=3),
        call("read_file", path="a.txt", offset=99_999), call("read_file", path="a.txt", offset=100_001),
        call("read_file", path="a.txt", offset=0))
    assert start.splitlines()[-2:] == ["2000|2000", "[lines 1-2000 of 100000; go on with offset=2001]"]
    assert middle.splitlines() == ["2001", "2002", "2003", "[lines 2001-2003 of 100000; go on with offset=2004]"]
    assert end.splitlines()[:2] == ["99999", "100000|100000"] and "go on" not in end
    assert beyond.startswith("Error: ") and "100,000" in beyond.replace("100000", "100,000")
    assert nowhere.startswith("Error: ")


def test_what_is_no_text_file_is_named(agent):
    write(agent, image_png=b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(1_000))
    (agent.folder / "src").mkdir()
    binary, folder, missing, nul = agent.call(*(
        call("read_file", path=path) for path in ("image.png", "src", "imagen.png", "a\0b")))
    assert binary.startswith("Error: ") and "binary" in binary and re.search(r"1[,.]?016", binary)
    for error, path in ((folder, "src"), (missing, "imagen.png")):
        assert error.startswith("Error: ") and path in error
    assert nul.startswith("Error: ")


@posix_only
def test_a_named_pipe_is_no_file_to_wait_for(agent):
    os.mkfifo(agent.folder / "pipe")
    for error in agent.call(call("read_file", path="pipe"), call("write_file", path="pipe", content="x"),
                            call("edit_file", path="pipe", old_text="x", new_text="y")):
        assert error.startswith("Error: ")


# Encodings

def test_gbk_file_keeps_its_bytes(agent):
    write(agent, calc_py="# 计算\ntotal = 1\nname = '价格'\n".encode("gbk"))
    shown, edited, refused = agent.call(
        call("read_file", path="calc.py"),
        call("edit_file", path="calc.py", old_text="total = 1", new_text="total = 2"),
        call("edit_file", path="calc.py", old_text="total = 2", new_text="total = 3  # ✅"))
    assert shown.splitlines()[0] == "[encoding: gbk]" and "计算" in shown and "价格" in shown
    assert edited == "edited calc.py (line 2)"
    assert refused.startswith("Error: ") and "gbk" in refused
    assert read(agent, "calc.py") == "# 计算\ntotal = 2\nname = '价格'\n".encode("gbk")


OTHER_BYTES = {     # name: around the edit
    "big5": "標題".encode("big5"),
    "shift_jis": "日本語テスト".encode("shift_jis"),
    "latin1": "café, déjà vu".encode("latin-1"),
    "torn": "完成".encode()[:-1] + b" and \xff\xfe and \xf0\x9f",
    "utf8_and_gbk": "完成 ".encode() + "完成".encode("gbk"),
    "bom": "\ufeff完成".encode(),
    "separators": "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g".encode(),      # str.splitlines() would cut here
}


def test_an_edit_changes_no_other_byte_in_any_encoding(agent):
    """Or it is refused and changes nothing; there is no third way."""
    for name, data in OTHER_BYTES.items():
        (agent.folder / name).write_bytes(data + b"\ntotal = 1\n" + data)
    calls = [(call("read_file", path=name), call("edit_file", path=name, old_text="total = 1", new_text="total = 2"))
             for name in OTHER_BYTES]
    answers = agent.call(*(one for pair in calls for one in pair))
    for name, shown, edited in zip(OTHER_BYTES, answers[::2], answers[1::2], strict=True):
        after = b"1" if edited.startswith("Error: ") else b"2"
        assert read(agent, name) == OTHER_BYTES[name] + b"\ntotal = " + after + b"\n" + OTHER_BYTES[name], name
        assert "�" not in shown
    assert r"\xff\xfe" in answers[2 * list(OTHER_BYTES).index("torn")]
    assert sum(answer == "edited " + name + " (line 2)" for name, answer in zip(OTHER_BYTES, answers[1::2])) >= 3


def test_replacing_a_file_keeps_its_encoding_bom_and_newlines(agent):
    write(agent, gbk_txt="价格\r\n旧\r\n".encode("gbk"), bom_txt="\ufeffold\r\n".encode(), lf_txt=b"old\n")
    gbk, bom, lf, refused = agent.call(
        call("write_file", path="gbk.txt", content="新\n价\n"), call("write_file", path="bom.txt", content="new\n"),
        call("write_file", path="lf.txt", content="新\n"), call("write_file", path="gbk.txt", content="🐍\n"))
    assert (gbk, bom, lf) == ("replaced gbk.txt (2 lines)", "replaced bom.txt (1 line)", "replaced lf.txt (1 line)")
    assert refused.startswith("Error: ")
    assert read(agent, "gbk.txt") == "新\r\n价\r\n".encode("gbk")
    assert read(agent, "bom.txt") == "\ufeffnew\r\n".encode()
    assert read(agent, "lf.txt") == "新\n".encode()


# Writing

def test_write_makes_folders_and_says_what_it_did(agent):
    made, again, nothing, absolute = agent.call(
        call("write_file", path="notes/deep/a.txt", content="一\ntwo\n✅"),
        call("write_file", path="notes/deep/a.txt", content="one\n"),
        call("write_file", path="empty", content=""),
        call("write_file", path=str(agent.folder / "src" / ".." / "b.txt"), content="one\n"))
    assert made == "created notes/deep/a.txt (3 lines)"
    assert again == "replaced notes/deep/a.txt (1 line)"
    assert nothing == "created empty (0 lines)" and absolute.startswith("created ")
    assert [read(agent, name) for name in ("notes/deep/a.txt", "empty", "b.txt")] == [b"one\n", b"", b"one\n"]


def test_a_new_or_empty_file_gets_the_content_as_it_is(agent):
    """There are no newlines yet whose style would have to be kept."""
    write(agent, empty_txt=b"")
    contents = {"new.txt": "a\r\nb\nc\n", "empty.txt": "a\r\nb\r\n", "old_mac.txt": "a\rb\r"}
    agent.call(*(call("write_file", path=path, content=content) for path, content in contents.items()))
    for path, content in contents.items():
        assert (agent.folder / path).read_bytes() == content.encode("utf-8")


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(agent):
    write(agent, a_txt=b"a\n")
    (agent.folder / "src").mkdir()
    for path, error in zip(paths := ["src", "a.txt/b", "x" * 300, ".", "nul\0"],
                           agent.call(*(call("write_file", path=path, content="x") for path in paths)), strict=True):
        assert error.startswith("Error: "), path
    assert names(agent) == ["a.txt", "src"] and read(agent, "a.txt") == b"a\n"


@posix_only
def test_files_keep_their_mode_and_links_stay_links(agent):
    write(agent, run_sh=b"#!/bin/sh\necho 1\n", real_txt=b"1\n")
    (agent.folder / "run.sh").chmod(0o754)
    (agent.folder / "link.txt").symlink_to("real.txt")
    agent.call(call("edit_file", path="run.sh", old_text="echo 1", new_text="echo 2"),
               call("write_file", path="link.txt", content="2\n"))
    assert (agent.folder / "run.sh").stat().st_mode & 0o777 == 0o754
    assert read(agent, "run.sh") == b"#!/bin/sh\necho 2\n"
    assert (agent.folder / "link.txt").is_symlink() and read(agent, "real.txt") == b"2\n"
    assert names(agent) == ["link.txt", "real.txt", "run.sh"]      # no temporary file stays


# Editing

def test_an_edit_keeps_the_newlines_of_the_file(agent):
    write(agent, a_ts=b"const a = 1;\r\nconst b = 2;\r\nconst c = 3;\r\n", lf_py=b"x = 1\ny = 2\n",
          mixed_txt=b"x\r\ny\nz\r\n", more_txt=b"a\r\nb\r\n", end_txt=b"a\r\nlast")
    agent_says = agent.call(
        call("edit_file", path="a.ts", old_text="const b = 2;\nconst c = 3;", new_text="const b = 20;\nconst c = 30;"),
        call("edit_file", path="lf.py", old_text="y = 2", new_text="y = 3"),
        call("edit_file", path="mixed.txt", old_text="y", new_text="Y"),
        call("edit_file", path="more.txt", old_text="a", new_text="1\n2"),
        call("edit_file", path="end.txt", old_text="a\nlast", new_text="a\nb\nlast"))
    assert agent_says == ["edited a.ts (line 2)", "edited lf.py (line 2)", "edited mixed.txt (line 2)",
                          "edited more.txt (line 1)", "edited end.txt (line 1)"]
    assert read(agent, "a.ts") == b"const a = 1;\r\nconst b = 20;\r\nconst c = 30;\r\n"
    assert read(agent, "lf.py") == b"x = 1\ny = 3\n"
    assert read(agent, "mixed.txt") == b"x\r\nY\nz\r\n"
    assert read(agent, "more.txt") == b"1\r\n2\r\nb\r\n"
    assert read(agent, "end.txt") == b"a\r\nb\r\nlast"


def test_empty_old_text_is_an_error_not_a_place(agent):
    """A model that wants to append sends it; nothing may be wiped, or sprayed through the file."""
    write(agent, notes_md=b"abc\n", nothing_md=b"")
    for error in agent.call(call("edit_file", path="notes.md", old_text="", new_text="X"),
                            call("edit_file", path="notes.md", old_text="", new_text="X", replace_all=True),
                            call("edit_file", path="nothing.md", old_text="", new_text="X"),
                            call("edit_file", path="new.md", old_text="", new_text="hi\n")):
        assert error.startswith("Error: ") and "old_text" in error
    assert read(agent, "notes.md") == b"abc\n" and read(agent, "nothing.md") == b""
    assert names(agent) == ["notes.md", "nothing.md"]


def test_an_edit_needs_exactly_one_place(agent):
    write(agent, a_txt=b"x = 1\ny = 2\nx = 1\n", b_txt=b"a.c\nabc\n", c_txt=b"aaa\n")
    none, several, pattern, overlap = agent.call(
        call("edit_file", path="a.txt", old_text="z = 1", new_text="z"),
        call("edit_file", path="a.txt", old_text="x = 1", new_text="z"),
        call("edit_file", path="b.txt", old_text="a.c", new_text=r"\1\g<0>"),
        call("edit_file", path="c.txt", old_text="aa", new_text="b"))
    assert none.startswith("Error: ") and "a.txt" in none
    assert several.startswith("Error: ") and re.search(r"\b2\b.*\b1, 3\b", several)
    assert pattern == "edited b.txt (line 1)"               # text, not a regular expression
    assert overlap.startswith("Error: ")
    assert read(agent, "a.txt") == b"x = 1\ny = 2\nx = 1\n"
    assert read(agent, "b.txt") == rb"\1\g<0>" + b"\nabc\n" and read(agent, "c.txt") == b"aaa\n"


# Somebody else changes a file

def test_a_file_changed_since_it_was_read_is_not_overwritten(agent):
    """Not even if size and time are the same: an editor, a formatter or the user was here in between."""
    write(agent, a_txt=b"one\n", b_txt=b"one\n", c_txt=b"one\n", meddle_py=(
        b"import os\nfor name in 'abc':\n    path = name + '.txt'\n    stat = os.stat(path)\n"
        b"    open(path, 'w').write('two\\n')\n    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))\n"))
    *_, edit, replace, unread, _, again = agent.call(
        call("read_file", path="a.txt"), call("read_file", path="b.txt"),
        call("terminal", command=f'"{sys.executable}" meddle.py'),
        call("edit_file", path="a.txt", old_text="o", new_text="0"),
        call("write_file", path="b.txt", content="three\n"),
        call("write_file", path="c.txt", content="three\n"),        # never read: nothing to be out of date
        call("read_file", path="a.txt"),
        call("edit_file", path="a.txt", old_text="o", new_text="0"))
    for error in (edit, replace):
        assert error.startswith("Error: ") and "read it again" in error
    assert (unread, again) == ("replaced c.txt (1 line)", "edited a.txt (line 1)")
    assert [read(agent, f"{name}.txt") for name in "abc"] == [b"tw0\n", b"two\n", b"three\n"]


# Staying inside

@pytest.fixture
def outside(agent):
    """A folder beside the working directory, with a file in it that nobody may read or change."""
    folder = agent.folder.parent / "work-secret"    # its name starts like the working directory's
    folder.mkdir()
    (folder / "key.txt").write_text("hunter2\n", encoding="utf-8")
    return folder


def refused_everywhere(agent, paths):
    calls = [one for path in paths for one in (
        call("read_file", path=path), call("write_file", path=path, content="x"),
        call("edit_file", path=path, old_text="hunter2", new_text="x"), call("list_dir", path=path))]
    for one, answer in zip(calls, agent.call(*calls), strict=True):
        assert answer.startswith("Error: ") and "hunter2" not in answer, one


def test_paths_that_lead_outside_are_refused(agent, outside):
    (agent.folder / "src").mkdir()
    refused_everywhere(agent, ["../work-secret/key.txt", "src/../../work-secret/key.txt", str(outside / "key.txt"),
                               "../work-secret/new.txt", "~/new.txt", "../work-secret"])
    assert [path.name for path in outside.iterdir()] == ["key.txt"]
    assert (outside / "key.txt").read_text(encoding="utf-8") == "hunter2\n"
    assert list(agent.home.iterdir()) == []


@posix_only
def test_links_that_lead_outside_are_refused(agent, outside):
    (agent.folder / "file").symlink_to(outside / "key.txt")
    (agent.folder / "dangling").symlink_to(outside / "new.txt")
    (agent.folder / "folder").symlink_to("../work-secret")
    (agent.folder / "chain").symlink_to("folder/key.txt")
    (agent.folder / "loop").symlink_to("loop")
    refused_everywhere(agent, ["file", "dangling", "folder/key.txt", "folder/new.txt", "chain", "loop", "folder"])
    assert [path.name for path in outside.iterdir()] == ["key.txt"]
    assert (outside / "key.txt").read_text(encoding="utf-8") == "hunter2\n"


PROTECTED = [".git/config", ".GIT/hooks/pre-commit", "lib/.git/config", ".rungs/tools/x.py", ".env", "sub/.Env",
             "AGENTS.md", "agents.MD", "src/../.git/config"]


def test_files_that_steer_others_are_not_written_unasked(agent):
    """With nobody to ask and no --yes they are refused; reading them is fine, and so are names that only look alike."""
    (agent.folder / ".git").mkdir()
    (agent.folder / ".git" / "config").write_bytes(b"[core]\n")
    calls = [call("write_file", path=path, content="x") for path in PROTECTED]
    calls += [call("edit_file", path=".git/config", old_text="core", new_text="x"),
              call("read_file", path=".git/config"),
              call("write_file", path=".gitignore", content="x"), call("write_file", path="env", content="x")]
    run = agent.task([{"tool_calls": calls}, "done"])
    *errors, shown, ignore, env = run.results
    for path, error in zip(PROTECTED + [".git/config"], errors, strict=True):
        assert error.startswith("Error: "), path
    assert shown == "[core]" and ignore.startswith("created ") and env.startswith("created ")
    assert names(agent) == [".git", ".git/config", ".gitignore", "env"]
    assert read(agent, ".git/config") == b"[core]\n"


@posix_only
def test_a_link_to_a_protected_folder_is_no_way_around(agent):
    (agent.folder / ".git").mkdir()
    (agent.folder / "innocent").symlink_to(".git")
    run = agent.task([step(call("write_file", path="innocent/config", content="x")), "done"])
    assert run.results[0].startswith("Error: ") and names(agent) == [".git", "innocent"]


@posix_only
def test_a_person_may_allow_it(agent):
    paths = {"AGENTS.md": "put it into docs", ".env": "", "sub/AGENTS.md": "y"}
    child, server = agent.prompt([step(*(call("write_file", path=path, content="x") for path in paths)), "I see."])
    child.sendline("go")
    for path, answer in paths.items():
        child.expect(f"{path}.*\\[y/N")
        child.sendline(answer)
    child.expect("I see.")
    refused, again, written = results(server.requests[1])
    assert "put it into docs" in refused and again.startswith("Error: ") and written.startswith("created ")
    assert names(agent) == ["sub", "sub/AGENTS.md"]


# Listing

def test_list_shows_folders_and_sizes_in_order(agent):
    write(agent, b_txt=b"12345", a_txt=b"")
    (agent.folder / "src").mkdir()
    (agent.folder / "空 白").mkdir()
    listing, empty, file, missing = agent.call(
        call("list_dir"), *(call("list_dir", path=path) for path in ("src", "a.txt", "nowhere")))
    assert [line.split() for line in listing.splitlines()] == [["a.txt", "0"], ["b.txt", "5"], ["src/"], ["空", "白/"]]
    assert empty and not empty.startswith("Error: ")
    assert file.startswith("Error: ") and missing.startswith("Error: ")


def test_a_huge_folder_is_listed_in_part(agent):
    for n in range(1_234):
        (agent.folder / f"{n:04}").touch()
    [listing] = agent.call(call("list_dir"))
    lines = listing.splitlines()
    assert len(lines) == 501 and lines[0].startswith("0000") and lines[499].startswith("0499")
    assert lines[500] == "[… and 734 more]"


@pytest.mark.skipif(not POSIX or sys.platform == "darwin", reason="needs file names of any bytes")
def test_names_that_are_no_text(agent):
    for name in (b"\xff\xfe.txt", "[red]a.txt".encode(), b"two\nlines", b"\x1b[2Jclear"):
        open(os.path.join(os.fsencode(agent.folder), name), "w", encoding="utf-8").close()
    [listing] = agent.call(call("list_dir"))
    assert len(listing.splitlines()) == 4 and "[red]a.txt" in listing and "\x1b" not in listing
