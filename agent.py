"""Rungs, a coding agent: the loop and the command line.

A turn is one request of the user. In it the model is asked again and again: while it answers with tool calls, they are
run and their results go back to it; when it answers with plain text, the turn is done.
"""
import argparse
import glob
import html
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from itertools import takewhile

from dotenv import dotenv_values
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

import memory
import models
import offline
import plan
import tools

VERSION = "v1.2"
MAX_ROUNDS = 50  # requests in one turn
WAITS = [1, 3]  # seconds before a request is tried again
SYSTEM = """You are Rungs, a coding agent on {system} in {directory}. Do the task yourself with the tools: look before
you change something, check the outcome by running it, then answer shortly in the user's language."""
OFFLINE = "No API key and no base URL, see .env.example: the offline model answers. Try: list . then read README.md"
ADVICE = {401: "check {}", 403: "check {}", 413: "start a new conversation", 429: "wait a little, or check your plan"}
TOO_LONG = re.compile("context.(length|size|window|limit)|(maximum|available) context|too long|max length|token limit"
                      "|input length", re.I)
secrets = set()  # API keys, which are never shown
spent = Counter()  # seconds, on the model and on tools; requests
console = Console(stderr=True, markup=False, emoji=False, highlight=False)  # only answers go to stdout, for pipes
SCREEN = sys.stdout.isatty()  # a person reads along: the answer is shown as Markdown, while it arrives
page = console if console.is_terminal else Console(markup=False, emoji=False, highlight=False)


class ModelError(Exception):
    """No answer, or no end of the turn: what happened, and which setting to change."""


class WindowError(ModelError):
    """The request is too long for the model."""


