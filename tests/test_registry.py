"""The registry: a tool is a function; its schema, its checks and its limits come from there."""
import json
import re

from conftest import call, step


def offered(run):
    return {tool["function"]["name"]: tool["function"] for tool in run.requests[0].body["tools"]}


def test_the_schema_comes_from_the_signature(agent):
    tools = offered(agent.task(["ok"]))
    schema = tools["read_file"]["parameters"]
    assert schema["type"] == "object" and schema["required"] == ["path"]
    assert {name: value["type"] for name, value in schema["properties"].items()} == {
        "path": "string", "offset": "integer", "limit": "integer"}
    assert tools["edit_file"]["parameters"]["required"] == ["path", "old_text", "new_text"]
    assert not tools["list_dir"]["parameters"].get("required")
    assert all(tool["description"] for tool in tools.values())


def test_adding_a_tool_is_writing_a_function(agent):
    """The program under test is a copy, so a tool can be added to it."""
    with open(agent.program / "tools.py", "a", encoding="utf-8") as file:
        file.write('\n\n@tool\ndef count_words(text: str, times: int = 1, loud: bool = False) -> str:\n'
                   '    """Count the words of a text."""\n'
                   '    return str(len(text.split()) * times) + "!" * loud\n')
    run = agent.task([step(call("count_words", text="a b c", times=2, loud=True), call("count_words")), "ok"])
    added = offered(run)["count_words"]
    assert added["description"] == "Count the words of a text."
    assert added["parameters"]["properties"]["loud"]["type"] == "boolean"
    assert added["parameters"]["required"] == ["text"]
    counted, error = run.results
    assert counted == "6!"
    assert error.startswith("Error: ") and "count_words(text, times" in error


def test_a_tool_without_words_of_its_own_still_works(agent):
    with open(agent.program / "tools.py", "a", encoding="utf-8") as file:
        file.write("\n\n@tool\ndef twice(text):\n    return text * 2\n")
    assert agent.call(call("twice", text="ab")) == ["abab"]


def test_whatever_a_tool_raises_is_an_answer(agent):
    with open(agent.program / "tools.py", "a", encoding="utf-8") as file:
        file.write('\n\n@tool\ndef fail(text: str) -> str:\n    """Fail."""\n'
                   '    errors = {"key": KeyError, "assert": AssertionError, "deep": RecursionError}\n'
                   '    raise errors[text](f"bad [/{text}]")\n')
    errors = agent.call(*(call("fail", text=text) for text in ("key", "assert", "deep")))
    for text, error in zip(("key", "assert", "deep"), errors, strict=True):
        assert error.startswith("Error: ") and f"bad [/{text}]" in error


WRONG = [   # call, the argument an error must name
    (call("edit_file", path="a.txt", new_text="B"), "old_text"),
    (call("edit_file", path="a.txt", old_text="b", new_text="B", replace_all=True), "replace_all"),
    (call("edit_file", path="a.txt", old_text="", new_text="B"), "old_text"),
    (call("edit_file", path=["a.txt"], old_text="b", new_text="B"), "path"),
    (call("edit_file", path="a.txt", old_text="b", new_text=None), "new_text"),
    (call("edit_file", path="a.txt", old_text="b", new_text=2), "new_text"),
    (call("edit_file", path="", old_text="b", new_text="B"), "path"),
    (call("read_file", path="a.txt", offset="ten"), "offset"),
    (call("read_file", path="a.txt", limit=1.5), "limit"),
    (call("read_file", path="a.txt", limit=True), "limit"),
    (call("terminal", command={"cmd": "echo > ran"}), "command"),
    (call("terminal", command=""), "command"),
    (call("write_file", filename="a.txt", content="B"), "filename"),
]


def test_wrong_arguments_are_named_and_the_tool_does_not_run(agent):
    """Never a call with guessed arguments; the error repeats how the tool is used."""
    (agent.folder / "a.txt").write_bytes(b"b\n")
    for (wrong, argument), error in zip(WRONG, agent.call(*(wrong for wrong, _ in WRONG)), strict=True):
        assert error.startswith("Error: "), wrong
        assert re.search(rf"\b{argument}\b", error) and f"{wrong['name']}(" in error, (wrong, error)
    assert (agent.folder / "a.txt").read_bytes() == b"b\n"
    assert [path.name for path in agent.folder.iterdir()] == ["a.txt"]


def test_wrong_arguments_stay_in_the_history_as_they_were(agent):
    """Only what is no JSON object is replaced: the model should see what it did."""
    run = agent.task([step(call("read_file", file="a.txt")), "ok"])
    sent = run.requests[1].body["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"file": "a.txt"}


def cut_out(result):
    """(what was kept, how many characters the line between says are missing)"""
    head, line, tail = re.fullmatch(r"(.*)\n(.*\d.* characters .*)\n(.*)", result).groups()
    return head + tail, int(re.search(r"\d[\d,]*", line)[0].replace(",", ""))


def test_a_long_result_is_cut_in_the_middle(agent):
    whole = "first" + "x" * 100_000 + "last"
    (agent.folder / "long.txt").write_text(whole, encoding="utf-8")
    [result] = agent.call(call("read_file", path="long.txt"))
    kept, missing = cut_out(result)
    assert len(result) <= 30_300
    assert kept.startswith("first") and kept.endswith("last")
    assert len(kept) + missing == len(whole)


def test_a_small_window_cuts_sooner_and_counts_bytes(agent):
    """Chinese has three bytes a character: 8,000 tokens of window hold far fewer than 8,000 of them."""
    agent.env["CONTEXT_WINDOW"] = "8000"
    (agent.folder / "long.txt").write_text("开头" + "长" * 20_000 + "结尾", encoding="utf-8")
    [result] = agent.call(call("read_file", path="long.txt"))
    kept, _ = cut_out(result)
    assert len(kept.encode()) <= 4_000
    assert kept.startswith("开头") and kept.endswith("结尾")
