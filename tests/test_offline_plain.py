"""The offline model follows plain instructions: each test is a conversation through a real SDK."""
import json

import offline
import pytest


def tool(name, required="", /, **properties):
    """A tool definition; a property is a JSON type or a whole schema."""
    schemas = {key: {"type": value} if isinstance(value, str) else value for key, value in properties.items()}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {
        "type": "object", "properties": schemas, "required": required.split()}}}


FILES = [tool("read_file", "path", path="string", offset="integer", limit="integer"),
         tool("write_file", "path content", path="string", content="string"),
         tool("edit_file", "path old_text new_text", path="string", old_text="string", new_text="string"),
         tool("list_dir", path="string"), tool("terminal", "command", command="string", timeout="integer")]
LATER = [tool("search_files", "pattern", pattern="string", path="string"),
         tool("web_search", "query", query="string", max_results="integer"), tool("web_read", "url", url="string"),
         tool("current_time"),
         tool("memory_save", "note", note="string", scope={"type": "string", "enum": ["user", "project"]}),
         tool("activate_skill", "name", name="string"),
         tool("recall", "id_or_query", id_or_query="string", find="string"),
         tool("clarify", "question", question="string", choices={"type": "array", "items": {"type": "string"}})]
UNSEEN = [tool("word_count", "path", path="string"), tool("add", "a b", a="integer", b="number"),
          tool("copy_file", "source destination", source="string", destination="string")]


@pytest.fixture
def talk(model, openai_client):
    """talk(text, tools, results) -> (calls of each message, final text, all messages): a tiny agent."""
    client = openai_client(model())

    def play(text, tools=FILES + LATER + UNSEEN, results=None, messages=()):
        messages, rounds = [*messages, {"role": "user", "content": text}], []
        while len(rounds) < 20:
            options = {"tools": tools} if tools else {}
            message = client.chat.completions.create(model="offline", messages=messages, **options).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return rounds, message.content, messages
            rounds.append([])
            for call in message.tool_calls:
                rounds[-1].append((call.function.name, json.loads(call.function.arguments)))
                messages.append({"role": "tool", "tool_call_id": call.id,
                                 "content": (results or {}).get(call.function.name, "ok")})
        raise AssertionError("it does not end")

    return play


def calls_of(talk, text, **options):
    return [call for calls in talk(text, **options)[0] for call in calls]


@pytest.mark.parametrize("text, calls", [
    ('read README.md', [("read_file", {"path": "README.md"})]),
    ('please show me the README', [("read_file", {"path": "README"})]),
    ('read a.txt offset 10 limit 5', [("read_file", {"path": "a.txt", "offset": 10, "limit": 5})]),
    ('read a.txt, carefully', [("read_file", {"path": "a.txt"})]),
    ('read a.txt 10', [("read_file", {"path": "a.txt"})]),
    ('read "a b.txt"', [("read_file", {"path": "a b.txt"})]),
    ('write "hello" to a.txt', [("write_file", {"path": "a.txt", "content": "hello"})]),
    ('write a.txt "hello"', [("write_file", {"path": "a.txt", "content": "hello"})]),
    ('write hello to a.txt', [("write_file", {"path": "a.txt", "content": "hello"})]),
    ('write "hello" to "notes.txt"', [("write_file", {"path": "notes.txt", "content": "hello"})]),
    (r'create x.py with content "print(\"a\")\n"', [("write_file", {"path": "x.py", "content": 'print("a")\n'})]),
    ('write "a; then\nlist b." to a.txt', [("write_file", {"path": "a.txt", "content": "a; then\nlist b."})]),
    ('write to a.py ```python\nx = 1\n```', [("write_file", {"path": "a.py", "content": "x = 1\n"})]),
    ('in a.txt replace "x" with "y"', [("edit_file", {"path": "a.txt", "old_text": "x", "new_text": "y"})]),
    ('edit a.txt "x" "y"', [("edit_file", {"path": "a.txt", "old_text": "x", "new_text": "y"})]),
    ('replace "x" with "" in a.txt', [("edit_file", {"path": "a.txt", "old_text": "x", "new_text": ""})]),
    ('list', [("list_dir", {})]),
    ('ls src', [("list_dir", {"path": "src"})]),
    ('run "sleep 9" timeout 5', [("terminal", {"command": "sleep 9", "timeout": 5})]),
    ('run git commit -m "a b"', [("terminal", {"command": 'git commit -m "a b"'})]),
    ("run 'echo \"hi\"'", [("terminal", {"command": 'echo "hi"'})]),
    ('search "def main" in src', [("search_files", {"pattern": "def main", "path": "src"})]),
    ('find TODO', [("search_files", {"pattern": "TODO"})]),
    ('search the web for python 3.13', [("web_search", {"query": "python 3.13"})]),
    ('read https://a.b/c', [("web_read", {"url": "https://a.b/c"})]),
    ('what time is it?', [("current_time", {})]),
    ('remember that I like tabs, and list nothing', [("memory_save", {"note": "I like tabs, and list nothing"})]),
    ('use the skill research', [("activate_skill", {"name": "research"})]),
    ('recall r17 find "x"', [("recall", {"id_or_query": "r17", "find": "x"})]),
    ('ask "which one?" with choices "a", "b"', [("clarify", {"question": "which one?", "choices": ["a", "b"]})]),
    ('word_count a.txt', [("word_count", {"path": "a.txt"})]),
    ('count the words of a.txt', [("word_count", {"path": "a.txt"})]),
    ('add 1 2', [("add", {"a": 1, "b": 2.0})]),
    ('copy a.txt to b.txt', [("copy_file", {"source": "a.txt", "destination": "b.txt"})]),
])
def test_english(talk, text, calls):
    assert calls_of(talk, text) == calls


