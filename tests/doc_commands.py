"""Find the commands in README and docs, and check them against the repository."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_brorl.cli.main import _parse
from megatron_brorl.config.load import load
from megatron_brorl.errors import UserError

ROOT = Path(__file__).parent.parent
# Pages in docs/results are records of commands at their time.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# A comment before a block says why no test runs its commands: <!-- not run: minutes, a GPU -->
BLOCK = re.compile(r"(?:^<!-- not run: ([^>]*) -->\n\n?)?^```(bash|sh|console)\n(.*?)^```", re.S | re.M)
FENCED = re.compile(r"^```.*?^```", re.S | re.M)
INLINE = re.compile(r"(?<!`)`((?:brorl|torchrun|sbatch|bash|make|python) [^`\n]+)`(?!`)")
OPTIONAL = re.compile(r"(?<=\s)\[[^\]=]*(?:=[^\]]*)?\]")  # [FILE.toml], [section.key=value ...]
SHELL = {"cd", "source", "export", "cat", "mkdir", "ls", "head", "wc", "echo", "cp", "grep", "cut", "tail"}
SKIPPED = {"for", "done"}


@dataclass(frozen=True)
class Command:
    where: str  # page:line
    words: tuple[str, ...]  # without variables, redirections and assignments of the shell
    reasons: frozenset[str] | None  # in the comment of the block; None without a comment
    inline: bool = False  # in a sentence or a table
    stdin: str = ""  # its input: the text up to END of <<END

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def commands(page: str, text: str) -> list[Command]:
    """Return all commands of a page: first those in blocks, then those in the text."""
    listed = []
    for match in BLOCK.finditer(text):
        reasons = None if match[1] is None else frozenset(part.strip() for part in match[1].split(","))
        line = text[: match.start(3)].count("\n") + 1
        for number, words, stdin in _block_commands(match[3], console=match[2] == "console"):
            listed.append(Command(f"{page}:{line + number}", words, reasons, stdin=stdin))
    prose = FENCED.sub(lambda m: "\n" * m[0].count("\n"), text)
    for match in INLINE.finditer(prose):
        where = f"{page}:{prose[: match.start()].count(chr(10)) + 1}"
        listed += [Command(where, words, reasons=None, inline=True) for words in _split(match[1])]
    return listed


def _block_commands(block: str, console: bool) -> list[tuple[int, tuple[str, ...], str]]:
    """Return line, words and input of each command of a block."""
    listed = []
    lines = block.splitlines()
    i = 0
    while i < len(lines):
        start = i
        line = lines[i]
        stdin = ""
        while line.endswith("\\") and i + 1 < len(lines):
            i += 1
            line = line[:-1] + " " + lines[i]
        if heredoc := re.search(r"<<-?\s*['\"]?(\w+)", line):
            while i + 1 < len(lines) and lines[i + 1].strip() != heredoc[1]:
                i += 1
                stdin += lines[i] + "\n"
            i += 1  # END itself
            if file := re.match(r"cat > (\S+)", line):
                listed.append((start, ("cat", file[1]), stdin))
                line = ""
        if line.startswith("$ ") or not console:
            listed += [(start, words, stdin) for words in _split(line.removeprefix("$ "))]
        i += 1
    return listed


def _split(line: str) -> list[tuple[str, ...]]:
    """Return the words of each command of a line."""
    lexer = shlex.shlex(OPTIONAL.sub("", line), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if set(word) <= set(";&|"):
            parts.append([])
        elif set(word) <= set("<>"):
            skip = True  # the file of a redirection
        elif skip:
            skip = False
        elif not re.fullmatch(r"\$\w+|\.\.\.", word):
            parts[-1].append(re.sub(r"\$\w+|^[A-Z]$", "1", word))  # 1 for $NAME or N
    return [tuple(words) for part in parts if (words := _bare(part))]


def _bare(words: list[str]) -> list[str]:
    """Remove words of a loop and variables that are set for the command."""
    if words and words[0] in SKIPPED:
        return []
    while words and (words[0] in ("do", "time") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    return words


def arguments_of_brorl(words: tuple[str, ...]) -> list[str] | None:
    """Return the arguments of `brorl`, or None if the command runs another program."""
    if words[0] == "brorl":
        return list(words[1:])
    if words[0] in ("torchrun", "python") and "megatron_brorl" in words:
        return list(words[words.index("megatron_brorl") + 1 :])
    return None


def fault(command: Command, toml: Path) -> str | None:
    """Return the reason why a command is invalid, or None. toml: stands for configurations that the reader writes."""
    words = command.words
    arguments = arguments_of_brorl(words)
    if arguments is not None:
        complaint = _brorl(arguments, toml)
        # A command in a sentence may omit required arguments.
        return None if command.inline and complaint and "arguments are required" in complaint else complaint

    if words[0] == "make":
        text = (ROOT / "Makefile").read_text()
        while value := re.search(r"^(\w+) :?= (.*)\n", text, re.M):  # replace a variable by its value
            text = text.replace(value[0], "").replace(f"$({value[1]})", value[2])
        targets = re.findall(r"^([\w./-]+):", text, re.M)
        missing = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"no target {missing[0]}" if missing else None
    if words == ("python", "-"):
        compile(command.stdin, command.where, "exec")
        return None
    if words[0] in ("bash", "sbatch", "torchrun", "python") and "pytest" not in words:
        return _script(words, toml)
    if words[0] == "python":
        missing = [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
        return f"no file {missing[0]}" if missing else None
    if words[0] in SHELL or command.inline:
        return None
    return None if command.reasons else f"{words[0]}: neither a program of this project nor marked as not run"


def _brorl(arguments: list[str], toml: Path) -> str | None:
    """Return the error of the parser or of the configuration, or None."""
    only_names = all(re.fullmatch("[a-z]+", word) for word in arguments)
    # A command that is only named in a text lacks its required arguments, which --help does not need.
    words = [*arguments, "--help"] if only_names and arguments != ["config"] else arguments
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            args = _parse(words)
    except SystemExit as end:
        return errors.getvalue().strip().splitlines()[-1] if end.code else None
    if getattr(args, "overrides", None) is None or not args.config:
        return None
    return _configuration(args.config, args.overrides, toml)


def _configuration(path: str, overrides: list[str], toml: Path) -> str | None:
    file = ROOT / path
    if path.startswith("examples/") and not file.is_file():
        return f"no file {path}"
    try:
        load(file if file.is_file() else toml, overrides)
    except UserError as e:
        return str(e)
    return None


def _script(words: tuple[str, ...], toml: Path) -> str | None:
    """Return the reason why a script, its options or its overrides are invalid, or None."""
    position = next((i for i, word in enumerate(words) if re.search(r"\.(sh|py|sbatch)$", word)), None)
    if position is None:
        return f"{words[0]} without a script"
    path = ROOT / words[position]
    rest = words[position + 1 :]
    if words[position].startswith("runs/"):
        return None  # a file that the reader has created
    if not path.is_file():
        return f"no file {words[position]}"
    # Add the modules that it imports from its folder, which may define the options.
    text = path.read_text()
    neighbours = [path.parent / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", text, re.M)]
    text += "".join(file.read_text() for file in neighbours if file.is_file())
    for option in (word for word in rest if word.startswith("--")):
        if not re.search(rf"[\"' \[]{re.escape(option.partition('=')[0])}\b", text):
            return f"{words[position]} knows no {option}"
    overrides = [word for word in rest if re.match(r"[a-z]+\.[a-z_]+=", word)]
    return _configuration(str(path.with_suffix(".toml")), overrides, toml) if overrides else None
