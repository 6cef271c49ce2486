"""A reader's own change, made at v0.1, goes along to every later version with `git merge`, as the README says."""

import re
import subprocess
import sys

import course
from conftest import COURSE, Repo

# The tool goes below this one. Not at the end of the file, nor below list_dir: later versions put their own tools there,
# and git would not know which come first.
PLACE = "read_file"


def test_a_tool_of_ones_own_survives_the_walk(tmp_path, env):
    """The tool is the solution of v0.1's exercise. At each version it is offered, and does its work."""
    reader = Repo(tmp_path / "rungs", env)
    subprocess.run(["git", "clone", "-q", "--no-tags", COURSE.parent.as_uri(), str(reader.folder)], env=env, check=True)
    reader.course("tags")
    versions = sorted(reader.tags(), key=course.number)[1:]  # v0.0 has no tools
    tool = re.search(r"```python\n(@tool.*?)```", reader.git("show", f"{versions[0]}:README.md"), re.S)[1]
    code = reader.git("show", f"{versions[0]}:tools.py") + "\n"
    end = re.compile(rf"^def {PLACE}\b.*?\n\n\n", re.S | re.M).search(code).end()

    reader.git("switch", "-q", "-c", "my", versions[0])
    reader.commit("my tool", {"tools.py": f"{code[:end]}{tool}\n\n{code[end:]}"})
    for version in versions:
        reader.git("merge", "-q", "--no-edit", version)  # a conflict fails here, and git says where
        done = subprocess.run([sys.executable, "agent.py"], input="/tools\nword_count LICENSE\n", capture_output=True,
                              cwd=reader.folder, env=course.reader(reader.folder, sys.executable), encoding="utf-8")
        assert re.search("^word_count +Count the words", done.stderr, re.M), f"{version}: {done.stderr}"
        assert re.search("word_count LICENSE.* 170 words$", done.stdout, re.M), f"{version}: {done.stdout}"
    assert reader.git("diff", "--shortstat", version, "my") == "1 file changed, 6 insertions(+)"
