"""Philox against published vectors, and the random-number contract."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from fastgnl.kernels import philox

# The known-answer vectors that Random123 publishes for philox4x32, 10 rounds: counter, key, output.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), PUBLISHED)
def test_published_vectors(counter, key, output):
    low, high = numbers(key)
    words = philox.philox_4x32_10(tuple(torch.tensor(c) for c in numbers(counter)), low | high << 32)
    assert [int(word) for word in words] == numbers(output)


def test_a_word_belongs_to_its_id_class_step_and_stream_only():
    ids = torch.tensor([7, 3, 4_000_000_000, 0])
    streams = [philox.stream(philox.FREE, network=1), philox.stream(philox.TRANSITION, draw=2)]
    seed, step = 2**63 + 12345, 9
    words = philox.words(seed, ids, 11, step, streams)
    for s, stream in enumerate(streams):
        for b, sample in enumerate(ids.tolist()):
            for c in range(11):
                counter = (sample, c // 4, step, stream)
                expected = philox.philox_4x32_10(tuple(torch.tensor(v) for v in counter), seed)[c % 4]
                assert words[s, b, c] == expected


def test_words_do_not_depend_on_batch_position_or_number_of_classes():
    ids = torch.arange(100)
    words = philox.words(1, ids, 20, 5, [0, 1])
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(philox.words(1, ids[order], 20, 5, [0, 1]), words[:, order])
    assert torch.equal(philox.words(1, ids, 7, 5, [1]), words[1:, :, :7])


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 6}, {"streams": [1]}])
def test_words_change_with_seed_step_and_stream(other):
    given = {"seed": 1, "ids_B": torch.arange(50), "num_classes": 8, "step": 5, "streams": [0]}
    same = philox.words(**given) == philox.words(**{**given, **other})
    assert same.sum() <= 1  # 400 words of 32 bits: an equal pair by chance has odds of 1 in 10 million


def test_streams_of_kinds_networks_and_draws_are_distinct():
    kinds = (philox.COVERAGE, philox.FREE, philox.WARMUP, philox.TRANSITION, philox.RANDOM_W)
    streams = [philox.stream(kind, network, draw) for kind in kinds for network in range(2) for draw in range(64)]
    assert len(set(streams)) == len(streams)


def test_words_are_uniform():
    words = philox.words(3, torch.arange(2000), 100, 0, [0]).flatten()
    assert words.min() >= 0
    assert words.max() < 2**32
    assert chisquare(np.bincount((words >> 24).numpy(), minlength=256)).pvalue > 1e-4


def test_exponential_is_minus_log_of_a_uniform_in_float32_precision():
    words = philox.words(4, torch.arange(5000), 40, 0, [0]).flatten()
    words[:4] = torch.tensor([0, 511, 512, 2**32 - 1])  # both ends
    u = ((words >> 9).double() * 2 + 1) / 2**24
    values = philox.exponential(words)
    assert values.dtype == torch.float32
    assert torch.isfinite(values).all()
    assert (values > 0).all()
    torch.testing.assert_close(values.double(), -u.log(), rtol=4e-7, atol=0)
    assert kstest(values.numpy(), "expon").pvalue > 1e-4


@pytest.mark.parametrize("bound", [1, 3, 10, 1000])
def test_integer_below_is_uniform(bound):
    values = philox.integer_below(philox.words(5, torch.arange(50_000), 1, 0, [0]).flatten(), bound)
    counts = np.bincount(values.numpy(), minlength=bound)
    assert len(counts) == bound
    assert bound == 1 or chisquare(counts).pvalue > 1e-4
