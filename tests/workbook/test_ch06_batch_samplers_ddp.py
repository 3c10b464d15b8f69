"""The numbers behind chapter 06's figures and widget."""

from workbook.ch06_batch_samplers_ddp import figure_of_uses, two_stream_explorer, use_counts
from workbook.display import png_bytes

from course_lib.samplers import TwoStreamBatchSampler


def test_use_counts_are_those_of_each_rank_and_of_all():
    ranks = [[[0, 1], [2, 7]], [[2, 3], [7, 7]]]
    assert use_counts(ranks, [0, 1, 2, 3, 4, 7]).tolist() == [
        [1, 1, 1, 0, 0, 1],
        [0, 0, 1, 1, 0, 2],
        [1, 1, 2, 1, 0, 3],
    ]


def test_the_heatmap_writes_what_is_missing_and_what_is_used_more_than_once():
    figure = figure_of_uses({"a": ([[[0, 1]], [[1, 2]]], [0, 1, 2, 3])})
    assert png_bytes(figure).startswith(b"\x89PNG")
    texts = {(text.get_position(), text.get_text()) for text in figure.axes[0].texts}
    assert texts == {((1, 2), "2"), ((3, 2), "0")}


def test_the_widget_follows_its_controls():
    explorer = two_stream_explorer()
    for tail in ("spread", "drop", "pad"):
        text = explorer.set(primary=13, secondary=5, sizes=2, secondary_size=1, ranks=3, tail=tail)
        samplers = [
            TwoStreamBatchSampler(range(13), range(100, 105), 2, 1, tail=tail, num_replicas=3, rank=rank)
            for rank in range(3)
        ]
        for line, sampler in zip(text.splitlines(), samplers, strict=False):
            assert line.endswith(" ".join(str(batch) for batch in sampler))
    assert "primary: never 0, more than once 5" in text
