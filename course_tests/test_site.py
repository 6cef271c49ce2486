"""The lessons as pages: what is in them, and how they behave in a browser."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

import course
from browser import PROGRAM, Browser
from test_course import first_line_has

SIZES = {"phone": (390, 844), "laptop": (1280, 800), "projector": (1920, 1080)}
FILES = ["--", "*.py", "*.json", "skills", ":!tests"]
WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def build(out, seed):
    """`course.py site`, of the line that main publishes."""
    done = subprocess.run([sys.executable, course.__file__, "site", "--out", str(out)], capture_output=True,
                          encoding="utf-8", env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"), "1")


@pytest.fixture(scope="module")
def pages(built):
    """{name: its page, parsed}"""
    return {path.name: BeautifulSoup(path.read_bytes(), "html.parser", preserve_whitespace_tags={"html"})
            for path in sorted(built.glob("*.html"))}


@pytest.fixture(scope="module")
def lessons(pages):
    """[(version, the one before, language, page)]"""
    versions = course.chosen_line(None)
    return [(version, before, language, pages[f"{version.version}{words['dot']}.html"])
            for before, version in zip([None, *versions], versions) for language, words in course.WORDS.items()]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".html", ".svg", ".css")}


# what is in them


def test_every_version_and_language_has_its_page(pages, lessons):
    assert len(pages) == len(lessons) + 2
    for version, _, language, page in lessons:
        lesson = course.readme(version, language)[1]
        assert page.html["lang"] == course.WORDS[language]["lang"]
        assert page.h1.text == lesson.split("\n")[0].removeprefix("# ") and page.h1.text in page.title.text
        assert page.find("a", attrs={"aria-current": "page"}).text == version.version
        shown = "".join(page.article.get_text().split())
        for words in re.findall(r"\w{4,}", re.sub(r"`[^`]*`|!\[.*?\]\(.*?\)|<[^>]*>", " ", lesson)):
            assert words in shown


def test_the_overview_has_the_ladder(pages):
    versions = course.chosen_line(None)
    for language, words in course.WORDS.items():
        ladder = pages[f"index{words['dot']}.html"].find("table")
        rows = [[cell.text for cell in row("td")] for row in ladder("tr")[1:]]
        assert [row[0] for row in rows] == [version.version for version in versions]
        assert [row[3] for row in rows[1:]] == [str(course.changed_lines(*pair)[0]) for pair in zip(versions, versions[1:])]
        head = course.readme(versions[-1], language)[0]
        assert all(f"| {idea} | {motto} |" in head for _, idea, motto, _ in rows)


def test_every_link_leads_somewhere(built, pages):
    for name, page in pages.items():
        ids = [tag["id"] for tag in page(id=True)]
        assert len(ids) == len(set(ids)), name
        for tag in [*page(href=True), *page(src=True)]:
            file, _, anchor = (tag.get("href") or tag.get("src")).partition("#")
            assert (built / (file or name)).is_file(), (name, tag)
            assert not anchor or pages[file or name].find(id=anchor), (name, tag)
        assert page.find("a", class_="switch")["href"] != name


def test_code_blocks_are_those_of_the_readme_in_both_languages(lessons):
    for (version, _, _, english), (_, _, _, chinese) in zip(lessons[::2], lessons[1::2]):
        blocks = ["\n".join(fence.body).rstrip("\n") for fence in course.fences(course.readme(version, "en")[1])]
        for page in (english, chinese):
            assert [pre.text.rstrip("\n") for pre in page.article("pre")] == blocks


def test_the_diff_is_gits(lessons):
    for version, before, _, page in lessons:
        old = before.id if before else course.git("hash-object", "-t", "tree", "--stdin").strip()
        expected = course.git("diff", "--no-renames", "--numstat", old, version.id, *FILES).splitlines()
        shown = []
        for section in page("section", attrs={"data-tab": True}):
            path, lines = section["aria-label"], []
            for block in section(class_="code"):  # from the numbers at its top, the style sheet counts on
                numbers = [sum(kind != other for kind, _ in lines) for other in ("ins", "del")]
                assert block["style"] == "counter-reset:o {} n {}".format(*numbers)
                lines += [(line.name, line.text) for line in block(["ins", "del", "span"], recursive=False)]
            shown.append("\t".join([str(sum(kind == tag for kind, _ in lines)) for tag in ("ins", "del")] + [path]))
            for commit, other in ((before, "ins"), (version, "del")):
                text = "".join(text + "\n" for kind, text in lines if kind != other)
                assert text == (course.texts(commit.id).get(path, "") if commit else ""), path
        assert sorted(shown, key=lambda row: row.split("\t")[2]) == expected


def test_notes_beside_the_code_are_words_of_the_readme(lessons):
    for version, _, language, page in lessons:
        guide = "".join(course.readme(version, language)[1].split(course.GUIDE[language])[1].replace("`", "").split())
        notes = page("aside")
        assert notes, (version.version, language)
        assert all("".join(note.text.split()) in guide for note in notes)
        for link in page.select("article a[href*='.py:']"):  # a name in the guide leads to a line that was changed
            assert page.find(id=link["href"][1:]).parent.name in ("ins", "del") and link.text in link["href"]


def test_two_builds_are_equal_and_old_pages_go(built, tmp_path):
    (tmp_path / "v9.9.html").write_text("a version that is no more", encoding="utf-8")
    (tmp_path / "note.md").write_text("not a page", encoding="utf-8")
    assert contents(build(tmp_path, "2")) == contents(built)
    assert (tmp_path / "note.md").exists() and sum(map(len, contents(built).values())) < 6_000_000


def test_docs_is_up_to_date(built):
    docs = contents(Path(course.__file__).parent / "docs")
    stale = [name for name, content in contents(built).items() if docs.get(name, b"").replace(b"\r\n", b"\n") != content]
    assert not stale, "run `python course.py site`"


def test_a_line_without_lessons(published):
    first_line_has(published.course("site", code=1), "docs/style.css".replace("/", os.sep), "missing")
    published.write({"docs/style.css": ""})
    first_line_has(published.course("site", code=1), "v0.0", "README.md", "no lesson")


def test_contrast():
    """All colours of text on all grounds, light and dark, as WCAG 2 asks of small text (AA)."""
    def light(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    style = (Path(course.__file__).parent / "docs" / "style.css").read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)]
    themes = [theme for theme in themes if theme]
    assert len(themes) == 2
    for theme in themes:
        pairs = [(ink, ground) for ink in "ink quiet link k s c m f".split() for ground in "paper box new old".split()]
        for ink, ground in [*pairs, ("ink", "note"), ("ink", "bar"), ("new-sign", "new"), ("old-sign", "old")]:
            dark, bright = sorted((light(theme[ink]), light(theme[ground])))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (ink, ground, theme["paper"])


# in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not PROGRAM or os.name == "nt":
        pytest.skip("there is no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.mark.parametrize("size", SIZES)
def test_every_page_fits_and_every_fold_and_link_works(built, pages, browser, size):
    browser.size(*SIZES[size])
    for name, page in pages.items():
        browser.open(built / name)
        assert not browser.run(WIDE), name
        for tab in [tag["id"] for tag in page(id=re.compile("^tab"))] or [""]:
            browser.run(f"document.getElementById('{tab}')?.click()")
            folds = browser.run("""folds = [...document.querySelectorAll("details")].filter(f => f.checkVisibility());
                                   folds.forEach(fold => fold.open = false); folds.length""")
            for fold in range(folds):
                browser.run(f"folds[{fold}].querySelector('summary').focus()")
                browser.press("Enter", 13)
            assert browser.run("folds.every(fold => fold.open)") and not browser.run(WIDE), (name, tab)
        assert browser.run("""(async () => {
            const lost = [], links = [...document.querySelectorAll("a[href^='#']")];
            for (const link of links) {
                document.querySelectorAll("#code details").forEach(fold => fold.open = false);
                link.click();
                await new Promise(done => setTimeout(done));
                await new Promise(requestAnimationFrame);
                const target = document.getElementById(decodeURIComponent(link.hash.slice(1)));
                const box = target.getBoundingClientRect();
                if (!target.checkVisibility() || box.top > innerHeight || box.bottom < 0) lost.push(link.hash);
            }
            return lost;
        })()""") == [], name


def test_the_tab_key_reaches_everything(built, pages, browser):
    browser.size(*SIZES["laptop"])
    name = [name for name in pages if len(pages[name]("section")) > 2][-1]
    browser.open(built / name)
    wanted = browser.run("""[...document.querySelectorAll("a[href], summary, input:checked")]
                            .filter(tag => tag.checkVisibility()).map((tag, n) => tag.dataset.n = String(n))""")
    reached = []
    for _ in range(3 * len(wanted)):
        browser.press("Tab", 9)
        reached.append(browser.run("document.activeElement.dataset.n"))
        if reached[-1] is not None:
            assert browser.run("""(style => style.outlineStyle != "none" && style.outlineWidth != "0px")(getComputedStyle(
                document.activeElement.matches("input") ? document.activeElement.nextSibling : document.activeElement))""")
        if reached[-1] == wanted[-1]:
            break
    assert list(dict.fromkeys(n for n in reached if n)) == wanted  # in the order of the page


def test_tabs_by_keyboard(built, pages, browser):
    browser.size(*SIZES["laptop"])
    name = [name for name in pages if len(pages[name]("section")) > 2][-1]
    browser.open(built / name)
    shown = "[...document.querySelectorAll('[data-tab]')].filter(s => s.checkVisibility()).map(s => s.ariaLabel)"
    first = browser.run(shown)
    browser.run("document.querySelector('#tab0').focus()")
    browser.press("ArrowRight", 39)
    second = browser.run(shown)
    assert len(first) == len(second) == 1 and first != second
