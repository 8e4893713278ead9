"""What a message costs: the line is found again, whatever the noise; ranks measure it in any world; the picture."""

import json
import math
import random

import pytest
import toys

from zero_minimal.meters import latency_probe
from zero_minimal.pictures.latency_chart import draw_latency

ALPHA, BETA = 60e-6, 0.4e-9  # seconds, seconds a byte


def made_up(change=lambda place, seconds: seconds, alpha=ALPHA, beta=BETA):
    return [(size, change(place, alpha + beta * size)) for place, size in enumerate(latency_probe.SIZES)]


def test_the_line_is_found_again():
    cost = latency_probe.fit(made_up())
    assert cost == pytest.approx((ALPHA, BETA), rel=1e-6) and cost.half == pytest.approx(150_000)
    assert cost.seconds(1_000_000) == pytest.approx(460e-6)


@pytest.mark.parametrize("far", range(len(latency_probe.SIZES)))
@pytest.mark.parametrize("times", (0.2, 7))
def test_one_point_far_off_changes_nothing(far, times):
    points = made_up(lambda place, seconds: seconds * times if place == far else seconds)
    assert latency_probe.fit(points) == pytest.approx((ALPHA, BETA), rel=0.01)


def test_the_order_of_the_points_and_a_size_measured_twice_change_nothing():
    points = made_up() + made_up()[3:5]
    random.Random(0).shuffle(points)
    assert latency_probe.fit(points) == pytest.approx((ALPHA, BETA), rel=0.01)


def test_noise_moves_both_by_no_more_than_itself():
    for seed in range(20):
        noise = random.Random(seed)
        points = made_up(lambda _, seconds, noise=noise: seconds * noise.uniform(0.9, 1.1))
        assert latency_probe.fit(points) == pytest.approx((ALPHA, BETA), rel=0.15)


def test_neither_is_ever_below_zero():
    """A line by least squares would have an α of −2 ms for the first, and a β below 0 for the second."""
    curved = latency_probe.fit([(size, size**1.3 * 1e-9) for size in latency_probe.SIZES])
    falling = latency_probe.fit([(size, 1e-3 / (1 + place)) for place, size in enumerate(latency_probe.SIZES)])
    for cost in (curved, falling):
        assert cost.alpha >= 0 and cost.beta >= 0 and cost.alpha + cost.beta > 0
    assert latency_probe.fit(made_up(beta=0.0)) == (ALPHA, 0.0) and latency_probe.Cost(ALPHA, 0.0).half == math.inf
    assert latency_probe.fit(made_up(alpha=0.0)) == pytest.approx((0.0, BETA))


@pytest.mark.parametrize("points", ([], [(8, 1e-6)], [(8, 1e-6), (8, 2e-6)], [(8, 0.0), (80, 1.0)],
                                    [(0, 1.0), (8, 1.0)]))
def test_too_few_points_are_refused(points):
    with pytest.raises(ValueError, match="a line needs points of two sizes"):
        latency_probe.fit(points)


# ----------------------------------------------------------------------------------------------------------- measured


@pytest.mark.parametrize("world_size", (2, 3))
def test_every_rank_gets_the_times_of_all_sizes(world_size):
    first, *others = toys.run(latency_probe.measure, world_size, rounds=2)
    assert [bytes for bytes, _ in first] == sorted(latency_probe.SIZES) and len(first) >= 8
    assert all(0 < seconds < 10 for _, seconds in first)
    assert others == [first] * (world_size - 1), "each rank has another result"
    cost = latency_probe.fit(first)
    assert cost.alpha >= 0 and cost.beta >= 0
    assert json.loads(json.dumps(first)) == [list(point) for point in first]


def test_sizes_come_in_order_and_once():
    points = toys.run(latency_probe.measure, 2, sizes=(5000, 1, 300, 1), rounds=1)[0]
    assert [bytes for bytes, _ in points] == [1, 300, 5000]


def refusals():
    words = []
    for options in ({"sizes": ()}, {"sizes": (0, 8)}, {"rounds": 0}):
        with pytest.raises(ValueError) as caught:
            latency_probe.measure(**options)
        words.append(str(caught.value))
    return words


def test_what_cannot_be_measured_is_refused():
    assert all("give sizes of 1 byte or more" in words for words in toys.run(refusals, 2)[0])
    with pytest.raises(Exception, match="a message needs two ranks: start 2 or more"):
        toys.run(latency_probe.measure, 1)


# -------------------------------------------------------------------------------------------------------- the picture


def test_the_picture_shows_the_points_and_both_pieces():
    points = made_up()
    axis = draw_latency(points, ALPHA, BETA).axes[0]
    labels = [line.get_label() for line in axis.get_lines()]
    assert "α = 60 µs before the first byte" in labels and "β·bytes, 2.5 GB a second" in labels
    (marks,) = (line for line in axis.get_lines() if line.get_label() == "measured")
    assert list(zip(*marks.get_data(), strict=True)) == points
    assert [text.get_text() for text in axis.texts] == ["n½ = 150 KB: half of the time is α"]
    assert axis.get_xscale() == axis.get_yscale() == "log"
    styles = {line.get_linestyle() for line in axis.get_lines() if line.get_marker() == "None"}
    assert len(styles) >= 3, "in grey the pieces look alike"


def test_a_picture_without_one_of_the_pieces_is_drawn_too():
    for alpha, beta in ((0.0, BETA), (ALPHA, 0.0)):
        draw_latency(made_up(), alpha, beta).draw_without_rendering()
