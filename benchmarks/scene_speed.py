"""Measures the speed of drawing scenes: pictures per second on one core, with one object and with several."""

import time

from tokensieve.embedded import scenes


def rate(make, n: int = 1000) -> float:
    scenes.render(make(0))
    began = time.perf_counter()
    for i in range(n):
        scenes.render(make(i))
    return n / (time.perf_counter() - began)


if __name__ == "__main__":
    for shape in scenes.SHAPES:
        scenes._distances(shape)
    print(f"one object       {rate(lambda i: scenes.single(0, i, scenes.PAIRS[i % 80])):6.0f} pictures/s")
    print(f"several objects  {rate(lambda i: scenes.several(0, i)):6.0f} pictures/s")