class Model:
    """A model of a provider. `window` is the size of its context window in tokens."""

    def __init__(self, settings: dict[str, str], debug, time: bool, provider: str = "", name: str = ""):
        self.provider = models.choose(settings, provider)
        self.name, self.url = name or models.model_of(settings, self.provider), self.provider.url
        self.key = settings.get(self.provider.key, "none")  # a server of one's own may not ask for one
        self.window, self.debug, self.client = int(settings.get("CONTEXT_WINDOW", 64_000)), debug, None
        self.time, self.usage, self.total = time, {}, Counter()  # tokens of the latest request, of all
        self.thinking = {"thinking": {"type": "adaptive"}} if self.provider.name == "anthropic" else {}
        tools.demand(self.window >= 1000, f"a window of {self.window} tokens is too small")
        tools.demand(models.is_ready(settings, self.provider), f"{self.provider.name} needs {self.provider.key}")
        if self.provider.name == "offline":
            self.name, self.url = "offline", offline.start(window=self.window)
            if not provider:
                notice(OFFLINE + "".join(f"\nTo use your {key}: set OPENAI_API_KEY to it, OPENAI_BASE_URL and MODEL as "
                                         "in .env.example." for key in settings if key.endswith("_API_KEY")))

    def complete(self, messages: list[dict], offered: list[dict], stable: int = 0) -> dict:
        """Ask, up to three times. Returns the message as models.stream gives it. Raises ModelError. `stable`: so many
        messages were an earlier request."""
        request = {"model": self.name, "messages": messages} | ({"tools": offered} if offered else {})
        if self.provider.format == "anthropic":
            request = models.anthropic_request(request, stable, min(self.window // 4, 32_000)) | self.thinking
        for attempt in range(1 + len(WAITS)):
            try:
                self.client = self.client or models.connect(self.provider.format, self.url, self.key)
                return self.listen(request)
            except Exception as error:
                if is_too_long(error):
                    raise WindowError(self.explain(error)) from error
                if self.thinking and getattr(error, "status_code", None) == 400 and "thinking" in str(error):
                    self.thinking = {}  # an older model, or another server
                    return self.complete(messages, offered, stable)
                if attempt == len(WAITS) or not models.is_passing(self.provider, error):
                    raise ModelError(self.explain(error)) from error
                wait, why = models.asked_wait(error) or WAITS[attempt], models.reason(error)[:99]
                notice(f"{self.url}: {why}; trying again in {wait:g} s ({attempt + 2} of {len(WAITS) + 1})")
                time.sleep(wait)

    def listen(self, request: dict) -> dict:
        """Show a reply while it arrives, and return it. One that breaks off is shown, but nothing comes of it."""
        started, usage = time.monotonic(), {}
        with Progress(self.name) as progress:
            for event in models.stream(self.provider.format, self.client, request):
                if event.kind in ("thinking", "text") and "tools" in request:  # without them it is a summary
                    progress.add(event.kind, event.data)
                elif event.kind == "usage":
                    usage = event.data
        message, self.usage = event.data, usage
        self.total.update(usage, requests=1)
        if self.debug:
            self.debug(json.dumps({"request": request, "reply": message, "usage": usage}, ensure_ascii=False, indent=1))
        spent.update(model=time.monotonic() - started, requests=1)
        if self.time:
            count = "{prompt_tokens:,} tokens in ({cached_tokens:,} cached), {completion_tokens:,} out"
            notice(f"model {time.monotonic() - started:.1f} s, {count.format(**usage) if usage else 'tokens unknown'}")
        tools.demand(message["content"] or message["tool_calls"], "the answer is empty")
        if message["finish_reason"] == "length":
            notice("The answer was cut at the model's limit for one answer.")
        return message

    def explain(self, error: Exception) -> str:
        """What is wrong between us and the server, and which setting to look at."""
        status = 401 if isinstance(error, UnicodeError) else getattr(error, "status_code", None)  # an odd key
        text = " ".join(models.reason(error).split())[:400]
        variables = [f"{name}, " for name in os.environ if re.fullmatch("(all|https?)_proxy|ssl_cert_file", name, re.I)]
        base_url = models.base_url(self.provider)
        advice = ("start a new conversation, or lower CONTEXT_WINDOW" if is_too_long(error) else
                  f"the server asks to wait {wait:,.0f} s" if (wait := models.asked_wait(error)) else
                  "pip install -r requirements.txt" if isinstance(error, ImportError) else
                  f"check {base_url}, {''.join(variables)}and the network" if status is None else
                  ADVICE.get(status, f"check MODEL and {base_url}").format(self.provider.key))
        return f"{self.name} at {self.url}: {text}; {advice}"


def is_too_long(error: Exception) -> bool:
    return getattr(error, "status_code", 400) < 429 and bool(TOO_LONG.search(str(error)))  # "took too long" is a 504


def valid(message: dict, log: list[dict]) -> dict:
    """The model's message as the next request may carry it: each call with a proper name, JSON arguments and an id that
    is not in the log yet (some servers count from call_0 in every reply, and some providers refuse that)."""
    kept = {"role": "assistant", "content": message.get("content") or ""}
    kept |= {key: message[key] for key in ["reasoning_content", "blocks"] if message.get(key)}  # they go back
    for call in message.get("tool_calls") or []:
        calls, id, function = kept.setdefault("tool_calls", []), call.get("id"), call["function"]
        taken = {None, "", *(other["id"] for other in calls), *(result.get("tool_call_id") for result in log)}
        id = f"call_{os.urandom(8).hex()}" if id in taken else id
        name = re.sub("[^a-zA-Z0-9_-]", "_", function.get("name") or "unknown")[:64]
        arguments = json.dumps(tools.parse(function.get("arguments")) or {})
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return kept


class Agent:
    """A conversation with a model. `log` is all that was said and done in it; `memory.view` makes requests of it."""

    def __init__(self, model: Model):
        self.model, self.next, self.sent, self.log = model, None, [], []  # sent: the latest request, tools and messages
        self.ends = []  # where requests ended that the latest one began with: so far the cache has it
        self.begin()

    def begin(self):
        """Memory is read now and not again, so that all requests of a conversation start with the same bytes. What the
        conversation before leaves behind is written first."""
        memory.keep(self.log)
        if self.next:  # another model has another cache
            self.model, self.next, self.sent = self.next, None, []
        self.before = Counter(self.model.total)
        tools.active.clear()
        system = SYSTEM.format(system=sys.platform, directory=os.getcwd()) + skill_index() + conventions()
        system = (system + memory.remembered()).encode("utf-8", "backslashreplace").decode("utf-8")  # stray bytes
        self.log = memory.L2 = [{"role": "system", "content": system}]
        self.rent = memory.Rent(**models.prices(self.model.url, self.model.name))
        self.prompt = self.whole = self.hidden = 0  # tokens: of the latest request, without forgetting, their difference
        self.switch("normal")

    def switch(self, mode: str):
        """Offer the tools of a mode. The requests have other first bytes then: it costs the cache."""
        tools.mode = mode
        self.tools = [*map(tools.definition, tools.offered().values())]
        self.measured = 0, memory.size(self.tools)  # how much of the log the latest request had, and its tokens

    def turn(self, request: str) -> str:
        """Do what the user asks; returns the answer. Raises ModelError; Ctrl-C may end it at any moment."""
        if memory.estimate(request) > self.model.window // 3:
            raise ModelError("the message is longer than a third of the window; put it into a file and name that")
        tools.sources.clear()
        self.before = Counter(self.model.total)
        plan.proposed = plan.report = None
        self.log.append({"role": "user", "content": request + plan.HINT * (tools.mode == "plan")})
        for _ in range(MAX_ROUNDS):
            message = self.ask()
            self.step(message)
            if not message.get("tool_calls") or plan.proposed or plan.report:
                return message.get("content") or ""
        raise ModelError(f"stopped after {MAX_ROUNDS} rounds; to go on, say so")

    def ask(self) -> dict:
        if self.sent and self.sent[0] != self.tools:
            self.rent.warm_until = 0  # nothing of what the cache holds begins with these bytes
        self.make_room()
        request = [self.tools, *memory.view(self.log, self.model.window)]
        stable = len([*takewhile(lambda pair: pair[0] == pair[1], zip(request, self.sent))])
        self.model.total["breaks"] += stable < len(self.sent)
        self.ends = [end for end in self.ends if end <= stable]
        warm = time.monotonic() <= self.rent.warm_until
        expected = warm * (self.counted(memory.size(request[:stable])) if stable < len(self.sent) else self.prompt)
        self.sent, sent = request, len(self.log)
        try:
            message = self.model.complete(request[1:], self.tools, max(self.ends, default=1) - 1)
        except WindowError:  # the model's window is smaller than CONTEXT_WINDOW says
            window, before = self.model.window, self.used()
            self.model.window = min(window, before) * 3 // 4
            self.make_room()
            if self.used() >= before:
                self.model.window = window
                raise
            notice(f"The model's window is smaller than {window:,} tokens: going on with {self.model.window:,}.")
            return self.ask()
        self.ends.append(len(request))
        self.rent.warm_until = time.monotonic() + self.rent.lifetime
        if count := self.model.usage.get("prompt_tokens"):
            self.measured = sent, count
            self.model.total.update(expected=min(expected, count), whole=count + self.hidden, old=warm * self.whole)
            self.prompt, self.whole = count, count + self.hidden
        return message

    def used(self) -> int:
        """Tokens of the next request: the provider's count of the latest one, and an estimate of what came after it."""
        sent, count = self.measured
        return count + memory.size(memory.view(self.log[sent:], self.model.window))

    def make_room(self):
        """Facts before summaries: a summary costs a request, and is less exact."""
        window, fixed, before = self.model.window, memory.size(self.tools), self.used()
        memory.page_tokens = max(window // 8 - 500, window // 16)
        full = before > memory.FULL * window
        mask = memory.mask(self.log, window, fixed, full, self.rent)
        if mask:
            self.measured = 0, fixed  # what comes next can only be estimated, so what was before is, too
            before = self.used()
            self.log.append(mask)
            self.forgot(before - self.used())
            notice(f"Archived {mask['new']} result{'s' * (mask['new'] != 1)}: from about {before:,} "
                   f"to {self.used():,} tokens, {100 * self.used() // window} % of the window.")
        if not full:
            return
        if self.used() > (memory.ENOUGH if mask else memory.FULL) * window:
            self.compress()

    def compress(self):
        """make room: a summary takes the place of what happened"""
        def summarise(request: str) -> str | None:
            with suppress(ModelError):
                return self.model.complete([{"role": "user", "content": request}], [])["content"]
            notice("The model gave no summary; an excerpt takes its place.")
        window, fixed = self.model.window, memory.size(self.tools)
        self.measured = 0, fixed  # the count of what comes next must be an estimate, so this one is, too
        before = self.used()
        if record := memory.compress(self.log, window, min(before, window) // 2 - fixed, summarise):
            self.log.append(record)
            self.forgot(before - self.used())
            tools.active = memory.active_skills(self.log)
        outcome = f"Compressed from about {before:,} to" if record else "Compressing would gain nothing:"
        notice(f"{outcome} {self.used():,} tokens, {100 * self.used() // window} % of the window.")

    def counted(self, estimate: int) -> int:
        """What the provider would count where we estimate that many tokens; the latest request tells the difference."""
        return estimate * self.prompt // max(1, memory.size(self.sent))

    def forgot(self, estimate: int):
        """So many tokens less are sent from now on."""
        self.hidden += self.counted(estimate)
        self.rent.paid = self.rent.due = 0

    def step(self, message: dict):
        """Run the message's tool calls. Whatever happens, it is kept together with exactly one result for each call:
        a provider refuses every later request of a conversation in which one is missing."""
        kept, calls, results = valid(message, self.log), message.get("tool_calls") or [], []
        if calls and kept["content"] and not SCREEN:
            notice(kept["content"])
        try:
            for call in calls:
                results.append(run(call))
        finally:
            results += map(tools.Failure, ["Error: interrupted by the user"]
                           + ["Error: not run, the user interrupted"] * len(calls))
            self.log.append(kept)
            for call, text in zip(kept.get("tool_calls", []), results):
                self.log.append(memory.result(self.log, call, text, self.model.window))


def run(call: dict) -> str:
    """Do a tool call and show its fact."""
    name, arguments, started = call["function"].get("name") or "", call["function"].get("arguments"), time.monotonic()
    with Progress(name):
        result = tools.run(name, arguments)
    spent["tools"] += time.monotonic() - started
    fact = memory.fact(name, hidden(arguments or ""), type(result)(hidden(result)))  # before it is cut
    line = fact.line(console.width - 10)
    notice(f"● {line}, {time.monotonic() - started:.1f} s", "cyan", soft_wrap=False, no_wrap=True, overflow="ellipsis")
    return result


def skill_index() -> str:
    """A line for each skill. Only this is in the system prompt, which stays as it is whatever skills are activated."""
    found, broken = tools.skills()
    for path, problem in broken.items():
        notice(f"Not a skill: {path}: {problem}")
    return "\nSkills, see activate_skill:" + "".join(f"\n- {name} ({whose}): {description}"
                                                    for name, (whose, description, _) in found.items())


def conventions() -> str:
    """The project's AGENTS.md, at most 8,000 characters of it."""
    try:
        text = tools.load(tools.inside("AGENTS.md"))[1]
        text = text[:8000] + f"\n[only the first 8,000 of {len(text):,} characters]" * (len(text) > 8000)
        return "\n" + tools.fenced("agents", "AGENTS.md, this project's conventions; the user's words count more", text)
    except FileNotFoundError:
        return ""
    except (OSError, tools.ToolError) as error:
        notice(f"AGENTS.md: {error}")
        return ""


# ---- the screen ----

class Progress:
    """What the model or a tool is doing, shown while it lasts: the unfinished end of its text above a spinner with
    seconds. Whole lines of thinking and whole blocks of the answer stay on the screen, the answer as Markdown."""
    current = None

    def __init__(self, name: str):
        self.spinner, self.name, self.started = Spinner("dots"), tools.printable(name), time.monotonic()
        self.kind, self.text = "", ""  # of what has arrived and is not yet finished
        self.live = Live(self, console=console, transient=True, refresh_per_second=8)

    def __enter__(self):
        if console.is_terminal:
            self.live.start()
        Progress.current = self
        return self

    def __exit__(self, *_):
        self.finish(self.text)
        self.live.stop()
        Progress.current = None

    def __rich__(self):
        bar = plan.current.bar() if tools.mode == "execution" else ""
        self.spinner.update(text=Text(f"{self.name} {time.monotonic() - self.started:.0f} s {bar}"))
        unfinished = tools.printable(self.text).splitlines()[-5:]
        return Group(Text("\n".join(unfinished), "dim"), self.spinner) if unfinished else self.spinner

    def add(self, kind: str, piece: str):
        if kind != self.kind:
            self.finish(self.text)
        self.kind, self.text = kind, self.text + piece
        self.finish(self.text[:self.text.rfind("\n") + 1] if kind == "thinking" else whole_blocks(self.text))

    def finish(self, text: str):
        """Print what is finished, from the start of self.text; it moves up out of the live part."""
        self.text = self.text[len(text):]
        if self.kind == "thinking" and text.strip():
            notice(text.rstrip("\n"), "dim italic")
        elif text.strip() and SCREEN:
            from rich.markdown import Markdown  # not before there is some: it takes a while

            page.print(Markdown(re.sub(r"&#?\w+;", printable_entity, tools.printable(text))))


def printable_entity(entity: re.Match) -> str:
    """Markdown turns &#27; into the character itself, so what is not safe to show must not get there as an entity."""
    character = html.unescape(entity[0])
    return entity[0] if tools.printable(character) == character else tools.printable(character)


def whole_blocks(text: str) -> str:
    """The part of a Markdown text up to its last blank line outside of a code fence: no more of it will change."""
    end, position, fenced = 0, 0, False
    for line in text.splitlines(keepends=True):
        position += len(line)
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        end = position if line == "\n" and not fenced else end
    return text[:end]


# ---- the command line ----

def hidden(text: str) -> str:
    """The text without our API keys."""
    return re.sub("|".join(map(re.escape, secrets)) or "(?!)", "***", text)


def debug_to(file: str | None):
    """A function that writes a text to the file, or shows it, without anything that looks like a key; None for None."""
    def masked(text: str) -> str:
        text = re.sub(r"(\\[nrt])", "\\1\0", hidden(text))  # the n of \n is no part of the word behind it
        return re.sub(rf"({memory.SECRET})[-\w.+/=]*", "***", text, flags=re.I).replace("\0", "")
    if not file:
        return None if file is None else lambda text: notice(masked(text))
    out = open(file, "a", encoding="utf-8", errors="backslashreplace")
    return lambda text: print(masked(text), file=out, flush=True)


def notice(text: str, style: str = "dim", **options):
    text = hidden(text)
    options = {"style": style, "soft_wrap": not console.is_terminal} | options
    for line in tools.printable(text).split("\n"):
        console.print(indented(line) if console.is_terminal else line, **options)


def indented(line: str) -> Padding:
    """A line that, where it has to be wrapped, goes on below its first letter."""
    return Padding.indent(Text(line.lstrip()), len(line) - len(line.lstrip()))


def reply(question: str) -> str:
    """What the user answers to a question."""
    progress = Progress.current
    if progress:
        progress.live.stop()
    console.print(tools.printable(question), style="bold", soft_wrap=True)
    answer = input().strip()
    if progress:
        progress.__enter__()
    return answer


def ask(question: str):
    """Returns if the user allows it; otherwise raises ToolError, with the user's words for the model."""
    tools.demand(sys.stdin.isatty(), "the user is not here to allow it, and --yes was not given")
    answer = reply(f"{question} [y/N, or say why not]")
    tools.demand(answer.lower() in ("y", "yes"), f"the user said no. {answer}")


def help_(agent: Agent):
    """show these lines"""
    notice("\n".join(f"{name:10}{function.__doc__}" for name, function in COMMANDS.items()))


def tools_(agent: Agent):
    """show what the model can do, and what is wrong with tools of yours"""
    lines = [f"{name:16}{f'(yours, {tools.own[name]}) ' if name in tools.own else ''}{tools.description(function)}"
             for name, function in tools.offered().items()]
    notice("\n".join(lines + tools.not_tools))


def new(agent: Agent):
    """start a new conversation"""
    agent.begin()
    plan.current = None
    notice("A new conversation.")


def memory_(agent: Agent):
    """show what is remembered, and the files it is in"""
    notice("\n".join([*(str(memory.file_of(scope)) for scope in ("global", "project")), *memory.told_lines()]))


def cd(agent: Agent, folder: str = "."):
    """start a new conversation in another directory, with its memory: /cd DIR"""
    memory.keep(agent.log)
    os.chdir(os.path.expanduser(folder))
    agent.log = []  # it is kept already, and belongs to the other directory
    new(agent)
    notice(os.getcwd())


def model_(agent: Agent, choice: str = ""):
    """show the providers, or choose for the next conversation: /model PROVIDER [MODEL]"""
    provider, _, name = choice.partition(" ")
    if provider:
        tools.demand(provider in models.NAMES, f"there is no {provider}; there are {', '.join(models.NAMES)}")
        agent.next = Model(tools.settings, agent.model.debug, agent.model.time, provider, name.strip())
        return notice(f"From /new on: {agent.next.name} at {provider}.")
    for one in models.PROVIDERS:
        here, ready = one.name == agent.model.provider.name, models.is_ready(tools.settings, one)
        model = agent.model.name if here else models.model_of(tools.settings, one)
        notice(f"{'*' if here else ' '} {one.name:11} {model:18} {f'needs {one.key}' * (not ready)}".rstrip())


def usage(agent: Agent):
    """show how many tokens were sent, and how full the window is"""
    total, used, window = agent.model.total, agent.used(), agent.model.window
    rent, sent, cached = agent.rent, total["prompt_tokens"], total["cached_tokens"]
    paid, never = rent.cost(sent, cached), rent.cost(total["whole"], total["old"])
    recalls = sum(entry["fact"].tool == "recall" for entry in agent.log if "fact" in entry)
    notice(f"{bill(total)}\nof these in the latest turn: {bill(total - agent.before)}\n"
           f"paid as for {paid:,.0f} tokens of fresh input{f', ${paid * rent.dollars / 1e6:.4f}' * bool(rent.dollars)}, "
           f"at {rent.read:g} for one from the cache and {rent.write:g} for another:\n"
           f"  {100 * paid / max(1, never):.0f} % of about {never:,.0f} without forgetting, "
           f"{100 * paid / max(1, sent):.0f} % of the {sent:,} without a cache\n"
           f"tokens from the cache: {cached:,} as the server says, {total['expected']:,} expected; recalls: {recalls}\n"
           f"rent of old results: {rent.paid:,} tokens{f', archived at {rent.due:,.0f}' * bool(rent.due)}\n"
           f"prefix breaks, requests that do not begin with the bytes of the one before: {total['breaks']}\n"
           f"phase of the task: {memory.phase(agent.log)}\n"
           f"[{'#' * min(20, 20 * used // window):·<20}] {used:,} of {window:,} tokens in the window")


def bill(tokens: Counter) -> str:
    sent, cached, written = tokens["prompt_tokens"], tokens["cached_tokens"], tokens["written_tokens"]
    count, share = tokens["requests"], 100 * cached // max(1, sent)
    return (f"{count} request{'s' * (count != 1)}: {sent:,} tokens sent, {share} % of them from the cache; "
            f"{tokens['completion_tokens']:,} received"
            f"\n  {sent - cached - written:,} fresh, {cached:,} from the cache, {written:,} written to it")


def context(agent: Agent):
    """show what the model sees of this conversation, and what the log holds"""
    notice(memory.layers(agent.log, agent.model.window, memory.size(agent.tools)))


def skills(agent: Agent):
    """show the skills, and what is wrong with those that are none"""
    found, broken = tools.skills()
    notice("\n".join([*(f"{name} ({whose}{', active' * (name in tools.active)}): {description}"
                        for name, (whose, description, _) in found.items()),
                      *(f"Not a skill: {path}: {problem}" for path, problem in broken.items())]))


def plan_(agent: Agent):
    """plan before anything is changed, as Shift+Tab does; or go on with a plan that was interrupted"""
    if plan.current:
        notice(str(plan.current))
        one_turn(agent, "")
    else:
        agent.switch("normal" if tools.mode == "plan" else "plan")
        notice(f"{tools.mode.capitalize()} mode.")


def quit_(agent: Agent):
    """leave, as Ctrl-D does"""
    raise EOFError


COMMANDS = {"/help": help_, "/tools": tools_, "/plan": plan_, "/skills": skills, "/new": new, "/memory": memory_,
            "/cd": cd, "/model": model_, "/compact": Agent.compress, "/usage": usage, "/context": context,
            "/quit": quit_}


def one_turn(agent: Agent, request: str) -> int:
    """A turn for a person, or the rest of a plan if there is no request; returns the exit code."""
    try:
        if not request:
            return plan.execute(agent)
        answer = agent.turn(request)
        if answer and not SCREEN:
            print(tools.printable(answer), flush=True)
        return review(agent) if tools.mode == "plan" else 0
    except (ModelError, OSError, KeyboardInterrupt) as error:
        notice(f"Error: {error}" if str(error) else "Interrupted.", "red")
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def review(agent: Agent) -> int:
    """Show the plan that was handed in; the user accepts it, or wants changes, or cancels it."""
    while draft := plan.proposed:
        for line in tools.printable(str(draft)).splitlines():
            page.print(indented(line)) if SCREEN else print(line, flush=True)
        choice, wish = plan.choose("Carry out this plan? a = accept, e = edit, c = cancel", "accept", "edit", "cancel")
        if choice == "accept":
            return plan.start(agent, draft)
        if choice == "cancel":
            agent.log.append({"role": "user", "content": plan.CANCELLED + plan.HINT})
            return 0
        agent.turn(wish or reply("What should be different?"))
    return 1 if plan.unattended else 0  # the model has handed in no plan


def line_reader(agent: Agent):
    """Returns a function that reads a line of the user; on a terminal with history, editing, pastes and completion."""
    def meter() -> str:
        doing = memory.phase(agent.log) if tools.mode == "normal" else tools.mode
        return f"{doing} {100 * agent.used() // agent.model.window}% > "
    if not sys.stdin.isatty() or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return lambda: input(meter() * sys.stdin.isatty())
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    class Names(Completer):
        """Commands at the start of a line, paths everywhere."""

        def get_completions(self, document, _):
            word = document.get_word_before_cursor(WORD=True)
            commands = [name for name in COMMANDS if name.startswith(word) and document.text == word]
            for name in commands or sorted(glob.glob(glob.escape(word) + "*")):
                yield Completion(name + "/" * os.path.isdir(name), -len(word))

    class Lines(FileHistory):
        def store_string(self, string):
            if not memory.is_secret(string):
                super().store_string(string)

    keys, drafts = KeyBindings(), []

    @keys.add("s-tab")
    def _(event):
        drafts.append(event.current_buffer.text)
        event.app.exit(result="/plan")

    file = memory.file_of("project").with_name("history")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    history = Lines(file) if os.access(file.parent, os.W_OK) else None
    session = PromptSession(history=history, completer=Names(), complete_while_typing=False, key_bindings=keys)
    return lambda: session.prompt(meter, default=drafts.pop() if drafts else "")


def load_sdk(name: str):
    """It takes a second, in which the first line is typed. What goes wrong is told when it is needed."""
    with suppress(ImportError):
        import_module(name)


def prompt(agent: Agent):
    """Turns and commands until the end of input. From a pipe, each line is one."""
    person, interrupts = sys.stdin.isatty(), 0
    if person:
        notice(f"Rungs {VERSION} · {agent.model.name} · {os.getcwd()}\n/help shows the commands, Ctrl-C stops a turn.")
    read = line_reader(agent)
    if person:
        threading.Thread(target=load_sdk, args=[agent.model.provider.format], daemon=True).start()
    while interrupts < 2:
        try:
            line, interrupts = read().strip(), 0
            name, _, argument = line.partition(" ")
            if line in COMMANDS or name in ("/cd", "/model"):
                COMMANDS[name](agent, *[argument.strip()] * bool(argument))
                read = line_reader(agent) if name == "/cd" else read  # with that project's history
            elif re.fullmatch(r"/\w+", line):
                notice(f"There is no {line}; /help shows the commands.")
            elif line:
                one_turn(agent, line)
        except EOFError:
            return
        except (OSError, ValueError, tools.ToolError) as error:
            notice(f"Error: {error}", "red")
        except KeyboardInterrupt:
            interrupts += 1
            notice("\nCtrl-C again or Ctrl-D leaves.")


def main() -> int | None:
    parser = argparse.ArgumentParser(description="Rungs, a coding agent. Without -p it opens a prompt.")
    parser.add_argument("-p", metavar="TASK", help="do one task and exit: 0 done, 1 failed, 130 interrupted")
    parser.add_argument("--dir", default=".", help="the directory to work in")
    parser.add_argument("--yes", action="store_true", help="allow commands and writes without asking")
    parser.add_argument("--plan", action="store_true", help="plan first; with -p: show the plan, --yes carries it out")
    parser.add_argument("--provider", choices=models.NAMES, default="", help="instead of the first that has a key")
    parser.add_argument("--model", default="", help="instead of the provider's usual one")
    parser.add_argument("--debug", metavar="FILE", nargs="?", const="", help="show requests and replies, or write them")
    parser.add_argument("--time", action="store_true", help="show how long each request took, its tokens, and the sums")
    parser.add_argument("--version", action="version", version=VERSION)
    options = parser.parse_args()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a console that lacks a character shows another, and all goes on
    for name in {"SIGTERM", "SIGHUP"} & {*dir(signal)}:
        signal.signal(getattr(signal, name), lambda *_: sys.exit(143))  # running commands end with us
    try:
        debug = debug_to(options.debug)
        os.chdir(options.dir)
        files = os.path.expanduser("~/.rungs/.env"), os.path.join(os.path.dirname(__file__), ".env")
        sources = [*(dotenv_values(file, encoding="utf-8-sig") for file in files), os.environ]  # the later counts more
        settings = {key: text.strip() for source in sources for key, text in source.items() if text and text.strip()}
        tools.settings.update(settings)
        secrets.update(tools.keys())
        memory.notice = notice
        tools.load_own()  # now and not again: all requests begin with the tools
        for line in tools.not_tools:
            notice(line)
        agent = Agent(Model(settings, debug, options.time, options.provider, options.model))
    except (OSError, ValueError, tools.ToolError) as error:
        parser.error(f"{error} (check --dir, .env and CONTEXT_WINDOW)")
    agent.switch("plan" if options.plan else "normal")
    plan.ask, plan.unattended = reply, "" if options.p is None else "accept" if options.yes else "cancel"
    tools.ask = (lambda question: None) if options.yes else ask
    try:
        return prompt(agent) if options.p is None else one_turn(agent, options.p)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it takes a moment, and then we are gone
        memory.keep(agent.log)
        if options.time:
            notice("in all {model:.1f} s for {requests} requests, {tools:.1f} s for tools".format_map(spent))


if __name__ == "__main__":
    sys.exit(main())
