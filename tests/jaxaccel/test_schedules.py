"""Tables of ticks against the published figures, and against a pipeline played with tokens."""

import itertools

import numpy as np
import pytest

from jaxaccel.schedules import IDLE, PARTS, Times, schedule

SMALL = [
    (kind, stages, count, chunks, delayed)
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
    for stages, count, delayed in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 7, 8), (0, 1))
]


def make(kind, stages, count, chunks=1, delayed=False):
    return schedule(kind, stages, count, chunks=chunks, delayed=bool(delayed))


def order(found, stage, which):
    """(micro-batch, chunk) of a stage's passes, from 1 as in the figures."""
    runs = getattr(found.ticks, which)[:, stage]
    chunks = getattr(found.ticks, f"{which}_chunk")[:, stage]
    return [(int(mb) + 1, int(c) + 1) for mb, c in zip(runs, chunks) if mb != IDLE]


def columns(found):
    """A row a stage, a column for each half of a tick that any stage has, numbers from 1."""
    halves = np.stack([found.ticks.forward, found.ticks.backward], 1).reshape(-1, found.stages)
    used = halves[(halves != IDLE).any(1)]
    return [" ".join("." if n == IDLE else str(n + 1) for n in row) for row in used.T]


def test_gpipe_is_figure_2c():
    """arXiv:1811.06965: four devices, four micro-batches, forward and then backward."""
    assert columns(make("gpipe", 4, 4)) == [
        "1 2 3 4 . . . . . . 4 3 2 1",
        ". 1 2 3 4 . . . . 4 3 2 1 .",
        ". . 1 2 3 4 . . 4 3 2 1 . .",
        ". . . 1 2 3 4 4 3 2 1 . . .",
    ]


def test_1f1b_is_the_published_order():
    """arXiv:2104.04473 figure 4, above (PipeDream-flush): all passes in order, on every device."""
    found = make("1f1b", 4, 8)
    for stage in range(4):
        assert order(found, stage, "forward") == [(n, 1) for n in range(1, 9)]
        assert order(found, stage, "backward") == [(n, 1) for n in range(1, 9)]
    # The last device: one forward, one backward.
    assert columns(found)[3] == ". . . 1 1 2 2 3 3 4 4 5 5 6 6 7 7 8 8 . . ."
    # Its first backward pass comes back a tick a stage.
    starts = [int(np.argmax(found.ticks.backward[:, stage] == 0)) for stage in range(4)]
    assert starts == [6, 5, 4, 3]


def test_1f1b_by_hand():
    assert columns(make("1f1b", 2, 4)) == [
        "1 2 . 3 1 4 2 . 3 4",
        ". 1 1 2 2 3 3 4 4 .",
    ]


def test_interleaved_is_figure_4():
    """arXiv:2104.04473, below: four devices, eight micro-batches, two chunks a device.

    Four micro-batches go through the first chunk, the same four through the second; backward
    through the second and then the first.
    """
    found = make("interleaved", 4, 8, 2)
    one, two = [1, 2, 3, 4], [5, 6, 7, 8]
    forward = [(n, c) for group, c in ((one, 1), (one, 2), (two, 1), (two, 2)) for n in group]
    backward = [(n, c) for group, c in ((one, 2), (one, 1), (two, 2), (two, 1)) for n in group]
    for stage in range(4):
        assert order(found, stage, "forward") == forward
        assert order(found, stage, "backward") == backward


class Slots:
    """A stage's places: what is written stays until it is read, and is read once."""

    def __init__(self, size):
        self.of = [None] * size

    def write(self, slot, what):
        if slot == len(self.of):  # the one past the last: nobody reads it
            return
        assert self.of[slot] is None, f"{what} over {self.of[slot]}"
        self.of[slot] = what

    def read(self, slot, what):
        assert self.of[slot] == what
        self.of[slot] = None