@pytest.mark.parametrize("text, calls", [
    ('读取README.md', [("read_file", {"path": "README.md"})]),
    ('打开 src/数据.md', [("read_file", {"path": "src/数据.md"})]),
    ('读取说明.md', [("read_file", {"path": "说明.md"})]),
    ('把“你好\\n世界”写入 a.txt', [("write_file", {"path": "a.txt", "content": "你好\n世界"})]),
    ('把 a.txt 里的 "x" 替换成 "y"', [("edit_file", {"path": "a.txt", "old_text": "x", "new_text": "y"})]),
    ('列出 src', [("list_dir", {"path": "src"})]),
    ('运行「python --version」', [("terminal", {"command": "python --version"})]),
    ('在 src 里搜索 main', [("search_files", {"pattern": "main", "path": "src"})]),
    ('上网搜索 Python 教程', [("web_search", {"query": "Python 教程"})]),
    ('打开网页 https://a.b/c', [("web_read", {"url": "https://a.b/c"})]),
    ('记住我喜欢 tabs', [("memory_save", {"note": "我喜欢 tabs"})]),
    ('使用技能 research', [("activate_skill", {"name": "research"})]),
    ('现在几点', [("current_time", {})]),
])
def test_chinese(talk, text, calls):
    assert calls_of(talk, text) == calls


@pytest.mark.parametrize("text, rounds", [
    ('read README.md then run "python --version"', [["read_file"], ["terminal"]]),
    ('列出 . 然后读取 README.md', [["list_dir"], ["read_file"]]),
    ('read a.txt; list . and then run ls', [["read_file"], ["list_dir"], ["terminal"]]),
    ('1. read a.txt.\n2. list src\n- run "ls"', [["read_file"], ["list_dir"], ["terminal"]]),
    ('read a.txt and list src', [["read_file", "list_dir"]]),
    ('读取 a.txt，并列出 src。再运行 "ls"', [["read_file", "list_dir"], ["terminal"]]),
    ('read a.txt, b.txt and c.txt then list src and tests', [["read_file"] * 3, ["list_dir"] * 2]),
])
def test_one_clause_a_message(talk, text, rounds):
    assert [[name for name, _ in calls] for calls in talk(text)[0]] == rounds


@pytest.mark.parametrize("text", [
    "Hello!", "你好", "what is love?", "read", "write hello", "run the tests", "I think we should read the docs",
    "replace x in a.txt", "add 1", "再见", "delete a.txt", "forget it", "", "then; then", "\0\0"])
def test_nothing_is_guessed(talk, text):
    rounds, answer, _ = talk(text)
    assert rounds == [] and "offline model" in answer and "read <path>" in answer


def test_a_tool_that_is_not_offered_is_not_called(talk):
    for text in ('write "x" to a.txt', 'search "x"', "remember x", "submit_plan x"):
        assert talk(text, tools=FILES[:1])[0] == []
    assert calls_of(talk, 'search "x"', tools=LATER[1:]) == [("web_search", {"query": "x"})]
    assert "No tools are offered" in talk("read a.txt", tools=[])[1]


def test_an_enum_is_filled_with_what_is_meant(talk):
    memory = tool("memory", "action", action={"type": "string", "enum": ["save", "list", "delete"]}, note="string")
    for text, arguments in (("remember that I like tabs", {"action": "save", "note": "I like tabs"}),
                            ("forget tabs", {"action": "delete", "note": "tabs"}), ("memory list", {"action": "list"})):
        assert calls_of(talk, text, tools=[memory]) == [("memory", arguments)]


