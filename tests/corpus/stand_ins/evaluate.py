"""A metric that counts nothing."""


class Metric:
    def add_batch(self, **_):
        """Forget it."""

    def compute(self, **_):
        return {"accuracy": 0.5}


def load(*_):
    return Metric()