@pytest.mark.parametrize("case", SMALL, ids=lambda case: "-".join(map(str, case)))
def test_played_with_tokens(case):
    """Every pass once, with the input that belongs to it, and no slot overwritten unread."""
    found = make(*case)
    p, last = found.stages, found.stages * found.chunks - 1
    ring = found.chunks > 1
    inputs, kept, gradients = (
        [Slots(size) for _ in range(p)] for size in (found.inputs, found.kept, found.gradients)
    )
    done = []

    def arrive(place, slots, sent, step):
        for stage in range(p):
            source = stage - step
            token = sent[source % p] if ring or 0 <= source < p else None
            if token is None:
                assert slots[stage] == len(place[stage].of)
            else:
                assert token[1] in (-1, last + 1) or slots[stage] < len(place[stage].of)
                place[stage].write(slots[stage], token)

    y, g = [None] * p, [None] * p  # what was found last: its micro-batch, and for which run it is
    for tick in range(len(found.ticks.forward)):
        now = type(found.ticks)(*(table[tick] for table in found.ticks))
        before_y, before_g = list(y), list(g)
        for s in range(p):
            y[s] = None
            if (mb := now.forward[s]) != IDLE:
                run = now.forward_chunk[s] * p + s
                assert (now.read[s] == IDLE) == (run == 0)
                if run:
                    inputs[s].read(now.read[s], (mb, run))
                kept[s].write(now.keep[s], (mb, run))
                assert (now.turn[s] != IDLE) == (run == last)
                if run == last:
                    gradients[s].write(now.turn[s], (mb, run))
                y[s] = mb, run + 1
                done.append(("forward", mb, run))
        if found.delayed:
            arrive(inputs, now.arrives, before_y, 1)
        else:
            arrive(gradients, now.returns, before_g, -1)
        for s in range(p):
            g[s] = None
            if (mb := now.backward[s]) != IDLE:
                run = now.backward_chunk[s] * p + s
                kept[s].read(now.kept[s], (mb, run))
                gradients[s].read(now.gradient[s], (mb, run))
                assert now.ends[s] == (run == 0)
                g[s] = mb, run - 1
                done.append(("backward", mb, run))
        if found.delayed:
            arrive(gradients, now.returns, before_g, -1)
        else:
            arrive(inputs, now.arrives, y, 1)
    runs = itertools.product(("forward", "backward"), range(found.micro_batches), range(last + 1))
    assert sorted(done) == sorted(runs)
    assert not any(filter(None, (x for s in (*inputs, *kept, *gradients) for x in s.of)))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_slots_follow_stages_under_1f1b_and_micro_batches_under_gpipe(stages, delayed):
    sizes = lambda *case: (lambda s: (s.inputs, s.kept, s.gradients))(make(*case, delayed))
    few, many = 4 * stages, 16 * stages
    assert sizes("1f1b", stages, few, 1) == sizes("1f1b", stages, many, 1)
    assert sizes("interleaved", stages, few, 2) == sizes("interleaved", stages, many, 2)
    assert [sizes("gpipe", stages, count, 1)[1] for count in (few, many)] == [few, many]
    if not delayed:
        assert sizes("1f1b", stages, many, 1)[1] == 2 * stages - 1


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("times", [Times(), Times(1.0, 1.0), Times(3.0, 7.0)])
def test_bubbles_are_the_published_ones(p, times):
    for m in (2 * p, 4 * p, 8 * p):
        for kind, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
            ideal = (p - 1) / (v * m)
            assert make(kind, p, m, v).bubble(times) == pytest.approx(ideal)
            # A fill takes two ticks a stage.
            assert make(kind, p, m, v, True).bubble(times) == pytest.approx(2 * ideal, rel=0.1)


def test_seconds_by_hand():
    """Two stages, two micro-batches: halves F., FB, FB and .B are in use."""
    found = make("1f1b", 2, 2)
    assert found.drawing() == "F. F. .B .B\n.. FB FB .."
    assert found.seconds(Times(1, 2)) == 9
    # A transfer in every half: seen where nothing runs, or it is the longer.
    assert found.seconds(Times(1, 2, 0.5)) == 9 + 2 * 0.5
    assert found.seconds(Times(1, 2, 1.5)) == 3 * 1.5 + 3 * 2 + 2 * 1.5
    assert found.seconds(Times(1, 2, 0.5, hides=False)) == 9 + 8 * 0.5
    # The loss on the second stage, beside the embedding on the first.
    assert found.seconds(Times(1, 2, last=1)) == 9 + 2
    assert found.seconds(Times(1, 2, last=1, first=0.25)) == 9 + 2 + 0.25
    assert found.seconds(Times(1, 2, end=0.5)) == 9 + 2 * 0.5
    assert make("interleaved", 1, 2, 2).seconds(Times(1, 2, last=1)) == 2 * (1 + 2 + 1)


@pytest.mark.parametrize("case", SMALL[::7], ids=lambda case: "-".join(map(str, case)))
def test_turns_are_the_ticks(case):
    found = make(*case)
    of_stage = [
        [parts for count, parts in found.turns(stage) for _ in range(count)]
        for stage in range(found.stages)
    ]
    forward, backward = (np.array([[n != IDLE for n in row] for row in table.T])
                         for table in (found.ticks.forward, found.ticks.backward))  # fmt: skip
    for stage, parts in enumerate(of_stage):
        assert [p >= {"forward"} for p in parts] == forward[stage].tolist()
        assert [p >= {"backward"} for p in parts] == backward[stage].tolist()
        sums = [sum(name in p for p in parts) for name in PARTS]
        m, v = found.micro_batches, found.chunks
        first, last = m * (stage == 0), m * (stage == found.stages - 1)
        assert sums == [m * v, first, last, m * v, first]
    together = [parts for count, parts in found.turns() for _ in range(count)]
    for tick, parts in enumerate(together):
        union = frozenset().union(*(each[tick] for each in of_stage))
        beside = found.stages > 1 and "last" in union
        assert parts == union - ({"first"} if beside else set())


def test_fewer_micro_batches_than_stages_are_warned_of():
    assert make("1f1b", 4, 4).warning() is None
    line = make("1f1b", 4, 2).warning()
    assert line and "2 for 4 stages" in line and "150%" in line and "75%" in line


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("1f1b", 0, 2), "got 0 stages, 2 micro-batches"),
        (("gpipe", 2, 0), "each must be at least 1"),
        (("1f1b", 2, 2, 2), "'1f1b' with 2 chunks"),
        (("interleaved", 2, 2, 1), "interleaved has 2 or more"),
        (("interleaved", 2, 2, 0), "0 chunks"),
    ],
)
def test_bad_input(case, message):
    with pytest.raises(ValueError, match=message):
        make(*case)