def test_the_account_tells_outcomes_and_errors(talk):
    results = {"read_file": "one\ntwo\nthree", "terminal": "exit 1\nboom", "list_dir": "Error: no such folder"}
    answer = talk('read a.txt then list b then run "make" then sing', results=results)[1]
    assert answer.splitlines() == ["Done:", "- read_file a.txt: 3 lines", "- list_dir b: failed: Error: no such folder",
                                   "- terminal make: failed: exit 1", "I could not follow: sing"]
    results = {"read_file": "[r1] read_file a.txt (3 lines)\none\ntwo\nthree", "list_dir": "[archived] [r2] list_dir b → 1 entry",
               "terminal": "[r3] terminal make → FAIL exit 2, 9 lines"}
    answer = talk('read a.txt then list b then run "make"', results=results)[1]
    assert answer.splitlines() == ["Done:", "- read_file a.txt (3 lines)", "- list_dir b → 1 entry",
                                   "- terminal make → FAIL exit 2, 9 lines"]
    assert "exit 0" in talk('run "x"', results={"terminal": "exit 0"})[1]
    assert "failed" not in talk('run "x"', results={"terminal": "exit 0"})[1]


def test_the_next_message_starts_anew(talk):
    _, _, messages = talk("read a.txt then list .")
    assert [name for name, _ in calls_of(talk, "run ls", messages=messages)] == ["terminal"]


@pytest.mark.parametrize("data", ["<notes>\nread b.txt\n</notes>\n", "[ledger]\nread b.txt\n[/ledger]\n\n",
                                  '<a id="1">x</a> <b>\n## y\n</b>\n'])
def test_fenced_data_is_no_instruction(talk, data):
    for text in (data + "list src", "list src\n\n" + data, "list src\n<mode>now</mode>\n" + data):
        assert calls_of(talk, text) == [("list_dir", {"path": "src"})]


def test_a_message_of_data_alone_is_skipped(talk):
    said = {"role": "user", "content": "list src"}
    for record in ("<summary>\nread b.txt\n</summary>", "Earlier:\n## Goal\n- read b.txt\n## Done\n- list"):
        assert calls_of(talk, record, messages=[said]) == [("list_dir", {"path": "src"})]


@pytest.mark.parametrize("count, left", [(0, ["a.txt", "b.txt", "c.txt"]), (1, ["b.txt", "c.txt"]), (2, ["c.txt"]), (3, []), (9, [])])
def test_a_record_counts_the_calls_that_it_stands_for(talk, count, left):
    """Without that number, what was done would be done again and again."""
    record = {"role": "user", "content": f"<record history; calls done: {count}>\n## Done\n- read a.txt\n</record>"}
    rounds, answer, _ = talk("read a.txt then read b.txt then read c.txt", messages=[record], results={})
    assert [arguments["path"] for [(_, arguments)] in rounds] == left
    assert ("calls that the record counts" in answer) == (count > 0)


def test_the_same_through_anthropic(model, anthropic_client):
    tools = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in FILES]
    client, messages = anthropic_client(model()), [{"role": "user", "content": "read a.txt and list . then run ls"}]
    names = []
    for result in ({"content": "ok"}, {"content": [{"type": "text", "text": "no"}], "is_error": True}):
        message = client.messages.create(model="offline", messages=messages, tools=tools, max_tokens=1000)
        calls = [block for block in message.content if block.type == "tool_use"]
        names.append([call.name for call in calls])
        results = [{"type": "tool_result", "tool_use_id": call.id} | result for call in calls]
        messages += [{"role": "assistant", "content": [call.model_dump(exclude_none=True) for call in calls]},
                     {"role": "user", "content": results}]
    assert names == [["read_file", "list_dir"], ["terminal"]]
    text = client.messages.create(model="offline", messages=messages, tools=tools, max_tokens=1000).content[0].text
    assert text.splitlines()[1:] == ["- read_file a.txt: ok", "- list_dir .: ok", "- terminal ls: failed: no"]


# Summaries

ASK = """Summarise the conversation under these headings:
## Goal
what the user wants
## Done
## State
## Decisions
## Exact values
## Preferences"""


def sections(text):
    parts = text.split("## ")[1:]
    return {part.split("\n")[0]: part.split("\n", 1)[1].strip() for part in parts}


def test_a_summary_has_the_headings_asked_for_filled_by_extraction(talk):
    _, _, messages = talk("read src/parser.py then run make. I prefer tabs. We decided to listen on port 8080.",
                          results={"terminal": "exit 2\nmake: no rule"})
    _, answer, _ = talk(ASK, messages=messages)
    found = sections(answer)
    assert list(found) == ["Goal", "Done", "State", "Decisions", "Exact values", "Preferences"]
    assert "src/parser.py" in found["Goal"]
    assert found["Done"].splitlines() == ["- read_file src/parser.py: ok", "- terminal make: failed: exit 2"]
    assert "port 8080" in found["Decisions"] and "- 8080" in found["Exact values"] and "tabs" in found["Preferences"]
    again = sections(talk(ASK, messages=[{"role": "user", "content": f"<summary>\n{answer}\n</summary>"}])[1])
    for name in ("Goal", "Done", "Decisions", "Exact values", "Preferences"):
        assert set(found[name].splitlines()) <= set(again[name].splitlines())


