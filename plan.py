"""Plan mode: a plan is made with tools that only read, judged by the user, and carried out step by step."""
import json
import re
import shutil
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from annotated_types import MinLen

import memory
import tools

VAGUE = re.compile(r"""(?<![a-z/.])(t\.?b\.?[ad]\.?|to be (determined|decided|defined|confirmed)|figure (it |this )?out
|somehow|(as|if|where) (needed|necessary|appropriate)|decide later|and so on|etc\.|ask the user)(?![a-z])
|待(定|补充|确认|讨论)|再说|自行决定|[看视]情况|酌情|根据需要|按需|如有必要|适当|等等|询?(?<!访)问用户|(?<!申)请用户""".replace("\n", ""), re.I)
QUOTED = re.compile(r"""(?<!\w)'[^']*'(?!\w)|"[^"]*"|`[^`]*`|“[^”]*”|「[^」]*」""")  # what a file shall say may be vague
PROSE = re.compile(r"(read|see|look|open|view)\b|\w+ (sure|that|the|if|it|this|an?|for|by|with)(\s|$)")  # make sure
HINT = "\n<mode>plan: nothing can be changed now. Look around, ask with clarify, then call submit_plan.</mode>"
CANCELLED = "I cancelled the plan."
STEP = "Step {}.\nfile: {file}\nlines: {lines}\nchange: {change}\ncheck: {check}"
STEP_HINT = "\n<mode>execution: carry out this step only, then call finish_step. Failed so far: {}</mode>"
Filled = Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=1)]


class Step(pydantic.BaseModel):
    file: Filled
    lines: Filled
    change: Filled
    check: Filled


@dataclass
class Plan:
    """`states` has one of each step: pending, in progress, done, failed or skipped."""
    goal: str
    steps: list[Step]
    states: list[str]

    def __str__(self):
        steps = [f"{n}. {step.file}, lines {step.lines}{f' [{state}]' * (state != 'pending')}\n{step.change}\n"
                 f"check: {step.check}".replace("\n", "\n   ")  # whatever the texts hold, a step looks like one step
                 for n, (step, state) in enumerate(zip(self.steps, self.states), 1)]
        return "\n".join([f"Goal: {self.goal}", *steps])

    def bar(self) -> str:
        left = sum(state in ("pending", "in progress") for state in self.states)
        return f"[{'#' * (len(self.steps) - left)}{'·' * left}] {left} of {len(self.steps)} steps left"


proposed = None  # the plan that the model handed in in this turn
report = None  # outcome and note of the step that is carried out in this turn
current = None  # the plan that was accepted, until all of its steps are done or skipped
ask = input  # agent.py puts its own here: ask(question) returns the user's answer
unattended = ""  # with nobody to ask: "accept" or "cancel", what is to become of a plan


def choose(question: str, *options: str) -> tuple[str, str]:
    """The option that the user names by its first letters, and for the option edit what is written behind it."""
    while not unattended:
        word, _, rest = ask(question).partition(" ")
        for option in options:
            if word and option.startswith(word.lower()) and (not rest or option == "edit"):
                return option, rest.strip()
    return unattended if unattended in options else options[-1], ""


@tools.tool(writes=False, only="plan")
def clarify(question: tools.Text, choices: list[str] = []) -> str:
    """Ask the user what only the user can decide."""
    if not sys.stdin.isatty():
        return "nobody is here to answer: decide, and state the assumption"
    answer = ask("\n".join([question, *(f"{n}. {choice}" for n, choice in enumerate(choices, 1))]))
    return dict(zip(map(str, range(1, len(choices) + 1)), choices)).get(answer, answer) or "no answer: decide"


@tools.tool(writes=False, only="plan")
def submit_plan(goal: Filled, steps: Annotated[list[Step], MinLen(1)]) -> str:
    """Hand in the plan. Each step: a file, its lines, the exact change, and a check, best a command."""
    global proposed
    for n, step in enumerate(steps, 1):
        tools.inside(step.file)
        vague = VAGUE.search(" ".join(QUOTED.sub("", " ".join(step.model_dump().values())).split()))
        tools.demand(not vague, f"step {n} leaves open what is to be done: {vague and vague[0]!r}. Find out, or decide")
    proposed = Plan(goal, steps, ["pending"] * len(steps))
    return "handed in"


@tools.tool(only="execution")
def finish_step(outcome: Literal["done", "failed"], note: str = "") -> str:
    """Report how the step went."""
    global report
    report = outcome, note
    return "noted"


def start(agent, plan: Plan) -> int:
    """Carry out an accepted plan in a fresh context: of what the planner read, only the places are carried along."""
    global current
    failed = {entry.get("tool_call_id") for entry in agent.log if entry.get("content", "").startswith("Error: ")}
    read = [json.loads(call["function"]["arguments"]) for entry in agent.log for call in entry.get("tool_calls", [])
            if call["function"]["name"] == "read_file" and call["id"] not in failed]
    places = dict.fromkeys(f"{one['path']} from line {one.get('offset') or 1}" for one in read)
    said = [entry["content"] for entry in agent.log if entry["role"] == "user" and entry["content"].endswith(HINT)]
    text = f"The request: {''.join(said).split(CANCELLED + HINT)[-1]}{plan}\nRead for it: {', '.join(places)}"
    agent.begin()
    text = tools.fenced("plan", "accepted by the user", text.replace(HINT, "\n"))
    agent.log.append({"role": "user", "content": text})
    current = plan
    return execute(agent)


def execute(agent) -> int:
    """Carry out what is left of the current plan; returns the exit code. Ctrl-C leaves the rest for another time."""
    global current
    plan = current
    agent.switch("execution")
    try:
        for n, step in enumerate(plan.steps):
            problem = ""
            while plan.states[n] not in ("done", "skipped"):
                plan.states[n] = "in progress"
                problem = memory.cut(carry_out(agent, step, f"{n + 1} of {len(plan.steps)}", problem), 500)
                plan.states[n] = "failed" if problem else "done"
                if problem:
                    memory.notice(f"Step {n + 1} failed: {problem}")
                    choice, _ = choose("What now? r = retry, s = skip, st = stop", "retry", "skip", "stop")
                    if choice == "stop":
                        return 1
                    plan.states[n] = {"skip": "skipped"}.get(choice, "failed")
        current = None
        return 0
    finally:
        memory.notice(str(plan))
        agent.switch("normal")


def carry_out(agent, step: Step, number: str, problem: str) -> str:
    """One step, in a turn of its own; returns what went wrong. `problem` is what went wrong in the last try."""
    memory.notice(f"Step {number}: {step.change}")
    agent.turn(STEP.format(number, **step.model_dump()) + STEP_HINT.format(problem or "nothing"))
    outcome, note = report or ("failed", "the model did not call finish_step")
    check = step.check.strip("`")
    command = check.partition(" ")[0]
    if outcome == "done" and (shutil.which(command) or command == "cd") and not PROSE.match(check):
        result = tools.run("terminal", json.dumps({"command": check}))
        memory.notice(f"check {check}: {result.partition(chr(10))[0]}")
        return "" if result.startswith("exit 0") else f"{check}: {result}"
    return note or "no reason given" if outcome == "failed" else ""
