"""Keras: one callback. Trains a small net on handwritten digits, then prints what trainvet measured and what it thinks of it."""

import keras
from sklearn.datasets import load_digits

from trainvet.callbacks.keras import Diagnostics


def main():
    keras.utils.set_random_seed(0)
    digits = load_digits()
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    diagnostics = Diagnostics(log_dir="runs/keras_digits")
    model.fit(digits.data / 16, digits.target, batch_size=64, epochs=8, verbose=0, callbacks=[diagnostics])

    print(diagnostics.report.verdict())
    norm = diagnostics.history("gradient.norm")  # steps [T], subjects (S names), values [T, S]
    for name, first, last in zip(norm.subjects, norm.values[0], norm.values[-1], strict=True):
        print(f"{name:<30} gradient norm: {first:.1e} at step {norm.steps[0]}, {last:.1e} at step {norm.steps[-1]}")


if __name__ == "__main__":
    main()
