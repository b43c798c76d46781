"""Studies whose truth is known."""

import numpy as np

from posenc.statistics.scores import Scores


class World:
    """Two encodings on tasks of different difficulty, whose seeds vary differently, and partly
    together; what lies between the two varies by `apart` from task to task."""

    def __init__(self, num_tasks: int, seed: int = 0, apart: float = 0.05) -> None:
        self.random = np.random.default_rng(seed)
        self.a = self.random.uniform(0.1, 0.9, num_tasks)
        self.b = self.a + self.random.normal(0.03, apart, num_tasks)
        self.deviation = self.random.uniform(0.01, 0.15, num_tasks)

    def study(self, num_seeds: int) -> Scores:
        shape = (len(self.a), num_seeds)
        shared = 0.6 * self.random.normal(size=shape)
        values = [
            mean[:, None]
            + self.deviation[:, None] * (shared + 0.8 * self.random.normal(size=shape))
            for mean in (self.a, self.b)
        ]
        tasks = [f"task {i}" for i in range(len(self.a))]
        return Scores(["a", "b"], tasks, range(num_seeds), np.array(values))

    def difference(self, iqm) -> float:
        """Of a study with very many seeds."""
        noise = self.deviation[:, None] * self.random.normal(size=(len(self.a), 20_000))
        return float(
            iqm((self.b[:, None] + noise).ravel()) - iqm((self.a[:, None] + noise).ravel())
        )
