"""What WORKSHOP.md tells a teacher to show works at each version, and the Chinese one shows the same."""

import re
import sys

import pytest

import course

ENGLISH, CHINESE = ((course.ROOT / f"WORKSHOP{language}.md").read_text(encoding="utf-8") for language in ("", ".zh-CN"))
DEMOS = dict(re.findall(r"^### (v\d+\.\d+)\n\n```sh\n(.*?)^```", ENGLISH, re.S | re.M))


def test_both_languages_have_the_same_blocks():
    assert course.fences(ENGLISH) and len(course.fences(ENGLISH)) == len(course.fences(CHINESE))
    for english, chinese in zip(course.fences(ENGLISH), course.fences(CHINESE)):
        assert (english.info, english.body) == (chinese.info, chinese.body)


@pytest.mark.skipif(sys.platform == "win32", reason="bash")
def test_every_demo_works_and_leaves_nothing_behind():
    versions = course.line(course.newest("HEAD")[1])
    assert list(DEMOS) == [version.version for version in versions]
    for version in versions:
        with course.scratch() as folder:
            course.unpack(version.id, folder)
            before = {path.name for path in folder.iterdir()}
            environment = course.reader(folder, sys.executable)
            code, said = course.run(["bash", "-ec", DEMOS[version.version]], folder, environment, 120)
            assert code == 0 and said.strip() and "Traceback" not in said, f"{version.version}: {said}"
            assert {path.name for path in folder.iterdir()} == before, version.version
