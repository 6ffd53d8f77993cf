"""Chance for one sample or batch: words, names, numbers, paths, filler; all from one seed."""

from collections.abc import Callable
from random import Random

from bench.nano.data.format import EFFORTS
from bench.nano.data.package import Package
from bench.nano.data.sample import Piece

SUFFIXES = (".txt", ".txt", ".md", ".cfg", ".ini", ".log", ".yaml", ".csv", ".list", ".toml", ".dat", ".json", ".py")
FILES = ("{}", "{}", "{}-{}", "{}_{}", "{}/{}", "src/{}", "docs/{}", "{}7", "{}2", "{}/{}/{}")
IDENTIFIERS = ("{}", "{}", "{}", "{}_{}", "{}_{}", "{}-{}", "{0}{3}", "{}_{}_{}", "get_{}", "{}7")
SKIPS = 6  # pieces of filler that do not fit, one after the other, until no more is tried


class Draw:
    """Draws from `package`; with `held` from the words and the filler that training never sees.

    No name, key or path comes twice out of one `Draw`.
    """

    def __init__(self, package: Package, seed: str, *, held: bool = False) -> None:
        self.package = package
        self.random = Random(seed)
        self._words = package.words.held if held else package.words.training
        self._pieces = package.held_filler if held else package.filler
        self._seen: set[str] = set()

    def chance(self, probability: float) -> bool:
        """True as often as `probability` says."""
        return self.random.random() < probability

    def effort(self) -> int | None:
        """Whether the model thinks, and at which effort: in half of the conversations it does not."""
        return self.random.choice(EFFORTS) if self.chance(0.5) else None

    def word(self) -> str:
        """Any word; some begin with a capital or are in capitals."""
        word = self.random.choice(self._words)
        form = self.random.random()
        return word if form > 0.09 else word.capitalize() if form > 0.02 else word.upper()

    def words(self, least: int, most: int) -> str:
        """Some words with spaces between them."""
        return " ".join(self.word() for _ in range(self.random.randint(least, most)))

    def name(self) -> str:
        """Two words that were not drawn together before."""
        return self._new(lambda: f"{self.word()} {self.word()}")

    def key(self) -> str:
        """A key of a line: mostly one word."""
        return self._new(lambda: self.random.choice(("{}", "{}", "{}", "{} {}", "{}-{}", "{}_{}")).format(*self._two()))

    def path(self) -> str:
        """A file, some of them in folders."""
        pattern = self.random.choice(FILES)
        return self._new(lambda: pattern.format(*self._two(), self.word()) + self.random.choice(SUFFIXES))

    def identifier(self) -> str:
        """A name as programs have it, of one to three words."""
        return self._new(self._make_identifier)

    def digits(self, count: int = 5) -> str:
        """A number of `count` digits that does not begin with a zero."""
        return str(self.random.randrange(10 ** (count - 1), 10**count))

    def phrase(self) -> str:
        """What stands in a line behind its key: some words, often with a number."""
        number = self.digits(self.random.randint(1, 5))
        pattern = self.random.choice(("{words}", "{words}", "{number} {words}", "{words} {number}", "{number}"))
        return pattern.format(words=self.words(1, 5), number=number)

    def filler(self, tokens: int) -> list[Piece]:
        """Pieces that followed each other in their source, of at most `tokens` in all and not many fewer."""
        pieces: list[Piece] = []
        place, skips = self.random.randrange(len(self._pieces)), 0
        while skips < SKIPS:
            piece = self._pieces[place % len(self._pieces)]
            place += 1
            if len(piece.ids) > tokens:
                skips += 1
                continue
            pieces.append(piece)
            tokens -= len(piece.ids)
        return pieces

    def _two(self) -> tuple[str, str]:
        return self.word(), self.word()

    def _make_identifier(self) -> str:
        first, second, third = (self.random.choice(self._words) for _ in range(3))
        return self.random.choice(IDENTIFIERS).format(first, second, third, second.capitalize())

    def _new(self, make: Callable[[], str]) -> str:
        while (made := make()) in self._seen:
            pass
        self._seen.add(made)
        return made
