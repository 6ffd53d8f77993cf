"""Free text from packages of the registries: filler that a model learns to ignore, and words for names.

Debian's `dict-jargon` (the Jargon File, public domain), `fortunes` (chosen files), `wamerican` (word list, public
domain); PyPI's `wonderwords` (chosen words, and such as nobody wants to read; MIT); of Python itself the language
reference in `pydoc_data` and modules of the standard library (PSF licence).
"""

import gzip
import importlib.util
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from bench.nano.data.package import Words

JARGON = Path("/usr/share/dictd/jargon.dict.dz")
FORTUNES = Path("/usr/share/games/fortunes")
WORDS = Path("/usr/share/dict/american-english")
INSTALL = "apt-get install dict-jargon fortunes wamerican; pip install wonderwords==3.0.1"
CHOSEN_LISTS = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")
UNWANTED_LIST = "profanitylist.txt"
FORTUNE_FILES = ("computers", "definitions", "linux", "science", "wisdom", "work", "education", "literature", "news")
MODULES = 90  # of the standard library, the first by name
LEAST_CHARACTERS, MOST_CHARACTERS = 200, 1200  # of a piece
HELD_ONE_IN, HELD_WORD_ONE_IN = 32, 8


def find_missing() -> list[str]:
    """The files that are not installed."""
    paths = (JARGON, FORTUNES / FORTUNE_FILES[0], WORDS, _find_lists() / UNWANTED_LIST)
    return [str(path) for path in paths if not path.exists()]


def read_pieces() -> tuple[list[str], list[str]]:
    """Texts for training and texts for checks; each begins with a visible character and ends in an empty line."""
    training: list[str] = []
    held: list[str] = []
    for source in (_read_jargon(), *_read_fortunes(), _read_topics(), *_read_modules()):
        for piece in _cut(source):
            (held if _is_held(piece) else training).append(piece)
    return training, held


def read_words() -> Words:
    """Plain words of three to nine letters: chosen ones, one in eight for checks, and for training many more."""
    chosen = {word for name in CHOSEN_LISTS for word in _read_list(name)}
    unwanted = {word for word in _read_list(UNWANTED_LIST) if len(word) > 3}
    held = {word for word in chosen if zlib.crc32(word.encode()) % HELD_WORD_ONE_IN == 0}
    training = (chosen | _pick(WORDS.read_text())) - held
    return Words(*(tuple(sorted(_drop(words, unwanted))) for words in (training, held)))


def _drop(words: set[str], unwanted: set[str]) -> Iterator[str]:
    """Those that do not begin with an unwanted one."""
    return (word for word in words if not any(word[:length] in unwanted for length in range(4, len(word) + 1)))


def _pick(text: str) -> set[str]:
    return {word for word in text.split() if re.fullmatch("[a-z]{3,9}", word)}


def _find_lists() -> Path:
    """The folder of the word lists of `wonderwords`, there or not."""
    spec = importlib.util.find_spec("wonderwords")
    return Path((spec and spec.origin) or "wonderwords/__init__.py").parent / "assets"


def _read_list(name: str) -> set[str]:
    return _pick((_find_lists() / name).read_text())


def _is_held(text: str) -> bool:
    """The same choice on every machine."""
    return zlib.crc32(text.encode()) % HELD_ONE_IN == 0


def _read_jargon() -> str:
    return gzip.decompress(JARGON.read_bytes()).decode(errors="ignore")


def _read_fortunes() -> Iterator[str]:
    for name in FORTUNE_FILES:
        yield (FORTUNES / name).read_text(errors="ignore").replace("\n%\n", "\n\n")


def _read_topics() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def _read_modules() -> Iterator[str]:
    files = sorted(Path(re.__file__).parents[1].glob("*.py"))
    yield from (path.read_text(errors="ignore") for path in files[:MODULES])


def _cut(text: str) -> Iterator[str]:
    """Paragraphs put together until a piece is long enough; those that are too long alone are left out."""
    held = ""
    for paragraph in re.split(r"\n\s*\n", text):
        held = f"{held}\n\n{_tidy(paragraph)}" if held else _tidy(paragraph)
        if len(held) >= LEAST_CHARACTERS:
            if len(held) <= MOST_CHARACTERS and "<|" not in held and "｜" not in held and "think>" not in held:
                yield held + "\n\n"
            held = ""


def _tidy(paragraph: str) -> str:
    """Without outer blank space, and indented alike in all its lines no more than needed."""
    lines = [line.rstrip() for line in paragraph.expandtabs(4).split("\n")]
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line), default=0)
    return "\n".join([lines[0].strip(), *(line[margin:] for line in lines[1:])]).strip()
