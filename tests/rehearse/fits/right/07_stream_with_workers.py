"""A stream that its two workers share, for three epochs."""

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.rehearse.fits.parts import Net, Points, quiet_trainer


class Stream(IterableDataset):
    """Points, of which a worker takes its share."""

    def __iter__(self):
        worker, points = get_worker_info(), Points()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (points[index] for index in range(first, len(points), step))


def make_run():
    return quiet_trainer(), Net(), DataLoader(Stream(), 8, num_workers=2)
