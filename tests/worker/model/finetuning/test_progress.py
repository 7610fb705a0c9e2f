"""What is told of a training while it runs."""

from io import StringIO

from ryzanstein.tools.progress import ReadingProgress, TrainingProgress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_has_step_speed_loss_rate_and_the_time_that_is_left() -> None:
    out, clock = StringIO(), Clock()
    progress = TrainingProgress([100, 100, 100, 200], out, clock)
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5)):
        clock.now += 12.5
        progress.step(step, loss, 1e-4)
    assert out.getvalue().splitlines() == [
        "step 2/4  8 tokens/s  loss 2.5000  lr 1.00e-04  38 s left",
        "step 3/4  8 tokens/s  loss 2.0000  lr 1.00e-04  25 s left",
        "step 4/4  11 tokens/s  loss 1.5000  lr 1.00e-04  0 s left",
    ]


def test_lines_are_seldom_where_steps_are_many() -> None:
    out, clock = StringIO(), Clock()
    progress = TrainingProgress([10] * 100, out, clock)
    for step in range(1, 101):
        clock.now += 1
        progress.step(step, 1.0, 1e-4)
    assert len(out.getvalue().splitlines()) == 11


def test_a_file_that_is_read_fast_is_not_told_of() -> None:
    out, clock = StringIO(), Clock()
    reading = ReadingProgress("data.jsonl", out, clock)
    for number in range(1, 31):
        clock.now += 0.5
        reading(number)
    assert out.getvalue() == "data.jsonl: 21 lines read\n"


def test_times_are_in_the_unit_that_people_use() -> None:
    assert [duration(seconds) for seconds in (4.4, 99, 100, 5999, 32400)] == ["4 s", "99 s", "2 min", "100 min", "9.0 h"]
