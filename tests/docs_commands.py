"""Commands out of Markdown pages and out of comments, as a shell would split them; for tests/test_docs.py."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

OTHER_LANGUAGES = ("python", "text")  # the former has a test that runs it, the latter no commands
NO_COMMANDS = {"spec_num_correct_drafts": "a formula in an indented block"}


@dataclass(frozen=True)
class Command:
    """One command of one page. `mention`: it stands in a sentence, where arguments may be left out."""

    page: Path
    words: tuple[str, ...]
    mention: bool = False

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.words)}"[:70]


def split(text: str) -> list[list[str]]:
    """The commands of a piece of shell: lines, lists, pipes and substitutions; redirections are left out."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, words = True, []
        for word in [*lexer, ";"]:
            if word and set(word) <= set(";&|"):
                found += [words] if words else []
                words = []
            else:
                words.append(word)
        for inner in re.findall(r"\$\(([^()]*)\)", line):
            found += split(inner)
    return [words[: words.index(">")] if ">" in words else words for words in found]


def in_markdown(page: Path, programs: Collection[str]) -> list[Command]:
    """Commands of fences and indented blocks, and those in sentences that begin with one of `programs`.

    Raises:
        AssertionError: a fence of a language that nothing here looks at.
    """
    found = []
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            language = token.info.strip()
            assert token.type == "code_block" or language in ("bash", *OTHER_LANGUAGES), f"{page}: ```{language}"
            if language not in OTHER_LANGUAGES:
                found += [Command(page, tuple(words)) for words in split(token.content) if words[0] not in NO_COMMANDS]
        for child in token.children or ():
            code = child.content.strip()
            if child.type == "code_inline" and code.split()[:1] and code.split()[0] in programs and " " in code:
                found += [Command(page, tuple(words), mention=True) for words in split(code)]
    return found


def in_comments(file: Path, programs: Collection[str]) -> list[Command]:
    """Commands in a file's comments, recognised by their program."""
    names = "|".join(map(re.escape, programs))
    lines = [re.match(rf"#(?:   |.*: )((?:{names}) .*)", line) for line in file.read_text().splitlines()]
    return [Command(file, tuple(words)) for line in lines if line for words in split(line[1])]
