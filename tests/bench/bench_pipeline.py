"""The model of the pipeline against the clock: samples and steps that only sleep, so that no core is short."""

import time

import pytest
from torch.utils.data import DataLoader, Dataset

from course_lib.pipeline import predict_throughput, trace

LOAD_S, COMPUTE_S, BATCHES, SERIES = 0.020, 0.010, 40, 3


class Sleeping(Dataset):
    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        time.sleep(LOAD_S)
        return index


def batches_per_second(workers: int) -> float:
    """From the first delivery to the last: the workers' start is not the model's."""
    records = trace(DataLoader(Sleeping(), num_workers=workers), compute=lambda batch: time.sleep(COMPUTE_S))
    return (len(records) - 1) / (records[-1].delivered_s - records[0].delivered_s)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores: they sleep
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_the_measured_throughput_is_within_a_fifth_of_the_predicted(workers):
    predicted = predict_throughput(LOAD_S, COMPUTE_S, workers)
    measured = []
    while len(measured) < SERIES and not any(abs(rate / predicted - 1) <= 0.2 for rate in measured):
        measured.append(batches_per_second(workers))
    rate = min(measured, key=lambda rate: abs(rate - predicted))  # what else the machine does disturbs one more
    print(
        f"\n{workers} workers: predicted {predicted:.1f} batches/s, measured {rate:.1f}, ratio {rate / predicted:.3f}"
    )
    assert 0.8 <= rate / predicted <= 1.2