def test_a_summary_of_a_transcript_in_the_message(talk):
    transcript = ("<summary>\n## Goal\n- old goal\n\n## Done\n- step one\n</summary>\n"
                  "<transcript>\n[user] read y.py, never use tabs\n"
                  "[assistant] read_file({\"path\": \"y.py\"})\n[tool] # Title\n## More\n</transcript>")
    found = sections(talk(ASK + "\n\n" + transcript, tools=[])[1])
    assert list(found) == ["Goal", "Done", "State", "Decisions", "Exact values", "Preferences"]
    assert found["Goal"].splitlines() == ["- old goal", "- read y.py, never use tabs"]
    assert "step one" in found["Done"] and "read_file" in found["Done"]


def test_a_summary_by_named_items(talk):
    answer = talk("Summarize, as\n- goal: what\n- preferences: which", tools=FILES,
                  messages=[{"role": "user", "content": "I like Python"}, {"role": "assistant", "content": "ok"}])[1]
    assert answer.splitlines() == ["- goal: I like Python", "- preferences: I like Python"]


def test_a_summary_is_bounded(talk):
    texts = [f"I always want file_{n}.py with \"value {n}\"; 决定用方案{n}。" * 10 for n in range(100)]
    history = [{"role": "user", "content": text} for text in texts]
    assert offline.tokens(talk(ASK, messages=history, tools=[])[1]) <= 1300


def test_writing_a_file_named_summary_is_no_request_for_one(talk):
    assert [name for name, _ in calls_of(talk, 'write "x" to summary.md then summarise nothing')] == ["write_file"]


# Plans

STEP = {key: {"type": "string"} for key in ("file", "lines", "change", "check")}
PLAN = tool("submit_plan", "goal steps", goal="string", steps={"type": "array", "items": {
    "type": "object", "properties": STEP, "required": list(STEP)}})
FINISH = tool("finish_step", "outcome note", outcome={"type": "string", "enum": ["done", "failed"]}, note="string")


def test_a_plan_has_a_step_for_what_cannot_be_done_now(talk):
    change = 'replace "x" with "y" in a.txt lines 3-5, check "make"'
    rounds, answer, _ = talk(f'read a.txt then {change} then write "z" to b.txt', tools=[FILES[0], PLAN])
    assert rounds[0] == [("read_file", {"path": "a.txt"})]
    [(name, plan)] = rounds[1]
    assert name == "submit_plan" and plan["goal"].startswith("read a.txt then replace")
    assert plan["steps"] == [
        {"file": "a.txt", "lines": "3-5", "change": change, "check": "make"},
        {"file": "b.txt", "lines": "1", "change": 'write "z" to b.txt', "check": "read b.txt"}]
    assert len(rounds) == 2 and "submit_plan: ok" in answer


def test_no_plan_for_a_greeting_or_for_reading_alone(talk):
    assert talk("hello there", tools=[FILES[0], PLAN])[0] == []
    assert calls_of(talk, "read a.txt", tools=[FILES[0], PLAN]) == [("read_file", {"path": "a.txt"})]


def test_required_fields_of_a_step_are_never_empty(talk):
    schema = {"type": "object", "properties": {
        "path": {"type": "string"}, "risk": {"type": "string", "enum": ["low", "high"]}, "title": {"type": "string"},
        "order": {"type": "integer"}, "hint": {"type": "string"}},
              "required": ["path", "risk", "title", "order"]}
    plan = tool("submit_plan", "goal steps", goal="string", steps={"type": "array", "items": schema})
    [(_, arguments)] = calls_of(talk, "fix the parser", tools=[FILES[0], plan])
    assert arguments["steps"] == [{"path": ".", "risk": "low", "title": "fix the parser", "order": 1}]


@pytest.mark.parametrize("result, outcome", [("ok", "done"), ("Error: no", "failed"), ("exit 3\nx", "failed"),
                                             ("[r9] edit_file a.txt → FAIL no such text", "failed")])
def test_a_step_is_finished_once_with_its_outcome(talk, result, outcome):
    step = 'Step 1 of 2\nfile: a.txt\nlines: 1\nchange: replace "x" with "y" in a.txt\ncheck: read a.txt'
    rounds, answer, _ = talk(step, tools=FILES + [FINISH], results={"edit_file": result})
    assert [name for calls in rounds for name, _ in calls] == ["edit_file", "read_file", "finish_step"]
    assert rounds[-1][0][1]["outcome"] == outcome and rounds[-1][0][1]["note"]
    assert "finish_step" in answer


def test_a_step_that_cannot_be_followed_has_failed(talk):
    assert calls_of(talk, "sing a song", tools=[FINISH])[0][1]["outcome"] == "failed"
