"""The bench: what the READMEs tell of it is what was stored, and what was stored is what comes out again."""
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import bench
import course

STORED = bench.ROOT / "docs/bench.json"
MARKED = re.compile(r"^<!-- bench -->\n(.*?)\n<!-- /bench -->$", re.S | re.M)


def stored():
    return json.loads(STORED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """`bench.py versions --quick`: (its result, what it printed)."""
    file = tmp_path_factory.mktemp("bench") / "result.json"
    done = subprocess.run([sys.executable, "bench.py", "versions", "--quick", "--json", str(file)], cwd=bench.ROOT,
                          capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8"))["versions"], done


@pytest.mark.skipif(not STORED.exists(), reason="nothing is stored yet")
@pytest.mark.parametrize("readme", sorted(bench.ROOT.glob("README*.md")), ids=lambda path: path.name)
def test_a_readme_carries_the_stored_table(readme):
    found = MARKED.findall(readme.read_text(encoding="utf-8"))
    assert found in ([], [bench.table(stored())])


def test_the_newest_version_sends_what_was_stored(quick):
    [(name, version)] = quick[0]["versions"].items()
    assert name == course.chosen_line(None)[-1].version
    assert list(version["tasks"]) == ["7", "25", "80"]
    before = stored()["versions"].get(name) if STORED.exists() else None
    for calls, task in version["tasks"].items():
        assert int(calls) <= task["calls"] <= int(calls) + 3  # three times it may have to look again
        assert 0 < task["cached"] < task["sent"]
        if before:
            exact = "requests", "calls", "sent", "cached"
            assert [task[key] for key in exact] == [before["tasks"][calls][key] for key in exact]


def test_a_cost_counts_each_fresh_token_as_written(quick):
    for version in quick[0]["versions"].values():
        for task in version["tasks"].values():
            name, price = next(iter(quick[0]["prices"].items()))  # of the others, only the cost is kept
            cost = task["cached"] * price["read"] + (task["sent"] - task["cached"]) * price["write"]
            assert abs(task["cost"][name] - cost) <= 1
            assert task["cost"].keys() == quick[0]["prices"].keys() and min(task["cost"].values()) > 0


def test_without_a_terminal_the_progress_is_plain(quick):
    result, done = quick
    assert done.stderr == "".join(f"versions: {name}\n" for name in result["versions"])
    assert all(name in done.stdout for name in result["versions"])
    assert {"cores", "python", "date"} <= result["measured"].keys()


def test_table_and_plot_have_all_versions(quick):
    result = quick[0]
    [one] = result["versions"].values()
    result = result | {"versions": {f"v0.{n}": one for n in range(12)}}
    lines = bench.table(result).splitlines()
    assert len(lines) == 2 + 12 and len({line.count("|") for line in lines}) == 1
    texts = ["".join(node.itertext()) for node in ElementTree.fromstring(bench.plot(result)).iter()]
    assert all(texts.count(name) == 2 for name in result["versions"])  # below both panels


def body(*results, tools=("read_file", "recall")):
    """A request in which a.py, b.py, ... were read, with these results."""
    calls = [{"id": f"c{n}", "function": {"name": "read_file", "arguments": json.dumps({"path": f"{'abc'[n]}.py"})}}
             for n in range(len(results))]
    messages = [{"role": "tool", "tool_call_id": f"c{n}", "content": text} for n, text in enumerate(results)]
    return {"tools": [{"function": {"name": name}} for name in tools],
            "messages": [{"role": "assistant", "content": "", "tool_calls": calls}, *messages]}


@pytest.mark.parametrize("request_body, expected", [
    (body("[r1] read_file a.py (2 lines)\nx\nneeded"), None),
    (body("[r1] read_file b.py\nx", "[archived] [r2] read_file b.py (9 lines)"),
     {"name": "recall", "arguments": {"id_or_query": "r2", "find": "needed"}}),
    (body("x", "[archived] read_file b.py (9 lines)", tools=["read_file"]),
     {"name": "read_file", "arguments": {"path": "b.py", "offset": 5, "limit": 9}}),
    (body("x", tools=["read_file", "recall"]),
     {"name": "read_file", "arguments": {"path": "b.py", "offset": 5, "limit": 9}}),
], ids=["seen", "recalled", "no recall", "gone"])
def test_a_line_that_is_no_longer_seen_is_fetched(request_body, expected):
    calls = bench.again(bench.Again("needed", "b.py", 5, 9), request_body)
    assert calls == (expected and [expected])


@pytest.mark.parametrize("result, failed", [
    ("Error: old_text is not in a.py", True), ("[r3] edit_file a.py → FAIL: old_text is not in a.py", True),
    ("exit 1\n< a\n> b", False), ("[r4] terminal diff a b → FAIL exit 1, 2 lines\nexit 1\n< a\n> b", False),
    ("[r5] read_file a.py (2 lines)\nError: as a text", False)])
def test_a_call_that_was_not_done_is_told_from_a_command_that_failed(result, failed):
    assert bool(bench.FAILED.match(result)) == failed


def test_exponent():
    sizes = 10, 100, 1000
    assert bench.exponent({n: 3 * n for n in sizes}) == 1 and bench.exponent({n: n**2 for n in sizes}) == 2
    assert math.isclose(bench.exponent({n: n * math.log(n) for n in sizes}), 1.24, abs_tol=0.02)


def test_the_loop_without_model_and_tools_is_measured():
    found = bench.loop_rounds([10, 50])
    short, long = (row["sent"] for row in found.values())  # with the tools; what is archived leaves marks in the log
    assert short == 11 and 45 < long <= 51
    for row in found.values():
        assert row["round_ms"] > 0 and row["session_s"] > 0 and row["parts_ms"].keys() >= {"view", "result"}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A recorded session in a file: 40 files are read, and at the end a word of the fourth one is said."""
    lines = [{"role": "system", "text": "s"}, {"role": "user", "text": "read all"}]
    for n in range(40):
        call = {"id": f"c{n}", "name": "read", "args": {"path": f"{n}.py"}}
        lines.append({"role": "assistant", "text": "", "tool_calls": [call]})
        lines.append({"role": "tool", "text": f"a_word_of_file_{n}\n" + "text " * 400, "tool_call_id": f"c{n}"})
    lines.append({"role": "assistant", "text": "There is a_word_of_file_3 in it."})
    file = tmp_path_factory.mktemp("traces") / "one.jsonl"
    rest = {"tool_calls": [], "tool_call_id": None}
    file.write_text("".join(json.dumps(rest | line) + "\n" for line in lines), encoding="utf-8")
    return file


def test_policies_are_compared_on_recorded_sessions(session):
    found = bench.traces(session.parent, quick=True)
    assert (found["sessions"], found["requests"], found["calls"]) == (1, 41, 40)
    for row in found["rows"]:
        whole = {name: policy["whole"] for name, policy in row["policies"].items()}
        assert whole["never"] == 1 and whole["optimum"] < whole["rent"] < whole["rent, recalls charged"] < 1
        assert whole["rent"] <= whole["rent, ledger in the task"]
        assert row["policies"]["rent"]["worst to optimum"] == pytest.approx(whole["rent"] / whole["optimum"])
    cheap, dear = (row["policies"]["last ten"]["whole"] for row in (found["rows"][0], found["rows"][1]))
    assert cheap > 1 > dear  # forgetting with each request costs more than it saves, where the cache is cheap
    assert 1 <= found["adversary"]["worst"] <= 1.5


def test_never_to_archive_costs_what_the_requests_say(session):
    one = bench.Session("one", bench.session_of(session))
    costs = one.costs([None] * len(one.requests), 0.1, 1.25)
    sizes = [sum(one.size[:n]) for n in one.requests]
    assert costs == pytest.approx([1.25 * sizes[0], *(0.1 * a + 1.25 * (b - a) for a, b in zip(sizes, sizes[1:]))])


def test_a_result_that_is_needed_again_is_charged_once(session):
    one = bench.Session("one", bench.session_of(session))
    [(place, word)] = one.needed(one.requests[-1], frozenset([5, 9])).items()
    assert (place, word) == (9, "a_word_of_file_3") and one.needed(one.requests[-1], frozenset([5])) == {}


def test_the_picture_shows_where_the_rent_is_due(session):
    picture = bench.rent_picture(bench.Session("one", bench.session_of(session)), 0.25, 1)
    lines = [node.get("points") for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("polyline")]
    assert [len(line.split()) for line in lines] == [41, 41] and "6 times" in picture


def test_a_folder_without_sessions_is_named(tmp_path):
    with pytest.raises(course.Fault, match="no \\*.jsonl in"):
        bench.traces(tmp_path, quick=True)


@pytest.mark.parametrize("arguments", [["traces"], ["picture"], ["versions", "--quick", "--store"],
                                       ["overhead", "--store"],
                                       ["versions", "somewhere"], ["nothing"]])
def test_a_wrong_command_line_is_refused(arguments):
    with pytest.raises(SystemExit) as exit:
        bench.main(arguments)
    assert exit.value.code == 2
