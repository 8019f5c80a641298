"""Docstrings, comments and documents: short sentences that do not open with a relative clause."""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 25

OPENING = re.compile(
    r"(What|Which|Who|Whom|Whose|Whether|How|Where|That|Those|By|Of|It|Because of)\b(?!.*\?$)"
)
RETURNS = re.compile(
    r"(Return|Yield|Give|Say|Tell) (what|which|who|whose|whether|how|where|that)\b"
)
C_COMMENT = re.compile(
    r'"(?:\\.|[^"\\\n])*"|((?:^[ \t]*//.*\n?)+|//.*)|/\*([^*]*(?:\*(?!/)[^*]*)*)\*/', re.M
)
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.M | re.S)
#: Lines that are no sentences: tables, headings, directives, doctests, fields of an entry, columns.
NO_TEXT = re.compile(
    r"\s*(\||#|\.\. |>>> |\.\.\. |!!! |<|[-=~]{3,}( |$)|[\w*, `]+ : |(?![-*+] |\d+\. )\S.*?\S {2,}\S)"
)
ITEM = re.compile(r"^\s*([-*+]|\d+\.) ")
CODE = re.compile(r"``.+?``|`[^`]*`")
CODES = re.compile(r"X(,? (and |or )?X\b)+")
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)\"*]*\s+")


def comments_of_python(source):
    """Yield the comments of a module; whole lines in one column are one comment."""
    block, last = [], (-2, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            beside_code = bool(token.line[: token.start[1]].strip())
            if block and (beside_code or token.start != (last[0] + 1, last[1])):
                yield "\n".join(block)
                block = []
            block.append(token.string.lstrip("#:! "))
            last = token.start
    if block:
        yield "\n".join(block)


def texts_of_errors(source):
    """Yield the texts of the errors that a module raises; a value in braces is one word."""
    for error in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)):
        inner = set()
        for part in ast.walk(error):
            if isinstance(part, ast.JoinedStr):
                inner.update(part.values)
                yield "".join(v.value if isinstance(v, ast.Constant) else "X" for v in part.values)
            elif isinstance(getattr(part, "value", None), str) and part not in inner:
                yield part.value


def texts_of_python(source):
    """Yield the docstrings, also those of attributes, and the comments."""
    for node in ast.walk(ast.parse(source)):
        for statement in (
            getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ()
        ):
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value
    yield from comments_of_python(source)


def texts_of_c(source):
    """Yield the comments of C++."""
    for match in C_COMMENT.finditer(source):
        if match[1] or match[2]:
            yield re.sub(r"^[ \t]*(//+|\*)[ \t]?", "", match[1] or match[2], flags=re.M)


def texts_of_markdown(source):
    """Yield the document without its code."""
    yield FENCE.sub("", source)


def paragraphs(text):
    """Yield the paragraphs, the items of lists and the entries of sections, each in one line."""
    lines, before, item = [], 0, False
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        begins = ITEM.match(line) or indent < before or (indent > before and not item)
        skipped = NO_TEXT.match(line)
        if lines and (not line.strip() or skipped or begins):
            yield " ".join(lines)
            lines = []
        if not lines:
            item = bool(ITEM.match(line))
        if line.strip() and not skipped:
            lines.append(ITEM.sub("", line, count=1).strip())
        before = indent


def words_of(sentence):
    """Count the words and numbers. Signs do not count, and a list of pieces of code is one word."""
    return sum(bool(re.search(r"\w", word)) for word in CODES.sub("X", sentence).split())


def faults(text):
    """Yield the faults of a text."""
    for number, paragraph in enumerate(paragraphs(text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", CODE.sub("X", paragraph))
        if OPENING.match(plain) or (number == 0 and RETURNS.match(plain)):
            yield f"opens with a relative clause or a pronoun: {plain[:80]}"
        for sentence in SENTENCE_END.split(plain):
            if (count := words_of(sentence)) > MOST_WORDS:
                yield f"a sentence of {count} words: {sentence[:80]}"


READERS = {
    ".py": texts_of_python,
    ".pyi": texts_of_python,
    ".md": texts_of_markdown,
} | dict.fromkeys((".cc", ".h", ".cu"), texts_of_c)


def faults_below(folder):
    found = []
    files = (ROOT / folder).rglob("*") if (ROOT / folder).is_dir() else ROOT.glob(folder)
    for path in sorted(files):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in READERS:
            continue
        for text in READERS[path.suffix](path.read_text()):
            found += [f"{name}: {fault}" for fault in faults(text)]
    return found


@pytest.mark.parametrize(
    "folder", ["pycollective", "csrc", "tests", "benchmarks", "examples", "docs", "*.md"]
)
def test_sentences_are_short_and_open_with_their_subject(folder):
    assert not faults_below(folder)


def test_sentences_of_errors_are_short():
    found = [
        f"{path.name}: {sentence}"
        for path in sorted((ROOT / "pycollective").rglob("*.py"))
        for text in texts_of_errors(path.read_text())
        for sentence in SENTENCE_END.split(CODE.sub("X", text))
        if words_of(sentence) > MOST_WORDS
    ]
    assert not found


def test_texts_of_errors_are_found():
    source = 'text = "no"\nif x:\n    raise E(f"a {x!r}: " "b", "c") from e\n'
    assert sorted(texts_of_errors(source)) == ["a X: b", "c"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return the sum.", 0),
        ("Which ranks wait?", 0),
        ("Which ranks wait.", 1),
        ("Return what the peer sent.", 1),
        ("word " * 25 + "end. Then more.", 1),
        ("word " * 24 + "end. Then more.", 0),
        ("word " * 20 + "\n* " + "word " * 20, 0),
        ("word " * 20 + "36. Then " + "word " * 20, 0),
        ("word " * 20 + "sends. recv() receives " + "word " * 20, 0),
        ("word " * 20 + "(e.g. with " + "word " * 20, 1),
        ("| " + "word " * 50, 0),
        ("word " * 20 + "  # " + "word " * 20, 0),
        ("* item  " + "word " * 30, 1),
        ("----- names (file.cc) ------\n" + "word " * 25, 0),
        ("`" + "word " * 50 + "` is code.", 0),
        ("``" + "word " * 50 + "`` is code.", 0),
        ("f = a + b " * 8, 0),
        ("`f`, `g` and `h` " * 30, 0),
        ("`f` calls `g`, then " * 9, 1),
    ],
)
def test_faults_of_a_text_are_counted(text, expected):
    assert len(list(faults(text))) == expected


def test_every_kind_of_text_is_read():
    source = '"""A."""\nx = 1\n"""B."""  # C\n# D\n# E\ny = "#"  # F\nz = 1  # G\n'
    assert list(texts_of_python(source)) == ["A.", "B.", "C", "D\nE", "F", "G"]
    assert "".join(texts_of_c('// A\n// B\nf("// no");  /* C */')) == "A\nB\n C "
    assert "".join(texts_of_markdown("A\n```\ncode\n```\nB")) == "A\n\nB"
